"""Building block masks on a GPU: as on the CPU, without waiting, in little memory, in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from benchmarks.mask_rows import MASKS, document_ids
from flexmod import create_block_mask, masks
from gpu.test_kernels import compilations

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def same_tiles(mask, other):
    assert torch.equal(mask.table().cpu(), other.table().cpu())
    for axis, count in (("kv", mask.storage.grid[1]), ("q", mask.storage.grid[0])):
        ours, theirs = (m.storage.runs(axis).table(count).cpu() for m in (mask, other))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("block", [(128, 128), (64, 256), (100, 48)])
@pytest.mark.parametrize("name", MASKS)
def test_equal_to_the_path_of_the_cpu(name, block):
    make, heads = MASKS[name]
    for length in (8192, 5120):
        built, expected = (
            create_block_mask(make(length, device), None, heads, length, length - 77, device, block)
            for device in (DEVICE, CPU)
        )
        same_tiles(built, expected)


def test_many_tiles():
    """At 2^20 tokens runs are counted before they are written."""
    make, _ = MASKS["documents, causal"]
    same_tiles(*(create_block_mask(make(1 << 20, d), None, None, 1 << 20, 1 << 20, d) for d in (DEVICE, CPU)))


def documents(length, shift=0):
    return masks.document(document_ids(length, DEVICE).roll(shift).contiguous(), causal=True)


def test_no_synchronization_and_little_memory():
    length = 1 << 17
    create_block_mask(documents(length), None, None, length, length, DEVICE)
    mask_mod = documents(length, 1000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        create_block_mask(mask_mod, None, None, length, length, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def test_in_a_cuda_graph():
    length = 1 << 15
    ids = document_ids(length, DEVICE)
    mask_mod = masks.document(ids, causal=True)
    create_block_mask(mask_mod, None, None, length, length, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = create_block_mask(mask_mod, None, None, length, length, DEVICE)
    ids.copy_(ids.flip(0))
    graph.replay()
    same_tiles(mask, create_block_mask(mask_mod, None, None, length, length, DEVICE))


def test_new_documents_and_windows_compile_nothing():
    def build(length):
        ids = document_ids(length, DEVICE)
        create_block_mask(masks.document(ids, causal=True), None, None, length, length, DEVICE)
        create_block_mask(masks.sliding_window(max(1, length // 9)), None, None, length, length, DEVICE)

    for length in (4000, 8192):  # the second window makes an argument of it
        build(length)
    with compilations() as later:
        for length in (1, 777, 9000, 16384, 1 << 17):
            build(length)
    assert not later
