"""One call of attention as plain data: its tensors, its mods, and what flexmod makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod


@dataclass(frozen=True)
class Table:
    """A captured tensor: whole numbers from `low` to `high`; floats are sixteenths of them, exact anywhere.

    `layout` as in `laid_out`. `ascending`: sorted along the last dimension, as the numbers of documents are.
    `values`: what all its elements are, call by call of a session, in place of what is random. `reach`: how
    a mod gets at it, as a global, a closure, a default argument or a buffer (`module.name`), or as Python's
    number in a closure ("number"). `on_cpu`: on the CPU whatever the call's device is. `padding`: what the
    last element of the last dimension holds. `pool`: what its elements are drawn from, in place of `low` to
    `high`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int
    layout: str = "plain"
    ascending: bool = False
    learned: bool = False
    values: tuple[float, ...] = ()
    reach: str = "global"
    on_cpu: bool = False
    padding: float = 0.0
    pool: tuple[float, ...] = ()


class Step(NamedTuple):
    """One call of a session, and what happens before it and between its forward and its backward.

    `events.py` lists what may happen.
    """

    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()


class Float8(NamedTuple):
    """The tensors of a call that are float8, "qkv", "kv" or "v", their format, and how each is scaled.

    Scales are powers of two, so that the case's dtype holds what the tensors stand for.
    """

    format: str
    tensors: str
    by: tuple[str, str, str]

    def scale(self, name: str, x: Tensor, seed: int) -> Tensor | None:
        """The scale of a tensor, by "tensor", "head" or "block", or None for 1."""
        by = self.by["qkv".index(name)]
        if not by or name not in self.tensors:
            return None
        blocks = -(-x.shape[2] // 128)
        shape = {"tensor": (), "head": x.shape[:2], "block": (*x.shape[:2], blocks)}[by]
        random = torch.Generator().manual_seed(seed + ord(name))
        return torch.exp2(torch.randint(-4, 2, shape, generator=random).float()).to(x.device)

    def given(self, name: str, x: Tensor, seed: int) -> Tensor:
        """The float8 tensor that stands for x, which it holds, in the same strides."""
        return x if name not in self.tensors else (x.float() / self._each(name, x, seed)).to(self._dtype)

    def rounded(self, name: str, x: Tensor, seed: int) -> Tensor:
        """What float8 and its scale leave of x."""
        if name not in self.tensors:
            return x
        return (self.given(name, x, seed).float() * self._each(name, x, seed)).to(x.dtype)

    def _each(self, name: str, x: Tensor, seed: int) -> Any:
        scale = self.scale(name, x, seed)
        if scale is None or scale.dim() == 0:
            return 1.0 if scale is None else scale
        if scale.dim() == 2:
            return scale[:, :, None, None]
        return scale.repeat_interleave(128, 2)[:, :, : x.shape[2], None]

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.format)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A call, or several with the same objects.

    Pairs are (queries', keys'): `batch` (B, B or 1), `heads` (Hq, Hkv), `lengths` (M, N).

    `backend`: cpu, interpret, triton (the portable kernels), hopper, or python, which is Hopper's kernels on
    the CPU. `score` and `mask`: texts of functions ("": none), which read `numbers`, and tables, by name.
    `kv_dtype` is lower than `dtype` only without gradients. `layouts`: of query, key, value and the gradient
    of the output. `mask_sizes`: B and H of the mask, 0 for None; `mask_form`: built, without full tiles
    (partial), the complement of the complement, or given as lists. `wanted`: which of q, k, v want a
    gradient; "" and no learned table: a forward alone. `kind` is the kind of draw. `route`: flex_attention
    (eager), or a handle, that is given its mask_mod or a block mask (handle with mask). `layout`: that of the
    call. `float8`: which tensors are; `dtype` is then that of the others and of the output.
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
    kind: str = "plain"
    route: str = "eager"
    layout: str = "bhsd"
    float8: Float8 | None = None
    steps: tuple[Step, ...] = (Step(),)


