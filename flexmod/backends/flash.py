"""Computes attention on the CPU by torch's flash attention, a call for each run of equal steps.

A step has all columns of its rows, so no partial softmax needs merging. Its partial tiles and a bias, which a
score mod adds to the score, become the kernel's mask. The backward runs the same steps: with the rows' lse,
the gradient of each step is its share of dQ, dK and dV.

Zeros make the head dimensions of keys and values equal. One more dimension takes the gradient of lse: the
kernel computes the sum of grad_out * out for each row, which must lose grad_lse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexmod.backends.arguments import SINGLE, BackwardInputs, Forward, Gradients, Problem
from flexmod.backends.bias import Bias, largest_row
from flexmod.backends.blocks import LOG2_E, WIDTH, Scratch, gradients_of, lse_suffices
from flexmod.backends.products import is_large, is_quick, product
from flexmod.backends.steps import (
    BITS,
    EqualSteps,
    Forbidden,
    OneStep,
    Step,
    batches_of,
    over_group,
    runs_of_equal,
    steps_of,
)
from flexmod.backends.tiles import ROWS, TALLER, Heads, StepRules, in_order_of
from flexmod.ir.ops import HALF
from flexmod.runtime.private_torch import flash_on_cpu

Turn = Callable[[Tensor], Tensor]
# Elements of a bias in memory, 4 MiB of float32.
BIASES = 1 << 20
# Elements of the keys of a run, each step's counted: the gradients of its keys need as much memory.
RUN = 1 << 21


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Forward | None:
    """Runs a forward, see `arguments`; None if the tensors have values that the kernel does not support."""
    call = FlashCall(problem, q, k, v)
    query, rows = call.rows(q), call.size[:3]
    attend, results = call.kernels[0], None
    for batch, mask, turned in call.batches():
        step = batch.step
        if call.masks(step) and not call.is_finite:
            return None
        of_batch = turned(batch.rows_of(query)), batch.columns_of(call.key), batch.columns_of(call.value)
        found = attend(*of_batch, 0.0, step.causal, attn_mask=mask, scale=problem.scale)
        part, lse = turned(found[0])[..., : v.shape[3]], found[1]
        dead = step.dead if call.bias is None or mask is None else _dead(mask, lse)
        lse = turned(lse if dead is None else lse.masked_fill(dead, -torch.inf))
        if step.shape[:3] == rows:
            results = part.to(q.dtype), lse
            break
        results = results or call.of_nothing(q, v.shape[3])
        batch.write_rows(results[0], part)
        batch.write_rows(results[1], lse)
    out, lse = results or call.of_nothing(q, v.shape[3])
    return Forward(in_order_of(call.heads.join_query(out), q), call.heads.join_query(lse), None)


def backward(problem: Problem, given: BackwardInputs, needs: tuple[bool, bool, bool]) -> Gradients | None:
    """Runs a backward, see `arguments`; None as in `forward`."""
    grad_out, grad_lse, q, k, v, out, lse = given[:SINGLE]
    if not lse_suffices(lse):
        return None
    dead = lse == -torch.inf
    group = Heads.of(q, k).group
    alive = group(lse.masked_fill(dead, torch.inf))  # exp(score - inf) is 0
    of_lse = None if grad_lse is None else group(grad_lse.masked_fill(dead, 0.0))
    quick = q.dtype in HALF and is_quick(torch.float32)
    call = FlashCall(problem, q, k, v, more=grad_lse is not None, taller=quick)
    as_given = [group(x) for x in (grad_out, q, out)]
    grads: list[Tensor] = []
    by_row: list[Tensor] = []
    for batch, mask, turned in call.batches():
        step = batch.step
        if call.masks(step) and not call.is_finite:
            return None
        masked: Any = {"attn_mask": mask, "scale": problem.scale}
        if quick and len(step.columns) == 1 and is_large(*step.shape[2:]):
            dq, *sums = grads or call.no_gradients(q.dtype)
            grads = [dq, *map(_by_dimension, sums)]
            rows = [turned(batch.rows_of(x)) for x in as_given]
            terms = [None if x is None else turned(batch.rows_of(x)) for x in (alive, of_lse)]
            columns = [batch.columns_of(x) for x in (call.k, call.v, *grads[1:])]
            part = gradients_by_products(*rows, *terms, *columns, causal=step.causal, **masked)
            batch.write_rows(dq[..., : q.shape[3]], turned(part))
            continue
        if not by_row:
            by_row = [*map(call.rows, (grad_out, q, out)), alive]
            if of_lse is not None:
                by_row[0][..., -1], by_row[2][..., -1] = 1.0, -of_lse
        grad, query, *more = (turned(batch.rows_of(x)) for x in by_row)
        by_column = batch.columns_of(call.key), batch.columns_of(call.value)
        found = call.kernels[1](grad, query, *by_column, *more, 0.0, step.causal, **masked)
        if step.shape == call.size:
            grads += turned(found[0]), *map(over_group, found[1:])
            break
        grads = grads or call.no_gradients(q.dtype)
        batch.write_rows(grads[0], turned(found[0]))
        for total, part in zip(grads[1:], found[1:], strict=True):
            batch.add_to_columns(total, part)
    whole = zip(grads or call.no_gradients(q.dtype), (q, k, v), needs, strict=True)
    asked = [x[..., : like.shape[3]] if need else None for x, like, need in whole]
    return gradients_of(call.heads, asked, (q, k, v))


def gradients_by_products(
    grad: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    *,
    causal: bool,
    attn_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Returns the gradient of query; adds the gradients of key and value to `key_grad` and `value_grad`.

    What torch's operation computes, in less time; see `products`. For operands in half precision: sums of any
    length in float32 are exact enough for them. Computes in the dtype of `key_grad` and `value_grad`, which
    may have more dimensions. All shapes are [z, g, rows or columns, dim].
    """
    real = lse.dtype
    dq = query.new_zeros(query.shape, dtype=real)
    rows, columns = query.shape[2], key.shape[2]
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], columns)
    one = lse.new_ones(columns, 1)
    for head in [(z, g) for z in range(query.shape[0]) for g in range(query.shape[1])]:
        q, g, o, k, v = (x[head].to(real).contiguous() for x in (query, grad, out, key, value))
        delta = (g * o).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[head][:, None]
        # one more dimension takes the term of each row
        k_and_one, v_and_one = torch.cat([k, one], -1), torch.cat([v, one], -1)
        by_row = torch.cat([q * (scale * LOG2_E), lse[head][:, None] * -LOG2_E], -1)
        grad_by_row = torch.cat([g, delta.neg_()], -1)
        to_key, to_value = key_grad[head][:, : k.shape[1]].mT, value_grad[head][:, : v.shape[1]].mT
        for here in spans(rows, TALLER):
            of_queries, of_grad = (q[here].mT * scale).contiguous(), g[here].mT.contiguous()  # [dim, rows]
            for part in spans(min(here.stop, columns) if causal else columns, WIDTH):
                weights = product(by_row[here], k_and_one[part])  # [rows, columns] of this piece
                if mask is not None:
                    weights.add_(mask[head][here, part], alpha=LOG2_E)
                weights.exp2_()
                if causal and part.stop > here.start:
                    weights.tril_(here.start - part.start)
                to_value[:, part].add_(product(of_grad, weights.mT))
                change = product(grad_by_row[here], v_and_one[part], times=weights)
                dq[head][here].add_(product(change, k[part].mT, depth=columns))
                to_key[:, part].add_(product(of_queries, change.mT))
    return dq.mul_(scale)


