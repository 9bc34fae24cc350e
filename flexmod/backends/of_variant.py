"""The plans of a variant's calls, without a call: what `explain` shows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from flexmod.backends import hopper, triton
from flexmod.backends.arguments import Operands, operands
from flexmod.backends.generated import FirstRungs, incoming, with_captured
from flexmod.backends.interface import Problem
from flexmod.block_mask.held import Held
from flexmod.block_mask.launched import MaskSnapshot
from flexmod.block_mask.runs import Runs
from flexmod.codegen.hopper import TARGET, HopperKernels, Way, why_portable
from flexmod.codegen.kernels import Kernels
from flexmod.ir.trace import Traced
from flexmod.plan import Plan, Writer
from flexmod.variant import Variant

LENGTH = 512  # of the call that plans are written for: in them it is a name


def plans_of(made: Variant) -> dict[str, Plan]:
    """What a call of a variant does, on the kernels of each family that takes it; sizes are names."""
    query, key, value = (
        torch.empty(2, 2, LENGTH, dim, dtype=made.spec.q_dtype, device="meta")
        for dim in (made.spec.head_dim, made.spec.head_dim, made.spec.value_dim)
    )
    score: Any = SimpleNamespace(tensors=made.score_tensors)
    problem = Problem(score, None, _mask_of(made), made.spec.head_dim**-0.5)
    call = operands(query, key, value, problem, (), ())
    found = dict[str, Plan]()
    for way in get_args(Way):
        write = _forward if way == "forward" else _backward
        found[f"portable {way}"] = write(call, made, made.kernels(way), query)
        if why_portable(made.spec_of(way), way, TARGET, {}) is None:
            own = HopperKernels(made.kernels(way, fused=True))
            found[f"hopper {way}"] = write(call, made, own, query)
    return found


def _forward(call: Operands, made: Variant, kernels: Kernels | HopperKernels, query: Tensor) -> Plan:
    writer = Writer()
    if isinstance(kernels, HopperKernels):
        shape = kernels.ladder("forward")[0]
        results = hopper.forward(writer, kernels, call, shape, keep=True)
    else:
        results = triton.forward(writer, kernels, call, FirstRungs(kernels), keep=True)
    return writer.plan(call.inputs, results)


def _backward(call: Operands, made: Variant, kernels: Kernels | HopperKernels, query: Tensor) -> Plan:
    out = query.new_empty((*query.shape[:3], made.spec.value_dim))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    given, writer, needs = incoming(call, out, lse, out, None, kept=2), Writer(), (True, True, True)
    if isinstance(kernels, HopperKernels):
        shape, tiles = kernels.ladder("backward")[0], FirstRungs(kernels.portable)
        facts = hopper.BackwardFacts(addressable=True, ordered=True)
        found = hopper.backward(writer, kernels, call, given, needs, shape, tiles, facts)
    else:
        found = triton.backward(writer, kernels, call, given, needs, FirstRungs(kernels))
    graph = made.score.score if made.score else None
    graph = graph and replace(graph, lines=False)  # as calls have it, for all mods that are alike
    fused = isinstance(kernels, HopperKernels)
    results = with_captured(writer, call, found, graph, made.learned, fused)
    first = (given.grad_out, None, *call.inputs[:3], given.out, given.lse, *given.kept)
    return writer.plan((*first, *call.inputs[3:]), results)


def _mask_of(made: Variant) -> MaskSnapshot | None:
    """A mask of a call, of which plans read the parts alone."""
    if made.mask is None or made.spec.mask_block is None or made.mask.score is None:
        return None

    def runs() -> Runs:
        rows = torch.empty(2, 2, 4, 2, 3, dtype=torch.int32, device="meta")
        return Runs(rows, torch.empty(4, 2, dtype=torch.int32, device="meta"))

    held = Held((2, 2), (4, 4), {"kv": runs(), "q": runs()}, {})
    traced = Traced(made.mask.score, made.mask_tensors)
    return MaskSnapshot(held, (LENGTH, LENGTH), made.spec.mask_block, False, traced)
