"""Score mods and masks as texts, with the tensors that they capture."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fuzz.choices import Drawn
from fuzz.operations import cast, operation
from fuzz.values import LONGEST, Pool, Value, pick

SCORE = "score, b, h, q_idx, kv_idx"
MASK = "b, h, q_idx, kv_idx"
# size of a dimension, by name where it follows the call's -> texts that index it
NATURAL = {
    "B": ("b",),
    "H": ("h",),
    "M": ("q_idx", "q_idx // 3", "-1 - q_idx"),
    "N": ("kv_idx", "kv_idx // 5", "kv_idx - N"),
    "M + N - 1": ("q_idx - kv_idx + N - 1",),
    "2 * max(M, N)": ("q_idx - kv_idx",),
    "9": ("(q_idx - kv_idx).clamp(-4, 4) + 4",),
}
WHOLE = ("int32", "int64", "int16", "int8", "uint8", "bool")
FLOATING = ("float32", "float32", "float16", "bfloat16", "float64")
# how what is loaded meets the score
JOINED = {
    "float": ("{0} + {1}", "{0} * {1}", "{0} - {1} * 0.5", "torch.tanh({0} * 0.5) * {1}"),
    "int": ("{0} + {1} * 0.125", "{0} * ({1} + 1)"),
    "bool": ("torch.where({1}, {0}, {0} * 0.5)", "{0} * {1}"),
}
ATOMS = ("causal", "window", "document", "prefix", "block", "pattern", "pairs", "by head", "loaded")
LAYOUTS = ("plain", "plain", "reversed", "sliced", "packed", "expanded")


@dataclass(frozen=True)
class TableForm:
    """A table of which sizes are named: as `check.Table`."""

    name: str
    sizes: tuple[str, ...]
    dtype: str
    low: int
    high: int
    layout: str
    ascending: bool
    learned: bool


@dataclass
class Mod:
    """A mod that is being drawn: its values, its tables, its Python numbers (name -> kind)."""

    pool: Pool
    prefix: str
    tables: list[TableForm] = field(default_factory=list)
    numbers: dict[str, str] = field(default_factory=dict)
    loaded: list[Value] = field(default_factory=list)

    def table(self, sizes: tuple[str, ...], dtype: str, low: int, high: int, **facts: Any) -> str:
        name = f"{self.prefix}{len(self.tables)}"
        facts = {"layout": "plain", "ascending": False, "learned": False, **facts}
        self.tables.append(TableForm(name, sizes, dtype, low, high, **facts))
        return name

    def number(self, kind: str, size: float) -> Value:
        """A Python number that a mod closes over; its value changes from call to call."""
        name = f"{self.prefix}{kind[0]}{len(self.numbers)}"
        self.numbers[name] = kind
        value = Value(name, "float" if kind == "float" else "int", size, 3, weak=True)
        self.pool.values.append(value)
        return value


def positions() -> list[Value]:
    sizes = {"b": 4, "h": 16, "q_idx": LONGEST, "kv_idx": LONGEST}
    return [Value(name, "int", size, reads=frozenset([name])) for name, size in sizes.items()]


def score_mod(draw: Drawn, steps: int) -> tuple[str, Mod]:
    score = Value("score", "float", 16.0, None, score=True)
    mod = Mod(Pool([*positions(), score]), "t")
    _start(draw, mod)
    for _ in range(draw.whole(1, steps)):
        kind = draw.one(["operation"] * 6 + ["load"] * 3 + ["cast"])
        if kind == "operation":
            operation(draw, mod.pool, "score")
        elif kind == "load":
            load(draw, mod, learns=True)
        else:
            cast(draw, mod.pool)
    return mod.pool.text("score_mod", SCORE, _result(draw, mod)), mod


def _result(draw: Drawn, mod: Mod) -> Value:
    """A value of the score, most often with what was loaded, and in one of the forms that mods end with."""
    pool = mod.pool
    floats = [v for v in pool.values if v.kind == "float" and not v.weak]
    chosen = draw.one([v for v in floats if v.score][-3:])
    for _ in range(draw.whole(0, 2) if mod.loaded else 0):
        loaded = draw.one(mod.loaded)
        chosen = _joined(pool, draw.one(JOINED[loaded.kind]), chosen, loaded)
    how = draw.one(["as it is", "add", "add", "add score", "forbid"])
    if how == "add":
        other = draw.one(floats[-4:])
        chosen = _joined(pool, "{0} + {1}", chosen, other)
    elif how == "add score":
        chosen = _joined(pool, "score + {0}", chosen)
    elif how == "forbid":
        causal = Value("(q_idx >= kv_idx)", "bool", 1.0)
        truth = draw.one([causal, *(v for v in pool.values if v.kind == "bool")])
        low = draw.one(['-float("inf")', '-float("inf")', "-1e4"])
        branches = draw.one([f"{{1}}, {low}", f"{low}, {{1}}"])
        chosen = _joined(pool, f"torch.where({{0}}, {branches})", truth, chosen)
    return chosen


def _joined(pool: Pool, text: str, *uses: Value) -> Value:
    return pool.add(text.format(*(v.text for v in uses)), uses, kind="float", size=1.0, grain=None)


def mask_mod(draw: Drawn, steps: int) -> tuple[str, Mod, frozenset[str]]:
    """The text, and which positions the mask reads."""
    mod = Mod(Pool(positions()), "m")
    _start(draw, mod)
    pool = mod.pool
    for _ in range(draw.whole(1, 3)):
        _atom(draw, mod)
    for _ in range(draw.whole(0, steps)):
        if draw.rarely(5):
            load(draw, mod, learns=False)
        else:
            operation(draw, pool, "mask")
    truths = [v for v in pool.values if v.kind == "bool"]
    result = draw.one(truths[-3:])
    for _ in range(draw.whole(0, 2)):
        other, sign = draw.one(truths), draw.one("&||^")
        result = pool.add(f"{result.text} {sign} {other.text}", [result, other], kind="bool", size=1.0)
    return pool.text("mask_mod", MASK, result), mod, result.reads


def _atom(draw: Drawn, mod: Mod) -> None:
    """What masks are made of: causal, windows, documents, prefixes, blocks, patterns."""
    pool, number = mod.pool, lambda: mod.number("window", LONGEST).text
    kind = draw.one(ATOMS)
    if kind == "causal":
        text = draw.one(["q_idx >= kv_idx", "kv_idx <= q_idx + N - M", "q_idx < kv_idx"])
    elif kind == "window":
        text = draw.one([f"(q_idx - kv_idx).abs() <= {number()}", f"q_idx - kv_idx < {number()}"])
    elif kind == "document":
        by_batch = draw.flag()
        sizes = ("B", "2 * max(M, N)") if by_batch else ("2 * max(M, N)",)
        dtype = draw.one(["int32", "int64", "int8"])
        name = mod.table(sizes, dtype, 0, 4, ascending=True, layout=draw.one(LAYOUTS[:4]))
        at = "b, " if by_batch else ""
        text = f"{name}[{at}q_idx] == {name}[{at}kv_idx]"
    elif kind == "prefix":
        name = mod.table(("B",), "int32", 0, 64)
        text = f"kv_idx < {name}[b]"
    elif kind == "block":
        size = draw.one([3, 8, 32])
        text = f"q_idx // {size} {draw.one(['==', '>='])} kv_idx // {size}"
    elif kind == "pattern":
        text = f"(q_idx + 2 * kv_idx) % {draw.one([3, 5, 8])} != 0"
    elif kind == "pairs":
        name = mod.table(("M", "N"), "bool", 0, 1, layout=draw.one(LAYOUTS))
        text = f"{name}[q_idx, kv_idx]"
    elif kind == "loaded":
        load(draw, mod, learns=False)
        if mod.loaded[-1].kind == "bool":
            return
        pool.add(f"{mod.loaded[-1].text} > 0", [mod.loaded[-1]], kind="bool", size=1.0)
        return
    else:
        text = "kv_idx <= q_idx + 16 * h"
    pool.values.append(Value(_named(pool, text), "bool", 1.0, reads=positions_in(text)))


def _named(pool: Pool, text: str, uses: tuple[str, ...] = ()) -> str:
    name = f"x{len(pool.statements)}"
    pool.statements[name] = (text, uses)
    return name


def positions_in(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\b(?:b|h|q_idx|kv_idx)\b", text))


def _start(draw: Drawn, mod: Mod) -> None:
    """What most mods begin with: a distance, numbers of Python's."""
    if draw.flag():
        places = [v for v in mod.pool.values if v.text in ("q_idx", "kv_idx")]
        mod.pool.add("q_idx - kv_idx", places, kind="int", size=LONGEST)
    for kind in draw.one([(), (), ("float",), ("int",), ("int", "float")]):
        mod.number(kind, 4.0)


