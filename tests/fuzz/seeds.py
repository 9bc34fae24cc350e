"""Calls that the fuzzer found to fail, by what was wrong. They hold from then on."""

from __future__ import annotations

from fuzz.case import Case

SEEDS = {
    "a number of a float64 call that was folded in float32": Case(
        "cpu",
        "def score_mod(score, b, h, q_idx, kv_idx):\n"
        "    third = torch.full_like(score, 0.3)\n"
        "    return score / third * torch.reciprocal(torch.full_like(score, 2) + 0.5)\n",
        dtype="float64",
        lengths=(3, 4),
        dims=(2, 2),
    ),
    "scores that are all -inf, whose bounds Hopper's forward wrote as a name": Case(
        "python",
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return torch.full_like(score, -float('inf'))\n",
        dtype="bfloat16",
        lengths=(3, 4),
        dims=(64, 64),
    ),
}
