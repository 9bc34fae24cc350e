"""explain(): what flexmod makes of a mod, for people: the graphs and the modules of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flexmod import errors
from flexmod.codegen.mod_text import NO_CAPTURES
from flexmod.codegen.render import render
from flexmod.compiler import capture_grad, capture_texts
from flexmod.ir.graph import Graph
from flexmod.lazy_imports import lazy_imports
from flexmod.plan import Plan
from flexmod.variant import Variant, variant

T = TypeVar("T")


class Named(dict[str, T]):
    """Graphs or texts by name; `str` is all of them, one after another."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.values()))


class ByFamily(Named[T]):
    """By family of kernels and direction, such as "hopper forward"; one that cannot serve has no entry.

    Raises NoKernelsError for a key without an entry.
    """

    def __missing__(self, key: str) -> T:
        raise errors.NoKernelsError(name=key, known=", ".join(map(repr, self)) or "none")


@dataclass(frozen=True)
class Explanation:
    """`str` shows the graphs, and on which template the kernels stand.

    `graphs` are those of the mask, the score and its derivative, as far as there are such. `source` is the
    portable module, forward and backward. `sources` are the modules of other families of kernels, by family
    and direction ("hopper forward"). `templates` says for each direction which runs where, and why. `plan`
    has what a call allocates and launches, by family and direction too ("portable forward"), with the first
    tile of each ladder. `sources` and `plan` print as a whole, and raise NoKernelsError for a key without an
    entry.
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
    """The optimized graphs of a variant: "mask", "score", and "grad", the score's derivative.

    The derivative is by captured elements too, where these are learned. What changes nothing is not there.
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
    """What flexmod compiles for these mods; nothing is launched, no GPU is needed.

    `head_dim` is that of query and key, `value_dim` that of value (head_dim if None), `dtype` that of all
    three. `block_size` is that of the mask's tiles, in positions: one number or (queries, keys). Captured
    tensors that require grad get theirs. The result prints the graphs; its `source` is the portable module
    of kernels, its `sources` are modules of other families. Raises what tracing raises.

    Example:

        explanation = explain(mods.softcap(50.0), masks.causal(), head_dim=128)
        print(explanation)
        print(explanation.source)
    """
    made = variant(
        score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype, block_size=block_size
    )
    score, mask, spec = made.score, made.mask, made.spec
    captures = NO_CAPTURES
    if made.learned and score and score.score:
        captures = capture_texts(score.score, made.learned)
    score_text, mask_text = score.text if score else None, mask.text if mask else None
    grad_text = score.grad_text if score else None
    source = render(spec, score_text, mask_text, grad_text, captures)
    graphs = tuple(graphs_of(made).values())
    with lazy_imports():
        from flexmod.backends.of_variant import plans_of, sources_of
    sources, templates = sources_of(made)
    return Explanation(graphs, source, ByFamily(sources), templates, ByFamily(plans_of(made)))
