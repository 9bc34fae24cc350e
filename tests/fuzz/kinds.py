"""The kinds of draws: what each makes of choices and a backend.

plain      mods, masks, shapes, strides and dtypes of all sorts, each call by itself
numbers    0-d CPU tensors in mods, that change between calls
copies     handles, masks and mods, copied and pickled between calls
writes     tensors, lists and mask_mods written or assigned between forward and backward
hostile    tensors that are not plain
huge       large and tiny scores, steep slopes, large caps, padding that is no number
integers   divisors of 0, casts that wrap, the ends of int32
float8     queries, keys and values in float8, with scales of all forms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuzz.case import Case
from fuzz.choices import Drawn
from fuzz.extremes import huge, integers
from fuzz.numbers import numbers
from fuzz.objects import LISTED, PLACES, copies, in_float8, tensors, writes
from fuzz.programs import Cases, program

KINDS: dict[str, Callable[[Drawn, str], Cases]] = {
    "plain": program,
    "numbers": numbers,
    "copies": copies,
    "writes": writes,
    "hostile": tensors,
    "huge": huge,
    "integers": integers,
    "float8": in_float8,
}


def labels(case: Case) -> Iterator[str]:
    """The names under which a run counts a case."""
    yield case.kind
    if case.kind in ("plain", "huge", "integers"):
        return
    if case.float8:
        yield f"float8, {case.float8.tensors}, {case.float8.format}"
    yield f"{case.kind}, {case.route}"
    for step in case.steps:
        for text in (*step.before, *step.between):
            yield f"{case.kind}, {_without_names(text)}"


def _without_names(text: str) -> str:
    """A happening without the name of a table or a list: there are many."""
    what, *words = text.split()
    if what == "disguise":
        place, kind = words
        return f"{'list' if place in LISTED else place if place in PLACES else 'capture'}, {kind}"
    return " ".join([what, words[0], *words[2:]] if words[:1] == ["list"] else [what, *words])
