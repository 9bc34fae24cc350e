"""The pipeline, on one screen: from a user's function to a loaded module of kernels.

    trace      the function runs once on proxies                                ir/trace.py
    check      the result, dtypes, captures: refused by name                    ir/trace.py, checks.py
    widen      index arithmetic in 64 bits where 32 would overflow              ir/passes.py
    optimize   fold, simplify                                                   ir/passes.py
    split      -inf branches of a score_mod become a mask                       ir/passes.py
    promote    constants that differ from call to call become arguments         `Constants`, below
    derive     the score_mod's derivative, where gradients are asked for        ir/derivative.py
    distances  costly functions of q_idx - kv_idx go into a kernel of their own codegen/by_distance.py
    place      loads and arithmetic by program, row, column or element          codegen/triton_text.py
    write      device functions as Triton text                                  codegen/triton_text.py
    render     templates + text + KernelSpec -> one complete module             codegen/render.py
    load       a content-hashed file in the cache folder, imported              codegen/cache.py

For the generated kernels a mod is widened and optimized once more, with its promoted constants as parameters.
All caches after `trace` use the traced graph as key, never the identity of a function, so a changed closure
never runs a stale kernel.

A mask_mod's graph is compiled into the kernels that build its block mask. The first graph of a skeleton
bounds its tiles with its own numbers as constants. If the skeleton returns with other numbers, these become
arguments of the kernels, and one analysis serves all of them.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from types import ModuleType
from typing import Any, TypeVar

from flexmod.codegen import by_distance, device_functions
from flexmod.codegen import cache as modules
from flexmod.codegen.builder_text import Builder, BuilderKernels, write_bounds, write_term
from flexmod.codegen.device_functions import Family
from flexmod.codegen.kernels import NO_CAPTURES, ByDistance, CaptureTexts, Kernels, ModText
from flexmod.codegen.render import render, render_builder
from flexmod.codegen.spec import FLOAT8, KernelSpec
from flexmod.codegen.term_text import write_exponent, write_terms
from flexmod.codegen.triton_text import write
from flexmod.ir import intervals
from flexmod.ir.bounds import UNKNOWN
from flexmod.ir.derivative import (
    LARGEST_ON_LINE,
    CaptureGrad,
    GradientTerm,
    differentiate,
    differentiate_captures,
    terms_of,
)
from flexmod.ir.exponents import choose_tanhs, score_bounds, with_ranges
from flexmod.ir.graph import POSITIONS, Graph, Structure
from flexmod.ir.integers import as_ranges, needs_int64
from flexmod.ir.passes import Extents, Places, fitted, optimize, promote_constants, split_mask
from flexmod.runtime import config
from flexmod.runtime.locks import Lock

Numbers = tuple[bool | int | float, ...]
T = TypeVar("T")
# How many graphs' stages and how many kernels stay in caches. A dropped kernel is loaded again from its text.
GRAPHS, KERNELS = 1024, modules.KEPT
LARGEST = 2**31  # above all positions


@dataclass(frozen=True)
class Lowered:
    """A mod after the graph stages.

    `graph` is None for a score_mod that does not change the score. `split` is the mask of a score_mod's -inf
    branches. `checked`: kernels check each index into a captured tensor. Positions are less than `largest`.
    """

    graph: Graph | None
    split: Graph | None
    checked: bool = False
    largest: int = LARGEST

    @cached_property
    def grad(self) -> Graph | None:
        return _staged("derive", lambda score: optimize(differentiate(score)), self.graph)

    @cached_property
    def text(self) -> ModText | None:
        return _staged("write", lambda graph: _written(graph, self.checked), self.graph)

    def text_with_tile(self, pair_tile: int | None) -> ModText | None:
        """Returns `text`, with the tile of a capture as an argument unless `pair_tile` is None."""
        if pair_tile is None:
            return self.text
        return _staged("write", lambda graph: _written(graph, self.checked, pair_tile), self.graph)

    def exponent_text(
        self, positive_scale: bool, coarse: bool = False, pair_tile: int | None = None
    ) -> ModText | None:
        def written(score: Graph) -> ModText:
            return write_exponent(as_ranges(score), self.checked, positive_scale, coarse, pair_tile)

        return _staged("write", written, self.graph)

    @cached_property
    def grad_text(self) -> ModText | None:
        return _staged("write", lambda grad: write(as_ranges(grad), self.checked), self.grad)


def _written(graph: Graph, checked: bool, pair_tile: int | None = None) -> ModText:
    text = write(as_ranges(graph), checked, pair_tile)
    return replace(text, bounds=score_bounds(graph)) if graph.kind == "score" else text


def _staged(name: str, work: Callable[[Graph], T], graph: Graph | None) -> T | None:
    return None if graph is None else stage(name, lambda: work(graph))


def lower(
    graph: Graph, extents: Extents, numbers: Places = (), *, split: bool, checked: bool = False
) -> Lowered:
    """Runs a traced graph through the graph stages. `numbers`: values or ranges of its parameters."""
    whole = fitted(own_graph(graph), extents, numbers)
    exact = {place: number for place, number in numbers if not isinstance(number, tuple)}
    largest = LARGEST_ON_LINE if max(extents) <= LARGEST_ON_LINE else LARGEST
    if graph.kind == "score":
        whole = with_ranges(choose_tanhs(whole, exact), exact)
    return _lower(whole, split, checked, largest)


def own_graph(graph: Graph) -> Graph:
    """Returns the graph for kernels of calls of any size.

    With checked indexes, equal mods get separate graphs, so that an error names this mod's line.
    """
    graph = graph.of_any_size
    return graph.with_lines if config.check_bounds() else graph


@lru_cache(GRAPHS)
def _lower(graph: Graph, split: bool, checked: bool, largest: int) -> Lowered:
    show("traced", graph)
    graph = stage("optimize", lambda: optimize(graph))
    show("optimized", graph)
    if split:
        return Lowered(*split_mask(graph), checked, largest)
    unchanged = graph.kind == "score" and graph.result.op == "input"
    return Lowered(None if unchanged else graph, None, checked, largest)


@lru_cache(GRAPHS)
def with_distances(
    score: Lowered, grad_captures: tuple[int, ...], backward: bool
) -> tuple[Lowered, Lowered, ByDistance | None]:
    """Splits off what a score_mod makes of distances alone, and writes it.

    Returns the score_mod that loads these values, the one to differentiate, and the text. Kernels that check
    indices compute each pair.
    """
    if score.graph is None or score.checked:
        return score, score, None
    graph, functions, derived = by_distance.split(
        score.graph, score.largest, grad_captures, backward=backward
    )
    if functions is None:
        return score, score, None
    show("by distance", graph)
    text = stage("write", lambda: by_distance.write(as_ranges(functions)))
    loading = replace(score, graph=graph)
    return loading, loading if derived is graph else score, text


@lru_cache(GRAPHS)
def capture_grad(graph: Graph, grad_captures: tuple[int, ...]) -> CaptureGrad:
    """Returns the derivatives of a lowered score_mod by the score and by `grad_captures`, optimized."""
    found = stage("derive", lambda: differentiate_captures(graph, grad_captures))
    return replace(found, graph=optimize(found.graph))


@lru_cache(GRAPHS)
def capture_terms(
    graph: Graph, grad_captures: tuple[int, ...], reduce_in_backward: bool = False
) -> tuple[GradientTerm, ...]:
    """Returns what each load of `grad_captures` adds to their gradients, and how to sum it.

    `reduce_in_backward`: the backward makes the sums itself; it also sums by column if only b and h index.
    """
    return terms_of(capture_grad(graph, grad_captures), "column" if reduce_in_backward else "row")


@lru_cache(GRAPHS)
def capture_texts(
    graph: Graph, grad_captures: tuple[int, ...], reduce_in_backward: bool = False, checked: bool = False
) -> CaptureTexts:
    """Writes `capture_terms` as device functions."""
    terms = capture_terms(graph, grad_captures, reduce_in_backward)
    return stage(
        "write", lambda: write_terms(capture_grad(graph, grad_captures), terms, reduce_in_backward, checked)
    )


class Constants:
    """Decides which constants of a graph become run-time arguments.

    A skeleton is a graph without its numbers. The first graph of a skeleton keeps its numbers as constants.
    If the skeleton returns with other numbers, all numbers that differ become arguments at once; their later
    values compile nothing, except for a score_mod's numbers in another range, see `with_ranges`.

    `version` becomes a new object at each promotion; caches that depend on promotions use it as key. The
    least recently used skeletons leave the cache. Such a skeleton starts again with constants, which costs a
    compilation and changes no result.
    """

    def __init__(self) -> None:
        self.version = object()
        self._known: OrderedDict[Structure, _Skeleton] = OrderedDict()
        self._lock = Lock()

    def promote(self, graph: Graph) -> tuple[Graph, Numbers]:
        """Returns the graph to compile, and this call's numbers by place."""
        skeleton, numbers = graph.skeleton
        with self._lock:
            known = self._known.get(skeleton)
            if known is None:
                known = self._known[skeleton] = _Skeleton(numbers)
                if len(self._known) > GRAPHS:
                    self._known.popitem(last=False)
            self._known.move_to_end(skeleton)
            if known.promote(numbers):
                self.version = object()
            return known.of_parameters(graph, numbers), numbers


