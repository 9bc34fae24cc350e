"""One call of attention as plain data: its tensors, its mods, and what flexmod makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod


@dataclass(frozen=True)
class Table:
    """A captured tensor: whole numbers from `low` to `high`; floats are sixteenths of them, exact anywhere.

    `layout` as in `laid_out`. `ascending`: sorted along the last dimension, as the numbers of documents are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int
    layout: str = "plain"
    ascending: bool = False
    learned: bool = False


@dataclass(frozen=True)
class Case:
    """A call. Pairs are (queries', keys'): `batch` (B, B or 1), `heads` (Hq, Hkv), `lengths` (M, N).

    `backend`: cpu, interpret, triton (the portable kernels), hopper, or python, which is Hopper's kernels on
    the CPU. `score` and `mask`: texts of functions ("": none), which read `numbers`, and tables, by name.
    `kv_dtype` is lower than `dtype` only without gradients. `layouts`: of query, key, value and the gradient
    of the output. `mask_sizes`: B and H of the mask, 0 for None; `mask_form`: built, without full tiles
    (partial), the complement of the complement, or given as lists. `wanted`: which of q, k, v want a
    gradient; "" and no learned table: a forward alone.
    """

    backend: str
    score: str = field(default="", repr=False)
    mask: str = field(default="", repr=False)
    tables: tuple[Table, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    dtype: str = "float32"
    kv_dtype: str = ""
    batch: tuple[int, int] = (1, 1)
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (1, 1)
    layouts: tuple[str, str, str, str] = ("plain",) * 4
    block: tuple[int, int] = (128, 128)
    mask_form: str = "built"
    mask_sizes: tuple[int, int] = (0, 0)
    scale: float | None = None
    wanted: str = "qkv"
    grad_lse: bool = False
    deterministic: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


class Call(NamedTuple):
    """A case's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    tables: dict[str, Tensor]


Results = dict[str, Tensor]


def call_of(case: Case, draw: int = 0) -> Call:
    """`draw` changes what tensors of floats hold; whole numbers and truth values stay."""
    device = "cuda" if case.backend in ("triton", "hopper") else "cpu"
    random = torch.Generator().manual_seed(1000 * case.seed + draw)
    same = torch.Generator().manual_seed(case.seed)
    (batch, kv_batch), (heads, kv_heads), (rows, columns) = case.batch, case.heads, case.lengths
    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype or case.dtype)
    q_layout, k_layout, v_layout, grad_layout = case.layouts

    def normal(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
        return laid_out(torch.randn(shape, generator=random).to(device, dtype), layout)

    tables = {}
    for table in case.tables:
        of = getattr(torch, table.dtype)
        drawn = torch.randint(
            table.low, table.high + 1, table.shape, generator=random if of.is_floating_point else same
        )
        if table.ascending:
            drawn = drawn.sort(-1).values
        values = drawn / 16 if of.is_floating_point else drawn
        tables[table.name] = laid_out(values.to(device, of), table.layout)
    return Call(
        normal((batch, heads, rows, case.dims[0]), dtype, q_layout),
        normal((kv_batch, kv_heads, columns, case.dims[0]), kv_dtype, k_layout),
        normal((kv_batch, kv_heads, columns, case.dims[1]), kv_dtype, v_layout),
        normal((batch, heads, rows, case.dims[1]), dtype, grad_layout),
        normal((batch, heads, rows), torch.float64 if case.dtype == "float64" else torch.float32, "plain"),
        tables,
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other places; "expanded" repeats the first of dimension 0, "alike" of 1."""
    if layout == "plain" or x.dim() == 0:
        return x
    if layout in ("expanded", "alike"):
        dim = 0 if layout == "expanded" or x.dim() == 1 else 1
        return x.narrow(dim, 0, 1).expand(x.shape)
    if layout == "reversed":  # the first dimension is the innermost
        return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    if layout == "bshd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":  # every second of the last dimension, behind something else
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), 7, dtype=x.dtype, device=x.device)
        view = wide[..., 3::2]
    else:
        assert layout == "packed", layout  # beside others in the last dimension
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), 7, dtype=x.dtype, device=x.device)
        view = wide[..., 8 : 8 + x.shape[-1]]
    return view.copy_(x)


