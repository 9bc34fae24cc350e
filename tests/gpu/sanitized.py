"""Calls of every kind of kernel, forward and backward, for NVIDIA's compute-sanitizer: `make sanitize`.

    PYTHONPATH=.:tests python -m gpu.sanitized --part 0 --of 8 [--portable]

Lengths are odd, and key heads and batch entries shared. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is
an allocation of its own, so that an element past its end is one past an allocation. Nothing is compared here:
the other tests on the GPU do that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from learned_mods import learned_mods
from reference_case import make_case

from flexmod import create_block_mask, flex_attention
from gpu.hopper_cases import DEVICE, mods_of

BATCH, HEADS, KV_HEADS, ROWS, COLUMNS = 2, 4, 2, 301, 333
MODS = (
    "plain", "causal", "window", "documents", "neighborhood", "holes", "nothing", "by head", "alibi",
    "softcap", "softcap shifted", "capped sum", "near ones", "loads", "risky", "lowest", "infinite",
    "buckets", "cosines",
)  # fmt: skip
LEARNED = ("slopes", "relative table", "bias of pairs", "bias of rows", "bias of keys", "scalar", "several")
FORMS: tuple[tuple[str, int, str, bool], ...] = (
    # template, head dimension, dtype, deterministic
    ("auto", 128, "bfloat16", False), ("auto", 64, "float16", False), ("portable", 64, "bfloat16", False),
    ("auto", 256, "bfloat16", False), ("auto", 40, "float32", False), ("auto", 64, "bfloat16", True),
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    mods: str
    template: str
    dim: int
    dtype: str
    deterministic: bool


def calls() -> Iterator[Call]:
    """Two forms of each mod, so that all forms meet mods of all kinds; of the plain one, all."""
    for number, mods in enumerate((*MODS, *LEARNED)):
        forms = [FORMS[(number + k) % len(FORMS)] for k in (0, 3)]
        for form in FORMS if mods == "plain" else forms:
            yield Call(mods, *form)


def attend(call: Call) -> None:
    learned: list[torch.Tensor] = []
    if call.mods in LEARNED:
        make, shapes = learned_mods(BATCH, HEADS, ROWS, COLUMNS, DEVICE)[call.mods]
        learned = [torch.rand(shape, device=DEVICE).requires_grad_() for shape in shapes]
        score_mod, mask_mod, apart = make(*learned), mods_of("causal", HEADS, ROWS, COLUMNS)[1], False
    else:
        score_mod, mask_mod, apart = mods_of(call.mods, HEADS, ROWS, COLUMNS)
    case = make_case(
        batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, q_len=ROWS, kv_len=COLUMNS, head_dim=call.dim,
        kv_batch=1, dtype=getattr(torch, call.dtype), device=DEVICE,
    )  # fmt: skip
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(
            mask_mod, BATCH if apart else None, HEADS if apart else None, ROWS, COLUMNS, device=DEVICE
        )
    leaves = [x.requires_grad_() for x in case.inputs]
    options: dict[str, Any] = {"TEMPLATE": call.template, "deterministic": call.deterministic}
    out, lse = flex_attention(
        *leaves, score_mod, mask, enable_gqa=True, return_lse=True, kernel_options=options
    )
    torch.autograd.grad([out, lse], [*leaves, *learned], [case.grad_out, torch.rand_like(lse)])
    if out.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="sanitized", description=__doc__)
    parser.add_argument("--part", type=int, default=0, help="of the calls, from 0 on")
    parser.add_argument("--of", type=int, default=1, help="so many parts")
    parser.add_argument("--portable", action="store_true", help="no kernels made for Hopper")
    given = parser.parse_args()
    made = dict.fromkeys(replace(call, template="portable") if given.portable else call for call in calls())
    for number, call in enumerate([*made][given.part :: given.of]):
        attend(call)
        print(number, call, flush=True)


if __name__ == "__main__":
    sys.exit(main())
