"""Each kernel of `device_functions/whole_kernels.py` by itself, beside what it says in torch."""

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
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("grad_lse", [False, True])
def test_statistics(dim: int, tile: int, large: bool, grad_lse: bool, device: torch.device) -> None:
    """A dead row, rows past the last, and one head with a row whose lse is large."""
    pitch = 80
    out, grad_out = (torch.randn(B, M, HQ, dim, device=device).transpose(1, 2) for _ in range(2))
    lse, grad = torch.randn(B, HQ, M, device=device), torch.randn(M, HQ, B, device=device).permute(2, 1, 0)
    row_max, rest = torch.randn(B, HQ, M, device=device), torch.randn(B, HQ, M, device=device)
    lse[0, 1, 3], lse[1, 2, 5], lse[1, 2, 6] = -math.inf, 5000.0, -5000.0
    lse2, delta, maxima = (poisoned(B, HQ, pitch, device=device) for _ in range(3))
    heads = torch.zeros(B, HQ, device=device)
    kernel(loaded("whole_kernels", ""), "statistics_kernel", out)[(B * HQ * pitch // 16,)](
        out, *out.stride(), grad_out, *grad_out.stride(), lse,
        grad if grad_lse else None, *(grad.stride() if grad_lse else (0, 0, 0)), lse2, delta,
        *((row_max, rest, maxima, heads) if large else (None,) * 4),
        HQ, M, pitch, DV=dim, DV_TILE=tile, FROM=1000.0, BLOCK_M=16,
    )  # fmt: skip
    dead = lse == -math.inf
    wanted = (out * grad_out).sum(-1) - (grad if grad_lse else 0.0)
    torch.testing.assert_close(delta[..., :M], wanted.masked_fill(dead, 0.0))
    assert torch.equal(delta[..., M:], torch.zeros_like(delta[..., M:]))
    in_base_2 = (lse * math.log2(math.e)).masked_fill(dead, math.inf)
    is_large = (lse.abs() > 4000) & ~dead
    if large:
        in_base_2 = torch.where(is_large, rest, in_base_2)
        assert torch.equal(maxima[..., :M], row_max.masked_fill(~is_large, 0.0))
        assert torch.equal(heads != 0, is_large.any(-1))
    torch.testing.assert_close(lse2[..., :M], in_base_2)
    assert torch.equal(lse2[..., M:], torch.full_like(lse2[..., M:], math.inf))


def test_statistics_without_an_lse(device: torch.device) -> None:
    out = torch.randn(B, HQ, M, 16, device=device)
    lse, delta = torch.zeros(B, HQ, M, device=device), poisoned(B, HQ, M, device=device)
    kernel(loaded("whole_kernels", ""), "statistics_kernel", out)[(B * HQ * 5,)](
        out, *out.stride(), out, *out.stride(), lse, None, 0, 0, 0, None, delta, *(None,) * 4,
        HQ, M, M, DV=16, DV_TILE=16, FROM=1000.0, BLOCK_M=16,
    )  # fmt: skip
    torch.testing.assert_close(delta, out.square().sum(-1))


@DIMS
def test_sums_of_dq_are_rounded(dim: int, tile: int, device: torch.device) -> None:
    """The sums come in the order of registers, see `as_held`."""
    pitch = 128
    grad = torch.randn(B, HQ, pitch, dim)
    blocks = grad.view(B * HQ * pitch // 64, 4, 2, 8, dim // 8, 4, 2)
    held = blocks.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 64 * dim).contiguous().to(device)
    made = poisoned(B, M, HQ, dim, device=device, dtype=torch.float16).transpose(1, 2)
    kernel(loaded("whole_kernels", ""), "round_kernel", made)[(B * HQ * 2,)](
        held, made, *made.stride(), 0.5, HQ, M, pitch, D=dim, D_TILE=tile
    )
    assert torch.equal(made.cpu(), (grad[..., :M, :] * 0.5).half())


@DIMS
def test_values_lie_by_keys(dim: int, tile: int, device: torch.device) -> None:
    v = torch.randn(B, N, HKV, dim).transpose(1, 2).to(torch.float16).to(device)
    made = poisoned(B, HKV, dim, 256, device=device, dtype=torch.float16)
    kernel(loaded("whole_kernels", ""), "values_kernel", v)[(B * HKV * 2,)](
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
    kernel(loaded("whole_kernels", ""), "steps_kernel", steps)[(2 * tiles,)](
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
