"""Programs whose objects are copied, pickled, written to, not plain tensors, or float8."""

from __future__ import annotations

from dataclasses import replace

from fuzz import hostile
from fuzz.case import Case, Float8, Step
from fuzz.choices import Drawn
from fuzz.events import COPIES, LIST_WRITES, LISTS
from fuzz.programs import HALVES, HOPPER, SIZES, Cases, calls_of, drawn_mods

ROUTES = ("eager", "handle", "handle with mask")
MASKS = (
    "flexmod.masks.causal()", "flexmod.masks.sliding_window(5)", "flexmod.masks.prefix_lm(3)",
    "flexmod.masks.dilated_window(9, 2)", "flexmod.masks.global_window(4, 2)",
    "flexmod.masks.sliding_window(7, causal=False)", "flexmod.masks.standalone_window(24, 32, 3)",
)  # fmt: skip
SCORES = (
    "flexmod.mods.softcap(5.0)", "flexmod.mods.alibi(HEADS)", "flexmod.mods.relative_position()",
    "flexmod.mods.temperature(2.0)", "flexmod.mods.causal_score()",
    "flexmod.mods.chain(flexmod.mods.relative_position(), flexmod.mods.softcap(3.0))",
)  # fmt: skip
PLACES = ("query", "key", "value")
LISTED = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def copies(draw: Drawn, backend: str) -> Cases:
    """Handles, masks and mods, the library's too, copied before calls and between them."""
    by_library = draw.flag()
    made = drawn_mods(draw, SIZES[backend].steps // 2, draw.one(["both", "both", "score", "mask"]))
    cases = _half_of(calls_of(draw, backend, made))
    score, mask = made.score, made.mask
    if by_library:
        score = score and draw.one(SCORES).replace("HEADS", str(cases[0].heads[0]))
        mask = mask and f"{draw.one(MASKS)} {draw.one(['&', '|', '& ~'])} {draw.one(MASKS)}"
    route, layout = draw.one(ROUTES[1:] + ROUTES), draw.one(["bhsd", "bshd"])
    steps = _copying(draw, route, bool(score), bool(mask), 3 if backend == "cpu" else 1)
    return tuple(
        replace(
            _routed(case, route), kind="copies", score=score, mask=mask, layout=layout, steps=steps,
            tables=tuple(replace(table, learned=False) for table in case.tables if not by_library),
            numbers=() if by_library else case.numbers,
        )
        for case in cases
    )  # fmt: skip


def _copying(draw: Drawn, route: str, score: bool, mask: bool, most: int) -> tuple[Step, ...]:
    kinds = ["score_mod"] * score + ["mask_mod"] * mask
    kinds += ["mask"] * 2 if mask and route != "handle" else []
    kinds += ["handle"] * 3 if route != "eager" else []
    steps = [Step()] * draw.one([0, 1, 3])  # a call that is known by then, or not
    for _ in range(draw.whole(1, most)):
        happens = [f"copy {draw.one([*kinds, 'all'])} {draw.one(COPIES)}"]
        if "mask" in kinds and draw.rarely(3):
            happens.append(f"recombine {draw.one(['complement', 'and', 'or'])}")
        steps.append(Step(tuple(happens)))
        if draw.rarely(3):
            steps.append(Step(("original",)))
        if draw.flag():
            steps.append(Step())
    return tuple(steps)


def writes(draw: Drawn, backend: str) -> Cases:
    """What the last of some calls is made of is written to, or assigned, before its backward."""
    made = drawn_mods(draw, SIZES[backend].steps // 2, draw.one(["both", "both", "both", "score", "mask"]))
    cases = _half_of(calls_of(draw, backend, made))
    route = draw.one(["eager", "eager", "handle", "handle with mask"])
    kinds = ["write query", "write key", "write value", "write out", "write lse", "another call",
             "another forward", "backward twice", "forget"]  # fmt: skip
    if made.score:
        kinds += ["write score_mod"] * 3
    if made.mask:
        kinds += ["write mask_mod"] * 3
        if route != "handle":
            lists = [f"write list {draw.one(LISTS)} {draw.one(LIST_WRITES)}" for _ in range(8)]
            kinds += [*lists, *["assign mask_mod"] * 4]
    steps = [Step()] * draw.one([0, 1, 2, 3])
    between = tuple(draw.one(kinds) for _ in range(draw.whole(1, 2)))
    # other calls come first: what is written or assigned would be theirs
    between = tuple(sorted(dict.fromkeys(between), key=lambda text: not text.startswith("another")))
    steps.append(Step(between=between))
    wanted = draw.one(["qkv", "qkv", "q", "kv"])
    return tuple(
        replace(_routed(case, route), kind="writes", steps=tuple(steps), wanted=wanted, kv_dtype="")
        for case in cases
    )


def in_float8(draw: Drawn, backend: str) -> Cases:
    """Queries, keys and values in float8, by any route."""
    made = drawn_mods(draw, SIZES[backend].steps)
    cases = _half_of(calls_of(draw, backend, made))
    route, layout = draw.one(["eager", "eager", *ROUTES]), draw.one(["bhsd", "bhsd", "bshd"])
    tensors = draw.one(["qkv", "qkv", "qkv", "kv", "v"])
    by = tuple(draw.one(["", "tensor", "head", "head", "block"]) for _ in range(3))
    made_of = Float8(draw.one(["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]), tensors, by)  # type: ignore[arg-type]
    fit = [dim for dim in SIZES[backend].dims if dim % 16 == 0]
    dims = draw.one(fit), draw.one(fit)
    dtype = draw.one([*HALVES, "bfloat16", *["float32"] * (backend not in HOPPER)])
    return tuple(
        replace(
            _routed(case, route), kind="float8", float8=made_of, layout=layout, dims=dims, dtype=dtype,
            kv_dtype="", wanted="", grad_lse=False,
            layouts=tuple("plain" if name in ("expanded", "alike") else name for name in case.layouts),
            tables=tuple(replace(table, learned=False) for table in case.tables),
        )
        for case in cases
    )  # fmt: skip


def tensors(draw: Drawn, backend: str) -> Cases:
    """One tensor of a call is not plain."""
    made = drawn_mods(draw, SIZES[backend].steps // 2)
    cases = _half_of(calls_of(draw, backend, made))
    route = draw.one(["eager", "eager", "handle", "handle with mask"])
    places = [*PLACES, *2 * [form.name for form in made.forms]]
    lists = route != "handle" and bool(made.mask)
    place = draw.one(places + [draw.one(LISTED)] * 2 * lists)
    kind = draw.one(sorted(hostile.KINDS.keys() - _unfit(place)))
    disguises = [f"disguise {place} {kind}"]
    if place == "query" and draw.flag():  # all three
        disguises += [f"disguise {other} {kind}" for other in ("key", "value")]
    steps = (Step(tuple(disguises)), *[Step()] * draw.one([0, 0, 1, 2]))
    return tuple(
        replace(
            _routed(case, route), kind="hostile", steps=steps, kv_dtype="",
            mask_form="lists" if place in LISTED else case.mask_form,
            tables=tuple(replace(t, learned=t.learned and t.name != place) for t in case.tables),
        )
        for case in cases
    )  # fmt: skip


def _unfit(place: str) -> set[str]:
    """Kinds that mean other numbers there, and yet are right."""
    if place in LISTED:
        return {"none"}
    if place in PLACES:
        return {"float8"}
    return {"number", "none", "list", "numpy", "whole", "long", "truth"}


def _routed(case: Case, route: str) -> Case:
    """A handle builds its own mask, in one way."""
    if route != "handle":
        return replace(case, route=route)
    return replace(case, route=route, mask_form="built", block=(128, 128))


def _half_of(cases: Cases) -> Cases:
    """Sessions are several calls each."""
    return cases[: -(-len(cases) // 2)]
