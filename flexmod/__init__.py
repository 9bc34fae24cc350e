"""flexmod: attention variants as plain Python functions, compiled to Triton kernels that you can read.

mask = flexmod.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8192, 8192)
out = flexmod.flex_attention(q, k, v, block_mask=mask)
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from flexmod.lazy_imports import lazy_imports, paused_collections

with paused_collections():
    from flexmod import errors, masks, mods
    from flexmod.attention import AuxOutput, AuxRequest, flex_attention
    from flexmod.block_mask.build import and_masks, create_block_mask, create_mask, noop_mask, or_masks
    from flexmod.block_mask.format import BlockMask
    from flexmod.compare import compare
    from flexmod.compiled import CompiledAttention, compile
    from flexmod.explain import explain
    from flexmod.ir.approximate import tanh_approximate
    from flexmod.ir.offsets import Offset
    from flexmod.kernel_options import FlexKernelOptions
    from flexmod.packed import nested_attention, varlen_attention
    from flexmod.sinks import apply_sink

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "CompiledAttention",
    "FlexKernelOptions",
    "Offset",
    "and_masks",
    "apply_sink",
    "compare",
    "compile",
    "create_block_mask",
    "create_mask",
    "errors",
    "explain",
    "flex_attention",
    "masks",
    "mods",
    "nested_attention",
    "noop_mask",
    "or_masks",
    "tanh_approximate",
    "varlen_attention",
]

if not TYPE_CHECKING:  # type checkers must still report a misspelled name

    def __getattr__(name: str) -> ModuleType:
        """Imports `flexmod.standalone` and `flexmod.ahead`, which need Triton, at their first use."""
        if name not in ("ahead", "standalone"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with lazy_imports():
            return import_module(f"flexmod.{name}")
