"""From a mask_mod's graph to the kernels that build its block mask.

The first time that a graph comes its tiles are bounded with its numbers. When it comes back with others,
these become arguments of the kernels, and what was found out about the graph serves all of them.
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
from flexmod.ir.graph import UNIFORM, Graph
from flexmod.ir.ops import COMPARISONS, strong
from flexmod.ir.passes import Extents, Places, fitted

# What the bounds of a tile lose nothing on where a side is no constant but an argument.
KEEP_BOUNDS = COMPARISONS | {"add", "sub", "neg", "minimum", "maximum"}


def builder(graph: Graph, extents: Extents) -> Builder:
    """The kernels that build the block mask of a mask_mod's graph."""
    graph, checked = compiler.own_graph(graph), config.check_bounds()
    promoted, numbers = compiler.CONSTANTS.promote(graph)
    if promoted is not graph and _bounds_serve(promoted):
        places = compiler.known_places(promoted, numbers, extents)
        kernels = _builder_of_parameters(promoted, extents, places, checked)
        return Builder(kernels, (numbers,) * (2 + len(kernels.terms)))
    return _builder_of_numbers(graph, extents, compiler.CONSTANTS.version, checked)


@lru_cache(compiler.GRAPHS)
def _bounds_serve(graph: Graph) -> bool:
    """Are the bounds of tiles as close with the graph's parameters as with its numbers?"""
    made_of_parameters: set[object] = set()
    for node in graph.nodes:
        given = [a in made_of_parameters for a in node.args]
        if node.op == "param" or any(given) and node.home <= UNIFORM:
            made_of_parameters.add(node)
        elif any(given) and (
            node.op not in KEEP_BOUNDS or any(strong(a.dtype).is_floating_point for a in node.args)
        ):
            return False
    return True


@lru_cache(compiler.GRAPHS)
def _builder_of_parameters(graph: Graph, extents: Extents, places: Places, checked: bool) -> BuilderKernels:
    """Those for all numbers that the parameters may take."""
    analysis = intervals.analyze(fitted(graph, extents, places), extents, places)
    mask = compiler.lower(graph, extents, places, split=False, checked=checked)
    return _builder_kernels(analysis.bounds, analysis.terms, mask)


@lru_cache(compiler.GRAPHS)
def _builder_of_numbers(graph: Graph, extents: Extents, version: object, checked: bool) -> Builder:
    """Those for the numbers that a graph has, the changing ones of its bounds as arguments."""
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
    """The module of `runs_kernel`."""
    return modules.load(prelude.module_text("runs"), "runs")
