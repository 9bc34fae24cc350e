"""Two GPUs: in turn, side by side, a model over both, and processes that train one model together."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import flexmod
from flexmod import create_block_mask, flex_attention, masks, mods
from flexmod.codegen import cache
from flexmod.codegen.compiler import kernels_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300, method="thread"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

FIRST, SECOND = "cuda:0", "cuda:1"
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 777, 64
EVEN = 776  # a length that two processes share
FORMS: dict[str, dict[str, Any]] = {
    "hopper": {"TEMPLATE": "auto"},
    "portable": {"TEMPLATE": "portable", "deterministic": True},
}
TEMPLATES = pytest.mark.parametrize("form", FORMS)


def given(device: str, length: int = LENGTH) -> list[Tensor]:
    """query, key, value and grad_out: the same numbers on each device."""
    numbers = torch.Generator().manual_seed(3)
    made = [torch.randn(BATCH, HEADS, length, HEAD_DIM, generator=numbers) for _ in range(4)]
    return [x.to(device, torch.bfloat16) for x in made]


class Attention(torch.nn.Module):
    """A learned bias and slopes in the score_mod, and documents of which the mask reads tensors."""

    def __init__(self, device: str, form: str = "hopper") -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(4)
        self.bias = torch.nn.Parameter(torch.randn(HEADS, LENGTH, generator=numbers).to(device))
        self.slopes = torch.nn.Parameter(torch.rand(HEADS, generator=numbers).to(device))
        self.options = FORMS[form]
        self.mask = masks.document(torch.arange(LENGTH, device=device) // 100)

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.bias[h, kv_idx] - self.slopes[h] * (q_idx - kv_idx) / 100

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = create_block_mask(self.mask, None, None, LENGTH, LENGTH, device=query.device)
        return flex_attention(query, key, value, self.score_mod, mask, kernel_options=self.options)


def trained(model: Attention, device: str) -> list[Tensor]:
    """out and all gradients, on the CPU."""
    *tensors, grad_out = given(device)
    leaves = [x.requires_grad_() for x in tensors]
    out = model(*leaves)
    learned = [model.bias, model.slopes]
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, [*leaves, *learned], grad_out))]


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Hopper adds dQ up in any order, and gradients of captured tensors are sums over queries."""
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@TEMPLATES
def test_in_turn(form: str) -> None:
    """Either device is the current one; calls are prepared, known and played."""
    wanted = trained(Attention(FIRST, form), FIRST)
    models = {device: Attention(device, form) for device in (FIRST, SECOND)}
    for number in range(12):
        with torch.cuda.device(number // 6):
            device = (FIRST, SECOND)[number % 2]
            near(trained(models[device], device), wanted)
            assert torch.cuda.current_device() == number // 6


@TEMPLATES
def test_side_by_side(form: str) -> None:
    """A thread for each device, none of which sets the current one; kernels are compiled by both at once."""
    wanted = trained(Attention(FIRST, form), FIRST)
    kernels_for.cache_clear()
    cache._modules.clear()
    found: dict[str, list[list[Tensor]]] = {}

    def work(device: str) -> None:
        model = Attention(device, form)
        found[device] = [trained(model, device) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(device,)) for device in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in (FIRST, SECOND):
        for each in found[device]:
            near(each, wanted)


def test_a_model_over_both() -> None:
    """autograd runs the backward of each device in a thread of its own."""

    def run(devices: tuple[str, str]) -> list[Tensor]:
        layers = [Attention(device) for device in devices]
        *tensors, grad_out = given(devices[0])
        leaves = [x.requires_grad_() for x in tensors]
        between = layers[0](*leaves).to(devices[1])
        out = layers[1](between, *(x.to(devices[1]) for x in leaves[1:]))
        out.backward(grad_out.to(devices[1]))
        learned = [layer.bias.grad for layer in layers]
        return [x.detach().cpu() for x in (out, *(x.grad for x in leaves), *learned)]

    wanted = run((FIRST, FIRST))
    for devices in ((FIRST, SECOND), (SECOND, FIRST), (SECOND, SECOND)) * 3:
        near(run(devices), wanted)


def test_copies_of_a_mask_on_the_other_device() -> None:
    *tensors, _ = given(FIRST)
    for mask_mod in (masks.causal() & masks.sliding_window(100), masks.prefix_lm(90)):
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=FIRST)
        wanted = [flex_attention(*tensors, mods.softcap(9.0), mask) for _ in range(4)][-1].cpu()
        there = [x.to(SECOND) for x in tensors]
        pickled = pickle.loads(pickle.dumps(mask))
        for moved in (mask.to(SECOND), pickled.to(SECOND), mask.to("cpu").to(SECOND), mask[:, :].to(SECOND)):
            assert moved.kv_num_blocks.device == torch.device(SECOND)
            for _ in range(4):
                assert torch.equal(flex_attention(*there, mods.softcap(9.0), moved).cpu(), wanted)
        assert torch.equal(flex_attention(*tensors, mods.softcap(9.0), mask).cpu(), wanted)


def test_one_handle_on_both() -> None:
    attend = flexmod.compile(mods.softcap(9.0), masks.causal())
    wanted = None
    for number in range(8):
        *tensors, grad_out = given((FIRST, SECOND)[number % 2])
        leaves = [x.requires_grad_() for x in tensors]
        out = attend(*leaves)
        found = [x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad_out))]
        wanted = wanted or found
        near(found, wanted)


