"""Programs of large and tiny numbers, and of special integers.

Large scores are judged by what float32 makes of them, see `check.py`. Integers are exact everywhere: an
overflow is drawn where the mod asks for it by a cast, from values that are int64 in any case.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fuzz.case import Case, Table
from fuzz.choices import Drawn
from fuzz.mods import MASK, SCORE, positions_in
from fuzz.programs import Cases, Mods, calls_of

LOW = ("-1e9", "-1e9", "-1e20", "-1e30", "-1e4", "-65504.0", "-1e15")
HIGH = ("1e15", "1e9", "1e20", "1e30", "1e5")
CAPS = (0.001, 0.5, 20.0, 45.0, 50.0, 60.0, 1e3, 1e5, 1e6, 1e8)
SLOPES = (0.5, 30.0, 1e3, 1e4, 1e5, -1e5)
CONDITIONS = ("q_idx >= kv_idx", "kv_idx % 3 == 0", "q_idx % 2 == 0", "q_idx - kv_idx < 5", "kv_idx < 2",
              "p0[q_idx] == p1[kv_idx]", "q_idx < 1")  # fmt: skip
# {x} is the score so far, {c} a condition, {low} and {high} large numbers, {cap} and {slope} numbers by name
LARGE = (
    "torch.where({c}, {x}, {low})", "torch.where({c}, {low}, {x})", "torch.where({c}, {x}, {high})",
    "{x} + torch.where({c}, 0.0, {low})", "{x} + {low}", "{x} + {high}", "{x} - {high}",
    "torch.where({c}, {x} + {low}, {x} + {low} * 2)", "torch.full_like({x}, {low})", "{x} * 0 + {low}",
    "torch.maximum({x}, torch.full_like({x}, {high}))", "{x} + a0[q_idx]", "{x} + a1[kv_idx]",
    "{x} + a2[q_idx, kv_idx]", "({x} + a0[q_idx]) + a1[kv_idx]", "torch.where({c}, {x} + a0[q_idx], {x})",
)  # fmt: skip
CAPPED = (
    "{cap} * torch.tanh({x} / {cap})", "torch.tanh({x} / {cap}) * {cap}",
    "{cap} * torch.tanh({x} * (1 / {cap}))",
    "{cap} * (torch.tanh({x} / {cap}) + torch.tanh({x} * 0.5 / {cap}))",
)  # fmt: skip
STEEP = (
    "{x} + {slope} * (kv_idx - q_idx)", "{x} - (q_idx - kv_idx).abs() * {slope}", "{x} * {slope}",
    "{x} + {slope} * torch.sigmoid({x})", "{slope} * {x} + kv_idx",
)  # fmt: skip
TINY = (
    "{x} * 1e-37 / 1e-38", "torch.where(kv_idx == 1, {x}, {x} * 1e-38 / 1e-39)", "{x} * 1e-30 * 1e30",
    "{x} + 1e-39", "{x} / (kv_idx * 1e-39 + 1)", "{x} * (1e-38 * (kv_idx + 1)) / (1e-38 * (q_idx + 1))",
    "torch.where({x}.abs() > 1e-30, {x}, {x} / 1e-39)", "{x} * 1e-40 * 1e30 + {x}",
)  # fmt: skip
# Numbers that float32 has few digits of. What a derivative has of them depends on the order of its products.
FORWARD_ALONE = [form for form in TINY if form.count("e-3") + form.count("e-40") > 1]
PADDED = (
    "torch.where(kv_idx < N - 1, {x} + i0[kv_idx], -float('inf'))",
    "torch.where(kv_idx < N - 1, {x} + i0[kv_idx] * 0.5, {x})",
)

INTEGERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**31 - 2, 2**30)
WHERE_ZERO = (
    "torch.where({d} != 0, {a} // {d}, 0)", "torch.where({d} != 0, {a} % {d}, -1)",
    "torch.where({d} == 0, 5, {a} // {d})", "torch.where({d} != 0, torch.fmod({a}, {d}), 3)",
    'torch.where({d} > 0, torch.div({a}, {d}, rounding_mode="trunc"), {a})',
    "torch.where({d} != 0, torch.remainder({a}, {d}), {a})",
    'torch.where({d} != 0, torch.div({a}, {d}, rounding_mode="floor"), 2)',
)  # fmt: skip
# divisors: some are 0, and special ones where a table has them
DIVISORS = ("kv_idx", "q_idx", "(q_idx - kv_idx)", "(kv_idx % 3)", "s0[kv_idx]", "s1[q_idx].long()",
            "(s0[q_idx] & 1)", "h", "b")  # fmt: skip
WRAPPED = (
    "({a}.long() * 2654435761).to(torch.int32)",
    "(({a}.long() * 73856093) ^ ({b}.long() * 19349663)).to(torch.int32)",
    "({a} * 37).to(torch.int8)", "({a} * 1000).to(torch.int16)", "({a} * 37 - 99).to(torch.uint8)",
    "({a}.long() * 4294967291 + {b}).to(torch.int32)", "({a}.long() << 20).int()", "({a} * 999).short()",
    "({a}.long() * 2654435761).to(torch.int32) >> 3", "({a}.long() * 65537).to(torch.int32) // 1000",
)  # fmt: skip
SPECIAL = (
    "torch.minimum({a}, s0[kv_idx])", "torch.maximum(s0[q_idx], {a})", "s1[q_idx].long() + {a}",
    "s0[kv_idx] // 65536", "s0[q_idx] % 7", "s0[kv_idx] >> 5", "{a} >> 31", "(1 << ({a} & 31))",
    "(s0[kv_idx] & {a})", "s1[q_idx] ^ {a}", "(-s1[kv_idx].long())", "s0[q_idx].abs() % 5", "{a} % {k}",
    "{a} // {k}", "{a} * {k}", "{a} & {k}", "{a} + {k}", "torch.clamp({a}.long(), {k}, 2147483647)",
    "({a} == {k}) * 3", "~{a}", "{k} - {a}", "{k} // ({a} * {a} + 1)", "~s0[kv_idx]",
)  # fmt: skip
TRUTHS = ("{a} >= {b}", "{a} < s0[q_idx]", "s0[q_idx] == s0[kv_idx]", "{a} % 2 == 0", "{a} <= {k}",
          "{a} != {b}", "({a} & 1) == 0", "{a} - {b} < s1[kv_idx]")  # fmt: skip


def huge(draw: Drawn, backend: str) -> Cases:
    """Scores that are large or tiny, or differ by much, and padding that is no number."""
    numbers: dict[str, float] = {}
    x, lines, forward_alone = "score", [], False
    for step in range(draw.whole(1, 3)):
        form = draw.one(draw.one([LARGE, LARGE, LARGE, CAPPED, STEEP, TINY, PADDED]))
        forward_alone |= form in FORWARD_ALONE
        slots = {"x": x, "c": draw.one(CONDITIONS), "low": draw.one(LOW), "high": draw.one(HIGH)}
        for slot, values in (("cap", CAPS), ("slope", SLOPES)):
            if f"{{{slot}}}" in form:
                numbers[f"{slot}{step}"] = draw.one(values)
                slots[slot] = f"{slot}{step}"
        x = f"x{step}"
        lines.append(f"    {x} = {form.format(**slots)}\n")
    score = f"def score_mod({SCORE}):\n{''.join(lines)}    return {x}\n"
    for name, value in list(numbers.items()):
        if draw.flag():  # in the text, or a number of a closure
            score = score.replace(name, repr(value))
    mask = f"def mask_mod({MASK}):\n    return {draw.one(CONDITIONS[:2])}\n" if draw.rarely(3) else ""
    low = float(draw.one(LOW))
    cases = calls_of(draw, backend, Mods(score, mask, [], {}, positions_in(mask)))
    scale = draw.one([None, None, None, 1.0, 8.0])
    return tuple(
        replace(
            case, kind="huge", numbers=tuple(numbers.items()), tables=_tables(case, low), scale=scale,
            kv_dtype="", wanted="" if forward_alone else case.wanted,
        )
        for case in cases
    )  # fmt: skip


def _tables(case: Case, low: float) -> tuple[Table, ...]:
    """p: whole numbers; a: rows of 0 or of a large number; i: what ends with a number that is none."""
    rows, columns = case.lengths
    shapes = {"a0": (rows,), "a1": (columns,), "a2": (rows, columns)}
    pool = (0.0, 0.0, low, low / 2)
    drawn = [Table(name, shape, "float32", 0, 0, pool=pool) for name, shape in shapes.items()]
    drawn += [Table("p0", (rows,), "int32", 0, 2), Table("p1", (columns,), "int32", 0, 2)]
    padding = (float("inf"), -float("inf"), float("nan"))[case.seed % 3]
    drawn.append(Table("i0", (columns,), "float32", -24, 24, padding=padding))
    return tuple(t for t in drawn if f"{t.name}[" in case.score + case.mask)


def integers(draw: Drawn, backend: str) -> Cases:
    """Divisors of 0 behind a condition, casts that wrap, and the ends of int32."""
    values = ["q_idx", "kv_idx", "(q_idx - kv_idx)"]
    lines: list[str] = []
    for step in range(draw.whole(1, 3)):
        form = draw.one(draw.one([WHERE_ZERO, WHERE_ZERO, WRAPPED, WRAPPED, SPECIAL]))
        text = form.format(
            a=draw.one(values), b=draw.one(values), d=draw.one(DIVISORS), k=f"({draw.one(INTEGERS)})"
        )
        lines.append(f"    x{step} = {text}\n")
        # what may be as large as int64 allows is not computed with again
        small = "%" in text and not re.search(r"s\d\[|\(-?\d+\)", text)
        values.append(f"x{step}" if small else f"(x{step} % {draw.one([5, 64, 1000])})")
        if "s0[" in text:  # an int32 result, with which arithmetic would wrap
            values[-1] += ".long()"
    value = values[-1]
    truth = draw.one(TRUTHS).format(
        a=value, b=draw.one([*values[:-1], "kv_idx"]), k=f"({draw.one(INTEGERS)})"
    )
    which = draw.one(["mask", "mask", "score", "bias"])
    mask = score = ""
    if which == "mask":
        kept = draw.one(["", " | (q_idx == kv_idx)", " & (q_idx >= kv_idx)"])
        mask = f"def mask_mod({MASK}):\n{''.join(lines)}    return ({truth}){kept}\n"
    elif which == "score":
        result = f"torch.where({truth}, score, score * 0.5 - 1)"
        score = f"def score_mod({SCORE}):\n{''.join(lines)}    return {result}\n"
    else:
        score = f"def score_mod({SCORE}):\n{''.join(lines)}    return score + ({value} % 16) * 0.125\n"
    special = tuple(draw.one(INTEGERS) for _ in range(4))
    cases = calls_of(draw, backend, Mods(score, mask, [], {}, positions_in(mask)))
    return tuple(replace(case, kind="integers", tables=_special(case, special)) for case in cases)


def _special(case: Case, values: tuple[int, ...]) -> tuple[Table, ...]:
    rows, columns = case.lengths
    tables = [Table(f"s{n}", (max(rows, columns),), f"int{32 + 32 * n}", 0, 0, pool=values) for n in range(2)]
    return tuple(t for t in tables if f"{t.name}[" in case.score + case.mask)
