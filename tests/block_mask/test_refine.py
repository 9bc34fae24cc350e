"""The builder's path for the CPU: each step against brute force, and all of them within their memory."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from block_mask.zoo import ZOO
from flexmod import masks
from flexmod.block_mask import refine
from flexmod.block_mask.build import and_masks, create_block_mask, create_mask
from flexmod.block_mask.tiles import EMPTY, FULL, PARTIAL
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace

CPU = torch.device("cpu")


def traced(mask_mod, sizes):
    found = trace(mask_mod, "mask", CPU)
    return Traced(fitted(found.graph, tuple(sizes)), found.tensors)


def by_hand(mask_mod, sizes, block):
    """What each tile is, from all of the mask: int8 [B, H, Qb, KVb]."""
    dense = create_mask(mask_mod, *sizes, device="cpu")
    padded = torch.nn.functional.pad(dense, (0, -sizes[3] % block[1], 0, -sizes[2] % block[0]))
    kept = padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).sum((3, 5))
    return torch.where(kept == block[0] * block[1], FULL, torch.where(kept > 0, PARTIAL, EMPTY)).to(
        torch.int8
    )


@pytest.mark.parametrize("side", [2, 32])
@pytest.mark.parametrize("block", [(16, 16), (48, 16), (128, 64)])
@pytest.mark.parametrize("name", ZOO)
def test_against_brute_force(name, block, side, monkeypatch):
    monkeypatch.setattr(refine, "SIDE", side)
    mask_mod, *sizes = ZOO[name]
    sizes = tuple(n or 1 for n in sizes)
    found = refine.classify(traced(mask_mod, sizes), sizes, block, CPU)
    assert torch.equal(found.expand(*sizes[:2], -1, -1), by_hand(mask_mod, sizes, block))


@pytest.mark.parametrize("at_once", [7, 300, 5000])
@pytest.mark.parametrize("name", ["by_head", "document_causal", "padding", "natten", "vision_cross"])
def test_in_small_portions(name, at_once, monkeypatch):
    monkeypatch.setattr(refine, "AT_ONCE", at_once)
    mask_mod, *sizes = ZOO[name]
    sizes = (sizes[0] or 1, sizes[1] or 1, min(sizes[2], 150), min(sizes[3], 140))
    found = refine.classify(traced(mask_mod, sizes), sizes, (32, 16), CPU)
    assert torch.equal(found.expand(*sizes[:2], -1, -1), by_hand(mask_mod, sizes, (32, 16)))


def hashed(b, h, q_idx, kv_idx):
    """No bounds say anything of it."""
    mixed = (q_idx * 40503 + kv_idx * 30011 + 977 * h) % 65521
    return (mixed * mixed) % 1009 < 1005


def at_one_place(b, h, q_idx, kv_idx):
    """One element of a tile: no sample falls on it."""
    return ((q_idx * 7919 + kv_idx * 104729) % 12289 == 5) | (q_idx // 64 == kv_idx // 64 + 1)


@pytest.mark.parametrize("mask_mod", [hashed, at_one_place])
def test_where_only_elements_tell(mask_mod):
    sizes = (1, 2, 300, 200)
    assert torch.equal(
        refine.classify(traced(mask_mod, sizes), sizes, (64, 32), CPU).expand(1, 2, -1, -1),
        by_hand(mask_mod, sizes, (64, 32)),
    )


NUMBERS = st.integers(-9, 40)
PLACES = st.sampled_from(
    ["q_idx", "kv_idx", "q_idx // 7", "kv_idx % 11", "ids[q_idx]", "ids[kv_idx]", "b", "h"]
)
SUMS = st.builds("({0} {1} {2})".format, PLACES, st.sampled_from("+-*"), PLACES | NUMBERS.map(str))
TESTS = st.builds(
    "({0} {1} {2})".format,
    SUMS,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    SUMS | NUMBERS.map(str),
)
MODS = st.recursive(
    TESTS, lambda inner: st.builds("({0} {1} {2})".format, inner, st.sampled_from("&|^"), inner), max_leaves=4
)


@settings(max_examples=60, deadline=None)
@given(MODS, st.integers(1, 90), st.integers(1, 90), st.sampled_from([(16, 16), (8, 32), (90, 5), (1, 64)]))
def test_random_masks(text, query, key, block):
    scope = {"ids": torch.arange(100).flip(0) // 13}
    mask_mod = eval(f"lambda b, h, q_idx, kv_idx: {text}", scope)
    sizes = (2, 2, query, key)
    found = refine.classify(traced(mask_mod, sizes), sizes, block, CPU)
    assert torch.equal(found.expand(2, 2, -1, -1), by_hand(mask_mod, sizes, block))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes = max([self.bytes, *(leaf.untyped_storage().nbytes() for leaf in made)])
        return result


@pytest.mark.parametrize("mask_mod", [masks.causal(), masks.sliding_window(1000)], ids=["causal", "window"])
def test_a_million_tokens(mask_mod):
    """One byte a tile while it is built, and little of that is left: 64 and 4 MB are what is allowed."""
    with Largest() as largest:
        mask = create_block_mask(mask_mod, None, None, 1 << 20, 1 << 20, "cpu")
    kept = [
        part for axis in ("kv", "q") for part in (mask.storage.runs(axis).rows, mask.storage.runs(axis).spans)
    ]
    assert sum(part.untyped_storage().nbytes() for part in kept) < 2 << 20
    assert largest.bytes <= 72 << 20
    window = 0 if mask_mod.__name__ == "causal_mask" else 8
    assert mask.storage.listed() == (8192 * 8193 // 2 if not window else 8192 * (window + 1) - 36)


def test_documents_are_decided_without_their_elements(monkeypatch):
    """131072 tokens: bounds and samples say it all, and no tensor is larger than a few megabytes."""
    lengths = torch.randint(100, 8001, (60,), generator=torch.Generator().manual_seed(0))
    ids = torch.repeat_interleave(torch.arange(60), lengths)[: 1 << 17].to(torch.int32)
    monkeypatch.setattr(refine.Refined, "by_elements", None)
    mask_mod = and_masks(masks.document(ids), masks.causal())
    refined = refine.Refined(
        traced(mask_mod, (1, 1, 1 << 17, 1 << 17)), (1, 1, 1 << 17, 1 << 17), (128, 128), CPU
    )
    with Largest() as largest:
        refined.by_bounds()
        refined.by_samples(4)
    assert len(refined.open) == 0 and largest.bytes <= 32 << 20
    inside = torch.arange(1 << 17) // 128
    first, last = ids[::128], ids[127::128]
    q, kv = torch.cartesian_prod(inside[::128], inside[::128]).unbind(1)
    full = (first[q] == last[q]) & (first[kv] == last[kv]) & (first[q] == first[kv]) & (q > kv)
    assert torch.equal(refined.table.flatten() == FULL, full)


def test_python_objects_are_few():
    """The steps work on tensors: no list of Python numbers grows with the mask."""
    tracemalloc.start()
    try:
        create_block_mask(masks.sliding_window(300), None, None, 1 << 16, 1 << 16, "cpu")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