def test_a_cuda_graph_of_the_second() -> None:
    model = Attention(SECOND)
    *tensors, _ = given(SECOND)
    with torch.cuda.device(SECOND), torch.no_grad():
        mask = create_block_mask(model.mask, None, None, LENGTH, LENGTH, device=SECOND)
        for _ in range(3):
            flex_attention(*tensors, model.score_mod, mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the stream of torch's own choice would serve later graphs of this process, on either device
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = flex_attention(*tensors, model.score_mod, mask)
        for _ in range(3):
            for x in tensors:
                x.normal_()
            graph.replay()
            near([out], [flex_attention(*tensors, model.score_mod, mask)])


def test_compiled_on_both() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, mods.softcap(9.0), mask), fullgraph=True
    )
    for number in range(6):
        device = (FIRST, SECOND)[number % 2]
        *tensors, _ = given(device)
        mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=device)
        near([compiled(*tensors, mask)], [flex_attention(*tensors, mods.softcap(9.0), mask)])


def _biased(table: Tensor, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[kv_idx]


@pytest.mark.parametrize("kind", ["decode", "float8", "checked"])
def test_other_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of queries, whose parts count themselves; float8; checked indices."""
    if kind == "checked":
        monkeypatch.setenv("FLEXMOD_CHECK_BOUNDS", "1")
    tables = {device: torch.arange(LENGTH, device=device) / 1000 for device in (FIRST, SECOND)}
    results = []
    for number in range(8):
        device = (FIRST, SECOND)[number % 2]
        query, key, value, _ = given(device)
        if kind == "decode":
            query = query[:, :, -1:]
        if kind == "float8":
            query, key, value = (x.to(torch.float8_e4m3fn) for x in (query, key, value))
        biased = partial(_biased, tables[device])
        results.append(flex_attention(query, key, value, biased).cpu())
    for found in results:
        assert torch.equal(found, results[0])


def test_tensors_of_both_are_refused() -> None:
    query, *_ = given(FIRST)
    there = query.to(SECOND)
    table = torch.zeros(LENGTH, device=SECOND)
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=SECOND)
    with pytest.raises(flexmod.errors.DeviceMismatch):
        flex_attention(query, there, query)
    with pytest.raises(flexmod.errors.DeviceMismatch):
        flex_attention(query, query, query, partial(_biased, table))
    with pytest.raises(flexmod.errors.DeviceMismatch):
        flex_attention(query, query, query, None, mask)


# Processes


def _group(rank: int, folder: str) -> str:
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl", f"file://{folder}/rendezvous", rank=rank, world_size=2, device_id=torch.device(device)
    )
    return device


def _data_parallel(rank: int, folder: str) -> None:
    device = _group(rank, folder)
    model = DistributedDataParallel(Attention(device), device_ids=[rank])
    for _ in range(4):
        model.zero_grad()
        *tensors, grad_out = (x[rank : rank + 1] for x in given(device))
        model(*tensors).backward(grad_out)
    found = [x.grad.cpu() * 2 for x in (model.module.bias, model.module.slopes)]  # the group takes the mean
    torch.save(found, f"{folder}/{rank}")


def _heads_parallel(rank: int, folder: str) -> None:
    """Tensors sharded by heads: each process runs its heads."""
    device = _group(rank, folder)
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))
    tensors = [distribute_tensor(x, mesh, [Shard(1)]) for x in given(device)[:3]]
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=device)
    for _ in range(4):
        out = flex_attention(*(x.to_local() for x in tensors), mods.softcap(9.0), mask)
    torch.save([out.cpu()], f"{folder}/{rank}")


def _positions_parallel(rank: int, folder: str) -> None:
    """Each process has half of the queries and of the keys; keys travel, and parts merge by their lse."""
    device = _group(rank, folder)
    half = EVEN // 2
    query, *mine = (x[:, :, rank * half :][:, :, :half].contiguous() for x in given(device, EVEN)[:3])
    parts = []
    for owner in range(2):
        sent = [x.clone() for x in mine]
        for x in sent:
            torch.distributed.broadcast(x, owner)
        mask = create_block_mask(
            masks.sliding_window(500), None, None, half, half,
            device=device, q_offset=rank * half, kv_offset=owner * half,
        )  # fmt: skip
        parts.append(flex_attention(query, *sent, mods.softcap(9.0), mask, return_lse=True))
    lse = torch.stack([x[1] for x in parts])
    weights = (lse - lse.logsumexp(0)).exp()
    outs = torch.stack([x[0] for x in parts]).float()
    torch.save([(weights[..., None] * outs).sum(0).cpu()], f"{folder}/{rank}")


def _run(work: Callable[[int, str], None], folder: Path) -> list[list[Tensor]]:
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def test_data_parallel(tmp_path: Path) -> None:
    wanted = trained(Attention(FIRST), FIRST)[-2:]
    for found in _run(_data_parallel, tmp_path):
        near(found, wanted)


def test_heads_parallel(tmp_path: Path) -> None:
    *tensors, _ = given(FIRST)
    mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device=FIRST)
    wanted = flex_attention(*tensors, mods.softcap(9.0), mask).cpu()
    assert torch.equal(torch.cat([found for (found,) in _run(_heads_parallel, tmp_path)], 1), wanted)


def test_positions_parallel(tmp_path: Path) -> None:
    *tensors, _ = given(FIRST, EVEN)
    mask = create_block_mask(masks.sliding_window(500), None, None, EVEN, EVEN, device=FIRST)
    wanted = flex_attention(*tensors, mods.softcap(9.0), mask).cpu().float()
    near([torch.cat([found for (found,) in _run(_positions_parallel, tmp_path)], 2)], [wanted])
