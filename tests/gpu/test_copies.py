"""Copies on a GPU: handles with recorded calls, masks whose tiles and captures are there, workers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.multiprocessing
from copied_objects import BLOCK_MASKS, EVERY, WAYS, Biased, block_mask, ids, made, near, results
from torch.utils.data import DataLoader, Dataset

import flexmod
from flexmod import flex_attention, masks, mods

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

DEVICE = "cuda:0"
DETERMINISTIC = {"deterministic": True}
CAPTURE_ON_THE_CPU = ("document", "combined")


def tensors(dtype: torch.dtype = torch.float16) -> list[Any]:
    torch.manual_seed(5)
    return [torch.randn(2, 3, 40, 16, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_copy_computes_the_same(kind: str, name: str) -> None:
    """The original has run four times, forward and backward: its calls are recorded and played."""
    original = made(kind, name, DETERMINISTIC, DEVICE)
    for _ in range(4):
        wanted = results(kind, original, DETERMINISTIC, DEVICE)
    for way, copied in WAYS.items():
        value = copied(original)
        for _ in range(4):
            found = results(kind, value, DETERMINISTIC, DEVICE)
            assert len(found) == len(wanted), way
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    again = results(kind, original, DETERMINISTIC, DEVICE)
    assert all(map(torch.equal, again, wanted))


def test_an_average_of_a_model_whose_calls_are_recorded() -> None:
    model = Biased(DEVICE)
    given = tensors()
    for _ in range(4):
        model(*given).sum().backward()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        model.bias.add_(2)
    average.update_parameters(model)
    wanted = Biased(DEVICE)
    with torch.no_grad():
        wanted.bias.add_(1)
    for _ in range(4):
        torch.testing.assert_close(average(*given), wanted(*given), rtol=2e-3, atol=2e-3)
    assert average.module.attend._traced()["score"].tensors[0] is average.module.bias


@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_a_mask_of_the_cpu_that_was_pickled_moves_to_the_gpu(name: str) -> None:
    """As one that was not: what flexmod made moves; what a user's function captures stays, and is refused."""
    original = BLOCK_MASKS[name]("cpu")
    given = [x.detach() for x in tensors()]
    masks_of_both = original.to(DEVICE), pickle.loads(pickle.dumps(original)).to(DEVICE)
    if name in CAPTURE_ON_THE_CPU:
        for mask in masks_of_both:
            with pytest.raises(flexmod.errors.DeviceMismatch):
                flex_attention(*given, block_mask=mask)
    else:
        assert torch.equal(*(flex_attention(*given, block_mask=mask) for mask in masks_of_both))


def test_a_handle_that_was_called_on_a_gpu_is_loaded_for_the_cpu(tmp_path: Any) -> None:
    model = Biased(DEVICE)
    model(*tensors())
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=False)
    given = [x.detach().cpu().float() for x in tensors()]
    assert torch.equal(loaded(*given), Biased()(*given))
    assert loaded.attend._traced()["score"].tensors[0].device.type == "cpu"


def test_masks_of_other_graphs_in_one_compiled_model() -> None:
    call = torch.compile(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    given = [x.detach() for x in tensors()]
    for reach in (1, 5, 9, 12):
        mask = pickle.loads(pickle.dumps(block_mask(near(reach), DEVICE)))
        wanted = flex_attention(*given, block_mask=block_mask(near(reach), DEVICE))
        torch.testing.assert_close(call(*given, mask), wanted)


class OnTheCpu(Dataset[Any]):
    """In a forked worker of a process that uses the GPU nothing may touch it."""

    def __init__(self) -> None:
        self.attend = flexmod.compile(mods.softcap(2.0), masks.causal())

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        copied = copy.deepcopy(self.attend), pickle.loads(pickle.dumps(self.attend))
        return block_mask(masks.document(ids(), causal=True) & near(3 + index), "cpu"), *copied


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_process_that_uses_the_gpu(start: str) -> None:
    given = [x.detach() for x in tensors()]
    flex_attention(*given)
    loader = DataLoader(
        OnTheCpu(), batch_size=None, num_workers=2, multiprocessing_context=start, timeout=200
    )
    wanted = flexmod.compile(mods.softcap(2.0), masks.causal())(*given)
    for index, (mask, first, second) in enumerate(loader):
        here = block_mask(masks.document(ids(), causal=True) & near(3 + index), "cpu")
        assert torch.equal(mask.table(), here.table()) and mask.graph_number == here.graph_number
        for attend in (first, second):
            torch.testing.assert_close(attend(*given), wanted)


def _receive(queue: Any, answers: Any) -> None:
    mask, attend, given = queue.get(timeout=200)
    answers.put(attend(*given, mask).cpu())
    queue.get(timeout=200)  # until the other side has read: it shares its memory


def test_masks_and_handles_are_sent_with_memory_of_the_gpu() -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(queue, answers))
    process.start()
    attend = flexmod.compile(mods.alibi(torch.linspace(0.1, 0.5, 3, device=DEVICE)))
    mask = block_mask(masks.document(ids(DEVICE), causal=True), DEVICE)
    given = [x.detach() for x in tensors()]
    queue.put((mask, attend, given))
    found = answers.get(timeout=200)
    queue.put(None)
    process.join(60)
    assert process.exitcode == 0
    torch.testing.assert_close(found, attend(*given, mask).cpu())