def load(draw: Drawn, mod: Mod, learns: bool) -> None:
    """An element of a new table, or of one that there is: of any rank, dtype and strides, nested too."""
    again = [t for t in mod.tables if draw.rarely(5)]
    if again:
        form = draw.one(again)
        _element(draw, mod, form)
        return
    rank = draw.one([0, 1, 1, 1, 2, 2, 3, 4])
    names = [draw.one([*NATURAL, "4", "5", "7"]) for _ in range(rank)]
    if rank == 4:
        names = ["B", "H", "M", "N"]
    if rank == 3 and sum("M" in n or "N" in n for n in names) > 2:
        names = names[:2]
    floating = not draw.rarely(4)
    dtype = draw.one(FLOATING if floating else WHOLE)
    low, high = (-24, 24) if floating else {"bool": (0, 1), "uint8": (0, 6)}.get(dtype, (-6, 6))
    learned = learns and floating and draw.flag()
    name = mod.table(
        tuple(names), dtype, low, high, layout=draw.one(LAYOUTS), learned=learned,
    )  # fmt: skip
    form = next(t for t in mod.tables if t.name == name)
    _element(draw, mod, form)


def _element(draw: Drawn, mod: Mod, form: TableForm) -> None:
    indices = [_index(draw, mod, size) for size in form.sizes]
    if len(indices) > 1 and form.sizes[0] in "457" and draw.flag():
        indices[0] = draw.one(["0", "-1", "3"]), None
    texts = [text for text, _ in indices]
    uses = [use for _, use in indices if use is not None]
    text = f"{form.name}[{', '.join(texts)}]" if texts else form.name
    kind = "bool" if form.dtype == "bool" else "float" if "float" in form.dtype else "int"
    name = _named(mod.pool, text, tuple(v.text for v in uses))
    value = Value(
        name, kind, max(-form.low, form.high) / (16 if kind == "float" else 1),
        4 if kind == "float" else 0, score=any(v.score for v in uses), rough=any(v.rough for v in uses),
        half=form.dtype if form.dtype in ("float16", "bfloat16") else "",
        reads=positions_in(text).union(*(v.reads for v in uses)),
    )  # fmt: skip
    mod.pool.values.append(value)
    mod.loaded.append(value)


def _index(draw: Drawn, mod: Mod, size: str) -> tuple[str, Value | None]:
    """A text that lies inside of a dimension, and the value that it reads, if it is one of the pool's."""
    if size in NATURAL:
        return draw.one(NATURAL[size]), None
    if draw.rarely(4):  # nested: a table of indices
        length, at = draw.one([("M", "q_idx"), ("N", "kv_idx")])
        inner = mod.table((length,), draw.one(["int32", "int64"]), 0, int(size) - 1)
        return f"{inner}[{at}]", None
    value = pick(draw, [v for v in mod.pool.values if v.kind == "int" and not v.weak])
    assert value is not None
    # torch has no indices of 8 or 16 bits
    text = f"({value.text} % {size}).{draw.one(['long', 'int'])}()"
    return f"{text} - {size}" if draw.rarely(5) else text, value