class _Skeleton:
    """The first graph's numbers of a skeleton, and the places that became arguments."""

    def __init__(self, first: Numbers) -> None:
        self._first = first
        self._promoted: frozenset[int] = frozenset()
        self._graphs: dict[tuple[type, ...], Graph] = {}

    def promote(self, numbers: Numbers) -> bool:
        """Promotes numbers that differ from the first graph's; returns whether it promoted new places."""
        pairs = enumerate(zip(self._first, numbers, strict=True))
        differing = {i for i, (a, b) in pairs if i not in self._promoted and not _same(a, b)}
        if differing:
            self._promoted |= differing
            self._graphs.clear()
        return bool(differing)

    def of_parameters(self, graph: Graph, numbers: Numbers) -> Graph:
        """Returns the graph with its promoted constants as parameters.

        If all promoted constants become parameters, all numbers of the same types share one graph object.
        """
        if not self._promoted:
            return graph
        types = tuple([type(number) for number in numbers])
        found = None if graph.lines else self._graphs.get(types)
        if found is None:
            found = promote_constants(graph, self._promoted)
            if not graph.lines and self._promoted == set(_places_of(found)):
                self._graphs[types] = found
        return found


def _same(a: object, b: object) -> bool:
    return a is b or type(a) is type(b) and repr(a) == repr(b)