def mod_of(
    text: str, case: Case, tables: dict[str, Tensor], halves: bool = True, functions: Any = torch
) -> Any:
    """The function of a text. Not `halves`: casts to less than float64 are casts to float64.

    `functions` stands for torch.
    """
    if not text:
        return None
    names = ("FLOAT32", "FLOAT16", "BFLOAT16")
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if halves else (torch.float64,) * 3
    rows, columns = case.lengths
    space: dict[str, Any] = {"torch": functions, "F": torch.nn.functional, "M": rows, "N": columns}
    space |= dict(zip(names, dtypes, strict=True)) | dict(case.numbers) | tables
    exec(compile(text, f"<{text[4:12]}>", "exec"), space)
    return space[text[4 : text.index("(")]]


def compiled(case: Case, call: Call) -> Results:
    """flexmod's results, from memory that held NaN before."""
    if case.backend != "python":
        return _compiled(case, call)
    from plain_gluon import on_python  # not on every path of a script

    with on_python(seed=case.seed, ordered=case.seed % 2 == 1):
        return _compiled(case, call)


def _compiled(case: Case, call: Call) -> Results:
    device = call.q.device
    tables = {
        t.name: call.tables[t.name].detach().requires_grad_(t.learned)
        for t in case.tables
    }
    inputs = {n: getattr(call, n).detach().requires_grad_(n in case.wanted) for n in "qkv"}
    mask, options = None, dict(case.options)
    backends = {
        "interpret": {"BACKEND": "INTERPRET"}, "python": {"BACKEND": "INTERPRET", "TEMPLATE": "hopper"},
        "triton": {"TEMPLATE": "portable"}, "hopper": {"TEMPLATE": "hopper"},
    }  # fmt: skip
    options |= backends.get(case.backend, {})
    if case.mask:
        mask_mod = mod_of(case.mask, case, {name: x.detach() for name, x in tables.items()})
        mask = block_mask(case, mask_mod, device)
    leaves = {name: x for name, x in (inputs | tables).items() if x.requires_grad}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.deterministic)  # torch fills what it allocates with NaN then
    try:
        poison(call.q, call.grad_out, call.grad_lse)
        out, lse = flexmod.flex_attention(
            inputs["q"], inputs["k"], inputs["v"], mod_of(case.score, case, tables), mask, scale=case.scale,
            enable_gqa=case.heads[0] != case.heads[1], return_lse=True, kernel_options=options,
        )  # fmt: skip
        found = {"out": out.detach(), "lse": lse.detach()}
        if leaves:
            results, incoming = [out], [call.grad_out]
            if case.grad_lse:
                results, incoming = [out, lse], [call.grad_out, call.grad_lse]
            poison(call.q, call.k, call.v, call.grad_lse, call.q.float(), *leaves.values())
            gradients = torch.autograd.grad(
                results, list(leaves.values()), incoming, allow_unused=True, materialize_grads=True
            )
            found |= dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)
    return found


def block_mask(case: Case, mask_mod: Any, device: torch.device) -> flexmod.BlockMask:
    sizes = [size or None for size in case.mask_sizes]
    facts: dict[str, Any] = {"device": device, "BLOCK_SIZE": case.block}
    if case.mask_form == "complement":

        def negated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return ~mask_mod(b, h, q_idx, kv_idx)

        return ~flexmod.create_block_mask(negated, *sizes, *case.lengths, **facts)
    facts["separate_full_blocks"] = case.mask_form != "partial"
    mask = flexmod.create_block_mask(mask_mod, *sizes, *case.lengths, **facts)
    if case.mask_form != "lists":
        return mask
    return flexmod.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        BLOCK_SIZE=case.block, mask_mod=mask_mod, seq_lengths=case.lengths,
    )  # fmt: skip


def poison(*likes: Tensor) -> None:
    """Leave NaN in freed blocks of the sizes of `likes`, twice each, from where allocations take theirs."""
    blocks = [torch.full_like(like, math.nan) for like in (*likes, *likes)]
    if likes[0].is_cuda:
        torch.cuda.synchronize()
    del blocks
