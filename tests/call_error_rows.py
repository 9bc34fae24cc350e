"""Mistakes of a call and of its block mask: the class, the call that raises it, its whole message."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from odd_tensors import Seeing, Wrapper, freed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import flexmod
from flexmod import AuxRequest, create_block_mask, create_mask, errors, flex_attention, masks, mods, or_masks
from flexmod.backends.arguments import Problem
from flexmod.backends.families import INTERPRETED
from flexmod.backends.options import OPTIONS

Row = tuple[type[errors.FlexmodError], Callable[[], Any], str]


def line_with(text: str) -> str:
    """The place of the first line of this file with a text, as messages name it."""
    lines = Path(__file__).read_text().splitlines()
    (number, *_) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"{__file__}:{number}: {lines[number - 1].strip()}"


def x(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (2, 4, 32, 16), **options)


def elsewhere() -> Tensor:
    """A tensor, without values, of a device that this machine need not have."""
    return FakeTensor(FakeTensorMode(), x(device="meta"), torch.device("xpu:0"))


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def mask(
    batch: int | None = None, heads: int | None = None, length: int = 32, mod: Any = causal, **options: Any
) -> flexmod.BlockMask:
    return create_block_mask(mod, batch, heads, length, length, device="cpu", **options)


def given_mask(**options: Any) -> flexmod.BlockMask:
    """One tile of 32 x 32, given as a list."""
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return flexmod.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, **options)


def packed(**options: Any) -> Any:
    tensors = (x(32, 4, 16) for _ in range(3))
    return flexmod.varlen_attention(*tensors, torch.tensor([0, 32]), **options)


def plotted_without_matplotlib() -> None:
    with mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None}):
        mask().plot("mask.png")


def call(query: Any = None, key: Any = None, value: Any = None, **options: Any) -> Any:
    """Attention on the CPU; key and value are like query where they are not given."""
    query = x() if query is None else query
    key = torch.zeros_like(query) if key is None else key
    return flex_attention(query, key, key if value is None else value, **options)


def nested(*lengths: int) -> Any:
    """[batch, 4, lengths, 16]"""
    rows = [x(length, 4, 16) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def options(**given: Any) -> Any:
    return call(kernel_options=given)


def decode(query: Tensor) -> Any:
    """What a call on a GPU with BACKEND="TRITON_DECODE" does, in the interpreter."""
    problem = Problem(None, None, None, 1.0, (("BACKEND", "TRITON_DECODE"),))
    return INTERPRETED.forward(problem, (query, query, query), want_max=False, keep=False)


def reads_batch() -> Any:
    return call(block_mask=mask(mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + b))


def captured_by_score(name: str, tensor: Tensor, **options: Any) -> Any:
    scope: dict[str, Any] = {name: tensor}
    return call(score_mod=eval(f"lambda score, b, h, q_idx, kv_idx: score + {name}[h]", scope), **options)


def captured_by_mask(tensor: Tensor) -> Any:
    limits = tensor
    return call(block_mask=mask(mod=lambda b, h, q_idx, kv_idx: kv_idx < limits[q_idx]))


def written_before_backward() -> None:
    limits = torch.full((32,), 9)
    block_mask = mask(mod=lambda b, h, q_idx, kv_idx: kv_idx < limits[q_idx])
    out = call(x(requires_grad=True), block_mask=block_mask)
    limits.add_(1)
    out.sum().backward()


def another_mask_in_a_checkpoint() -> None:
    block_mask = mask()
    out = checkpoint(lambda q: call(q, block_mask=block_mask), x(requires_grad=True), use_reentrant=False)
    block_mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx
    out.sum().backward()


def hooks_that_cast() -> None:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.double() if x.is_floating_point() else x
    ):
        out = call(x(requires_grad=True))
    out.sum().backward()


def fake_mask() -> flexmod.BlockMask:
    with FakeTensorMode():
        return mask()


def call_in_a_fake_mode() -> Any:
    tensor = x()
    with FakeTensorMode():
        return call(tensor, tensor, tensor)


def call_of_two_fake_modes() -> Any:
    made = []
    for _ in range(2):
        with FakeTensorMode():
            made.append(x())
    return call(made[0], made[1], made[1])


FAKE_ADVICE = (
    "  Instead: make all tensors of a call within one FakeTensorMode, or all of them outside; "
    "FakeTensorMode(allow_non_fake_inputs=True) takes real ones too."
)


def short_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + captured_bias[kv_idx]


IN_A_MASK = (
    f"{__file__}:{captured_by_mask.__code__.co_firstlineno + 2}: "
    "return call(block_mask=mask(mod=lambda b, h, q_idx, kv_idx: kv_idx < limits[q_idx]))"
)
captured_bias = torch.zeros(30)
IN_SHORT_BIAS = f"{__file__}:{short_bias.__code__.co_firstlineno + 1}: return score + captured_bias[kv_idx]"


def parts(**changed: Any) -> flexmod.BlockMask:
    one, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    given = {"kv_num_blocks": one, "kv_indices": index, "BLOCK_SIZE": 32, **changed}
    return flexmod.BlockMask.from_kv_blocks(**given)


def written_list() -> Any:
    """A list that was right when the mask was made."""
    block_mask = parts()
    block_mask.kv_indices.fill_(9)
    return call(block_mask=block_mask)


def assigned_list() -> Any:
    block_mask = parts()
    block_mask.kv_num_blocks = torch.full((1, 1, 1), 2)
    return call(block_mask=block_mask)


def second_derivative() -> Any:
    query = torch.ones(1, 1, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(query, query).square().sum(), query, create_graph=True)
    return torch.autograd.grad(gradient.sum(), query)


def without_head_dimension() -> Any:
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    block_mask = parts(kv_num_blocks=one[0], kv_indices=one * 0, seq_lengths=(32, 32))
    return call(block_mask=block_mask)


def sliced_by_torch() -> Any:
    whole = torch_flex.create_block_mask(causal, 2, 4, 32, 32, device="cpu")
    return call(block_mask=whole[0])


def part_of_changed() -> Any:
    width = 8

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < width

    made = create_block_mask(window, None, None, 32, 32, "cpu", q_offset=3)
    width = 9
    return made[:, :, 0]


HALF, DOUBLE = torch.float16, torch.float64

BSHD: list[Row] = [
    (
        errors.LayoutError,
        lambda: call(layout="sbhd"),
        "layout is 'sbhd'.\n"
        "  Instead: give 'bhsd' for [batch, heads, length, head_dim], or 'bshd' for [batch, length, heads, "
        "head_dim].",
    ),
    (
        errors.NotATensor,
        lambda: call(key=[1.0], layout="bshd"),
        "key is a list, not a torch.Tensor.\n"
        "  Instead: pass a tensor of shape [batch, length, heads, head_dim] in layout 'bshd'.",
    ),
    (
        errors.NotFourDimensional,
        lambda: call(x(32, 4, 16), layout="bshd"),
        "query has 3 dimensions, shape (32, 4, 16); attention takes [batch, length, heads, head_dim] in "
        "layout 'bshd'.\n"
        "  Instead: add the missing dimensions, e.g. query.unsqueeze(0), or merge the extra ones.",
    ),
    (
        errors.EmptyHeadDim,
        lambda: call(key=x(2, 32, 4, 0), layout="bshd"),
        "key has a head_dim of 0, shape (2, 32, 4, 0).\n"
        "  Instead: give it one element at least; batch, heads and lengths may be 0.",
    ),
    (
        errors.LengthMismatch,
        lambda: call(x(2, 32, 4, 16), value=x(2, 31, 4, 16), layout="bshd"),
        "key has length 32 but value has 31.\n"
        "  Instead: give key and value the same number of positions (dimension 1 of layout 'bshd').",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(x(2, 32, 4, 16), value=x(2, 32, 2, 16), layout="bshd"),
        "key has 4 heads but value has 2.\n"
        "  Instead: pass enable_gqa=True: each head of key and of value then serves a group of query heads.",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(x(2, 32, 4, 16), value=x(2, 32, 8, 16), layout="bshd"),
        "key has 4 heads but value has 8.\n"
        "  Instead: put the 2 value heads of each key head side by side, "
        "value.unflatten(2, (4, 2)).flatten(3): the output has theirs side by side too.",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(x(2, 32, 4, 16), value=x(2, 32, 3, 16), layout="bshd"),
        "key has 4 heads but value has 3.\n"
        "  Instead: give key and value the same number of heads (dimension 2 of layout 'bshd').",
    ),
    (
        errors.HeadCountMismatch,
        lambda: call(x(2, 32, 4, 16), key=x(2, 32, 2, 16), layout="bshd"),
        "query has 4 heads but key and value have 2.\n"
        "  Instead: pass enable_gqa=True if groups of query heads share a key head.",
    ),
    (
        errors.MaskLengthError,
        lambda: call(block_mask=mask(2, None, 32), layout="bshd"),
        "block_mask was made for Q_LEN=32 and KV_LEN=32, but query has 4 positions and key 4.\n"
        "  Instead: create_block_mask(mask_mod, 2, None, 4, 4, device='cpu', BLOCK_SIZE=(128, 128)); or say "
        "by layout='bhsd' or 'bshd' which dimension has the positions",
    ),
]

TENSORS: list[Row] = [
    (
        errors.NotATensor,
        lambda: call(key=[1.0]),
        "key is a list, not a torch.Tensor.\n"
        "  Instead: pass a tensor of shape [batch, heads, length, head_dim].",
    ),
    (
        errors.NotStrided,
        lambda: call(value=x().to_sparse()),
        "value has layout torch.sparse_coo; attention takes strided tensors.\n"
        "  Instead: pass value.to_dense().",
    ),
    (
        errors.NotFourDimensional,
        lambda: call(x(4, 32, 16)),
        "query has 3 dimensions, shape (4, 32, 16); attention takes [batch, heads, length, head_dim].\n"
        "  Instead: add the missing dimensions, e.g. query.unsqueeze(0), or merge the extra ones.",
    ),
    (
        errors.NotFourDimensional,
        lambda: call(value=x(1, 2, 4, 32, 16)),
        "value has 5 dimensions, shape (1, 2, 4, 32, 16); attention takes [batch, heads, length, "
        "head_dim].\n"
        "  Instead: add the missing dimensions, e.g. value.unsqueeze(0), or merge the extra ones.",
    ),
    (
        errors.EmptyHeadDim,
        lambda: call(key=x(2, 4, 32, 0)),
        "key has a head_dim of 0, shape (2, 4, 32, 0).\n"
        "  Instead: give it one element at least; batch, heads and lengths may be 0.",
    ),
    (
        errors.ExtentError,
        lambda: call(
            *[torch.zeros(1).expand(1, 1, 2**30 + 1, 16)] * 2, kernel_options={"BACKEND": "INTERPRET"}
        ),
        "query's length is 1073741825; kernels count to 1073741824.\n"
        "  Instead: split the call along the positions.",
    ),
    (
        errors.ExtentError,
        lambda: call(
            torch.zeros(1).expand(2**16, 2**15, 1, 16),
            *[torch.zeros(1).expand(1, 2**15, 1, 16)] * 2,
            kernel_options={"BACKEND": "INTERPRET"},
        ),
        "the number of query's tiles, batch * heads * length / 16, is 2147483648; kernels count to "
        "2147483647.\n"
        "  Instead: split the call along the batch.",
    ),
    (
        errors.TensorKindError,
        lambda: captured_by_mask(Wrapper(x(32))),
        "limits, captured by mask_mod, is of the class Wrapper, which alone can reach its elements; no "
        "kernel can read it.\n"
        "  Instead: pass the tensor inside of it.",
    ),
    (
        errors.TensorKindError,
        lambda: captured_by_score("bias", x(4).as_subclass(Seeing)),
        "bias is of the class Seeing, whose own __torch_function__ may change what is read; no kernel can "
        "read it.\n"
        "  Instead: pass bias.as_subclass(torch.Tensor), if its storage holds the elements.",
    ),
    (
        errors.TensorKindError,
        lambda: captured_by_score("bias", torch.nn.LazyLinear(4).bias),
        "bias is a parameter of a lazy module, without a shape yet; no kernel can read it.\n"
        "  Instead: pass bias after the first forward of its module.",
    ),
    (
        errors.TensorKindError,
        lambda: parts(kv_indices=torch.zeros(1, 1, 1, 1, dtype=torch.int32).to_sparse()),
        "kv_indices is a tensor of layout torch.sparse_coo; no kernel can read it.\n"
        "  Instead: pass kv_indices.to_dense().",
    ),
    (
        errors.FreedStorageError,
        lambda: call(value=freed(x())),
        "value needs 16384 bytes, but its storage has 0: it was freed or shrunk, as FSDP does with a "
        "module's parameters after its forward.\n"
        "  Instead: allocate it again before the call, e.g. module.unshard(), or "
        "value.untyped_storage().resize_(16384) and write to it.",
    ),
    (
        errors.OperationTensorError,
        lambda: captured_by_score("bias", Wrapper(x(4, 1), shape=(4,), strides=(1,))),
        "torch.ops.flexmod.attention was given bias as torch.float32 of rank 2; this call has "
        "torch.float32 of rank 1 there.\n"
        "  Instead: let a __torch_dispatch__ hand on all tensors as they were given, or none.",
    ),
    (
        errors.ScaleError,
        lambda: flexmod.compile(scale="1"),  # type: ignore[arg-type]
        "scale is a str; it is a number, fixed at the call, without a gradient.\n"
        "  Instead: give a number, or None for 1/sqrt(head_dim).",
    ),
    (
        errors.ScaleError,
        lambda: call(scale=True),
        "scale is a bool; it is a number, fixed at the call, without a gradient.\n"
        "  Instead: give a number, or None for 1/sqrt(head_dim).",
    ),
    (
        errors.ScaleValueError,
        lambda: call(scale=float("nan")),
        "scale is nan; it must be a finite number that float32 holds.\n"
        "  Instead: give such a number, or None for 1/sqrt(head_dim).",
    ),
    (
        errors.ScaleValueError,
        lambda: call(scale=10**400),
        "scale is an integer of 1329 bits; it must be a finite number that float32 holds.\n"
        "  Instead: give such a number, or None for 1/sqrt(head_dim).",
    ),
    (
        errors.FakeTensorError,
        lambda: call(block_mask=fake_mask()),
        "the tiles of block_mask is a fake tensor, a shape without values, and query is a real one.\n"
        + FAKE_ADVICE,
    ),
    (
        errors.FakeTensorError,
        call_in_a_fake_mode,
        f"query is a real tensor, and a FakeTensorMode is active.\n{FAKE_ADVICE}",
    ),
    (
        errors.FakeTensorError,
        call_of_two_fake_modes,
        f"query and key are fake tensors of two modes.\n{FAKE_ADVICE}",
    ),
    (
        errors.FakeTensorError,
        lambda: copy.deepcopy(fake_mask()),
        "block_mask has fake tensors, shapes without values, and is copied or pickled.\n"
        "  Instead: build it again, outside of the FakeTensorMode.",
    ),
    (
        errors.FakeTensorError,
        lambda: fake_mask().sparsity(),
        "block_mask has shapes without values, and its tiles are asked for.\n"
        "  Instead: build it on a device, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "
        "device=query.device), outside of a FakeTensorMode.",
    ),
    (
        errors.NoSignatureError,
        lambda: call(score_mod=dict),
        "score_mod is dict, and Python cannot tell what arguments it takes.\n"
        "  Instead: write a function, e.g. def score_mod(score, b, h, q_idx, kv_idx): return score.",
    ),
    (
        errors.NoSignatureError,
        lambda: mask(mod=torch.where),
        "mask_mod is where, and Python cannot tell what arguments it takes.\n"
        "  Instead: write a function, e.g. def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx.",
    ),
    (
        errors.ScaleError,
        lambda: call(scale=torch.tensor(0.5)),
        "scale is a Tensor; it is a number, fixed at the call, without a gradient.\n"
        "  Instead: give scale=1.0, and a score_mod that reads the tensor at each call: score * scale.",
    ),
    (
        errors.ScaleError,
        lambda: call(scale="0.5"),
        "scale is a str; it is a number, fixed at the call, without a gradient.\n"
        "  Instead: give a number, or None for 1/sqrt(head_dim).",
    ),
    (
        errors.NestedTensorInput,
        lambda: call(torch.nested.nested_tensor([x(4, 5, 16)], layout=torch.jagged)),
        "query is a nested tensor; flex_attention takes strided ones.\n"
        "  Instead: call flexmod.nested_attention(query, key, value, mask_mod=...).",
    ),
    (
        errors.NestedLayoutError,
        lambda: flexmod.nested_attention(nested(3, 5), nested(3, 5), nested(3, 4)),
        "value has sequences of other lengths than key; nested_attention takes [batch, heads, length, "
        "head_dim], with one length for each batch entry.\n"
        "  Instead: give each sequence as many values as keys.",
    ),
    (
        errors.PackedShapeError,
        lambda: flexmod.varlen_attention(x(), x(), x(), torch.tensor([0, 32])),
        "query has shape [2, 4, 32, 16]; varlen_attention takes packed sequences, [total, heads, head_dim].\n"
        "  Instead: put them one after another, e.g. with torch.cat(sequences); nested tensors go to "
        "flexmod.nested_attention.",
    ),
    (
        errors.MaskTwiceError,
        lambda: flexmod.varlen_attention(
            *[x(32, 4, 16)] * 3, torch.tensor([0, 32]), mask_mod=causal, block_mask=mask()
        ),
        "both mask_mod and block_mask are given.\n"
        "  Instead: give block_mask alone, built of masks.jagged(offsets, mask_mod).",
    ),
    (
        errors.DeviceMismatch,
        lambda: call(query=x(device="meta"), key=x()),
        "query is on meta but key is on cpu.\n  Instead: move one of them, e.g. key.to('meta').",
    ),
    (
        errors.DeviceMismatch,
        lambda: call(key=x(device="meta")),
        "query is on cpu but key is on meta.\n  Instead: make key on cpu; on meta it has no elements.",
    ),
    (
        errors.DeviceMismatch,
        lambda: call(value=x(device="meta")),
        "query is on cpu but value is on meta.\n  Instead: make value on cpu; on meta it has no elements.",
    ),
    (
        errors.DeviceMismatch,
        lambda: captured_by_mask(x(32, device="meta")),
        "the mask is on cpu but limits is on meta.\n"
        "  Instead: make limits on cpu; on meta it has no elements.",
    ),
    (
        errors.DeviceMismatch,
        lambda: call(block_mask=mask().to("meta")),
        "query is on cpu but block_mask is on meta.\n"
        "  Instead: make block_mask on cpu; on meta it has no elements.",
    ),
    (
        errors.DeviceMismatch,
        lambda: captured_by_score("bias", x(4, device="meta")),
        "query is on cpu but bias, captured by score_mod, is on meta.\n"
        "  Instead: make bias on cpu; on meta it has no elements.",
    ),
    (
        errors.UnsupportedDevice,
        lambda: call(*[elsewhere()] * 3),
        "query is on xpu:0; flexmod runs on cuda and cpu.\n"
        "  Instead: move query, key and value to one of them.",
    ),
    (
        errors.UnsupportedDtype,
        lambda: call(x(dtype=torch.int32)),
        "query has dtype int32; the CPU backend takes float16, bfloat16, float32, float64.\n"
        "  Instead: cast it, e.g. query.to(torch.bfloat16).",
    ),
    (
        errors.UnsupportedDtype,
        lambda: call(x(dtype=DOUBLE), kernel_options={"BACKEND": "INTERPRET"}),
        "query has dtype float64; the INTERPRET backend takes float16, bfloat16, float32.\n"
        "  Instead: cast it, e.g. query.to(torch.bfloat16).",
    ),
    (
        errors.MixedDtypes,
        lambda: call(key=x(dtype=HALF), value=x()),
        "query is float32, key is float16 and value is float32; key and value must share one dtype, "
        "query's or a lower one.\n"
        "  Instead: cast key and value to float32.",
    ),
    (
        errors.MixedDtypes,
        lambda: call(x(dtype=HALF), x(dtype=torch.bfloat16)),
        "query is float16, key is bfloat16 and value is bfloat16; key and value must share one "
        "dtype, query's or a lower one.\n"
        "  Instead: cast key and value to float16.",
    ),
    (
        errors.MixedDtypes,
        lambda: call(x(dtype=HALF), x()),
        "query is float16, key is float32 and value is float32; key and value must share one dtype, "
        "query's or a lower one.\n"
        "  Instead: cast key and value to float16.",
    ),
    (
        errors.LowerPrecisionBackward,
        lambda: call(x(requires_grad=True), x(dtype=HALF)),
        "key and value are float16 but query is float32, and a gradient is asked for; the backward "
        "takes one dtype.\n"
        "  Instead: cast key and value to float32, or call under torch.no_grad().",
    ),
    (
        errors.HeadDimMismatch,
        lambda: call(key=x(2, 4, 32, 8)),
        "query has head_dim 16 but key has 8.\n"
        "  Instead: give query and key the same last dimension (value's may differ).",
    ),
    (
        errors.LengthMismatch,
        lambda: call(value=x(2, 4, 31, 16)),
        "key has length 32 but value has 31.\n"
        "  Instead: give key and value the same number of positions (dimension 2).",
    ),
    (
        errors.BatchMismatch,
        lambda: call(key=x(3, 4, 32, 16)),
        "query has batch 2 but key has 3 and value has 3.\n"
        "  Instead: give key and value query's batch, or both a batch of 1 to share them.",
    ),
    (
        errors.BatchMismatch,
        lambda: call(value=x(1, 4, 32, 16)),
        "query has batch 2 but key has 2 and value has 1.\n"
        "  Instead: give key and value query's batch, or both a batch of 1 to share them.",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(value=x(2, 2, 32, 16)),
        "key has 4 heads but value has 2.\n"
        "  Instead: pass enable_gqa=True: each head of key and of value then serves a group of query heads.",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(value=x(2, 8, 32, 16)),
        "key has 4 heads but value has 8.\n"
        "  Instead: put the 2 value heads of each key head side by side, "
        "value.unflatten(1, (4, 2)).transpose(2, 3).flatten(3): the output has theirs side by side too.",
    ),
    (
        errors.KeyValueHeadsMismatch,
        lambda: call(value=x(2, 3, 32, 16)),
        "key has 4 heads but value has 3.\n"
        "  Instead: give key and value the same number of heads (dimension 1).",
    ),
    (
        errors.HeadCountMismatch,
        lambda: call(key=x(2, 2, 32, 16)),
        "query has 4 heads but key and value have 2.\n"
        "  Instead: pass enable_gqa=True if groups of query heads share a key head.",
    ),
    (
        errors.HeadRatioError,
        lambda: call(key=x(2, 3, 32, 16), enable_gqa=True),
        "query has 4 heads, which is no multiple of key's 3.\n"
        "  Instead: make query's head count a multiple of key's (any ratio will do).",
    ),
    (
        errors.HeadCountMismatch,
        lambda: call(x(2, 64, 4, 16), key=x(2, 32, 4, 16)),
        "query has 64 heads but key and value have 32.\n"
        "  Instead: pass enable_gqa=True if groups of query heads share a key head; or say by layout='bhsd' "
        "or 'bshd' which dimension has the positions.",
    ),
    (
        errors.HeadRatioError,
        lambda: call(x(2, 32, 4, 16), key=x(2, 77, 4, 16)),
        "query has 32 heads, which is no multiple of key's 77.\n"
        "  Instead: make query's head count a multiple of key's (any ratio will do); or say by layout='bhsd' "
        "or 'bshd' which dimension has the positions.",
    ),
]

BLOCK_MASKS: list[Row] = [
    (
        errors.NotABlockMask,
        lambda: call(block_mask=create_mask(causal, None, None, 32, 32, device="cpu")),
        "block_mask is a Tensor, not a BlockMask.\n"
        "  Instead: build one with create_block_mask(dense), where dense is the tensor.",
    ),
    (
        errors.NotABlockMask,
        lambda: call(block_mask=x(32, 32).bool()),
        "block_mask is a Tensor, not a BlockMask.\n"
        "  Instead: build one with create_block_mask(dense), where dense is the tensor.",
    ),
    (
        errors.NotABlockMask,
        lambda: call(block_mask=x(32, 32)),
        "block_mask is a Tensor, not a BlockMask.\n"
        "  Instead: give scores that are added as score_mod=lambda score, b, h, q_idx, kv_idx: score + "
        "dense[q_idx, kv_idx], where dense is the tensor.",
    ),
    (
        errors.NotABlockMask,
        lambda: call(block_mask=x(4, 32, 32).bool().numpy()),
        "block_mask is an ndarray, not a BlockMask.\n"
        "  Instead: build one with create_block_mask(dense), where dense is torch.from_numpy of the array.",
    ),
    (
        errors.NotABlockMask,
        lambda: call(block_mask=causal),
        "block_mask is a function, not a BlockMask.\n"
        "  Instead: build one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN).",
    ),
    (
        errors.MaskBroadcastError,
        lambda: call(block_mask=mask(batch=3)),
        "block_mask has B 3 but query has 2; it must be equal or 1.\n"
        "  Instead: rebuild it with B=2, or with B=None if the mask is the same for each.",
    ),
    (
        errors.MaskBroadcastError,
        lambda: call(block_mask=mask(heads=2)),
        "block_mask has H 2 but query has 4; it must be equal or 1.\n"
        "  Instead: rebuild it with H=4, or with H=None if the mask is the same for each.",
    ),
    (
        errors.MaskLengthError,
        lambda: call(block_mask=mask(2, None, 64)),
        "block_mask was made for Q_LEN=64 and KV_LEN=64, but query has 32 positions and key 32.\n"
        "  Instead: create_block_mask(mask_mod, 2, None, 32, 32, device='cpu', BLOCK_SIZE=(128, 128))",
    ),
    (
        errors.MaskLengthError,
        lambda: call(query=x(2, 4, 1, 16), key=x(), block_mask=mask(2)),
        "block_mask was made for Q_LEN=32 and KV_LEN=32, but query has 1 position and key 32.\n"
        "  Instead: create_block_mask(mask_mod, 2, None, 1, 32, device='cpu', BLOCK_SIZE=(128, 128)), with "
        "q_offset=31 if the queries are the last",
    ),
    (
        errors.MaskLengthError,
        lambda: call(query=x(2, 4, 0, 16), key=x(), block_mask=mask(2)),
        "block_mask was made for Q_LEN=32 and KV_LEN=32, but query has 0 positions and key 32.\n"
        "  Instead: leave block_mask out of a call without queries or without keys",
    ),
    (
        errors.MaskReadsBroadcastIndex,
        reads_batch,
        "mask_mod reads b, but the block mask was built with B=1 and query has B=2: its tiles are "
        "those of b=0 alone.\n"
        "  Instead: build it with B=2.",
    ),
    (
        errors.BlockSizeError,
        lambda: mask(BLOCK_SIZE=0),
        "BLOCK_SIZE 0 is neither an integer from 1 to 1073741824 nor a pair of them.\n"
        "  Instead: use BLOCK_SIZE=128 or BLOCK_SIZE=(queries, keys).",
    ),
    (
        errors.BlockSizeError,
        lambda: mask(BLOCK_SIZE="128"),  # type: ignore[arg-type]
        "BLOCK_SIZE '128' is neither an integer from 1 to 1073741824 nor a pair of them.\n"
        "  Instead: use BLOCK_SIZE=128 or BLOCK_SIZE=(queries, keys).",
    ),
    (
        errors.BlockSizeError,
        lambda: call(block_mask=mask(BLOCK_SIZE=8), kernel_options={"BACKEND": "INTERPRET"}),
        "BLOCK_SIZE (8, 8) is no multiple of 16 on both sides.\n  Instead: use multiples of 16, e.g. 128.",
    ),
    (
        errors.BlockMaskPartsError,
        lambda: parts(full_kv_num_blocks=torch.ones(1, 1, 1, dtype=torch.int32)),
        "full_kv_num_blocks is given without full_kv_indices.\n"
        "  Instead: give counts [..., rows] and indices [..., rows, columns] of the same rows.",
    ),
    (
        errors.BlockMaskPartsError,
        without_head_dimension,
        "block_mask's kv_indices have shape (1, 1, 1); attention takes [B, H, Qb, KVb].\n"
        "  Instead: give all its lists dimensions for B and H, of size 1 where the mask is the same for "
        "each.",
    ),
    (
        errors.BlockMaskPartsError,
        written_list,
        "kv_indices lists a tile that is not one of the 1.\n  Instead: list tiles from 0 to 0.",
    ),
    (
        errors.BlockMaskPartsError,
        assigned_list,
        "kv_num_blocks has a count that is not one from 0 to 1, the width of kv_indices.\n"
        "  Instead: count how many entries of each row are tiles, 0 where there are none.",
    ),
    (
        errors.LengthError,
        lambda: mask(length=0),
        "Q_LEN is 0; it must be an integer from 1 to 1073741824.\n"
        "  Instead: call flex_attention without a block mask where there are no queries or no keys.",
    ),
    (
        errors.DenseMaskError,
        lambda: flexmod.create_block_mask(torch.zeros(4, 30, 30)),
        "a dense mask, of shape (4, 30, 30), is float32, but it says True or False.\n"
        "  Instead: compare it, e.g. create_block_mask(dense > 0), or dense >= 0 if -inf hides a pair and 0 "
        "keeps it. Numbers to add to scores are a score_mod, lambda score, b, h, q_idx, kv_idx: score + "
        "dense[h, q_idx, kv_idx].",
    ),
    (
        errors.DenseMaskError,
        lambda: flexmod.create_block_mask(torch.ones(30, 30, dtype=torch.int32)),
        "a dense mask, of shape (30, 30), is int32, but it says True or False.\n"
        "  Instead: compare it, e.g. create_block_mask(dense > 0). Numbers to add to scores are a score_mod, "
        "lambda score, b, h, q_idx, kv_idx: score + dense[q_idx, kv_idx].",
    ),
    (
        errors.DenseMaskError,
        lambda: flexmod.create_block_mask(torch.zeros(30) > 0),
        "a dense mask, of shape (30,), has the wrong number of dimensions.\n"
        "  Instead: give [Q_LEN, KV_LEN], [H, Q_LEN, KV_LEN] or [B, H, Q_LEN, KV_LEN].",
    ),
    (
        errors.DenseMaskError,
        lambda: flexmod.create_block_mask(torch.zeros(2, 1, 30, 30) > 0, 3, None, 30, 30),
        "a dense mask, of shape (2, 1, 30, 30), has B=2, but B=3 is given.\n"
        "  Instead: leave B, H, Q_LEN and KV_LEN out: the tensor has them.",
    ),
    (
        errors.DenseMaskError,
        lambda: flexmod.create_block_mask(torch.zeros(2, 30) > 0, 2, None, 30, 30),
        "a dense mask, of shape (2, 30), has Q_LEN=2, but Q_LEN=30 is given.\n"
        "  Instead: index a padding mask [B, KV_LEN]: lambda b, h, q_idx, kv_idx: dense[b, kv_idx].",
    ),
    (
        errors.LengthError,
        lambda: flexmod.create_block_mask(flexmod.masks.causal(), 2, 4, 30),
        "KV_LEN is None; it must be an integer from 1 to 1073741824.\n"
        "  Instead: give the number of positions, e.g. KV_LEN=key.shape[2].",
    ),
    (
        errors.BlockMaskPartsError,
        lambda: flexmod.BlockMask.from_dense(torch.zeros(3)),
        "tiles is torch.float32 of shape (3,); a table of tiles is bool or integers, of shape [B, H, Qb, "
        "KVb].\n"
        "  Instead: give one entry for each tile, e.g. block_mask.to_dense(); a dense mask of one entry for "
        "each query and key goes to create_block_mask.",
    ),
    (
        errors.BlockMaskPartsError,
        lambda: flexmod.BlockMask.from_dense(torch.eye(3) > 0, seq_lengths=(300, 600)),
        "tiles has 3 rows and 3 columns, but Q_LEN=300 and KV_LEN=600 have 3 and 5 with BLOCK_SIZE (128, "
        "128).\n"
        "  Instead: give the seq_lengths and the BLOCK_SIZE that the table was made for.",
    ),
    (
        errors.MaskExtentError,
        lambda: mask(heads=0),
        "H is 0; it must be an integer from 1 to 1073741824 or None.\n"
        "  Instead: give H=query.shape[1], or None if the mask is the same for each.",
    ),
    (
        errors.NoDeviceError,
        lambda: create_block_mask(causal, None, None, 32, 32, device=3.5),  # type: ignore[arg-type]
        "device is 3.5: it must be a torch.device, the name of one or None.\n"
        "  Instead: name a device that is here, e.g. cpu, or give query.device.",
    ),
    (
        errors.NoDeviceError,
        lambda: mask().to(""),
        "device is '': Device string must not be empty.\n"
        "  Instead: name a device that is here, e.g. cpu, or give query.device.",
    ),
    (
        errors.BlockMaskIndexError,
        lambda: mask()[0, 0, 0, 0],
        "a block mask of (1, 1, 1) (batches, heads, rows of tiles) is indexed with (0, 0, 0, 0): too "
        "many indices.\n"
        "  Instead: give at most three, mask[b, h, q].",
    ),
    (
        errors.BlockMaskCropError,
        lambda: mask()._adjust(64, 32),
        "_adjust crops a block mask: this one of Q_LEN=32 and KV_LEN=32 has no tiles for Q_LEN=64 "
        "and KV_LEN=32.\n"
        "  Instead: build it anew, create_block_mask(mask_mod, B, H, 64, 32).",
    ),
    (
        errors.BlockMaskResizeError,
        lambda: given_mask().resize(64, 32),
        "this block mask of Q_LEN=32 and KV_LEN=32 was given as lists, which say nothing of Q_LEN=64 and "
        "KV_LEN=32.\n"
        "  Instead: build it of its mask_mod, create_block_mask(mask_mod, B, H, 64, 32).",
    ),
    (
        errors.BlockMaskCombineError,
        lambda: mask() & mask(length=64),
        "these block masks do not go together: seq_lengths is (32, 32) in one and (64, 64) in the other.\n"
        "  Instead: build both with the same seq_lengths; resize() and to() change lengths and device.",
    ),
    (
        errors.BlockMaskCombineError,
        lambda: mask() & masks.causal(),
        "these block masks do not go together: causal_mask is not a BlockMask.\n"
        "  Instead: combine the mask_mods, create_block_mask(and_masks(first, second), B, H, Q_LEN, KV_LEN), "
        "or build a block mask of each.",
    ),
    (
        errors.BlockMaskCombineError,
        lambda: torch.ones(32, 32, dtype=torch.bool) | mask(),
        "these block masks do not go together: a tensor is not a BlockMask.\n"
        "  Instead: combine the mask_mods, create_block_mask(or_masks(first, second), B, H, Q_LEN, KV_LEN), "
        "or build a block mask of each.",
    ),
    (
        errors.MaskModChangedError,
        part_of_changed,
        "mask_mod window would decide otherwise now than when the block mask was built with q_offset=3, "
        "kv_offset=0.\n"
        "  Instead: build the mask again, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, q_offset=...).",
    ),
    (
        errors.SlicedTorchMaskError,
        sliced_by_torch,
        "this torch BlockMask was sliced, and torch drops the mask_mod of a slice.\n"
        "  Instead: slice a mask of flexmod.create_block_mask, which keeps its mask_mod, or set the slice's "
        "mask_mod first.",
    ),
    (
        errors.MissingMatplotlib,
        plotted_without_matplotlib,
        "BlockMask.plot draws with matplotlib, which is not installed.\n"
        "  Instead: pip install matplotlib, or write mask.to_svg() to a file.",
    ),
    (
        errors.GridSizeError,
        lambda: mask().to_string(grid_size=0),
        "grid_size is 0; it is the largest number of rows and columns to draw.\n"
        "  Instead: give a positive integer, a pair (rows, columns) of them, or -1 to draw every "
        "tile.",
    ),
]

OFFSETS: list[Row] = [
    (
        errors.OffsetTypeError,
        lambda: call(q_offset=1.5),
        "q_offset is a float; it must be an integer, or an int32 or int64 tensor with one element for each "
        "batch entry.\n"
        "  Instead: give a number, e.g. q_offset=1024, or a tensor, e.g. q_offset=lengths.to(torch.int32).",
    ),
    (
        errors.OffsetTypeError,
        lambda: mask(kv_offset=x(2)),
        "kv_offset is a tensor of float32; it must be an integer, or an int32 or int64 tensor with one "
        "element for each batch entry.\n"
        "  Instead: give a number, e.g. kv_offset=1024, or a tensor, e.g. "
        "kv_offset=lengths.to(torch.int32).",
    ),
    (
        errors.OffsetValueError,
        lambda: mask(q_offset=-3),
        "q_offset is -3; it must be from 0 to 1073741824.\n"
        "  Instead: count positions from 0, e.g. add the same number to q_offset and kv_offset.",
    ),
    (
        errors.OffsetValueError,
        lambda: call(kv_offset=2**31),
        "kv_offset is 2147483648; it must be from 0 to 1073741824.\n"
        "  Instead: count positions from the first key that was ever there, so that kv_offset is at most "
        "1073741824.",
    ),
    (
        errors.OffsetValueError,
        lambda: call(q_offset=flexmod.Offset(torch.tensor([4, 9]), bound=8)),
        "q_offset is 9; it must be from 0 to 8.\n"
        "  Instead: declare what the tensor may hold, flexmod.Offset(q_offset, bound=9).",
    ),
    (
        errors.OffsetShapeError,
        lambda: call(q_offset=torch.tensor([4, 5, 6])),
        "q_offset has shape (3,), but query has batch 2.\n"
        "  Instead: give one element for each batch entry, shape (2,), or one number for all.",
    ),
    (
        errors.OffsetShapeError,
        lambda: mask(q_offset=torch.tensor([4, 5])),
        "q_offset has shape (2,), but the mask has batch 1.\n"
        "  Instead: build the mask with B=2, or give one number for all.",
    ),
    (
        errors.OffsetMismatchError,
        lambda: call(block_mask=mask(q_offset=3), q_offset=4),
        "the call states q_offset=4, but its block mask has q_offset=3, kv_offset=0.\n"
        "  Instead: leave q_offset out, since a call has the offsets of its mask, or build the mask with "
        "create_block_mask(..., q_offset=q_offset).",
    ),
    (
        errors.DeviceMismatch,
        lambda: call(q_offset=torch.zeros(2, dtype=torch.int32, device="meta")),
        "query is on cpu but q_offset is on meta.\n"
        "  Instead: make q_offset on cpu; on meta it has no elements.",
    ),
    (
        errors.CallSizeError,
        lambda: call(score_mod=mods.sandwich(4, length=40, dim=4), q_offset=9),
        "mods.sandwich is made for 40 queries (its length), but the call has 32, from position 9 on.\n"
        "  Instead: give it 41 queries.",
    ),
    (
        errors.CallSizeError,
        lambda: mask(mod=masks.document(torch.zeros(40, dtype=torch.int32)), kv_offset=9),
        "masks.document is made for 40 keys (its ids), but the block mask has 32, from position 9 on.\n"
        "  Instead: give it 41 keys, or build the block mask with KV_LEN=31.",
    ),
    (
        errors.BlockMaskCombineError,
        lambda: mask(q_offset=3) & mask(),
        "these block masks do not go together: q_offset=3, kv_offset=0 in one and q_offset=0, kv_offset=0 in "
        "the other.\n"
        "  Instead: build both with the same offsets, the very tensors if they are tensors.",
    ),
]

MODS: list[Row] = [
    (
        errors.CallSizeError,
        lambda: call(score_mod=mods.alibi(16)),
        "mods.alibi is made for 16 heads (its slopes), but the call has 4.\n"
        "  Instead: give it 4 heads, or say which they are, "
        "lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h + first, q_idx, kv_idx).",
    ),
    (
        errors.CallSizeError,
        lambda: mask(mod=masks.document(lengths=torch.tensor([4, 5]))),
        "masks.document is made for 9 queries (its sum of lengths), but the block mask has 32.\n"
        "  Instead: give it 32 queries, or build the block mask with Q_LEN=9.",
    ),
    (
        errors.CallSizeError,
        lambda: mask(3, mod=masks.padding(torch.tensor([4, 5]))),
        "masks.padding is made for 2 batch entries (its lengths), but the block mask has 3.\n"
        "  Instead: give it 3 batch entries, or build the block mask with B=2.",
    ),
    (
        errors.CallSizeError,
        lambda: mask(mod=masks.jagged(torch.tensor([0, 9, 20, 32]), masks.padding(torch.tensor([4, 5])))),
        "masks.padding is made for 2 batch entries (its lengths), but the packing has 3 sequences.\n"
        "  Instead: give it 3 batch entries.",
    ),
    (
        errors.NotCallable,
        lambda: call(score_mod=x(32, 32)),
        "score_mod is a Tensor, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, "
        "kv_idx].",
    ),
    (
        errors.NotMadeError,
        lambda: masks.sliding_window & masks.causal(),  # type: ignore[operator]
        "masks.sliding_window is a function that makes a mask_mod, and it was not called.\n"
        f"  at {line_with('lambda: masks.sliding_window & ')}\n"
        "  Instead: call it: masks.sliding_window(window).",
    ),
    (
        errors.NotMadeError,
        lambda: create_block_mask(masks.causal, None, None, 64, 64),
        "masks.causal is a function that makes a mask_mod, and it was not called.\n"
        f"  at {line_with('lambda: create_block_mask(masks.causal, ')}\n"
        "  Instead: call it: masks.causal().",
    ),
    (
        errors.TensorKindError,
        lambda: create_block_mask(torch.eye(8).bool().to_sparse()),
        "dense is a tensor of layout torch.sparse_coo; no kernel can read it.\n"
        "  Instead: pass dense.to_dense().",
    ),
    (
        errors.TensorKindError,
        lambda: flexmod.quantize(nested(3, 4)),
        "x is nested; no kernel can read it.\n  Instead: pass its sequences, x.unbind(), one by one.",
    ),
    (
        errors.DeviceMismatch,
        lambda: flexmod.apply_sink(x(), x(2, 4, 32), torch.zeros(4, device="meta")),
        "out is on cpu but sink is on meta.\n  Instead: make sink on cpu; on meta it has no elements.",
    ),
    (
        errors.NotMadeError,
        lambda: masks.jagged(torch.tensor([0, 8]), masks.tree),  # type: ignore[arg-type]
        "masks.tree is a function that makes a mask_mod, and it was not called.\n"
        f"  at {line_with('lambda: masks.jagged(torch.tensor([0, 8]), masks.tree)')}\n"
        "  Instead: call it: masks.tree(parents).",
    ),
    (
        errors.NotCallable,
        lambda: create_block_mask(torch.ones(8, 8).bool().numpy()),
        "mask_mod is an ndarray, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): return q_idx >= "
        "kv_idx, or make the array a tensor, torch.from_numpy(dense).",
    ),
    (
        errors.NotMadeError,
        lambda: flex_attention(x(), x(), x(), mods.softcap),
        "mods.softcap is a function that makes a score_mod, and it was not called.\n"
        f"  at {line_with('lambda: flex_attention(x(), x(), x(), mods.softcap)')}\n"
        "  Instead: call it: mods.softcap(cap).",
    ),
    (
        errors.NotCallable,
        lambda: call(score_mod=mask()),
        "score_mod is a BlockMask, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def score_mod(score, b, h, q_idx, kv_idx): return "
        "score, and the BlockMask as block_mask=block_mask.",
    ),
    (
        errors.NotCallable,
        lambda: call(score_mod=x(32, 32, dtype=torch.bool)),
        "score_mod is a Tensor, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. lambda score, b, h, q_idx, kv_idx: "
        "torch.where(bias[q_idx, kv_idx], score, -float('inf')).",
    ),
    (
        errors.ModArityError,
        lambda: call(score_mod=causal),
        "score_mod causal takes 4 positional arguments without defaults; a score_mod takes 5 (score, b, h, "
        "q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx).\n"
        "  Instead: write def score_mod(score, b, h, q_idx, kv_idx): return score, or give the mask as "
        "block_mask=create_block_mask(causal, B, H, Q_LEN, KV_LEN), to flexmod.compile as mask_mod=causal.",
    ),
    (
        errors.ModArityError,
        lambda: mask(mod=short_bias),
        "mask_mod short_bias takes 5 positional arguments without defaults; a score_mod takes 5 (score, b, "
        "h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx).\n"
        "  Instead: write def mask_mod(b, h, q_idx, kv_idx): return q_idx >= kv_idx, or give the score_mod "
        "as score_mod=short_bias to flex_attention or flexmod.compile.",
    ),
    (
        errors.NotCallable,
        lambda: or_masks(causal, None),  # type: ignore[arg-type]
        "mask_mod is a NoneType, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): "
        "return q_idx >= kv_idx.",
    ),
    (
        errors.NotCallable,
        lambda: flexmod.and_masks([causal, causal]),  # type: ignore[arg-type]
        "mask_mod is a list, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): "
        "return q_idx >= kv_idx, or join several, and_masks(*mask_mods).",
    ),
    (
        errors.NotCallable,
        lambda: call(score_mod=[mods.softcap(3.0)]),
        "score_mod is a list, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def score_mod(score, b, h, q_idx, kv_idx): "
        "return score, or join several, mods.chain(*score_mods).",
    ),
    (
        errors.NotCallable,
        lambda: flexmod.and_masks(causal, mask()),  # type: ignore[arg-type]
        "mask_mod is a BlockMask, which cannot be called.\n"
        "  Instead: pass a function of scalars, e.g. def mask_mod(b, h, q_idx, kv_idx): "
        "return q_idx >= kv_idx, or the BlockMask's own, block_mask.mask_mod.",
    ),
    (
        errors.CaptureBoundsError,
        lambda: call(score_mod=short_bias),
        "captured_bias, of shape (30,), captured by score_mod, is indexed with 31 in dimension 0, which has "
        "30 elements.\n"
        f"  at {IN_SHORT_BIAS}\n"
        "  Instead: use an index from -30 to 29, e.g. index.clamp(0, 29): what a mask rules out counts too.",
    ),
    (
        errors.MaskCaptureGradientError,
        lambda: captured_by_mask(x(32, requires_grad=True)),
        "limits, captured by mask_mod, requires grad; a mask has no derivative.\n"
        f"  at {IN_A_MASK}\n"
        "  Instead: capture limits.detach().",
    ),
]

DERIVATIVES: list[Row] = [
    (
        errors.ModifiedBeforeBackwardError,
        written_before_backward,
        "limits, captured by mask_mod, has been modified by an inplace operation between forward and "
        "backward, which needs it as it was.\n"
        "  Instead: modify it after the backward (optimizer.step() too), or modify a new one: limits = "
        "limits.clone().",
    ),
    (
        errors.RecomputedError,
        another_mask_in_a_checkpoint,
        "a checkpoint computes attention again, and its block_mask is not that of the first forward.\n"
        "  Instead: assign it after the backward, or inside of the checkpointed function.",
    ),
    (
        errors.SavedTensorError,
        hooks_that_cast,
        "query was saved for the backward as (2, 4, 32, 16) of torch.float32 on cpu and comes back as "
        "(2, 4, 32, 16) of torch.float64 on cpu.\n"
        "  Instead: return what was saved from the unpack hook (tensors of integers too), and assign to "
        ".data after the backward.",
    ),
    (
        errors.DoubleBackwardError,
        second_derivative,
        "a second derivative of flex_attention is asked for; the CPU backend has the first alone.\n"
        '  Instead: pass kernel_options={"BACKEND": "REFERENCE"} to the call: dense, and differentiable to '
        "any order.",
    ),
    (
        errors.ForwardModeError,
        lambda: torch.func.jvp(call, (x(),), (x(),)),
        "query carries a tangent of forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad); "
        "flex_attention has reverse mode alone.\n"
        "  Instead: use torch.func.vjp or torch.autograd.grad, or pass "
        'kernel_options={"BACKEND": "REFERENCE"}.',
    ),
    (
        errors.JitTraceError,
        lambda: torch.jit.trace(call, x(1, 2, 32, 16)),
        "torch.jit.trace records a call of flexmod; it would keep the call's sizes and miss its kernels.\n"
        "  Instead: use torch.compile(model) or torch.export.export(model, args).",
    ),
    (
        errors.VmapError,
        lambda: torch.func.vmap(call)(x(3, 2, 4, 32, 16)),
        "torch.vmap maps over query; flex_attention has no batching rule. (jacrev and is_grads_batched are "
        "vmap too.)\n"
        "  Instead: put the mapped dimension into the batch, dimension 0 of query, key and value, or, unless "
        'a mask_mod captures it, pass kernel_options={"BACKEND": "REFERENCE"}.',
    ),
]

OPTION_MISTAKES: list[Row] = [
    (
        errors.ArgumentTypeError,
        lambda: call(return_aux=True),
        "return_aux is True.\n"
        "  Instead: give AuxRequest(lse=True, max_scores=True), with False for what you do not need.",
    ),
    *(
        (
            errors.ArgumentTypeError,
            lambda aux=aux: call(return_aux=aux),
            f"return_aux is {given}.\n"
            "  Instead: give AuxRequest(lse=True, max_scores=True), with False for what you do not need.",
        )
        for aux, given in (
            (AuxRequest, "<class 'flexmod.calls.attention.AuxRequest'>"),
            (AuxRequest(lse="yes"), "AuxRequest(lse='yes', max_scores=False)"),  # type: ignore[arg-type]
            (flexmod.AuxOutput(), "AuxOutput(lse=None, max_scores=None)"),
        )
    ),
    *(
        (
            errors.ArgumentTypeError,
            mistake,
            f"{name} is {given}.\n  Instead: give {name}=True or {name}=False.",
        )
        for name, given, mistake in (
            ("enable_gqa", "{'BACKEND': 'REFERENCE'}", lambda: call(enable_gqa={"BACKEND": "REFERENCE"})),
            ("enable_gqa", "None", lambda: flexmod.compile(enable_gqa=None)),  # type: ignore[arg-type]
            ("return_lse", "(True, False)", lambda: call(return_lse=(True, False))),
            ("return_lse", "'yes'", lambda: flexmod.compile()(x(), x(), x(), return_lse="yes")),  # type: ignore[call-overload]
            ("return_lse", "2", lambda: packed(return_lse=2)),
            ("separate_full_blocks", "'no'", lambda: mask(separate_full_blocks="no")),
            ("compute_q_blocks", "-1", lambda: given_mask(compute_q_blocks=-1)),
            ("flatten", "3", lambda: mask().as_tuple(3)),  # type: ignore[arg-type]
            ("density", "'x'", lambda: mask().to_string(density="x")),  # type: ignore[arg-type]
            ("color", "2", lambda: mask().to_string(color=2)),  # type: ignore[arg-type]
            ("causal", "32", lambda: masks.sliding_window(64, 32)),  # type: ignore[arg-type]
            ("causal", "2", lambda: masks.dilated_window(8, 2, 2)),  # type: ignore[arg-type]
            ("causal", "None", lambda: masks.global_window(8, 2, None)),  # type: ignore[arg-type]
            ("causal", "tensor(True)", lambda: masks.document(torch.arange(8), torch.tensor(True))),  # type: ignore[arg-type]
            ("approximate", "0.5", lambda: mods.softcap(30.0, 0.5)),  # type: ignore[arg-type]
            # as in Transformers, where the distance follows
            ("bidirectional", "128", lambda: mods.t5_bias(torch.zeros(32, 2), 128)),  # type: ignore[arg-type]
        )
    ),
    (
        errors.ArgumentTypeError,
        lambda: mask().to_string(20, "x"),  # type: ignore[arg-type]
        "limit is 'x'.\n  Instead: give a number of pairs (b, h), or -1 for all.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: mask().facts("x"),  # type: ignore[arg-type]
        "budget is 'x'.\n  Instead: give a number of elements, e.g. 2**20.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: mask().plot(3),
        "target is 3.\n  Instead: give a file's name, axes of matplotlib, or nothing for a new figure.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: flexmod.BlockMask.cat(mask()),  # type: ignore[arg-type]
        "masks is a BlockMask of shape [1, 1, 32, 32].\n"
        "  Instead: give a list, BlockMask.cat([first, second]).",
    ),
    (
        errors.ArgumentTypeError,
        lambda: call(kernel_options="REFERENCE"),
        "kernel_options is 'REFERENCE'.\n"
        "  Instead: give a dict of names and values, e.g. {'BACKEND': 'REFERENCE'}.",
    ),
    (
        errors.ArgumentTypeError,
        lambda: call(kernel_options=torch.zeros(2)),
        "kernel_options is tensor([0., 0.]).\n"
        "  Instead: give a dict of names and values, e.g. {'BACKEND': 'REFERENCE'}.",
    ),
    (
        errors.ReturnArgumentsError,
        lambda: call(return_lse=True, return_aux=AuxRequest()),
        "both return_lse and return_aux are given.\n  Instead: use return_aux=AuxRequest(lse=True) alone.",
    ),
    (
        errors.UnknownOption,
        lambda: options(fwd_BLOCKM=64),
        "kernel_options has no option 'fwd_BLOCKM'. Did you mean 'BLOCK_M'?\n"
        f"  Instead: use some of: {', '.join(OPTIONS)}.",
    ),
    (
        errors.UnknownOption,
        lambda: options(block_m=64),
        "kernel_options has no option 'block_m'. Did you mean 'BLOCK_M'?\n"
        f"  Instead: use some of: {', '.join(OPTIONS)}.",
    ),
    (
        errors.UnknownOption,
        lambda: options(speed=11),
        f"kernel_options has no option 'speed'.\n  Instead: use some of: {', '.join(OPTIONS)}.",
    ),
    (
        errors.OptionValueError,
        lambda: options(BLOCK_M=100),
        "kernel option BLOCK_M is 100.\n  Instead: give a power of two, 16 or more.",
    ),
    (
        errors.OptionValueError,
        lambda: options(bwd_num_warps=True),
        "kernel option bwd_num_warps is True.\n  Instead: give 1, 2, 4, 8, 16 or 32.",
    ),
    (
        errors.OptionValueError,
        lambda: options(num_warps=4.0),
        "kernel option num_warps is 4.0.\n  Instead: give 1, 2, 4, 8, 16 or 32.",
    ),
    (
        errors.OptionValueError,
        lambda: options(BLOCK_M=torch.tensor(64)),
        "kernel option BLOCK_M is tensor(64).\n  Instead: give a power of two, 16 or more.",
    ),
    (
        errors.OptionValueError,
        lambda: options(BLOCK_M=torch.eye(2)),
        "kernel option BLOCK_M is a Tensor of shape [2, 2].\n  Instead: give a power of two, 16 or more.",
    ),
    (
        errors.OptionValueError,
        lambda: options(BACKEND="CUDNN"),
        "kernel option BACKEND is 'CUDNN'.\n"
        "  Instead: give one of 'AUTO', 'TRITON', 'TRITON_DECODE', 'INTERPRET', 'REFERENCE'.",
    ),
    (
        errors.FlashBackendError,
        lambda: options(BACKEND="FLASH"),
        'BACKEND="FLASH" asks for torch\'s FlashAttention kernels, which flexmod does not contain.\n'
        "  Instead: leave BACKEND out: flexmod chooses its own fastest kernel.",
    ),
    (
        errors.DecodeBackendError,
        lambda: decode(x(dtype=torch.float16)),
        'BACKEND="TRITON_DECODE" cannot run this call: it has 32 queries, 32 keys and heads of 16 columns in '
        "float16.\n"
        "  Instead: leave BACKEND out: without gradients, flexmod takes this kernel for few queries on more "
        "than 64 keys, in float32 with heads of up to 128 columns, unless others take less time.",
    ),
    (
        errors.BackendDeviceError,
        lambda: options(BACKEND="TRITON"),
        'BACKEND="TRITON" runs on cuda tensors, but query is on cpu.\n'
        "  Instead: move query, key and value to cuda, or leave BACKEND out.",
    ),
    (
        errors.BackendDeviceError,
        lambda: options(BACKEND="TRITON_DECODE"),
        'BACKEND="TRITON_DECODE" runs on cuda tensors, but query is on cpu.\n'
        "  Instead: move query, key and value to cuda, or leave BACKEND out.",
    ),
    (
        errors.OptionValueError,
        lambda: options(TEMPLATE="cutlass"),
        "kernel option TEMPLATE is 'cutlass'.\n  Instead: give one of 'auto', 'hopper', 'portable'.",
    ),
    (
        errors.TemplateError,
        lambda: options(TEMPLATE="hopper", BACKEND="INTERPRET"),
        "kernel option TEMPLATE is 'hopper', but the forward cannot run on it: Triton's interpreter is no "
        "Hopper chip (sm_90).\n"
        "  Instead: leave TEMPLATE out: flexmod takes the portable template then.",
    ),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def float8(**options: Any) -> Any:
    return call(x(dtype=E4M3), **options)


def scaled(scale: Any, **options: Any) -> Any:
    return float8(scales=flexmod.Scales(key=scale), **options)


def learned_slope() -> Any:
    slope = torch.ones(4, requires_grad=True)
    return float8(score_mod=lambda score, b, h, q_idx, kv_idx: score * slope[h])


OF_KEY = (
    "key takes (), (2, 4) by head, or (2, 4, 1) by block of 128 positions.\n"
    "  Instead: give what flexmod.quantize(key, dtype, by) returned for this tensor."
)
FLOAT8: list[Row] = [
    (
        errors.Float8MixedError,
        lambda: call(x(dtype=E4M3), x(dtype=E5M2)),
        "query is float8_e4m3fn, key is float8_e5m2 and value is float8_e5m2; float8 is for all three, for "
        "key and value, or for value alone, in one format.\n"
        "  Instead: quantize the others too, e.g. flexmod.quantize(key, torch.float8_e4m3fn), or convert "
        "all to torch.bfloat16.",
    ),
    (
        errors.Float8MixedError,
        lambda: call(x(dtype=E5M2), x(dtype=torch.bfloat16)),
        "query is float8_e5m2, key is bfloat16 and value is bfloat16; float8 is for all three, for key and "
        "value, or for value alone, in one format.\n"
        "  Instead: quantize the others too, e.g. flexmod.quantize(key, torch.float8_e5m2), or convert all "
        "to torch.bfloat16.",
    ),
    (
        errors.Float8MixedError,
        lambda: call(x(dtype=HALF), x(), x(dtype=E4M3)),
        "query is float16, key is float32 and value is float8_e4m3fn; float8 is for all three, for key and "
        "value, or for value alone, in one format.\n"
        "  Instead: quantize the others too, e.g. flexmod.quantize(key, torch.float8_e4m3fn), or convert "
        "all to torch.bfloat16.",
    ),
    (
        errors.Float8HeadDimError,
        lambda: call(x(2, 4, 32, 24, dtype=E4M3)),
        "query is float8 with a head_dim of 24; float8 tensors take multiples of 16.\n"
        "  Instead: pad it with zeros before quantize, torch.nn.functional.pad(query, (0, 8)).",
    ),
    (
        errors.Float8GradientError,
        lambda: call(x(dtype=HALF, requires_grad=True), x(dtype=E4M3)),
        "query requires a gradient; attention on float8 has no backward.\n"
        "  Instead: call under torch.no_grad(), or give float16 or bfloat16 tensors.",
    ),
    (
        errors.Float8GradientError,
        lambda: scaled(torch.ones((), requires_grad=True)),
        "scales.key requires a gradient; attention on float8 has no backward.\n"
        "  Instead: call under torch.no_grad(), or give float16 or bfloat16 tensors.",
    ),
    (
        errors.Float8GradientError,
        learned_slope,
        "a tensor captured by score_mod requires a gradient; attention on float8 has no backward.\n"
        "  Instead: call under torch.no_grad(), or give float16 or bfloat16 tensors.",
    ),
    (
        errors.OutDtypeError,
        lambda: float8(out_dtype=DOUBLE),
        "out_dtype is torch.float64; float8 queries give bfloat16, float16 or float32.\n"
        "  Instead: leave out_dtype out, or cast the output, out.to(dtype).",
    ),
    (
        errors.OutDtypeError,
        lambda: call(out_dtype=HALF),
        "out_dtype is torch.float16; queries in float32 give that dtype.\n"
        "  Instead: leave out_dtype out, or cast the output, out.to(dtype).",
    ),
    (
        errors.OutDtypeError,
        lambda: float8(out_dtype="bfloat16"),
        "out_dtype is 'bfloat16'; float8 queries give bfloat16, float16 or float32.\n"
        "  Instead: leave out_dtype out, or cast the output, out.to(dtype).",
    ),
    (
        errors.ScalesTypeError,
        lambda: float8(scales=(torch.ones(()), None, None)),
        "scales is a tuple; scales are flexmod.Scales of float32 tensors.\n"
        "  Instead: give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize "
        "returned.",
    ),
    (
        errors.ScalesTypeError,
        lambda: float8(scales=torch.ones(2)),
        "scales is a Tensor; scales are flexmod.Scales of float32 tensors.\n"
        "  Instead: give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize "
        "returned.",
    ),
    (
        errors.ScalesTypeError,
        lambda: float8(scales=()),
        "scales is a tuple; scales are flexmod.Scales of float32 tensors.\n"
        "  Instead: give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize "
        "returned.",
    ),
    (
        errors.ScalesTypeError,
        lambda: scaled(0.5),
        "scales.key is a float; scales are flexmod.Scales of float32 tensors.\n"
        "  Instead: give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize "
        "returned.",
    ),
    (
        errors.ScalesTypeError,
        lambda: scaled(torch.ones((), dtype=HALF)),
        "scales.key is a tensor of float16; scales are flexmod.Scales of float32 tensors.\n"
        "  Instead: give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize "
        "returned.",
    ),
    (
        errors.ScalesUnusedError,
        lambda: call(scales=flexmod.Scales(query=torch.ones(()))),
        "scales.query is given, but query is float32; scales are for float8 tensors.\n"
        "  Instead: leave it out, or quantize query with flexmod.quantize.",
    ),
    (errors.ScalesShapeError, lambda: scaled(torch.ones(4)), f"scales.key has shape (4,); {OF_KEY}"),
    (errors.ScalesShapeError, lambda: scaled(torch.ones(4, 2)), f"scales.key has shape (4, 2); {OF_KEY}"),
    (
        errors.ScalesShapeError,
        lambda: scaled(torch.ones(2, 4, 2)),
        f"scales.key has shape (2, 4, 2); {OF_KEY}",
    ),
    (
        errors.ScalesValueError,
        lambda: scaled(torch.full((2, 4), -0.5)),
        "scales.key contains -0.5; scales are positive finite numbers.\n"
        "  Instead: let flexmod.quantize make them, or clamp them, scale.clamp(min=1e-12).",
    ),
    (
        errors.ScalesValueError,
        lambda: scaled(torch.tensor([[1.0, 1.0, 1.0, torch.nan]] * 2)),
        "scales.key contains nan; scales are positive finite numbers.\n"
        "  Instead: let flexmod.quantize make them, or clamp them, scale.clamp(min=1e-12).",
    ),
    (
        errors.DeviceMismatch,
        lambda: scaled(torch.ones(2, 4, device="meta")),
        "key is on cpu but scales.key is on meta.\n"
        "  Instead: make scales.key on cpu; on meta it has no elements.",
    ),
]

ROWS = [*TENSORS, *FLOAT8, *BSHD, *BLOCK_MASKS, *OFFSETS, *MODS, *DERIVATIVES, *OPTION_MISTAKES]
