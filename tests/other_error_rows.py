"""Mistakes outside of a call: the class, what raises it, its whole message."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from call_error_rows import Row, call, x
from triton.runtime.errors import OutOfResources

import flexmod
from flexmod import compare, errors, masks, mods
from flexmod.block_mask import build
from flexmod.block_mask.tiles import MaskLayout
from flexmod.codegen import cache
from flexmod.codegen.spec import Verdict
from flexmod.ir import record
from flexmod.ir.record import decoded, encoded, graph_of, numbered, record_of
from flexmod.ir.recorder import Recorder
from flexmod.ir.trace import trace
from flexmod.runtime import config, launch, target, tuned
from flexmod.runtime.interpreter import interpreted
from flexmod.runtime.locks import lazy_imports
from flexmod.tools import ahead


def refused(refusal: object, **options: int) -> Any:
    """A call on a device that refuses each tile."""
    with mock.patch.object(launch, "verdict", return_value=Verdict(refusal=refusal)):
        return call(kernel_options={"BACKEND": "INTERPRET", **options})


def no_tile_fits() -> Any:
    too_large = OutOfResources(200_000, 101_376, "shared memory")
    return refused(too_large, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1)


def not_tuned() -> Any:
    with mock.patch.object(tuned, "folder", return_value=Path("~/.cache/flexmod/tuned")):
        return call(kernel_options={"BACKEND": "INTERPRET", "tuned": True})


def rounded_products() -> Any:
    """As Triton 3.6 may do on sm_100."""
    return refused(errors.RoundedProductsError, BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2)


def misaddressed_products() -> Any:
    """As the ptxas of Triton 3.6 may do on sm_90."""
    return refused(errors.MisaddressedProductsError, BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2)


def uninterpretable() -> Any:
    text = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def run(X):\n    i = tl.arange(0, 4)\n    if i > 1:\n        tl.store(X, 1.0)\n"
    )
    return interpreted(cache.load(text, "branch")).run[(1,)](torch.zeros(1))


def without_triton() -> Any:
    with mock.patch.dict(sys.modules, {"triton": None}), lazy_imports():
        import triton  # noqa: F401


def dropout_of_transformers() -> Any:
    pytest.importorskip("transformers", minversion="4.57")
    from transformers import BertConfig

    from flexmod.integrations.transformers import attention

    layer = torch.nn.Module()
    layer.config = BertConfig()
    return attention(layer, x(), x(), x(), None, dropout=0.1)


def bloom_of_transformers() -> Any:
    pytest.importorskip("transformers", minversion="4.57")
    from transformers import BloomConfig, BloomModel

    from flexmod.integrations.transformers import register

    register()
    return BloomModel._from_config(BloomConfig(n_layer=1), attn_implementation="flexmod")


def behind_the_recorder() -> Any:
    recorder = Recorder("mask", torch.device("cpu"))
    return recorder.noted(recorder.arguments[0] * 2)


def two_graphs_of_one_number() -> Any:
    with mock.patch.object(record, "digest", return_value=7):
        return [numbered(trace(lambda b, h, q, k, n=n: q + n > k, "mask").graph) for n in (77771, 77772)]


def called() -> flexmod.CompiledAttention:
    attend = flexmod.compile()
    attend(x(), x(), x())
    return attend


ROWS: list[Row] = [
    (
        errors.NotTunedError,
        not_tuned,
        "kernel option tuned is True, but nothing was tuned for the forward of this variant on Triton's "
        "interpreter.\n"
        "  Instead: run flexmod tune with the same mods, dtype and head dimension (what it finds is in "
        "~/.cache/flexmod/tuned), or leave the option out.",
    ),
    (
        errors.NotCalledError,
        lambda: flexmod.compile().source,
        "this handle was not called yet, and its source depends on the dtype and the head dimensions of a "
        "call.\n"
        "  Instead: call it once, give flexmod.compile a dtype and a head_dim, or write "
        "flexmod.explain(score_mod, mask_mod, head_dim=64, dtype=torch.bfloat16).source.",
    ),
    (
        errors.NoPtxError,
        lambda: called().ptx,
        "there is no PTX of this handle: what it shows is for the CPU.\n"
        "  Instead: name a chip that need not be here, e.g. attend.ptx_for('sm_90').",
    ),
    (
        errors.NoPtxError,
        lambda: called().ptx_for("gfx942"),
        "there is no PTX of gfx942: it is not a chip of NVIDIA's.\n"
        "  Instead: name a chip that need not be here, e.g. attend.ptx_for('sm_90').",
    ),
    (
        errors.NoPtxError,
        lambda: flexmod.compile(kernel_options={"tuned": True}).ptx_for(
            "sm_90", head_dim=64, dtype=torch.bfloat16
        ),
        "there is no PTX of this handle: its kernel option tuned asks for tiles that were found on a "
        "device.\n"
        "  Instead: compile a handle without the option.",
    ),
    (
        errors.NoStandaloneError,
        lambda: flexmod.compile(kernel_options={"tuned": True}).save(
            "mine.py", head_dim=64, dtype=torch.bfloat16
        ),
        "this handle cannot be saved as a file of its own: a file does not heed its kernel option tuned.\n"
        "  Instead: compile a handle without the option, and save that.",
    ),
    (
        errors.InGraphModError,
        behind_the_recorder,
        "TorchDynamo did something with a traced value that flexmod cannot see.\n"
        "  Instead: write it as a function of torch itself: torch.neg(x), torch.abs(x), "
        "torch.logical_not(x), torch.tanh(x) and torch.sigmoid(x) rather than those of torch.nn.functional; "
        "and index a row of a table, row[0], rather than unpack it.",
    ),
    (
        errors.InGraphMaskError,
        lambda: build.create_in_graph(
            masks.causal(),
            MaskLayout((1, 1, 5001 * 128, 5003 * 128), (128, 128), torch.device("cpu"), True),
        ),
        "create_block_mask makes a mask of 25020003 tiles, inside torch.compile or torch.export.\n"
        "  Instead: build it before the call, and hand it to the compiled function.",
    ),
    (
        errors.ConstantError,
        lambda: encoded(("mul", object())),
        "an object is no constant of a mod in torch.compile or torch.export.\n"
        "  Instead: give torch's functions numbers, strings, dtypes, devices and tensors.",
    ),
    (
        errors.ConstantError,
        lambda: decoded('{"code": "print(1)"}'),
        'the text \'{"code": "print(1)"}\' is no constant of a mod in torch.compile or torch.export.\n'
        "  Instead: give torch's functions numbers, strings, dtypes, devices and tensors.",
    ),
    (
        errors.ConstantError,
        lambda: record_of(encoded(("mask", (), ("value", 0)))),
        'the text \'["mask",[],["value",0]]\' is no constant of a mod in torch.compile or torch.export.\n'
        "  Instead: give torch's functions numbers, strings, dtypes, devices and tensors.",
    ),
    (
        errors.GraphNumberError,
        two_graphs_of_one_number,
        "the graphs of two block masks have one number, 7, by which a compiled model knows them.\n"
        "  Instead: change a constant of one mask_mod: the number is a digest of 62 bits, and almost never "
        "equal.",
    ),
    (
        errors.NotPicklableError,
        lambda: pickle.dumps(masks.Mask(lambda b, h, q_idx, kv_idx: q_idx, "position")),
        "mask_mod position cannot be pickled, since it cannot be traced: MaskResultError, mask_mod returned "
        "int32; a mask says True or False.\n"
        "  Instead: mend the mod: flexmod.explain(mask_mod=mask_mod) says the same, with the line that is at "
        "fault.",
    ),
    (
        errors.ForgottenGraphError,
        lambda: graph_of(-5),
        "a compiled model asks for a block mask that is gone, and thousands were made since.\n"
        "  Instead: keep a reference to the mask until its backward has run.",
    ),
    (
        errors.TransformersArgumentError,
        dropout_of_transformers,
        'attn_implementation="flexmod": dropout is 0.1, which flexmod does not do.\n'
        "  Instead: set attention_probs_dropout_prob=0.0 in the model's config.",
    ),
    (
        errors.TransformersModelError,
        bloom_of_transformers,
        'BloomModel computes attention in its own code, which attn_implementation="flexmod" does not reach.\n'
        '  Instead: load the model with attn_implementation="eager".',
    ),
    (
        errors.LibraryArgumentError,
        lambda: masks.natten((8, 8), kernel=4),
        "natten: kernel is 4; it must be odd on axes that are not causal, and times the dilation at most the "
        "extent, (8, 8).\n"
        "  Instead: write e.g. kernel=(3, 3).",
    ),
    (
        errors.LibraryArgumentError,
        lambda: masks.natten((4, 9), kernel=11, dilation=(1, 2)),
        "natten: kernel is 11; it must be odd on axes that are not causal, and times the dilation at most "
        "the extent, (4, 9).\n"
        "  Instead: write e.g. kernel=(3, 3).",
    ),
    (
        errors.LibraryArgumentError,
        lambda: masks.padding(torch.ones(2, 8, dtype=torch.int64)),
        "padding: lengths is torch.int64 [2, 8]; it must be an integer tensor of shape [B].\n"
        "  Instead: bring it into this shape, e.g. with reshape, expand or sum.",
    ),
    (
        errors.LibraryArgumentError,
        lambda: call(score_mod=lambda score, *position: mods.softcap(score)(score, *position)),
        "softcap: cap is Proxy(score: float32); it must be a positive finite number.\n"
        "  Instead: write e.g. softcap(50.0).",
    ),
    (
        errors.OperationArgumentError,
        lambda: flexmod.tanh_approximate(0.5),
        "flexmod.tanh_approximate was called with a float.\n"
        "  Instead: give it a traced scalar or a tensor, and a number to math.tanh.",
    ),
    (
        errors.LibraryArgumentError,
        lambda: mods.alibi_slopes("8"),  # type: ignore[arg-type]
        "alibi_slopes: heads is '8'; it must be an integer of 1 or more.\n"
        "  Instead: give the number of query heads, query.shape[1].",
    ),
    (
        errors.LibraryArgumentError,
        lambda: flexmod.Offset([4, 5]),  # type: ignore[arg-type]
        "Offset: values is [4, 5]; it must be a tensor.\n  Instead: give torch.tensor(values).",
    ),
    (
        errors.QuantizeGradientError,
        lambda: flexmod.quantize(x(requires_grad=True)),
        "x requires a gradient, and rounding to float8 has none.\n"
        "  Instead: write flexmod.quantize(x.detach()), or call under torch.no_grad().",
    ),
    (
        errors.NoTileFits,
        no_tile_fits,
        "no tile size fits the 101376 bytes of shared memory of cpu; tried 64x64 (4 warps, 1 "
        "stage): 200000 bytes.\n"
        "  Instead: use a smaller head_dim, a half-precision dtype, or kernel_options with smaller "
        "BLOCK_M and BLOCK_N.",
    ),
    (
        errors.RoundedProductsError,
        rounded_products,
        f"Triton {triton.__version__} multiplies float32 in TF32 on cpu, though it is told not to, with each "
        "tile size that was tried: 64x32 (8 warps, 2 stages).\n"
        "  Instead: install a newer Triton, leave BLOCK_M to flexmod if kernel_options have it, or allow "
        "TF32 with torch.set_float32_matmul_precision('high').",
    ),
    (
        errors.MisaddressedProductsError,
        misaddressed_products,
        f"the ptxas of Triton {triton.__version__} has a matrix product on cpu read at a wrong address, with "
        "each tile size that was tried: 64x32 (8 warps, 2 stages).\n"
        "  Instead: install a newer Triton, set TRITON_PTXAS_PATH to a ptxas of CUDA 12.9 or later, or leave "
        "BLOCK_M to flexmod if kernel_options have it.",
    ),
    (
        errors.FlexOnCpuError,
        lambda: compare("causal", device="cpu", flex=True),
        "flex=True, or --flex, times torch's compiled flex_attention, which has no backward on cpu.\n"
        "  Instead: run it on a CUDA device, or leave flex out.",
    ),
    (
        errors.EnvironmentSwitchError,
        lambda: config.read({"FLEXMOD_DEBUG": "verbose"}),
        "environment variable FLEXMOD_DEBUG is 'verbose'.\n  Instead: set it to 0, 1, 2 or 3.",
    ),
    (
        errors.InterpreterOperationError,
        uninterpretable,
        "`if`, `and`, `or`, `not` of a block of shape [4] does not work in Triton's interpreter.\n"
        '  Instead: run the kernel on a GPU, or use BACKEND="REFERENCE".',
    ),
    (
        errors.UnknownTarget,
        lambda: target.named("sm_9000"),
        "'sm_9000' is not a chip that flexmod knows.\n"
        "  Instead: use one of: sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_120, gfx942.",
    ),
    (
        errors.NoKernelsError,
        lambda: flexmod.explain(head_dim=264, value_dim=64).plan["hopper forward"],
        "there is no 'hopper forward' for this variant; there is: 'portable forward', "
        "'portable backward'.\n"
        "  Instead: print(flexmod.explain(...)), which says why a family cannot serve; its `source` has the "
        "portable kernels.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.standalone.save(None),  # type: ignore[arg-type]
        "path is None.\n  Instead: give a text or a pathlib.Path.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.compile().save("mine.py", head_dim=torch.tensor(64), dtype=torch.float32),  # type: ignore[arg-type]
        "head_dim is tensor(64).\n  Instead: give a whole number above 0, e.g. 64.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.compile().save("mine.py", head_dim=64, value_dim=0, dtype=torch.float32),
        "value_dim is 0.\n  Instead: give a whole number above 0, e.g. 64.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.compile().ptx_for("sm_90", head_dim=True, dtype=torch.float32),
        "head_dim is True.\n  Instead: give a whole number above 0, e.g. 64.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.compile().ptx_for("sm_90", head_dim=64, dtype="float32"),  # type: ignore[arg-type]
        "dtype is 'float32'.\n  Instead: give torch.float16, torch.bfloat16 or torch.float32.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: next(ahead.warm(3)),  # type: ignore[arg-type]
        "folder is 3.\n  Instead: give a text or a pathlib.Path.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: next(ahead.warm("kernels", targets="sm_90")),
        "targets is 'sm_90'.\n  Instead: give a list of chips, targets=['sm_90'].",
    ),
    (
        errors.ArgumentTypeError,
        lambda: next(ahead.warm("kernels", length=64.0)),  # type: ignore[arg-type]
        "length is 64.0.\n  Instead: give a whole number above 0.",
    ),
    (
        errors.NoKernelsError,
        lambda: flexmod.compile(dtype=torch.float32, head_dim=16).source["fwd"],
        "there is no 'fwd' for this variant; there is: 'forward', 'backward'.\n"
        "  Instead: take one of these names, or print all.",
    ),
    (
        errors.NoKernelsError,
        lambda: flexmod.compile(mods.softcap(3.0)).graph["mask"],
        "there is no 'mask' for this variant; there is: 'score', 'grad'.\n"
        "  Instead: take one of these names, or print all.",
    ),
    (
        errors.NotAGpuError,
        lambda: target.target_of("cpu"),
        "cpu is not a GPU: kernels are compiled for cuda devices.\n"
        "  Instead: name a kind of chip, e.g. flexmod.runtime.target.named('sm_90').",
    ),
    (
        errors.MissingPackage,
        without_triton,
        "this needs the package triton, which cannot be imported: import of triton halted; None in "
        "sys.modules.\n"
        '  Instead: pip install "triton>=3.6".',
    ),
]