CONSTANTS = Constants()


@dataclass(frozen=True, eq=False)
class Mod:
    """One mod of a call, ready for kernels: the lowered mod and the numbers for its parameters."""

    lowered: Lowered
    numbers: Numbers


def compile_mod(graph: Graph, extents: Extents) -> Mod:
    """Lowers a mod for the generated kernels, with promoted constants; keeps its -inf branches."""
    return _compiled_mod(own_graph(graph), extents, CONSTANTS.version, config.check_bounds())


@lru_cache(GRAPHS)
def _compiled_mod(graph: Graph, extents: Extents, version: object, checked: bool) -> Mod:
    promoted, numbers = CONSTANTS.promote(graph)
    places = known_places(promoted, numbers, extents) if promoted is not graph else ()
    return Mod(lower(promoted, extents, places, split=False, checked=checked), numbers)


# The analysis of a graph before it runs treats integers of one sign up to here alike.
LARGEST_ALIKE = 2**30


def known_places(graph: Graph, numbers: Numbers, extents: Extents) -> Places:
    """Returns values or ranges of a graph's parameters, for the stages before a run.

    For a mask's integers these are ranges, if int32 arithmetic suffices for the range: so other numbers in
    the range reuse the cached stages.
    """
    exact = tuple([(place, numbers[place]) for place in _places_of(graph)])
    if graph.kind == "mask":
        for span in (_span, _span_of_bits):
            alike = tuple([(place, span(number)) for place, number in exact])
            if not _needs_int64(graph, extents, alike):
                return alike
    return exact


@lru_cache(GRAPHS)
def _places_of(graph: Graph) -> tuple[int, ...]:
    """Returns the places of the numbers that the graph's parameters stand for."""
    return tuple(n.value for n in graph.nodes if n.op == "param")


@lru_cache(GRAPHS)
def _needs_int64(graph: Graph, extents: Extents, places: Places) -> bool:
    return needs_int64(graph, dict(zip(POSITIONS, extents, strict=True)), dict(places))


def _span(number: bool | int | float) -> Any:
    if isinstance(number, float):
        return UNKNOWN
    if type(number) is int and 0 < abs(number) <= LARGEST_ALIKE:
        return (1, LARGEST_ALIKE) if number > 0 else (-LARGEST_ALIKE, -1)
    return number


def _span_of_bits(number: bool | int | float) -> Any:
    """Returns the range of integers with the number's sign and at most as many bits."""
    span = _span(number)
    if type(number) is not int or span is number:
        return span
    largest = (1 << number.bit_length()) - 1
    return (1, largest) if number > 0 else (-largest, -1)


@lru_cache(KERNELS)
def kernels_for(
    spec: KernelSpec,
    score: Lowered | None,
    mask: Lowered | None,
    options: tuple[tuple[str, Any], ...] = (),
    interpreted: bool = False,
    grad_captures: tuple[int, ...] = (),
    reduce_in_backward: bool = False,
    family: Family = "",
) -> Kernels:
    """Returns the kernels of a spec and its mods; their first launch renders and loads them.

    `grad_captures`: the score_mod's captures that get gradients. `reduce_in_backward`: a family's backward
    kernel makes their sums. `family`: chips whose instructions the portable kernels may use.
    """
    spec, derived, of_distances = spec.on(family), score, None
    few_pairs = 0 < spec.short <= 128 or spec.decoding is not None
    if score and not few_pairs:
        score, derived, of_distances = with_distances(score, grad_captures, spec.backward)
    score_text = score.text if score else None
    mask_text = mask.text if mask else None
    grad_text = derived.grad_text if derived and spec.backward else None
    family_score = None
    if score and not spec.backward:
        family_score = score.exponent_text(spec.positive_scale, spec.v_dtype in FLOAT8, spec.pair_tile)
    elif score:
        family_score = score.text_with_tile(spec.pair_tile)
    captures = NO_CAPTURES
    if grad_captures and derived and derived.graph:
        captures = capture_texts(derived.graph, grad_captures, reduce_in_backward, derived.checked)
    # another family's dK/dV kernel replaces the portable one, and makes these sums
    portable = replace(captures, column=None, added=None) if reduce_in_backward else captures
    return Kernels(
        spec, lambda s: build(s, score_text, mask_text, grad_text, portable, family, of_distances),
        score_text, mask_text, grad_text, dict(options), interpreted, captures, family_score, of_distances,
    )  # fmt: skip


