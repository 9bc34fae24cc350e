"""Programs, and the calls of each.

A program is what kernels are made for: mods, dtypes, head dimensions, blocks of the mask, how heads share
keys. Its calls differ in lengths, batch, Python numbers and what tensors hold, so that a program is
compiled once. The strides of its calls are alike to Triton too (multiples of 16 or not), which makes
kernels of its own otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fuzz import mods
from fuzz.case import Case, Table
from fuzz.choices import Drawn

Cases = tuple[Case, ...]


@dataclass(frozen=True)
class Sizes:
    """What a backend's calls are drawn from. `scores`: the most of a call, B * Hq * M * N, seldom reached."""

    lengths: int
    dims: tuple[int, ...]
    batch: int
    heads: int
    group: int
    scores: int
    blocks: tuple[Any, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    steps: int
    calls: int


LAYOUTS = ("plain", "plain", "plain", "bshd", "reversed", "sliced", "packed", "expanded", "alike")
HALVES = ("bfloat16", "float16")
ANY_DIMS = (1, 2, 3, 8, 16, 16, 24, 31, 32, 33, 48, 64, 64, 80, 100, 128, 192, 256, 300)

SIZES = {
    "cpu": Sizes(
        300, ANY_DIMS, 3, 3, 4, 1 << 16, (1, 5, 16, (7, 40), 48, 128, (128, 32)),
        ("float32", "float32", "float64", *HALVES), LAYOUTS, 10, 4,
    ),
    "interpret": Sizes(
        56, (1, 3, 8, 16, 17, 24, 32, 40), 2, 2, 2, 2400, (16, 32, (16, 32), (48, 16), 64, 128),
        ("float32", "float32", *HALVES), LAYOUTS, 8, 16,
    ),
    "python": Sizes(
        600, (40, 64, 64, 72, 96, 128, 128, 160, 192, 256), 2, 2, 2, 1 << 18, (128, 128, (128, 256), 256),
        HALVES, ("plain", "plain", "bshd", "packed"), 8, 4,
    ),
    "triton": Sizes(
        400, ANY_DIMS, 3, 3, 4, 1 << 21, (16, 64, (64, 128), 128, 128, (128, 64), 256),
        ("float32", *HALVES), LAYOUTS, 9, 8,
    ),
    "hopper": Sizes(
        700, (40, 64, 64, 72, 96, 128, 128, 160, 192, 256), 3, 3, 4, 1 << 21, (128, 128, (128, 256), 256),
        HALVES, ("plain", "plain", "bshd", "packed"), 9, 8,
    ),
}  # fmt: skip
HOPPER = ("python", "hopper")  # the same kernels
NUMBERS = {
    "float": (0.5, 1.0, 2.0, -0.75, 0.0),
    "int": (0, 1, 2, 3, -4),
    "window": (0, 1, 7, 16, 33, 64, 130, 300),
}
MASK_FORMS = ("built", "built", "built", "partial", "complement", "lists")
SCALES = (None, None, None, 1.0, 0.25, -0.125)


class Mods(NamedTuple):
    """The mods of a program: texts, tables, Python numbers (name -> kind), what positions a mask reads."""

    score: str
    mask: str
    forms: list[mods.TableForm]
    numbers: dict[str, str]
    reads: frozenset[str]


def program(draw: Drawn, backend: str) -> Cases:
    """The calls of one program."""
    return calls_of(draw, backend, drawn_mods(draw, SIZES[backend].steps))


def calls_of(draw: Drawn, backend: str, mods_of_it: Mods) -> Cases:
    """All else of a program whose mods are drawn, and its calls."""
    sizes = SIZES[backend]
    score, mask, forms, numbers, reads = mods_of_it
    kv_heads = draw.whole(1, sizes.heads)
    heads = kv_heads * draw.one([1, 1, *range(2, sizes.group + 1)])
    dtype = draw.one(sizes.dtypes)
    dims = draw.one(sizes.dims), draw.one(sizes.dims)
    if draw.flag():
        dims = dims[0], dims[0]
    wanted, kv_dtype = draw.one(["qkv"] * 5 + ["q", "kv", "v", "", "k"]), ""
    learns = any(form.learned for form in forms)
    if not wanted and not learns and backend not in HOPPER and dtype == "float32":
        kv_dtype = draw.one(["", "bfloat16", "float16"])
    block = draw.one(sizes.blocks)
    layouts = [draw.one(sizes.layouts) for _ in range(4)]
    aligned, apart = draw.flag(), (draw.flag(), draw.flag())
    shared = Case(
        backend=backend, score=score, mask=mask, dtype=dtype, kv_dtype=kv_dtype, heads=(heads, kv_heads),
        dims=dims, layouts=(layouts[0], layouts[1], layouts[2], layouts[3]),
        block=block if isinstance(block, tuple) else (block, block), mask_form=draw.one(MASK_FORMS),
        wanted=wanted, grad_lse=draw.rarely(4), scale=draw.one(SCALES),
        deterministic=backend not in HOPPER and draw.flag(), options=_options(draw, backend, block),
    )  # fmt: skip
    calls = draw.whole(sizes.calls // 2, sizes.calls)
    return tuple(_call(draw, sizes, forms, numbers, reads, aligned, apart, shared) for _ in range(calls))


def drawn_mods(draw: Drawn, steps: int, which: str = "") -> Mods:
    """`which` of them there are: both, score, mask or none."""
    which = which or draw.one(["both", "both", "both", "score", "score", "mask", "mask", "none"])
    score = mask = ""
    drawn: list[mods.Mod] = []
    reads: frozenset[str] = frozenset()
    if which in ("both", "score"):
        score, mod = mods.score_mod(draw, steps)
        drawn.append(mod)
    if which in ("both", "mask"):
        mask, mod, reads = mods.mask_mod(draw, steps // 2)
        drawn.append(mod)
    used = set(re.findall(r"\w+", score + mask))
    forms = [form for mod in drawn for form in mod.tables if form.name in used]
    numbers = {name: kind for mod in drawn for name, kind in mod.numbers.items() if name in used}
    return Mods(score, mask, forms, numbers, reads)


def _options(draw: Drawn, backend: str, block: Any) -> tuple[tuple[str, Any], ...]:
    """Tiles: in the interpreter small ones, so that small calls have several."""
    if backend == "interpret" or (backend == "triton" and draw.rarely(3)):
        smallest = min(block) if isinstance(block, tuple) else block
        tile = draw.one([16, 16, 32])
        tile = tile if smallest % tile == 0 else 16
        return tuple((f"BLOCK_{side}{n}", tile) for side in "MN" for n in ("", 1, 2, 3))
    return ()


def _call(
    draw: Drawn, sizes: Sizes, forms: list[mods.TableForm], numbers: dict[str, str], reads: frozenset[str],
    aligned: bool, apart: tuple[bool, bool], case: Case,
) -> Case:  # fmt: skip
    rows, columns = (_length(draw, sizes, case.backend, aligned) for _ in range(2))
    if draw.flag():
        columns = rows
    batch, most = draw.whole(1, sizes.batch), sizes.scores // draw.one([4, 4, 1])
    while batch * case.heads[0] * rows * columns > most and (batch > 1 or max(rows, columns) > 16):
        if batch > 1:
            batch -= 1
        elif rows >= columns:
            rows = _half(rows)
        else:
            columns = _half(columns)
    kv_batch = draw.one([batch, batch, 1])
    named = {"B": batch, "H": case.heads[0], "M": rows, "N": columns}
    tables = tuple(
        Table(
            form.name, tuple(eval(size, {"max": max}, named) for size in form.sizes), form.dtype, form.low,
            form.high, form.layout, form.ascending, form.learned,
        )
        for form in forms
    )  # fmt: skip
    mask_sizes = (
        batch if ("b" in reads and batch > 1) or apart[0] else 0,
        case.heads[0] if ("h" in reads and case.heads[0] > 1) or apart[1] else 0,
    )
    values = tuple((name, draw.one(NUMBERS[kind])) for name, kind in numbers.items())
    return replace(
        case, batch=(batch, kv_batch), lengths=(rows, columns), tables=tables, numbers=values,
        mask_sizes=mask_sizes, seed=draw.whole(0, 10**6),
    )  # fmt: skip


def _half(length: int) -> int:
    """About half; a multiple of 16 stays one, an odd length odd."""
    return length // 32 * 16 or 16 if length % 16 == 0 else length // 2 | 1


def _length(draw: Drawn, sizes: Sizes, backend: str, aligned: bool) -> int:
    """Short ones as often as long ones; on a GPU all of a program are multiples of 16, or none is."""
    top = sizes.lengths
    length = draw.whole(1, draw.one([8, top // 4, top]))
    if backend in ("triton", "hopper"):
        length = -(-length // 16) * 16 if aligned else length | 1
    return int(length)
