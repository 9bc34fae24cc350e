"""Extents that need the memory of a large GPU: offsets beyond 2^31, 2^20 tokens, grids beyond 65535."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod import masks

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300, method="thread")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 1 << 30
BEYOND = 2**31
LARGE = 2**19 + 77
TEMPLATES = ["auto", "portable"]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def memory() -> Any:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def needs(gib: int) -> Any:
    there = torch.cuda.get_device_properties(0).total_memory // GIB if torch.cuda.is_available() else 0
    return pytest.mark.skipif(there < gib, reason=f"needs {gib} GiB of GPU memory")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def close(ours: Tensor, truth: Tensor, name: str = "") -> None:
    """By the ratio of norms, in float64."""
    assert ours.shape == truth.shape
    error = (ours.double() - truth.double()).norm() / truth.double().norm()
    assert error < TOLERANCE[ours.dtype], f"{name}: {float(error)}"


def attend(
    inputs: list[Tensor], grad_out: Tensor, template: str, score_mod: Any = None, **options: Any
) -> list[Tensor]:
    """out and the gradients of inputs, [out, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = flexmod.flex_attention(*leaves, score_mod, kernel_options={"TEMPLATE": template}, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def dense_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v


def dense(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, bias: Any = None) -> list[Tensor]:
    """The same in float64, for q [M, D] and the like; `bias` is added to the scores."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.T / q.shape[-1] ** 0.5
    out = torch.softmax(scores if bias is None else scores + bias, -1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())]


# Captured tables


@needs(40)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_table_beyond_two_to_the_31(template: str) -> None:
    """[2100, 2^20 + 64] of half, read in its last columns; its gradient is that of the columns alone."""
    rows, columns = 2100, 2**20 + 64
    table = torch.empty(rows, columns, device=DEVICE, dtype=torch.float16)
    assert table.numel() > BEYOND
    first = columns - 300
    table[:, first:].normal_()
    few = table[:, first:].contiguous()
    inputs, grad_out = (
        [random(1, 2, rows, 64), *(random(1, 2, 300, 64) for _ in "kv")],
        random(1, 2, rows, 64),
    )
    wide = attend(inputs, grad_out, template, lambda s, b, h, q_idx, kv_idx: s + table[q_idx, kv_idx + first])
    small = attend(inputs, grad_out, template, lambda s, b, h, q_idx, kv_idx: s + few[q_idx, kv_idx])
    for one, other, name in zip(wide, small, ("out", "dq", "dk", "dv"), strict=True):
        close(one, other, name)
    truth = dense(*(x[0, 1] for x in (*inputs, grad_out)), few.double())
    for one, other, name in zip(wide, truth, ("out", "dq", "dk", "dv"), strict=True):
        close(one[0, 1], other, name)


@needs(60)
def test_the_gradient_of_a_table_beyond_two_to_the_31() -> None:
    rows, columns = 2100, 2**20 + 64
    table = torch.zeros(rows, columns, device=DEVICE, dtype=torch.float16, requires_grad=True)
    first = columns - 300
    query, key = random(1, 1, rows, 64), random(1, 1, 300, 64)
    grad_out = random(1, 1, rows, 64)
    out = flexmod.flex_attention(
        query, key, key, lambda s, b, h, q_idx, kv_idx: s + table[q_idx, kv_idx + first]
    )
    (found,) = torch.autograd.grad(out, table, grad_out)
    bias = torch.zeros(rows, 300, device=DEVICE, dtype=torch.float64, requires_grad=True)
    scores = query[0, 0].double() @ key[0, 0].double().T / 8 + bias
    exact = torch.softmax(scores, -1) @ key[0, 0].double()
    (truth,) = torch.autograd.grad(exact, bias, grad_out[0, 0].double())
    error = (found[:, first:].double() - truth).norm() / truth.norm()
    assert error < 2e-2
    assert not found[:, :first].any()


@needs(20)
def test_a_mask_of_a_table_beyond_two_to_the_31() -> None:
    """One dimension of bytes, indexed by sums that int32 does not hold; the builder reads it too."""
    length = 1000
    table = torch.zeros(BEYOND + length, device=DEVICE, dtype=torch.int8)
    table[BEYOND:] = torch.arange(length, device=DEVICE) // 77 % 100
    few = table[BEYOND:].clone()

    def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[q_idx + BEYOND] == table[kv_idx + BEYOND]

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return few[q_idx] == few[kv_idx]

    built = [flexmod.create_block_mask(mod, None, None, length, length, device=DEVICE) for mod in (far, near)]
    assert torch.equal(built[0].table(), built[1].table())
    q = random(1, 2, length, 64)
    outs = [flexmod.flex_attention(q, q, q, block_mask=mask) for mask in built]
    assert torch.equal(*outs)


# query, key and value


def large() -> Tensor:
    """[8, 8, LARGE, 64] with more than 2^31 elements."""
    made = torch.empty(8, 8, LARGE, 64, device=DEVICE, dtype=torch.bfloat16)
    assert made.numel() > BEYOND
    return made.normal_()


@needs(60)
@pytest.mark.parametrize("template", TEMPLATES)
def test_queries_beyond_two_to_the_31(template: str) -> None:
    query, grad_out = large(), large()
    check_the_ends(query, random(8, 8, 100, 64), random(8, 8, 100, 64), grad_out, template)


@needs(60)
@pytest.mark.parametrize("template", TEMPLATES)
def test_keys_beyond_two_to_the_31(template: str) -> None:
    query, grad_out = random(8, 8, 100, 64), random(8, 8, 100, 64)
    check_the_ends(query, large(), large(), grad_out, template)


def check_the_ends(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, template: str) -> None:
    """The first and the last head of the batch."""
    found = attend([query, key, value], grad_out, template)
    for b, h in ((0, 0), (7, 7)):
        truth = dense(*(x[b, h] for x in (query, key, value, grad_out)))
        for ours, other, name in zip(found, truth, ("out", "dq", "dk", "dv"), strict=True):
            close(ours[b, h], other, f"{name} of batch {b}, head {h}")


@pytest.mark.parametrize("form", ["rows", "heads", "pages"])
@needs(40)
@torch.no_grad()
def test_few_queries_of_keys_beyond_two_to_the_31(form: str) -> None:
    """A query attends to the last keys, whose offsets exceed int32: by row, by head, or in a listed page."""
    heads, length, dim = (8, 2**21 + 256, 128) if form == "rows" else (16, 2**20 + 256, 256)
    shape = (1, length, heads, dim) if form == "rows" else (1, heads, length, dim)
    q = random(1, 2 * heads, 1, dim)
    k, v = (torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    if form == "rows":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    assert (heads - 1) * k.stride(1) + (length - 200) * k.stride(2) > BEYOND
    for x in (k, v):
        x[:, :, -200:] = random(1, heads, 200, dim)

    def last(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= length - 200

    if form == "pages":
        counts, pages = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[[2]]], [[[[1, 0]]]]))
        pages += length // 128 - 2
        mask = flexmod.BlockMask.from_kv_blocks(
            counts, pages, mask_mod=last, seq_lengths=(1, length), compute_q_blocks=False
        )
    else:
        mask = flexmod.create_block_mask(last, None, None, 1, length, device=DEVICE)
    options: Any = {"BACKEND": "TRITON_DECODE"}
    out = flexmod.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    for head in (0, heads - 1):
        truth = dense_out(q[0, 2 * head], k[0, head, -200:], v[0, head, -200:])
        close(out[0, 2 * head], truth, form)


# Grids


@needs(20)
@pytest.mark.parametrize("template", TEMPLATES)
def test_batch_times_heads_beyond_65535(template: str) -> None:
    batch, heads, length = 300, 256, 70
    inputs = [random(batch, heads, length, 64) for _ in range(3)]
    grad_out = random(batch, heads, length, 64)
    mask = flexmod.create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx >= (b + h) % 5),
        batch, heads, length, length, device=DEVICE,
    )  # fmt: skip
    assert mask.shape == (batch, heads, length, length)
    found = attend(inputs, grad_out, template, block_mask=mask)
    b, h, row, column = (
        torch.arange(size, device=DEVICE).view([-1 if dim == own else 1 for dim in range(4)])
        for own, size in enumerate((batch, heads, length, length))
    )
    for part in (slice(0, 2), slice(batch - 2, batch)):
        keep = (row >= column) & (column >= (b[part] + h) % 5)
        dead = ~keep.any(-1, keepdim=True)
        exact = [x[part].double().requires_grad_() for x in inputs]
        scores = (exact[0] @ exact[1].mT / 8).masked_fill(~keep & ~dead, -torch.inf)
        out = torch.softmax(scores, -1).masked_fill(dead, 0.0) @ exact[2]
        truth = [out.detach(), *torch.autograd.grad(out, exact, grad_out[part].double())]
        for ours, other, name in zip(found, truth, ("out", "dq", "dk", "dv"), strict=True):
            close(ours[part], other, name)


# Lengths


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 1000), (1000, 1)], ids=str)
def test_one_token(template: str, lengths: tuple[int, int]) -> None:
    inputs = [random(2, 2, lengths[0], 64), *(random(2, 2, lengths[1], 64) for _ in "kv")]
    grad_out = random(2, 2, lengths[0], 64)
    found = attend(inputs, grad_out, template)
    truth = dense(*(x[1, 1] for x in (*inputs, grad_out)))
    for ours, other, name in zip(found, truth, ("out", "dq", "dk", "dv"), strict=True):
        if float(other.norm()) > 1e-9:
            close(ours[1, 1], other, name)
        else:  # one key: its weight is 1 whatever the score
            assert float(ours[1, 1].double().norm()) < 1e-2, name


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
def test_nothing(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, length, keys = sizes
    inputs = [random(batch, heads, length, 64), *(random(batch, heads, keys, 64) for _ in "kv")]
    found = attend(inputs, random(batch, heads, length, 64), "auto")
    for ours, like in zip(found, (inputs[0], *inputs), strict=True):
        assert ours.shape == like.shape and not ours.any()


@needs(20)
@pytest.mark.parametrize("template", TEMPLATES)
def test_two_to_the_20_tokens_in_a_window(template: str) -> None:
    """Rows and keys at both ends and in the middle, beside dense attention over what they can see."""
    length, window = 2**20, 1024
    inputs = [random(1, 2, length, 64) for _ in range(3)]
    grad_out = random(1, 2, length, 64)
    mask = flexmod.create_block_mask(masks.sliding_window(window), None, None, length, length, device=DEVICE)
    found = attend(inputs, grad_out, template, block_mask=mask)
    for first in (0, length // 2 - 37, length - 300):
        stop = min(length, first + 300)
        # queries that see a key of these, and all keys that they see
        rows = slice(max(0, first - window), min(length, stop + window))
        columns = slice(max(0, rows.start - window), min(length, rows.stop + window))
        q_idx = torch.arange(rows.start, rows.stop, device=DEVICE)[:, None]
        kv_idx = torch.arange(columns.start, columns.stop, device=DEVICE)[None, :]
        keep = masks.sliding_window(window)(torch.zeros_like(q_idx), torch.zeros_like(q_idx), q_idx, kv_idx)
        bias = torch.zeros(keep.shape, device=DEVICE, dtype=torch.float64).masked_fill_(~keep, -torch.inf)
        query, key, value, gradient = (x[0, 1] for x in (*inputs, grad_out))
        truth = dense(query[rows], key[columns], value[columns], gradient[rows], bias)
        for ours, other, offset, name in zip(
            found, truth, (rows, rows, columns, columns), ("out", "dq", "dk", "dv"), strict=True
        ):
            here = slice(first - offset.start, stop - offset.start)
            close(ours[0, 1, first:stop], other[here], f"{name} from {first} on")
