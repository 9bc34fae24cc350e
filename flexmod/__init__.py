"""flexmod: attention variants as plain Python functions, compiled to Triton kernels that you can read.

mask = flexmod.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8192, 8192)
out = flexmod.flex_attention(q, k, v, block_mask=mask)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexmod.runtime.locks import lazy_imports

if TYPE_CHECKING:
    from flexmod import errors, masks, mods
    from flexmod.backends.options import FlexKernelOptions
    from flexmod.block_mask.build import and_masks, create_block_mask, create_mask, noop_mask, or_masks
    from flexmod.block_mask.format import BlockMask
    from flexmod.calls.attention import AuxOutput, AuxRequest, flex_attention
    from flexmod.calls.compiled import CompiledAttention, compile
    from flexmod.calls.float8 import Scales, quantize
    from flexmod.calls.packed import apply_sink, nested_attention, varlen_attention
    from flexmod.ir.formulas import tanh_approximate
    from flexmod.ir.offsets import Offset
    from flexmod.tools.comparison import compare
    from flexmod.tools.inspection import explain

__version__ = "0.1.0"

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "CompiledAttention", "FlexKernelOptions", "Offset", "Scales",
    "and_masks", "apply_sink", "compare", "compile", "create_block_mask", "create_mask", "errors", "explain",
    "flex_attention", "masks", "mods", "nested_attention", "noop_mask", "or_masks", "quantize",
    "tanh_approximate", "varlen_attention",
]  # fmt: skip

# A module, and the public names that it defines.
_DEFINED_IN = {
    "backends.options": ("FlexKernelOptions",),
    "block_mask.build": ("and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"),
    "block_mask.format": ("BlockMask",),
    "calls.attention": ("AuxOutput", "AuxRequest", "flex_attention"),
    "calls.compiled": ("CompiledAttention", "compile"),
    "calls.float8": ("Scales", "quantize"),
    "calls.packed": ("apply_sink", "nested_attention", "varlen_attention"),
    "ir.formulas": ("tanh_approximate",),
    "ir.offsets": ("Offset",),
    "tools.comparison": ("compare",),
    "tools.inspection": ("explain",),
}
_MODULES = ("errors", "masks", "mods")
_NEED_TRITON = ("ahead", "standalone")


def _import_public_names() -> None:
    """Imports the modules of all public names, and torch with them."""
    with lazy_imports():
        for module, names in _DEFINED_IN.items():
            found = import_module(f"flexmod.{module}")
            globals().update({name: getattr(found, name) for name in names})


if not TYPE_CHECKING:  # type checkers must still report a misspelled name

    def __getattr__(name: str) -> Any:
        """Imports public names at their first use: `flexmod --help` would wait seconds for torch."""
        if name in _MODULES:
            return import_module(f"flexmod.{name}")
        if name in _NEED_TRITON:
            with lazy_imports():
                return import_module(f"flexmod.tools.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _import_public_names()
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# With torch there is nothing to wait for. A saved program finds flexmod's operations after this import.
if "torch" in sys.modules:
    _import_public_names()