def build(
    spec: KernelSpec,
    score: ModText | None,
    mask: ModText | None,
    grad: ModText | None,
    captures: CaptureTexts = NO_CAPTURES,
    family: Family = "",
    distances: ByDistance | None = None,
) -> ModuleType:
    """Renders and loads a module of kernels."""
    text = stage("render", lambda: render(spec, score, mask, grad, captures, distances, target=family))
    name = "_".join(["attention", *(["score"] if score else []), *(["mask"] if mask else [])])
    module = stage("load", lambda: modules.load(text, name))
    if config.debug_level() >= 3:
        print(f"flexmod: source {module.__file__}", file=sys.stderr)
    return module


def stage(name: str, work: Callable[[], T]) -> T:
    """Runs one stage; FLEXMOD_DEBUG=1 prints its time."""
    if config.debug_level() < 1:
        return work()
    start = time.perf_counter()
    result = work()
    print(f"flexmod: {name:<8} {(time.perf_counter() - start) * 1e6:8.0f} us", file=sys.stderr)
    return result


def show(title: str, graph: Graph) -> None:
    """Prints a graph with FLEXMOD_DEBUG=2."""
    if config.debug_level() >= 2:
        print(f"flexmod: {title}\n{graph}", file=sys.stderr)


def builder(graph: Graph, extents: Extents) -> Builder:
    """Returns the kernels that build the block mask of a mask_mod's graph."""
    graph, checked = own_graph(graph), config.check_bounds()
    promoted, numbers = CONSTANTS.promote(graph)
    if promoted is not graph:
        places = known_places(promoted, numbers, extents)
        kernels = _builder_of_parameters(promoted, extents, places, checked)
        if kernels is not None:
            return Builder(kernels, (numbers,) * (2 + len(kernels.terms)))
    return _builder_of_numbers(graph, extents, CONSTANTS.version, checked)


@lru_cache(GRAPHS)
def _builder_of_parameters(
    graph: Graph, extents: Extents, places: Places, checked: bool
) -> BuilderKernels | None:
    """Returns kernels for all values of the parameters; None if bounds are tighter with exact numbers."""
    analysis = intervals.analyze(fitted(graph, extents, places), extents, places)
    if not analysis.serves:
        return None
    mask = lower(graph, extents, places, split=False, checked=checked)
    return _builder_kernels(analysis.bounds, analysis.terms, mask)


@lru_cache(GRAPHS)
def _builder_of_numbers(graph: Graph, extents: Extents, version: object, checked: bool) -> Builder:
    """Returns kernels for a graph's own numbers, with the changing numbers of its bounds as arguments."""
    graph = fitted(graph, extents)
    analysis = intervals.analyze(graph, extents)
    bounds, of_bounds = CONSTANTS.promote(analysis.bounds)
    terms = [(term, *CONSTANTS.promote(term.graph)) for term in analysis.terms]
    mask = compile_mod(graph, extents)
    kernels = _builder_kernels(
        bounds, tuple(replace(term, graph=promoted) for term, promoted, _ in terms), mask.lowered
    )
    return Builder(kernels, (of_bounds, mask.numbers, *(numbers for *_, numbers in terms)))


@lru_cache(KERNELS)
def _builder_kernels(bounds: Graph, terms: tuple[intervals.BoundsTerm, ...], mask: Lowered) -> BuilderKernels:
    written = tuple(write_term(term, mask.checked) for term in terms)
    of_bounds = write_bounds(bounds, written, mask.checked)
    of_mask = mask.text
    assert of_mask is not None

    def made() -> ModuleType:
        text = stage("render", lambda: render_builder(written, of_bounds, of_mask))
        return stage("load", lambda: modules.load(text, "block_mask"))

    return BuilderKernels(written, of_bounds, of_mask, made)


@cache
def runs_module() -> ModuleType:
    """Returns the module of `runs_kernel`."""
    return modules.load(device_functions.module_text("runs"), "runs")
