"""Each kernel of `device_functions/hopper_kernels.py` by itself, beside what it says in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from device_functions.applied import kernel, loaded

B, HQ, HKV, M, N = 2, 3, 2, 70, 150
DIMS = pytest.mark.parametrize("dim, tile", [(16, 16), (24, 32)], ids=["whole", "padded"])


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, math.nan if dtype.is_floating_point else -9, dtype=dtype, device=device)


@DIMS
def test_sums_of_dq_are_rounded(dim: int, tile: int, device: torch.device) -> None:
    """The sums come in the order of registers, see `as_held`."""
    pitch = 128
    grad = torch.randn(B, HQ, pitch, dim)
    blocks = grad.view(B * HQ * pitch // 64, 4, 2, 8, dim // 8, 4, 2)
    held = blocks.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 64 * dim).contiguous().to(device)
    made = poisoned(B, M, HQ, dim, device=device, dtype=torch.float16).transpose(1, 2)
    kernel(loaded("hopper_kernels", ""), "round_kernel", made)[(B * HQ * 2,)](
        held, made, *made.stride(), 0.5, HQ, M, pitch, D=dim, D_TILE=tile
    )
    assert torch.equal(made.cpu(), (grad[..., :M, :] * 0.5).half())


@DIMS
def test_values_lie_by_keys(dim: int, tile: int, device: torch.device) -> None:
    v = torch.randn(B, N, HKV, dim).transpose(1, 2).to(torch.float16).to(device)
    made = poisoned(B, HKV, dim, 256, device=device, dtype=torch.float16)
    kernel(loaded("hopper_kernels", ""), "values_kernel", v)[(B * HKV * 2,)](
        v, *v.stride(), made, HKV, N, DV=dim, DV_TILE=tile
    )
    padded = torch.nn.functional.pad(v.cpu(), (0, 0, 0, 256 - N))
    keys = torch.arange(256)
    unit, place = keys // 16 * 16, keys % 16
    column = unit + place % 8 // 2 * 4 + place // 8 * 2 + place % 2
    wanted = torch.empty_like(made, device="cpu")
    wanted[..., column] = padded.mT
    assert torch.equal(made.cpu(), wanted)


@pytest.mark.parametrize("form", ["runs", "lists", "partial lists"])
def test_steps_are_those_that_a_consumer_meets(form: str, device: torch.device) -> None:
    """Two heads of a mask with blocks of 128 queries and 64 keys; three consumers; a ragged last tile."""
    rows, columns, consumers, queries = 4, 7, 3, 500
    kinds = torch.randint(0, 3, (2, rows, columns), generator=torch.Generator().manual_seed(1))
    kinds[0, 1] = 0
    if form == "partial lists":
        kinds[kinds == 2] = 0
    given = runs_of(kinds) if form == "runs" else lists_of(kinds, form == "lists")
    tiles, steps_across = -(-queries // 192), 2 * columns - 1
    steps = poisoned(2, tiles, 1 + steps_across, device=device, dtype=torch.int32)
    on_device = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    kernel(loaded("hopper_kernels", ""), "steps_kernel", steps)[(2 * tiles,)](
        **on_device, KV_STEPS=steps, ROWS=rows, M=queries, N=32 * steps_across - 5,
        Q_BLOCK=128, KV_BLOCK=64, CONSUMERS=consumers, BLOCK_N=32,
    )  # fmt: skip
    for head in range(2):
        for tile in range(tiles):
            starts = [192 * tile + 64 * consumer for consumer in range(consumers)]
            wanted = []
            for step in range(steps_across):
                own = [int(kinds[head, at // 128, step // 2]) if at < queries else 0 for at in starts]
                if any(own):
                    wanted.append(32 * step + sum(kind << 2 * place for place, kind in enumerate(own)))
            found = steps[head, tile].tolist()
            assert found[: found[0] + 1] == [len(wanted), *wanted]


def runs_of(kinds: Tensor) -> dict[str, object]:
    entries, spans = [], []
    for row in kinds.flatten(0, 1).tolist():
        for kind in (1, 2):
            edges = [0, *(int(x == kind) for x in row), 0]
            first = [i for i in range(len(row)) if edges[i + 1] > edges[i]]
            stop = [i + 1 for i in range(len(row)) if edges[i + 1] > edges[i + 2]]
            entries.append([row.count(kind), len(first), len(spans)])
            spans += zip(first, stop, strict=True)
    return {
        "KV_ROWS": torch.tensor(entries, dtype=torch.int32),
        "KV_RUNS": torch.tensor(spans, dtype=torch.int32),
        **dict.fromkeys(("KV_NUM_BLOCKS", "KV_INDICES", "FULL_KV_NUM_BLOCKS", "FULL_KV_INDICES")),
        "kv_slots": 0, "full_kv_slots": 0,
    }  # fmt: skip


def lists_of(kinds: Tensor, with_full: bool) -> dict[str, object]:
    columns = kinds.shape[-1]
    made: dict[str, object] = {"KV_ROWS": None, "KV_RUNS": None}
    for kind, prefix in ((1, ""), (2, "FULL_")):
        there = kinds == kind
        made[f"{prefix}KV_NUM_BLOCKS"] = there.sum(-1, dtype=torch.int32)
        order = there.int().argsort(dim=-1, descending=True, stable=True)
        made[f"{prefix}KV_INDICES"] = order.to(torch.int32)
        made[f"{prefix.lower()}kv_slots"] = columns
    if not with_full:
        made |= {"FULL_KV_NUM_BLOCKS": None, "FULL_KV_INDICES": None, "full_kv_slots": 0}
    return made
