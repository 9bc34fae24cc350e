"""The masks at every dtype, head_dim, length and group: errors beside those of plain eager attention.

`measure` runs in worker processes, so it takes plain data and returns plain numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import reference_case
import torch
from reference_case import Limit, Truth, error_size, limits_beside
from torch import Tensor

import flexmod
from benchmarks.dense import Attention, Mods, differentiated
from gpu.poison import poison

MASKS = ("noop", "causal", "window", "prefix", "document", "alibi", "softcap")
DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (16, 64, 80, 128, 192, 256)
LENGTHS = (1, 63, 127, 129, 1000, 2049)
GROUPS = (1, 3, 8)
RESULTS = Attention._fields
TINY = 1e-300


@dataclass(frozen=True)
class Case:
    mask: str
    dtype: str
    head_dim: int
    length: int
    group: int

    def __str__(self) -> str:
        return f"{self.mask}-{self.dtype}-D{self.head_dim}-S{self.length}-G{self.group}"

    @property
    def kernels(self) -> tuple[str, str, int]:
        """Cases that agree in this run the same compiled kernels."""
        return self.mask, self.dtype, self.head_dim

    @property
    def batch(self) -> int:
        return 32 if self.length < 200 else 4 if self.length < 2000 else 1


CASES = [Case(*facts) for facts in product(MASKS, DTYPES, HEAD_DIMS, LENGTHS, GROUPS)]


class Error(NamedTuple):
    """Root mean square and maximum of (result - truth), and what they may be."""

    rms: float
    max: float
    rms_limit: float
    max_limit: float

    def ok(self) -> bool:
        """False for NaN too."""
        return self.rms <= self.rms_limit and self.max <= self.max_limit

    def share(self) -> float:
        """How much of its limit the nearer of the two used."""
        return max(self.rms / max(self.rms_limit, TINY), self.max / max(self.max_limit, TINY))


Errors = dict[str, Error]


def measure(case: Case) -> Errors:
    """Error of out, lse, dq, dk and dv, by name.

    The largest error of a tensor is a matter of luck, for flexmod and for the yardstick: mostly it is one
    rounding to the dtype. So a case that is over a limit is drawn eight times more. Of the largest errors the
    median draw counts, beside its own yardstick; of the RMS errors all nine do, as those of one tensor.
    """
    draws = [draw(case, 0)]
    if not all(error.ok() for error in draws[0].values()):
        draws += [draw(case, number) for number in range(1, 9)]
    return {name: together([errors[name] for errors in draws]) for name in RESULTS}


def together(errors: list[Error]) -> Error:
    """The errors of several draws as one. NaN in any is NaN."""
    rms, largest, rms_limit, max_limit = zip(*errors, strict=True)
    if any(error != error for error in (*rms, *largest)):
        return Error(float("nan"), float("nan"), rms_limit[0], max_limit[0])
    typical = sorted(errors, key=lambda error: error.max / max(error.max_limit, TINY))[len(errors) // 2]
    return Error(_mean_square(rms), typical.max, _mean_square(rms_limit), typical.max_limit)


def _mean_square(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5


def draw(case: Case, number: int) -> Errors:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(zlib.crc32(f"{case} {number}".encode()))
    dtype = getattr(torch, case.dtype)
    kv_heads = 1 if case.group == 8 else 2
    shape = (case.batch, kv_heads * case.group, case.length, case.head_dim)
    query, grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    key, value = (torch.randn_like(query[:, :kv_heads]) for _ in range(2))
    documents = torch.randint(0, 4, (case.batch, case.length), device=device).sort(-1).values
    tensors = (query, key, value, grad_out)

    mask_batch = case.batch if case.mask == "document" else None
    ours = compiled(*tensors, mods(case, documents, torch.float32), mask_batch)
    eager = differentiated(*tensors, mods(case, documents, dtype))
    truth = differentiated(*(x.double() for x in tensors), mods(case, documents, torch.float64))
    limits = limits_of(eager, truth, reference_case.Case(*tensors, case.head_dim**-0.5))
    return {
        name: Error(*error_size(getattr(ours, name), getattr(truth, name)), *limits[name]) for name in RESULTS
    }


def compiled(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, mods: Mods, mask_batch: int | None
) -> Attention:
    """flexmod's results, from memory that held NaN before each call."""
    length, mask = query.shape[2], None
    if mods.mask_mod is not None:
        mask = flexmod.create_block_mask(mods.mask_mod, mask_batch, None, length, length, device=query.device)
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    statistics = torch.empty(query.shape[:-1], device=query.device)
    poison(query, statistics)
    out, lse = flexmod.flex_attention(
        *inputs, score_mod=mods.score_mod, block_mask=mask, enable_gqa=True, return_lse=True
    )
    poison(query, key, value, statistics)
    gradients = torch.autograd.grad(out, inputs, grad_out)
    return Attention(out.detach(), lse.detach(), *gradients)


def mods(case: Case, documents: Tensor, dtype: torch.dtype) -> Mods:
    """The functions of a mask. `dtype` is that of captured slopes, which are powers of two: exact in each."""
    window = 1024 if case.length > 1024 else 50
    prefix = case.length // 3
    slopes = (2.0 ** -torch.arange(1, 17, device=documents.device)).to(dtype)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    def prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | (kv_idx < prefix)

    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (documents[b, q_idx] == documents[b, kv_idx])

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 20.0 * torch.tanh(score / 20.0)

    table = {
        "noop": Mods(),
        "causal": Mods(mask_mod=causal),
        "window": Mods(mask_mod=sliding_window),
        "prefix": Mods(mask_mod=prefix_lm),
        "document": Mods(mask_mod=document),
        "alibi": Mods(alibi, causal),
        "softcap": Mods(softcap, causal),
    }
    return table[case.mask]


def limits_of(eager: Attention, truth: Attention, call: reference_case.Case) -> dict[str, Limit]:
    """The usual limits, and one for lse, which is float32 whatever the inputs are.

    float32 inputs: some roundings of it. Half types: a sixteenth of one of theirs, as in every limit.
    """
    limits = limits_beside(as_truth(eager), call, as_truth(truth))
    size = max(1.0, truth.lse.abs().max().item()) * torch.finfo(call.q.dtype).eps
    exact = call.q.dtype == torch.float32
    limits["lse"] = Limit(2 * size, 16 * size) if exact else Limit(size / 16, size / 16)
    return limits


def as_truth(found: Attention) -> Truth:
    return Truth(found.out, found.lse, found.lse.new_empty(0), found.dq, found.dk, found.dv)


def summary(results: dict[str, Any]) -> list[list[Any]]:
    """A row for each (mask, dtype): cases, faults, the largest share of its limit that each result used."""
    rows: dict[tuple[str, str], list[Any]] = {}
    for case in CASES:
        if str(case) not in results:
            continue
        row = rows.setdefault((case.mask, case.dtype), [case.mask, case.dtype, 0, 0, *[0.0] * 5])
        errors = {name: Error(*error) for name, error in (results[str(case)]["errors"] or {}).items()}
        row[2] += 1
        row[3] += not errors or not all(error.ok() for error in errors.values())
        for column, name in enumerate(RESULTS, start=4):
            row[column] = max(row[column], errors[name].share() if errors else 0.0)
    return list(rows.values())
