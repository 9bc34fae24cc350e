"""Selects the kernel family that computes a call on a GPU.

flexmod asks the families in order; the first one without an obstacle makes the kernels of a forward or a
backward. The last family, "portable", has no obstacles. A family is an object with the methods of `Family`;
`insert` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flexmod.backends import options as kernel_options
from flexmod.backends.arguments import BackwardInputs, Operands
from flexmod.backends.hopper import HopperFamily
from flexmod.backends.triton import Found, PortableFamily, Rungs
from flexmod.block_mask.storage import MaskSnapshot
from flexmod.codegen.device_functions import Family as Chips
from flexmod.codegen.kernels import Kernels, Made
from flexmod.codegen.spec import Direction, template
from flexmod.codegen.variant import Variant
from flexmod.errors import TemplateError
from flexmod.runtime.plan import Place, PlanWriter

Places = tuple[Place | None, ...]


class Family(Protocol):
    """A kernel family. `name` is its name in kernel option TEMPLATE, `title` its name in sentences.

    `target`: the chip for which `explain` shows it. `reads_order`: there, its kernels follow the order of a
    mask's rows and columns. `reduce_in_backward`: its backward kernel reduces gradients of captures that only
    b and h index.
    """

    name: str
    title: str
    target: str
    reduce_in_backward: bool
    reads_order: bool

    def obstacle(
        self, variant: Variant, direction: Direction, target: str, *, deterministic: bool
    ) -> str | None:
        """Returns why the family cannot make a variant's kernels for a chip, or None if it can.

        `deterministic`: reruns must agree bit for bit, beside what the variant's options ask.
        """

    def call_obstacle(self, q: Tensor, k: Tensor, v: Tensor, by_column: MaskSnapshot | None) -> str | None:
        """Returns why its kernels cannot take these tensors and this mask's columns, or None if they can."""

    def kernels(self, portable: Kernels) -> Made:
        """Returns the family's kernels for the same spec and mods as `portable`, always the same object.

        Except for the portable family, the result has `text`, the module's source, and `choices(direction)`,
        the rungs that tuning tries.
        """

    def forward(
        self, writer: PlanWriter, made: Any, call: Operands, rungs: Rungs, *, want_max: bool, keep: bool
    ) -> Places:
        """See `triton.forward`."""

    def backward(
        self, writer: PlanWriter, made: Any, call: Operands, incoming: BackwardInputs,
        needs: tuple[bool, bool, bool], rungs: Rungs, key: Tensor, grad_out: Tensor,
    ) -> Found:  # fmt: skip
        """See `triton.backward`. `key` and `grad_out` are tensors of the call, or stand-ins."""


PORTABLE: Family = PortableFamily()
INTERPRETER = "Triton's interpreter"  # replaces a chip's name
_known: tuple[Family, ...] = (HopperFamily(), PORTABLE)


def families() -> tuple[Family, ...]:
    """Returns all families, in the order in which flexmod asks them."""
    return _known


def insert(family: Family) -> Callable[[], None]:
    """Adds a family in the first place; returns a function that removes it. Calls get new plans."""
    _set((family, *_known))
    return lambda: _set(tuple(other for other in _known if other is not family))


def _set(known: Sequence[Family]) -> None:
    global _known
    _known = tuple(known)
    kernel_options.set_family_names([family.name for family in _known])


def reads_order(target: str) -> bool:
    """Returns whether any family on a chip follows the order of a mask's rows and columns."""
    return any(family.reads_order and family.target == target for family in _known)


def obstacle(family: Family, variant: Variant, direction: Direction, target: str) -> str | None:
    """Returns why a family cannot make a variant's kernels for a chip; reads torch's switch for determinism.

    Raises TemplateError if there is an obstacle and the variant's options ask for this family.
    """
    options = dict(variant.options)
    if template(options, direction) not in ("auto", family.name):
        return "kernel option TEMPLATE asks for another"
    deterministic = torch.are_deterministic_algorithms_enabled()
    why = family.obstacle(variant, direction, target, deterministic=deterministic)
    if why is not None:
        check_not_asked_for(family, direction, options, why)
    return why


def check_not_asked_for(family: Family, direction: Direction, options: Mapping[str, Any], why: str) -> None:
    """Raises TemplateError if the options ask for a family that cannot run."""
    if template(options, direction) == family.name:
        raise TemplateError(template=family.name, direction=direction, why=why)


def kernels_of(
    family: Family, variant: Variant, direction: Direction, chips: Chips = "", interpreted: bool = False
) -> Made:
    """Returns a family's kernels for one direction of a variant, for these chips or the interpreter."""
    return family.kernels(variant.kernels(direction, family.reduce_in_backward, chips, interpreted))


def serving(variant: Variant, direction: Direction, target: str) -> tuple[Family, dict[str, str]]:
    """Returns the first family without an obstacle on a chip, and the obstacles of earlier ones by name.

    Raises the error of `obstacle`.
    """
    passed: dict[str, str] = {}
    for family in _known:
        why = obstacle(family, variant, direction, target)
        if why is None:
            return family, passed
        passed[family.name] = why
    raise AssertionError("the portable family has no obstacle")