class Call(NamedTuple):
    """A case's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    tables: dict[str, Tensor]


Results = dict[str, Tensor]


def device_of(case: Case) -> torch.device:
    return torch.device("cuda" if case.backend in ("triton", "hopper") else "cpu")


def call_of(case: Case, draw: int = 0, number: int = 0) -> Call:
    """The tensors of call `number` of a session.

    `draw` changes what tensors of floats hold; whole numbers, truth values and `values` stay.
    """
    device = device_of(case)
    random = torch.Generator().manual_seed(1000 * case.seed + 100 * number + draw)
    same = torch.Generator().manual_seed(case.seed)
    (batch, kv_batch), (heads, kv_heads), (rows, columns) = case.batch, case.heads, case.lengths
    dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype or case.dtype)
    q_layout, k_layout, v_layout, grad_layout = case.layouts

    def normal(shape: tuple[int, ...], dtype: torch.dtype, layout: str, name: str = "") -> Tensor:
        drawn = torch.randn(shape, generator=random).to(device, dtype)
        if case.float8 and name:
            drawn = case.float8.rounded(name, drawn, case.seed)
        return laid_out(drawn, layout)

    tables = {}
    for table in case.tables:
        of = getattr(torch, table.dtype)
        if table.values:
            number_now = table.values[number % len(table.values)]
            tables[table.name] = torch.full(
                table.shape, number_now, dtype=of, device="cpu" if table.on_cpu else device
            )
            continue
        drawn = torch.randint(
            table.low, table.high + 1, table.shape, generator=random if of.is_floating_point else same
        )
        if table.pool:
            chosen = torch.randint(0, len(table.pool), table.shape, generator=same)
            drawn = torch.tensor(table.pool)[chosen]
        if table.ascending:
            drawn = drawn.sort(-1).values
        values = drawn / 16 if of.is_floating_point and not table.pool else drawn
        if table.padding:
            values[..., -1] = table.padding
        tables[table.name] = laid_out(values.to(device, of), table.layout)
    return Call(
        normal((batch, heads, rows, case.dims[0]), dtype, q_layout, "q"),
        normal((kv_batch, kv_heads, columns, case.dims[0]), kv_dtype, k_layout, "k"),
        normal((kv_batch, kv_heads, columns, case.dims[1]), kv_dtype, v_layout, "v"),
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
    space |= {t.name: tables[t.name].item() for t in case.tables if t.reach == "number" and t.name in tables}
    space |= {"flexmod": flexmod, "module": _module(case, tables)}
    if not text.startswith("def "):  # an expression: a mod of the library
        return eval(text, space)
    name = text[4 : text.index("(")]
    reached = {t.name: t.reach for t in case.tables if re.search(rf"\b{t.name}\b", text)}
    defaults = "".join(f", {name}={name}" for name, reach in reached.items() if reach == "default")
    text = text.replace("kv_idx):", f"kv_idx{defaults}):", 1)
    closure = ", ".join(name for name, reach in reached.items() if reach in ("closure", "number"))
    if closure:
        inner = "".join(f"    {line}\n" for line in text.splitlines())
        text = f"def make({closure}):\n{inner}    return {name}\n{name} = make({closure})\n"
    exec(compile(text, f"<{name}>", "exec"), space)
    return space[name]


def _module(case: Case, tables: dict[str, Tensor]) -> torch.nn.Module:
    """A module whose buffers are the tables that mods reach as such."""
    module = torch.nn.Module()
    for table in case.tables:
        if table.reach == "buffer" and table.name in tables:
            module.register_buffer(table.name, tables[table.name])
    return module


def block_mask(
    case: Case, mask_mod: Any, device: torch.device, lists: Callable[[str, Any], Any] = lambda name, x: x
) -> flexmod.BlockMask:
    """The block mask of a case; `lists` changes the lists of a mask that is given by lists."""
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
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    parts = (lists(name, getattr(mask, name)) for name in names)
    return flexmod.BlockMask.from_kv_blocks(
        *parts, BLOCK_SIZE=case.block, mask_mod=mask_mod, seq_lengths=case.lengths
    )


def poison(*likes: Tensor) -> None:
    """Leave NaN in freed blocks of the sizes of `likes`, twice each, from where allocations take theirs."""
    blocks = [torch.full_like(like, math.nan) for like in (*likes, *likes)]
    if likes[0].is_cuda:
        torch.cuda.synchronize()
    del blocks
