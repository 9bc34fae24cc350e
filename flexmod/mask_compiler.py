"""Compiles a mask_mod's graph into the kernels that build its block mask.

The first graph of a skeleton bounds its tiles with its own numbers as constants. If the skeleton returns with
other numbers, these become arguments of the kernels, and one analysis serves all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType

from flexmod import compiler, config
from flexmod.codegen import cache as modules
from flexmod.codegen import prelude
from flexmod.codegen.builder_kernels import Builder, BuilderKernels
from flexmod.codegen.builder_text import write_bounds, write_term
from flexmod.codegen.render import render_builder
from flexmod.ir import intervals
from flexmod.ir.graph import Graph
from flexmod.ir.passes import Extents, Places, fitted


def builder(graph: Graph, extents: Extents) -> Builder:
    """Returns the kernels that build the block mask of a mask_mod's graph."""
    graph, checked = compiler.own_graph(graph), config.check_bounds()
    promoted, numbers = compiler.CONSTANTS.promote(graph)
    if promoted is not graph:
        places = compiler.known_places(promoted, numbers, extents)
        kernels = _builder_of_parameters(promoted, extents, places, checked)
        if kernels is not None:
            return Builder(kernels, (numbers,) * (2 + len(kernels.terms)))
    return _builder_of_numbers(graph, extents, compiler.CONSTANTS.version, checked)


@lru_cache(compiler.GRAPHS)
def _builder_of_parameters(
    graph: Graph, extents: Extents, places: Places, checked: bool
) -> BuilderKernels | None:
    """Returns kernels for all values of the parameters; None if bounds are tighter with exact numbers."""
    analysis = intervals.analyze(fitted(graph, extents, places), extents, places)
    if not analysis.serves:
        return None
    mask = compiler.lower(graph, extents, places, split=False, checked=checked)
    return _builder_kernels(analysis.bounds, analysis.terms, mask)


@lru_cache(compiler.GRAPHS)
def _builder_of_numbers(graph: Graph, extents: Extents, version: object, checked: bool) -> Builder:
    """Returns kernels for a graph's own numbers, with the changing numbers of its bounds as arguments."""
    graph = fitted(graph, extents)
    analysis = intervals.analyze(graph, extents)
    bounds, of_bounds = compiler.CONSTANTS.promote(analysis.bounds)
    terms = [(term, *compiler.CONSTANTS.promote(term.graph)) for term in analysis.terms]
    mask = compiler.compile_mod(graph, extents)
    kernels = _builder_kernels(
        bounds, tuple(replace(term, graph=promoted) for term, promoted, _ in terms), mask.lowered
    )
    return Builder(kernels, (of_bounds, mask.numbers, *(numbers for *_, numbers in terms)))


@lru_cache(compiler.KERNELS)
def _builder_kernels(
    bounds: Graph, terms: tuple[intervals.BoundsTerm, ...], mask: compiler.Lowered
) -> BuilderKernels:
    written = tuple(write_term(term, mask.checked) for term in terms)
    of_bounds = write_bounds(bounds, written, mask.checked)
    of_mask = mask.text
    assert of_mask is not None

    def made() -> ModuleType:
        text = compiler.stage("render", lambda: render_builder(written, of_bounds, of_mask))
        return compiler.stage("load", lambda: modules.load(text, "block_mask"))

    return BuilderKernels(written, of_bounds, of_mask, made)


@cache
def runs_module() -> ModuleType:
    """Returns the module of `runs_kernel`."""
    return modules.load(prelude.module_text("runs"), "runs")
