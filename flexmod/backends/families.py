"""Families of kernels: the ways in which a call can be computed on a GPU, asked one after the other.

The first family that has no obstacle makes the kernels of a forward, and of a backward. The last one,
"portable", has none. A family is an object with the parts of `Family`; `insert` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flexmod import family_names
from flexmod.backends import triton
from flexmod.backends.arguments import Operands
from flexmod.backends.hopper import HopperFamily
from flexmod.backends.interface import BackwardInputs
from flexmod.backends.triton import BackwardFacts, Found, Rungs
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.codegen.kernels import Kernels, Made
from flexmod.codegen.spec import Direction, KernelSpec, template
from flexmod.compiler import CONSTANTS
from flexmod.errors import TemplateError
from flexmod.plan import Place, PlanWriter

Places = tuple[Place | None, ...]


class Family(Protocol):
    """`name` is what kernel option TEMPLATE calls it, `title` what a sentence does.

    `target`: a chip for which `explain` shows it. `reduce_in_backward`: its backward kernel reduces gradients
    of captures that b and h alone index.
    """

    name: str
    title: str
    target: str
    reduce_in_backward: bool

    def obstacle(
        self,
        spec: KernelSpec,
        direction: Direction,
        target: str,
        options: Mapping[str, Any],
        *,
        deterministic: bool,
    ) -> str | None:
        """Why it does not make these kernels for a chip; None where it does."""

    def call_obstacle(self, q: Tensor, k: Tensor, v: Tensor, by_column: MaskSnapshot | None) -> str | None:
        """Why its kernels do not take these tensors, and the columns of this mask."""

    def kernels(self, portable: Kernels) -> Made:
        """Its kernels for what the portable ones were made for; the same object for the same ones.

        All but portable kernels have `text`, the source of their module, and `choices(direction)`, the rungs
        that tuning tries.
        """

    def forward(
        self, writer: PlanWriter, made: Any, call: Operands, rungs: Rungs, *, want_max: bool, keep: bool
    ) -> Places:
        """See `triton.forward`."""

    def facts(self, key: Tensor, grad_out: Tensor) -> BackwardFacts:
        """What a backward of these tensors goes by."""

    def backward(
        self, writer: PlanWriter, made: Any, call: Operands, incoming: BackwardInputs,
        needs: tuple[bool, bool, bool], rungs: Rungs, facts: BackwardFacts,
    ) -> Found:  # fmt: skip
        """See `triton.backward`."""

    def reads_order(self, target: str) -> bool:
        """Do its kernels on a chip go by the order of a mask's rows and columns (`Runs.order`)?"""


class _Portable:
    name, title, target, reduce_in_backward = family_names.PORTABLE, "portable Triton kernels", "", False
    forward = staticmethod(triton.forward)
    backward = staticmethod(triton.backward)

    def obstacle(self, *_: Any, **__: Any) -> None:
        return None

    call_obstacle = obstacle

    def kernels(self, portable: Kernels) -> Kernels:
        return portable

    def facts(self, key: Tensor, grad_out: Tensor) -> BackwardFacts:
        return BackwardFacts(deterministic=torch.are_deterministic_algorithms_enabled())

    def reads_order(self, target: str) -> bool:
        return False


PORTABLE: Family = _Portable()
INTERPRETER = "Triton's interpreter"  # in place of a chip
_known: tuple[Family, ...] = (HopperFamily(), PORTABLE)


def families() -> tuple[Family, ...]:
    """All, in the order in which they are asked."""
    return _known


def insert(family: Family) -> Callable[[], None]:
    """Ask this family first; returns what takes it out again. Plans of calls are made again."""
    _set((family, *_known))
    return lambda: _set(tuple(other for other in _known if other is not family))


def _set(known: Sequence[Family]) -> None:
    global _known
    _known = tuple(known)
    family_names.set_names([family.name for family in _known])
    CONSTANTS.version = object()  # what is known of calls depends on it


def reads_order(target: str) -> bool:
    """Does any family go by the order of a mask's rows and columns on a chip?"""
    return any(family.reads_order(target) for family in _known)


def obstacle(
    family: Family,
    spec: KernelSpec,
    direction: Direction,
    target: str,
    options: Mapping[str, Any] | None = None,
) -> str | None:
    """Why a family does not make these kernels for a chip, as torch's switch for determinism stands.

    Raises TemplateError where the options insist on it.
    """
    given = options or {}
    asked = template(given, direction)
    why = family.obstacle(
        spec, direction, target, given, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    if why is None and asked not in ("auto", family.name):
        why = "kernel option TEMPLATE asks for another"
    if why is not None:
        check_not_asked_for(family, direction, given, why)
    return why


def check_not_asked_for(family: Family, direction: Direction, options: Mapping[str, Any], why: str) -> None:
    """Raises TemplateError where the options insist on a family that cannot serve."""
    if template(options, direction) == family.name:
        raise TemplateError(template=family.name, direction=direction, why=why)


def serving(
    spec: KernelSpec, direction: Direction, target: str, options: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, str]]:
    """The first family without an obstacle on a chip, and why the ones before it do not serve, by name.

    Raises as `obstacle`.
    """
    passed: dict[str, str] = {}
    for family in _known:
        why = obstacle(family, spec, direction, target, options)
        if why is None:
            return family, passed
        passed[family.name] = why
    raise AssertionError("the portable family has no obstacle")
