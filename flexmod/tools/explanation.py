"""explain(): shows the graphs and the modules of kernels that flexmod makes from a mod."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flexmod import errors
from flexmod.codegen.compiler import capture_grad
from flexmod.codegen.render import render
from flexmod.codegen.variant import Variant, variant
from flexmod.ir.graph import Graph
from flexmod.runtime.lazy_imports import lazy_imports
from flexmod.runtime.plan import Plan

T = TypeVar("T")


class Named(dict[str, T]):
    """Graphs or texts by name; `str` joins them all."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.values()))


class ByFamily(Named[T]):
    """Texts by kernel family and direction, such as "hopper forward"; a family that cannot run has no entry.

    Raises NoKernelsError for a key without an entry.
    """

    def __missing__(self, key: str) -> T:
        raise errors.NoKernelsError(name=key, known=", ".join(map(repr, self)) or "none")


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str` shows the graphs and the kernels' templates.

        graphs     the graphs of the mask, of the score and of its derivative, "mask", "score" and "grad"
        source     the portable module, forward and backward
        sources    the modules of other kernel families, by family and direction ("hopper forward")
        templates  for each direction, which family runs on which chip, and why
        plan       the allocations and launches of a call, by family and direction ("portable forward"), with
                   the first tile of each ladder

    The last three print as a whole. The dicts `sources` and `plan` raise NoKernelsError for a missing key.
    """

    graphs: tuple[Graph, ...]
    source: str
    sources: ByFamily[str]
    templates: tuple[str, ...]
    plan: ByFamily[Plan]

    def __str__(self) -> str:
        graphs = "\n\n".join(map(str, self.graphs)) or "no mod: plain attention"
        return "\n".join([graphs, "", *self.templates])


def graphs_of(made: Variant) -> Named[Graph]:
    """Returns a variant's optimized graphs: "mask", "score", and "grad", the score's derivative.

    "grad" also has derivatives by captured elements that require them. A mod without effect has no entry.
    """
    score, mask = made.score, made.mask
    found = {"mask": mask.score if mask else None}
    if score and score.score:
        found |= {"score": score.score, "grad": score.grad}
        if made.learned:
            found["grad"] = capture_grad(score.score, made.learned).graph
    return Named({name: graph for name, graph in found.items() if graph})


def explain(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | tuple[int, int] = 128,
) -> Explanation:
    """Shows what flexmod compiles for these mods. It needs no GPU and launches nothing.

        head_dim    of query and key
        value_dim   of value; head_dim if None
        dtype       of all three
        block_size  of the mask's tiles, in positions: one number or (queries, keys)

    The backward includes gradients of captured tensors that require them. The result prints the graphs; its
    `source` is the portable module of kernels, its `sources` are modules of other families. Raises
    ArgumentTypeError for an invalid dtype, dimension or block_size, and what tracing raises.

    Example:

        explanation = explain(mods.softcap(50.0), masks.causal(), head_dim=128)
        print(explanation)
        print(explanation.source)
    """
    made = variant(
        score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype, block_size=block_size
    )
    kernels = made.kernels(made.spec.directions[-1])
    source = render(kernels.spec, kernels.score, kernels.mask, kernels.grad, kernels.captures)
    graphs = tuple(graphs_of(made).values())
    with lazy_imports():
        from flexmod.backends.of_variant import plans_of, sources_of
    sources, templates = sources_of(made)
    return Explanation(graphs, source, ByFamily(sources), templates, ByFamily(plans_of(made)))
