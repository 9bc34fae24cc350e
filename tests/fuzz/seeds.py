"""Calls that the fuzzer found to fail, by what was wrong. They hold from then on."""

from __future__ import annotations

from fuzz.case import Case, Table

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
    "a tanh of float64, whose registers Hopper's own text took for float32": Case(
        "python",
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return torch.tanh(torch.float_power(score, 2))\n",
        dtype="bfloat16",
        lengths=(3, 4),
        dims=(64, 64),
    ),
    "a comparison with a tanh, which is as near as docs/operations.md says": Case(
        "python",
        "def score_mod(score, b, h, q_idx, kv_idx):\n"
        "    return torch.where(torch.tanh(score) >= score, -float('inf'), score)\n",
        dtype="float16",
        lengths=(40, 55),
        dims=(64, 64),
        scale=0.01,
    ),
    "a hash that wraps where the mod casts to int32": Case(
        "interpret",
        "def score_mod(score, b, h, q_idx, kv_idx):\n"
        "    mixed = (q_idx * 2654435761 + kv_idx * 40503).to(torch.int32)\n"
        "    return score + mixed % 1000 * 0.001\n",
        lengths=(40, 55),
        dims=(16, 16),
    ),
    "the rest of a float whose quotient is large": Case(
        "interpret",
        "def score_mod(score, b, h, q_idx, kv_idx):\n"
        "    return score + (q_idx * 2.0**40) % 0.75 + torch.fmod(kv_idx * 2.0**60, 2.0**-9 * 3)\n",
        lengths=(40, 55),
        dims=(16, 16),
    ),
    "a quotient by a denormal number": Case(
        "interpret",
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return torch.tanh(score * 1e-39 / 1e-39)\n",
        lengths=(40, 55),
        dims=(16, 16),
    ),
    "a learned table beside what cancels": Case(
        "interpret",
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return (score - score) * t0[kv_idx] + score\n",
        tables=(Table("t0", (16,), "float32", -24, 24, learned=True),),
        dtype="bfloat16",
        lengths=(32, 16),
        dims=(2, 2),
        wanted="kv",
    ),
    "values whose address in shared memory the ptxas of Triton 3.6 lost": Case(
        "triton",
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return score - t1[q_idx] * 0.5\n",
        tables=(Table("t1", (207,), "bfloat16", -24, 24, layout="packed"),),
        dtype="float16",
        heads=(12, 3),
        lengths=(207, 117),
        dims=(80, 2),
        scale=-0.125,
        seed=814286,
    ),
    "the same in a kernel for lists of blocks": Case(
        "triton",
        "def score_mod(score, b, h, q_idx, kv_idx):\n"
        "    x = score - t0[b] * 0.5\n"
        "    return torch.where(q_idx >= kv_idx, x, -float('inf'))\n",
        tables=(Table("t0", (2,), "float32", -24, 24, learned=True),),
        dtype="float16",
        batch=(2, 2),
        heads=(2, 2),
        lengths=(145, 145),
        dims=(33, 2),
        layouts=("reversed", "plain", "plain", "expanded"),
        block=(128, 64),
        mask_form="lists",
        mask_sizes=(2, 2),
        scale=0.25,
        wanted="kv",
        deterministic=True,
        seed=81329,
    ),
    "a head without queries before others, whose lse2 Hopper's backward loads in vain": Case(
        "python",
        mask="def mask_mod(b, h, q_idx, kv_idx):\n    return (q_idx < kv_idx) & (kv_idx <= q_idx + 16 * h)\n",
        dtype="bfloat16",
        heads=(2, 1),
        lengths=(35, 103),
        dims=(72, 40),
        mask_sizes=(0, 2),
    ),
}
