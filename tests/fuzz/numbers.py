"""Numbers of a mod that change between calls: 0-d tensors on the CPU, or Python's.

A number stands first or second, in operators and in torch functions, beside traced values and beside plain
tensors alone. A mod reaches it as a global, a closure, a default argument, a buffer, or as an element of a
tensor. Each case is two or three calls, eager or of a handle. A handle keeps its mod, so only eager calls
have numbers of Python's, in a closure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuzz.case import Step, Table
from fuzz.choices import Drawn
from fuzz.mods import MASK, SCORE, Mod, positions, positions_in
from fuzz.operations import operation
from fuzz.programs import Cases, Mods, calls_of
from fuzz.values import Pool, Value

REACHES = ("closure", "default", "global", "buffer", "element")
# {x} is a float of the score, {n} a float number, {i} a whole one (0 to 40), {t} a truth value
SCORES = (
    "{x} * {n}", "{n} * {x}", "torch.mul({x}, {n})", "torch.mul({n}, {x})", "{x}.mul({n})",
    "{x} + {n}", "{n} + {x}", "torch.add({x}, {n}, alpha=2)", "torch.add({n}, {x}, alpha=0.5)",
    "{x} - {n}", "{n} - {x}", "torch.sub({n}, {x})", "torch.rsub({x}, {n})",
    "{x} / ({n}.abs() + 1)", "{n} / ({x}.abs() + 1)", "torch.div({x}, {n}.abs() + 1)",
    "torch.minimum({x}, {n})", "torch.minimum({n}, {x})", "{x}.maximum({n})", "torch.max({x}, {n})",
    "torch.where(q_idx >= kv_idx, {x}, {n})", "torch.where(q_idx >= kv_idx, {n}, {x})",
    "{x}.where(kv_idx % 2 == 0, {n})", "{x}.masked_fill(kv_idx % 3 == 0, {n})",
    "{x}.clamp(max={n})", "torch.clamp({x}, min={n})", "torch.clamp({x}, -{n}.abs(), {n}.abs())",
    "torch.where({n} > 0, {x}, -{x})", "torch.where({n} > {x}, {n}, {x})",
    "{n}.abs() * torch.tanh({x} / ({n}.abs() + 0.5))", "({x}.abs() + 1) ** ({n} * 0.25)",
    "torch.pow({x}.abs() + 1.0, {n} * 0.25)", "({n} * 0.5) * {x}", "{n} ** 2 * {x}",
    "{x} * torch.exp(-{n}.abs())", "{x} * {n}.sigmoid()", "torch.full_like({x}, 2) * {n} + {x}",
    "{x} + {n} * (kv_idx - q_idx) * 0.01", "{x} - {n}.abs() * (q_idx - kv_idx).abs() / 8",
    "{x} * {n}.to(FLOAT16)", "{x} + {n}.float() * kv_idx * 0.0625",
    "torch.addcmul({x}, {x}, {n}.to({x}.dtype))",
)  # fmt: skip
WHOLES = (
    "torch.where(q_idx - kv_idx <= {i}, {x}, {x} * 0.5)",
    "torch.where({i} >= (q_idx - kv_idx).abs(), {x}, -1.0)",
    "{x} + (kv_idx + {i}) * 0.01", "{x} + ({i} - kv_idx) * 0.01", "{x} + kv_idx % ({i} + 1) * 0.125",
    "torch.where({i} % 2 == 0, {x}, {x} * 0.5)", "{x} * ({i} + 1) * 0.0625", "{x} + {i} * 0.125",
    "{x} + torch.remainder(kv_idx + {i}, 7) * 0.25", "{x} + r0[(kv_idx + {i}.int()) % 7]",
    "{x} + r0[{i}.long() % 7]",
    "r0[({i}.long() + q_idx) % 7] + {x}", "{x} * r1[{i}.long() % 5, kv_idx % 3]",
)  # fmt: skip
# {p} is a number of Python's
PYTHONS = (
    "{x} * {p}", "{p} + {x}", "{p} - {x}", "{x} / (abs({p}) + 0.5)", "{p} / ({x}.abs() + 1)",
    "({x}.abs() + 1) ** ({p} * 0.5)", "({x}.abs() + 1) ** {p} * 0.0625", "(abs({p}) + 0.5) ** ({x} * 0.125)",
    "abs({p}) * 20 * torch.tanh({x} / (abs({p}) * 20))", "{x}.clamp(-abs({p}), abs({p}))",
    "torch.where({x} > {p}, {x}, {p} * 0.5)", "{x} + {p} * (kv_idx - q_idx) * 0.01",
    "torch.add({x}, {x}, alpha={p})", "torch.lerp({x}, -{x}, {p} * 0.25)",
)  # fmt: skip
TRUTHS = ("torch.where({t}, {x}, {x} * 0.5)", "{x}.masked_fill({t} & (kv_idx % 2 == 0), 0.5)",
          "torch.where({t} | (q_idx >= kv_idx), {x}, 0.25)")  # fmt: skip
MASKS = (
    "(q_idx - kv_idx).abs() <= {i}", "{i} >= (q_idx - kv_idx).abs()", "torch.le(q_idx - kv_idx, {i})",
    "torch.ge({i}, q_idx - kv_idx)", "kv_idx <= q_idx + {i}", "{i} + q_idx >= kv_idx",
    "q_idx // ({i} + 1) == kv_idx // ({i} + 1)", "torch.where({i} > 8, q_idx >= kv_idx, q_idx <= kv_idx)",
    "({i} > 8) | (q_idx >= kv_idx)", "(kv_idx < {i}) | (q_idx >= kv_idx)", "q_idx - {i} <= kv_idx",
    "torch.minimum(q_idx, {i}) >= kv_idx - 4", "torch.maximum({i}, q_idx) >= kv_idx",
    "(kv_idx + {i}) % 3 != 0", "(kv_idx & {i}) == 0", "({i} | kv_idx) % 2 == 0",
    "(q_idx - kv_idx) * 0.5 <= {n} * 8", "{n} * 8 >= (q_idx - kv_idx)", "{t} | (q_idx >= kv_idx)",
    "torch.where({t}, q_idx >= kv_idx, q_idx < kv_idx + 9)", "({t} ^ (q_idx >= kv_idx))",
)  # fmt: skip
ROOM = {"r0": (7,), "r1": (5, 3)}  # tables of some texts
VALUES = {
    "n": (0.5, 1.0, 2.0, -1.25, 3.0, 0.25, -0.75, 1.5),
    "i": (0, 1, 2, 3, 5, 8, 13, 40),
    "t": (0, 1),
    "p": (0.5, 1, 2, -1.25, 3, 0.25, -0.75, 1.5),
}
DTYPES = {
    "n": ("float32", "float32", "float64", "float16", "bfloat16"),
    "i": ("int64", "int64", "int32", "int16", "uint8"),
    "t": ("bool",),
    "p": ("float64",),
}


@dataclass
class Drawing:
    """The numbers of a program: texts name them, tables hold them."""

    draw: Drawn
    learns: bool
    calls: int
    tables: list[Table]

    def filled(self, form: str, x: str = "") -> str:
        """A form with numbers in it; one in three was there before."""
        names = {letter: self.number(letter) for letter in "nitp" if f"{{{letter}}}" in form}
        return form.format(x=x, **names)

    def number(self, letter: str) -> str:
        draw = self.draw
        there = [t for t in self.tables if t.name[0] == letter]
        table = draw.one(there) if there and draw.rarely(3) else self.table(letter)
        if table.shape:
            return f"{table.name}[{draw.one([0, 1, -1])}]"
        return f"module.{table.name}" if table.reach == "buffer" else table.name

    def table(self, letter: str) -> Table:
        draw = self.draw
        reach, dtype = draw.one(REACHES), draw.one(DTYPES[letter])
        values = tuple(draw.one(VALUES[letter]) for _ in range(self.calls))
        if len(set(values)) == 1:  # they change
            others = [value for value in VALUES[letter] if value != values[0]]
            values = (*values[:-1], draw.one(others))
        shape = (3,) if reach == "element" and letter != "p" else ()
        reach = draw.one(REACHES[:4]) if reach == "element" else reach
        reach = "global" if shape and reach == "buffer" else reach
        reach = "number" if letter == "p" else reach
        learned = self.learns and letter == "n" and draw.flag()
        name = f"{letter}{len(self.tables)}"
        table = Table(name, shape, dtype, 0, 0, values=values, reach=reach, on_cpu=True, learned=learned)
        self.tables.append(table)
        return table


def numbers(draw: Drawn, backend: str) -> Cases:
    """The cases of a program whose mods have such numbers."""
    calls = draw.one([2, 3, 3])
    which = draw.one(["score", "score", "mask", "both"])
    route = draw.one(["eager", "handle"])
    of_score, of_mask = Drawing(draw, True, calls, []), Drawing(draw, False, calls, [])
    texts = (SCORES, SCORES, SCORES, WHOLES, WHOLES, TRUTHS)
    texts = (*texts, PYTHONS, PYTHONS) if route == "eager" else texts
    score = _score(draw, of_score, texts) if which != "mask" else ""
    mask, reads = _mask(draw, of_mask) if which != "score" else ("", frozenset())
    tables = (*of_score.tables, *of_mask.tables)
    room = tuple(Table(n, shape, "float32", -24, 24) for n, shape in ROOM.items() if f"{n}[" in score)
    cases = calls_of(draw, backend, Mods(score, mask, [], {}, reads))
    cases = cases[: -(-len(cases) // 2)]
    return tuple(
        replace(
            case, kind="numbers", route=route, kv_dtype="", tables=(*tables, *room), steps=(Step(),) * calls,
            mask_form="built" if route == "handle" else case.mask_form,
            block=(128, 128) if route == "handle" else case.block,
        )
        for case in cases
    )  # fmt: skip


def _score(draw: Drawn, drawing: Drawing, texts: Sequence[Sequence[str]]) -> str:
    score = Value("score", "float", 16.0, None, score=True)
    mod = Mod(Pool([*positions(), score]), "t")
    for _ in range(draw.whole(0, 2)):
        operation(draw, mod.pool, "score")
    x = draw.one([v for v in mod.pool.values if v.kind == "float" and v.score])
    for _ in range(draw.whole(1, 3)):
        form = draw.one(draw.one(texts))
        x = mod.pool.add(drawing.filled(form, x.text), [x], kind="float", size=8.0, grain=None)
    return mod.pool.text("score_mod", SCORE, x)


def _mask(draw: Drawn, drawing: Drawing) -> tuple[str, frozenset[str]]:
    """The names of its numbers are other ones: a mask learns nothing."""
    texts = [drawing.filled(draw.one(MASKS)) for _ in range(draw.whole(1, 2))]
    text = draw.one([" & ", " | "]).join(f"({text})" for text in texts)
    for table in drawing.tables:
        text = text.replace(table.name, f"m{table.name}")
    drawing.tables[:] = [replace(table, name=f"m{table.name}") for table in drawing.tables]
    return f"def mask_mod({MASK}):\n    return {text}\n", positions_in(text)