def _by_dimension(x: Tensor) -> Tensor:
    """Returns x [Z, N, dim] with the columns of a dimension side by side in memory, as products come."""
    return x if x.mT.is_contiguous() else x.mT.contiguous().mT


def spans(size: int, width: int) -> Iterator[slice]:
    """Splits range(size) into slices of about this width, the last one up to half as wide again."""
    start = 0
    while start < size:
        stop = start + width if size - start > 1.5 * width else size
        yield slice(start, stop)
        start = stop


class FlashCall:
    """The layout of one call: [Z, G, M, dim] for tensors by query, [Z, N, dim] for keys and values."""

    def __init__(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, more: bool = False, taller: bool = False
    ) -> None:
        kernels = flash_on_cpu()
        assert kernels is not None
        self.kernels = kernels
        self.bias = None if problem.score is None else Bias(problem, q, k)
        self.problem, self.heads = problem, Heads.of(q, k)
        self.size = *self.heads.shape, q.shape[2], k.shape[2]
        self._dim = max(q.shape[3], v.shape[3]) + more
        self._taller = taller
        self._scratch = Scratch(q.new_empty((), dtype=self.heads.real))
        self._query, self.k, self.v = q, k.flatten(0, 1), v.flatten(0, 1)

    @cached_property
    def key(self) -> Tensor:
        """The keys, padded with zeros."""
        return self._ready(self.k)

    @cached_property
    def value(self) -> Tensor:
        """The values, padded with zeros."""
        return self._ready(self.v)

    def rows(self, x: Tensor) -> Tensor:
        """Returns [B, Hq, M, dim] as [Z, G, M, dim], padded with zeros."""
        return self._ready(self.heads.group(x))

    def no_gradients(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns zeros for gradients by row, in a dtype, by key and by value."""
        by_row = self.k.new_zeros((*self.size[:3], self._dim), dtype=dtype)
        by_key = self.k.new_zeros((*self.k.shape[:2], self._dim), dtype=self.heads.real)
        return [by_row, by_key, torch.zeros_like(by_key)]

    def _ready(self, x: Tensor) -> Tensor:
        """Returns x in the dtype of the computation, with strides that matrix products support."""
        if x.dtype != self.heads.real:
            x = x.to(self.heads.real)
        if x.shape[-1] < self._dim:
            return torch.nn.functional.pad(x, (0, self._dim - x.shape[-1]))
        return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()

    def of_nothing(self, q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Returns out and lse of rows that attend to nothing."""
        lse = torch.full(self.size[:3], -torch.inf, dtype=self.heads.real, device=q.device)
        return q.new_zeros((*self.size[:3], dim)), lse

    def masks(self, step: Step) -> bool:
        """Whether the kernel adds -inf to scores of a step that the mask or the score mod replaces by it."""
        return bool(step.forbidden) or self.bias is not None and self.bias.replaces

    @cached_property
    def is_finite(self) -> bool:
        """Whether no score can be nan or infinite, which would stay so beside -inf."""
        largest = largest_row(self._query, self.heads.real) * largest_row(self.k, self.heads.real)
        return largest * max(1.0, abs(self.problem.scale)) < torch.finfo(self.heads.real).max / 2

    def batches(self) -> Iterator[tuple[OneStep | EqualSteps, Tensor | None, Turn]]:
        """Yields the batches of the kernel, its mask, and the order of rows.

        The mask broadcasts to the scores. A function brings rows into the mask's order and back.
        """
        dtype, no_bias = self.heads.real, self.bias is None
        rules = StepRules(no_bias and self.problem.scale > 0, self._taller and not no_bias, no_bias)
        known: tuple[Forbidden, int] = (), 0
        mask = None
        steps = steps_of(self.problem.mask, self.heads, *self.size[2:], rules)
        if self.bias is not None:
            for step in steps:
                mask = self.bias.from_last_row(step, dtype)
                if mask is not None:
                    yield OneStep(step), mask, _last_first
                    continue
                for part in step.cut(BIASES, ROWS):
                    yield OneStep(part), self.bias.of(part, dtype), _unchanged
            return
        for run in runs_of_equal(steps, RUN // self._dim):
            step = run[0]
            if step.forbidden and (known[0] is not step.forbidden or known[1] != step.shape[3]):
                known, mask = (step.forbidden, step.shape[3]), self._mask_of(step)
            for batch in batches_of(run):
                yield batch, mask if step.forbidden else None, _unchanged

    def _mask_of(self, step: Step) -> Tensor:
        """Returns 0, and -inf where the mask is False; valid until the next call.

        It writes the bits of -inf: a product is vectorized, `masked_fill_` branches at each element.
        """
        sizes = [max(sizes) for sizes in zip(*(x.shape[:3] for _, x in step.forbidden), strict=True)]
        mask = self._scratch.take("mask", (*sizes, step.shape[3]))
        integer, minus_infinity = BITS[mask.dtype]
        bits, start = mask.view(integer), 0
        for span, forbidden in step.forbidden:
            bits[..., start : span.start].zero_()
            bits[..., span].copy_(forbidden).mul_(minus_infinity)
            start = span.stop
        bits[..., start:].zero_()
        return mask


def _unchanged(x: Tensor) -> Tensor:
    return x


def _last_first(x: Tensor) -> Tensor:
    """Returns x [z, g, rows, ...] with the last row first."""
    return x.flip(2)


def _dead(bias: Tensor, lse: Tensor) -> Tensor | None:
    """Returns True for rows that attend to nothing; None without such rows. Their `lse` is 0."""
    dead = lse == 0.0
    return dead & (bias.amax(-1) == -torch.inf) if bool(dead.any()) else None
