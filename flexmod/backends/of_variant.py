"""Makes plans of a variant without a call, for `explain` and for compilation ahead of time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import Problem, operands
from flexmod.backends.families import PORTABLE, families, kernels_of, obstacle
from flexmod.backends.generated import NO_RUNGS, FirstRungs, PlannedCall
from flexmod.backends.triton import Rungs
from flexmod.block_mask.storage import MaskSnapshot, TileStorage
from flexmod.block_mask.tiles import LISTS, Runs
from flexmod.codegen.kernels import Made
from flexmod.codegen.spec import FLOAT8, Direction
from flexmod.codegen.variant import Variant
from flexmod.ir.trace import Traced
from flexmod.runtime.launch import sample
from flexmod.runtime.plan import Launch, Place, Plan, Size, contiguous, extents_of
from flexmod.runtime.target import NAMES, named

LENGTH = 512  # of the stand-in call; plans have a name for it
OF_A_CALL = {"PROCESSORS": 128}  # values of names that do not follow from tensors' sizes


class VariantCall:
    """A call of a variant on dense tensors without memory. Its plans have names for sizes."""

    def __init__(self, made: Variant) -> None:
        spec = made.spec
        self._made = made
        query, key = (_empty(dtype, spec.head_dim) for dtype in (spec.q_dtype, spec.k_dtype))
        self._qkv = query, key, _empty(spec.v_dtype, spec.value_dim)
        score: Any = SimpleNamespace(tensors=made.score_tensors)
        self._mask = _mask_of(made)
        self._value_scale = torch.empty(2, 2, device="meta") if spec.value_scale else None
        problem = Problem(
            score, None, self._mask, spec.head_dim**-0.5,
            out_dtype=spec.out_dtype, value_scale=self._value_scale,
        )  # fmt: skip
        self.call = operands(*self._qkv, problem, (), (), _list)

    def plan(
        self,
        direction: Direction,
        made: Made,
        rungs: Rungs = NO_RUNGS,
        *,
        keep: bool = True,
        captured: bool = True,
    ) -> Plan:
        """Returns the plan of a forward or a backward on these kernels, with the first rungs by default.

        `keep`: the forward keeps tensors for a backward. `captured`: the plan ends with the gradients of
        captured tensors, otherwise with their sums.
        """
        family = next(one for one in families() if one.name == made.family)
        given = self._tensors
        tensors: tuple[Tensor | None, ...] = self._qkv
        if direction == "backward":
            tensors = (given["grad_out"], None, *self._qkv, given["out"], given["lse"])
        variant, score = replace(self._made, spec=self._made.spec_of(direction)), self._made.score
        if score and score.score:  # as in calls, where equal mods share a graph
            variant = replace(variant, score=replace(score, score=replace(score.score, lines=False)))
        call = PlannedCall(variant, self.call, tensors, keep=keep, kept=2, captured=captured)
        return call.plan(family, FirstRungs(made, rungs))

    def arguments(self, plan: Plan, step: Launch) -> dict[str, Any]:
        """Returns the arguments of a launch of the plan, as a compiler sees them."""
        given = [None if place is None else self._tensors[place.name] for place in plan.inputs]
        return sample(step, self._tensors, {**extents_of(plan.inputs, given), **OF_A_CALL})

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """The stand-ins for the inputs, by name."""
        query, key, value = self._qkv
        out, lse = (
            _empty(self.call.out_dtype or query.dtype, value.shape[3]),
            query.new_empty(query.shape[:3], dtype=torch.float32),
        )
        named = {"query": query, "key": key, "value": value, "out": out, "grad_out": out, "lse": lse}
        named |= {"kept0": lse, "kept1": lse}
        if self._value_scale is not None:
            named["value_scale"] = self._value_scale
        for mod, tensors in (("score", self._made.score_tensors), ("mask", self._made.mask_tensors)):
            named |= {f"{mod}_capture{number}": _unfilled(tensor) for number, tensor in enumerate(tensors)}
        if self._mask is not None:
            named |= dict(zip(self._mask.storage.parts(), self._mask.storage.tensors(), strict=True))
        return named


def by_family(made: Variant) -> tuple[dict[str, Plan], dict[str, str], tuple[str, ...]]:
    """Returns the plans, the modules, and which family runs where: see `Explanation`.

    Sizes in plans are names. The kernel_options choose no family here.
    """
    call, asked, keep = VariantCall(made), replace(made, options=()), "backward" in made.spec.directions
    plans, sources, lines = dict[str, Plan](), dict[str, str](), []
    for direction in made.spec.directions:
        whys, runs = [], []
        for family in families():
            why = obstacle(family, asked, direction, family.target)
            if why is not None:
                whys.append(why)
                continue
            kernels: Any = kernels_of(family, made, direction)
            plans[f"{family.name} {direction}"] = call.plan(direction, kernels, keep=keep)
            if family is not PORTABLE:
                sources[f"{family.name} {direction}"] = kernels.text
                runs.append(f"{family.name} on {family.target}, {kernels.ladder(direction)[0]} first")
        said = [*runs, "portable elsewhere"] if runs else [f"portable everywhere: {'; '.join(whys)}"]
        lines.append(f"{direction} template: {'; '.join(said)}")
    if made.spec.q_dtype in FLOAT8:
        chips = ", ".join(name for name in NAMES if named(name).float8)
        lines.append(f"products in float8 on {chips}; elsewhere a call converts the tensors to a half type")
    return plans, sources, tuple(lines)


def _empty(dtype: torch.dtype, dim: int) -> Tensor:
    return torch.empty(2, 2, LENGTH, dim, dtype=dtype, device="meta")


def _unfilled(tensor: Tensor) -> Tensor:
    """Returns a tensor with this one's strides and without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _list(name: str, tensor: Tensor) -> Place:
    """Returns the place of a dense list of a mask's blocks; all lists of a mask share names of sizes."""
    sides = ("Q_BLOCKS", "KV_BLOCKS") if "kv_" in name else ("KV_BLOCKS", "Q_BLOCKS")
    shape = tuple(map(Size, ("MASK_B", "MASK_H", *sides)))[: tensor.dim()]
    return Place(name, shape, contiguous(shape), tensor.dtype)


def _mask_of(made: Variant) -> MaskSnapshot | None:
    """Returns a stand-in mask, of which plans read only the parts. With captured tensors it has an order."""
    if made.mask is None or made.spec.mask_block is None or made.mask.score is None:
        return None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def runs() -> Runs:
        return Runs(empty(2, 2, 4, 2, 3), empty(4, 2), empty(16) if made.mask_tensors else None)

    if made.spec.mask_form == "lists":
        storage = TileStorage.of_lists(
            {name: empty(16, 16, 16, *[16] * name.endswith("indices")) for name in LISTS}
        )
    else:
        storage = TileStorage((2, 2), (4, 4), {"kv": runs(), "q": runs()}, {})
    traced = Traced(made.mask.score, made.mask_tensors)
    return MaskSnapshot(storage, (LENGTH, LENGTH), made.spec.mask_block, False, traced)
