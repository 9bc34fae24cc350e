"""What all standalone files share, as ordinary Python. `standalone.py` copies the text of each part.

It needs torch and triton alone. Shapes: rows and columns of a mask's blocks; B, HQ, M and N of a call.
"""

import warnings
from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Blocks(NamedTuple):
    """The blocks of each row (or column) of blocks in which there is anything to compute, ascending."""

    counts: Tensor  # int32 [.., rows]: partial blocks: kernels evaluate the mask for each pair
    indices: Tensor  # int32 [.., rows, columns]
    full_counts: Tensor  # full blocks: the mask keeps all pairs
    full_indices: Tensor


class BuiltMask(NamedTuple):
    """A mask for one size of call, from build_mask."""

    lengths: tuple  # M and N
    by_row: Blocks  # blocks of keys, for each block of queries
    by_column: Blocks  # blocks of queries, for each block of keys
    captured: tuple  # tensors that the mask reads
    writes: list  # how often each was written to before


def kinds_of_blocks(keeps, sizes, q_block, kv_block, device):
    """Truth values [batch, heads, rows, columns] of partial and of full blocks, a row of blocks at a time.

    `keeps` takes b, h, q_idx and kv_idx; `sizes` has their numbers.
    """
    batch, heads, queries, keys = sizes
    b, h, q_idx, kv_idx = (torch.arange(size, dtype=torch.int32, device=device) for size in sizes)
    kept = []
    for rows in q_idx.split(q_block):
        keep = keeps(b[:, None, None, None], h[:, None, None], rows[:, None], kv_idx)
        keep = keep.expand(batch, heads, len(rows), keys)
        keep = torch.nn.functional.pad(keep, (0, -keys % kv_block))
        kept.append(keep.unflatten(3, (-1, kv_block)).sum((2, 4)))
    pairs = torch.stack(kept, 2)
    full = pairs == q_block * kv_block
    return (pairs > 0) & ~full, full


def check_operands(q, k, v, scale, head_dim, value_dim, dtypes, longest):
    """Refuses tensors and scales that the kernels do not take."""
    if q.shape[3] != head_dim or k.shape[3] != head_dim or v.shape[3] != value_dim:
        raise ValueError(f"this file is for head dimensions of {head_dim} (q, k) and {value_dim} (v)")
    if not (q.numel() and k.numel()):
        raise ValueError("B, HQ, HKV, M and N are 1 or more")
    if q.dtype not in dtypes:
        raise ValueError(f"q is {q.dtype}; this file is for {' and '.join(map(str, dtypes))}")
    if not q.dtype == k.dtype == v.dtype or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        raise ValueError("q, k and v do not go together: see the docstring")
    if k.shape[0] not in (1, q.shape[0]) or not scale > 0 or max(*q.shape[:3], k.shape[2]) > longest:
        raise ValueError(f"a batch of keys is q's or 1, scale is positive, sizes are up to {longest}")


def listed(partial, full):
    """Blocks from truth values [batch, heads, rows, columns]."""
    lists = []
    for kind in (partial, full):
        lists.append(kind.sum(3, dtype=torch.int32).contiguous())
        order = kind.to(torch.int8).argsort(dim=3, descending=True, stable=True)
        lists.append(order.to(torch.int32).contiguous())
    return Blocks(*lists)


def check_mask(mask, q, k, writes):
    """Refuses a mask for other sizes, and one whose tensors had other numbers of `writes`."""
    told_apart = mask.by_row.indices.shape[:2]
    if mask.lengths != (q.shape[2], k.shape[2]) or any(
        size not in (1, whole) for size, whole in zip(told_apart, q.shape[:2], strict=True)
    ):
        raise ValueError("the mask was built for another B, HQ, M or N")
    if writes != mask.writes:
        raise ValueError("a tensor that the mask captures was written to: build the mask again")


def check_captured(name, tensor, dtype, *least):
    """Refuses a captured tensor that the kernels would read wrongly. `least` has the sizes that they read."""
    if tensor.dtype != dtype or tensor.dim() != len(least):
        given = f"{tensor.dtype} of rank {tensor.dim()}"
        raise ValueError(f"{name} is {given}; the kernels read {dtype} of rank {len(least)}")
    if any(size < most for size, most in zip(tensor.shape, least, strict=True)):
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, but the kernels read {list(least)}")


def check_size(owner, name, given, whole, start=0, exact=False):
    """Refuses another number than a mod was made for. A call may have the first of its positions."""
    if given + start > whole or (exact and given < whole):
        raise ValueError(f"{owner} is made for {name}={whole}, but the call has {given + start}")


class FirstDerivative(torch.autograd.Function):
    """The gradients as a node of autograd. Differentiating them raises an error."""

    @staticmethod
    def forward(ctx, gradients, *inputs):
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("this file has no second derivatives; dense_attention has them")


def add_at(grad, sums, along, index, *captured):
    """Adds sums [B, HQ, M] by "row" or [B, HQ, N] by "column" to the elements that `index` names for each."""
    b, h, position = (torch.arange(size, dtype=torch.int32, device=sums.device) for size in sums.shape)
    positions = (position, position[:1]) if along == "row" else (position[:1], position)
    places = index(b[:, None, None], h[:, None], *positions, *captured)
    places = places if isinstance(places, tuple) else (places,)
    grad.index_put_(tuple(place.expand(sums.shape) for place in places), sums, accumulate=True)


def random_operands(sizes, dtype, device):
    """q, k, v and the gradient of the output; `sizes` are B, HQ, HKV, M, N, and the two head dimensions."""
    batch, heads, shared_heads, queries, keys, head_dim, value_dim = sizes
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # a chip does not warn of an overflow either
    torch.manual_seed(0)
    shapes = (
        (batch, heads, queries, head_dim),
        (batch, shared_heads, keys, head_dim),
        (batch, shared_heads, keys, value_dim),
        (batch, heads, queries, value_dim),
    )
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def compare(names, results, truths, limit):
    """Prints relative errors; returns whether all are within the limit."""
    agrees = True
    for name, result, truth in zip(names, results, truths, strict=True):
        error = (result.double() - truth).norm() / truth.norm().clamp_min(1e-30)
        agrees &= bool(error <= limit)
        print(f"{name:<12} relative error {error:.1e}{'' if error <= limit else '  DIFFERS'}")
    return agrees


def times(call, operands, grad_out):
    """Prints the medians of the forward and of the backward in milliseconds."""
    out = call()
    forward = triton.testing.do_bench(call, return_mode="median")
    backward = triton.testing.do_bench(
        lambda: torch.autograd.grad(out, operands, grad_out, retain_graph=True), return_mode="median"
    )
    print(f"forward {forward:.3f} ms, backward {backward:.3f} ms")
