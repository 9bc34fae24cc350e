"""Copies of handles, masks and mods compute what the originals do, and share what Python says they share."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from copied_objects import (
    BACKENDS,
    EVERY,
    INTERPRET,
    LENGTH,
    WAYS,
    Biased,
    block_mask,
    closure,
    ids,
    inputs,
    made,
    near,
    results,
    saved,
    shifted,
)
from tiers import long_but
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_attention

import flexmod
from flexmod import create_block_mask, errors, flex_attention, masks, mods
from flexmod.ir.graph import Graph, GraphBuilder
from flexmod.ir.record import digest
from flexmod.ir.trace import trace

# what other backends run too; the CPU runs all
SOME = {("handle", "module"), ("handle", "bshd"), ("block mask", "sliced"), ("score", "chain")}


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize(
    ("backend", "kind", "name"),
    [(backend, *case) for backend in BACKENDS for case in EVERY if backend == "cpu" or case in SOME],
)
def test_a_copy_computes_the_same(backend: str, kind: str, name: str) -> None:
    """Copied after calls that were recorded: each result and gradient, bit for bit.

    Other backends than the CPU see copies of both kinds, one with and one without the memory. "twice" is a
    deep copy of a pickled deep copy.
    """
    options = BACKENDS[backend]
    original = made(kind, name, options)
    for _ in range(2):
        wanted = results(kind, original, options)
    for way in ("copy", "torch.save", "twice") if backend == "cpu" else ("copy", "twice"):
        found = results(kind, WAYS[way](original), options)
        assert len(found) == len(wanted), way
        assert all(map(torch.equal, found, wanted)), way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_copy_has_the_name(kind: str, name: str, way: str) -> None:
    original = made(kind, name)
    copied = WAYS[way](original)
    if kind in ("mask", "score"):
        assert copied.__name__ == original.__name__
    elif kind == "block mask":
        assert copied.mask_mod.__name__ == original.mask_mod.__name__
        assert (copied.shape, copied.BLOCK_SIZE) == (original.shape, original.BLOCK_SIZE)
        assert copied.graph_number == original.graph_number
        for flag in ("_is_classified", "full_tiles_padded"):
            assert getattr(copied, flag) == getattr(original, flag)
        assert torch.equal(copied.table(), original.table())
        assert str(copied) == str(original)
        assert torch.equal(copied.to("cpu")[0].table(), original[0].table())
    else:
        assert str(copied.graph) == str(original.graph)


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_a_number_of_a_closure_stays_what_it_was(backend: str, way: str) -> None:
    factor, tensors = 0.25, [x.detach() for x in inputs()]
    attend = flexmod.compile(
        lambda s, b, h, q, k: s + factor * (k - q), lambda b, h, q, k: q + 8 * factor >= k,
        kernel_options=BACKENDS[backend],
    )  # fmt: skip
    wanted = attend(*tensors)
    factor = 3.0
    assert torch.equal(WAYS[way](attend)(*tensors), wanted)
    assert torch.equal(WAYS["pickle"](attend)(*tensors), wanted)


# what a deep copy shares


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "twice"])
@pytest.mark.parametrize("together", [False, True], ids=["model", "handle first"])
def test_the_copy_of_a_model_attends_with_its_own_parameters(way: str, together: bool) -> None:
    model = Biased()
    pair = WAYS[way]([model.attend, model])[::1] if together else [None, WAYS[way](model)]
    copied = pair[1]
    assert copied.attend._traced()["score"].tensors[0] is copied.bias
    assert not together or pair[0] is copied.attend
    tensors = inputs()
    with torch.no_grad():
        copied.bias.mul_(3)
    wanted = Biased()
    with torch.no_grad():
        wanted.bias.mul_(3)
    assert torch.equal(copied(*tensors), wanted(*tensors))
    assert torch.equal(model(*tensors), Biased()(*tensors))
    copied(*tensors).sum().backward()
    assert copied.bias.grad is not None and model.bias.grad is None


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "twice"])
@pytest.mark.parametrize("longer", [False, True], ids=["alike", "longer"])
def test_a_copy_has_what_took_a_tensors_place(way: str, longer: bool) -> None:
    """Also before a call of the original has met it."""
    model, tensors = Biased(), inputs()
    model(*tensors)
    model.bias = nn.Parameter(torch.cat([model.bias.detach() + 2] * (1 + longer), -1))
    assert model.attend._traced()["score"].tensors[0] is model.bias
    model.bias = nn.Parameter(model.bias.detach() * 2)
    copied = WAYS[way](model.attend)
    assert torch.equal(copied(*tensors), model(*tensors))


def test_an_average_of_a_model_attends_with_its_average() -> None:
    model = Biased()
    average = torch.optim.swa_utils.AveragedModel(model)
    tensors = [x.detach() for x in inputs()]
    model(*tensors), average(*tensors)
    average.update_parameters(model)
    with torch.no_grad():
        model.bias.add_(2)
    average.update_parameters(model)
    wanted = Biased()
    with torch.no_grad():
        wanted.bias.add_(1)
    torch.testing.assert_close(average(*tensors), wanted(*tensors))


class Tree(nn.Module):
    """The handle of a branch has a mod of the root, whose other branch is copied after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Linear(3, 1)
        self.first.attend = flexmod.compile(self.mod)

    def mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.second.weight[0, h] * (q_idx - kv_idx)


def test_parameters_that_are_copied_after_the_handle() -> None:
    model = Tree()
    copied = copy.deepcopy(model)
    assert copied.first.attend._traced()["score"].tensors[0] is copied.second.weight
    assert copied.first.attend._mods["score"].__self__ is copied


@pytest.mark.parametrize(
    ("make", "shared"),
    [
        (closure, True),
        (lambda: mods.alibi(torch.rand(3)), True),
        (lambda: mods.chain(closure(), mods.softcap(2.0)), True),
        (lambda: functools.partial(lambda t, s, b, h, q, k: s + t[h], torch.rand(3)), False),
        (lambda: functools.partial(closure()), True),
        (lambda: Biased().biased, False),
    ],
    ids=["closure", "library", "chain", "partial", "partial of a closure", "method"],
)
def test_deepcopy_shares_what_functions_capture_and_copies_what_objects_hold(make: Any, shared: bool) -> None:
    score_mod = make()
    attend = flexmod.compile(score_mod)
    mine, copied = (x._traced()["score"].tensors[0] for x in (attend, copy.deepcopy(attend)))
    assert (mine is copied) == shared
    assert copy.copy(attend)._traced()["score"].tensors[0] is mine
    assert WAYS["pickle"](attend)._traced()["score"].tensors[0] is not mine


def test_a_copied_mask_has_lists_of_its_own() -> None:
    for way in WAYS:
        for name in ("causal", "lists", "assigned"):
            original = made("block mask", name)
            dense = original.to_dense()
            copied = WAYS[way](original)
            copied.kv_num_blocks = torch.zeros_like(copied.kv_num_blocks)
            copied.mask_mod = near(1)
            assert torch.equal(original.to_dense(), dense) and not copied.kv_num_blocks.any()
            assert original.mask_mod is not copied.mask_mod
            if way != "copy":
                original.kv_num_blocks.zero_()
                again = WAYS[way](original)
                assert not again.kv_num_blocks.any()


def test_a_wrong_list_is_refused_in_the_copy_too() -> None:
    for way in WAYS:
        mask = made("block mask", "lists")
        mask.kv_indices[:] = 77
        with pytest.raises(errors.BlockMaskPartsError):
            flex_attention(*inputs(), block_mask=WAYS[way](mask))


def test_a_mask_that_captures_a_tensor_twice_captures_one() -> None:
    """In one pickle a tensor is one tensor."""
    table = ids()
    mask, score = masks.document(table), mods.ScoreMod(lambda s, b, h, q, k: s + table[q])
    sent = WAYS["pickle"]((block_mask(mask), mask, score, table))
    assert {id(t) for t in (sent[0]._traced.tensors[0], sent[1].function.traced.tensors[0], sent[3])} == {
        id(sent[3])
    }
    assert sent[2].function.traced.tensors[0] is sent[3]


# pickles

# what pickles of masks name; one that was written before finds it under the same name
NAMED = {
    "block_mask.combine.Combined", "block_mask.combine.Complement", "block_mask.combine.Dense",
    "block_mask.combine.Listed", "block_mask.combine.OfBatch",
    "block_mask.format.BlockMask", "block_mask.storage.TileStorage", "block_mask.selection.Affine",
    "block_mask.selection.Rebased", "block_mask.selection.Same", "block_mask.tiles.Runs", "errors.Where",
    "ir.composed.Mask", "ir.graph.Capture", "ir.graph.ExpectedSize", "ir.graph._unpickled",
    "ir.offsets.MaskAt", "ir.offsets.Positions", "ir.replay.MaskReplay", "ir.trace.Traced",
}  # fmt: skip


class Names(pickle.Unpickler):
    """Notes the classes and functions of flexmod that a pickle names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("flexmod."):
            self.found.add(f"{module.removeprefix('flexmod.')}.{name}")
        return super().find_class(module, name)


def test_pickles_of_masks_name_what_they_always_did() -> None:
    built, lists = block_mask(masks.document(ids())), made("block mask", "lists")
    by_head = create_block_mask(lambda b, h, q, k: q >= k + h, None, 2, LENGTH, LENGTH, "cpu")
    found = set()
    for mask in (
        built, lists, block_mask(masks.causal()), built[:, :, 1:], by_head[:, 1:], built & lists, ~built,
        create_block_mask(torch.eye(LENGTH) > 0), type(built).cat([built, lists]),
    ):  # fmt: skip
        names = Names(io.BytesIO(pickle.dumps(mask)))
        assert torch.equal(names.load().to_dense(), mask.to_dense())
        found |= names.found
    assert found == NAMED


def test_a_mod_means_what_it_meant_when_it_was_pickled() -> None:
    reach = 2
    mask = masks.Mask(lambda b, h, q, k: (q - k).abs() <= reach)
    sent = pickle.dumps(mask)
    reach = 30
    wanted = create_block_mask(near(0), None, None, LENGTH, LENGTH, "cpu")
    assert pickle.loads(sent)(0, 0, 5, 3) and not pickle.loads(sent)(0, 0, 5, 2)
    assert mask(0, 0, torch.tensor(5), 2) and wanted is not None


def test_a_deep_graph_pickles() -> None:
    def deep(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for number in range(2 * sys.getrecursionlimit()):
            s = s + number % 3
        return s

    graph = trace(deep, "score").graph
    for way in WAYS.values():
        assert way(graph) == graph


def test_a_graph_keeps_which_nodes_are_one() -> None:
    builder = GraphBuilder()
    q = builder.input("q_idx", torch.int32)
    twice = builder.node("mul", (builder.fresh_const(2), q), torch.int32)
    other = builder.node("mul", (builder.fresh_const(2), q), torch.int32)
    graph = Graph("mask", (twice, builder.node("lt", (twice, other), torch.bool)))
    for way in (pickle.dumps, copy.deepcopy):
        found = pickle.loads(way(graph)) if way is pickle.dumps else way(graph)
        assert found == graph and found.key == graph.key and digest(found) == digest(graph)
        assert found.results[1].args[0] is found.results[0]
        assert found.results[0].args[1] is q  # an input is one node in a process
        assert [n.home for n in found.nodes] == [n.home for n in graph.nodes]
    assert pickle.loads(pickle.dumps(twice)).op == "mul"


def test_what_a_mod_refuses_is_an_error_when_it_is_pickled() -> None:
    unfit = masks.Mask(lambda b, h, q_idx, kv_idx: bool(q_idx > 3))
    for kind in (pickle.PicklingError, TypeError, errors.NotPicklableError):
        with pytest.raises(kind, match="ControlFlowError"):
            pickle.dumps(unfit)
    assert copy.deepcopy(unfit)(0, 0, 5, 1) is True


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_errors_are_copied_with_their_class(way: str) -> None:
    with pytest.raises(errors.ControlFlowError) as raised:
        trace(lambda b, h, q, k: q > k if q > 3 else k > q, "mask")
    error = WAYS[way](raised.value)
    assert type(error) is errors.ControlFlowError and str(error) == str(raised.value)
    assert error.where == raised.value.where
    assert type(error)(error.message).args == raised.value.args  # as torch's DataLoader raises it again


def test_a_pickled_handle_shows_and_saves(tmp_path: Any) -> None:
    attend = flexmod.compile(closure(), near(3), kernel_options=INTERPRET, scale=0.5)
    attend(*[x.detach().half() for x in inputs()])
    for way in WAYS.values():
        assert str(way(attend).source) == str(attend.source)
    text = saved(attend).save(tmp_path / "file.py").read_text()
    compile(text, "file.py", "exec")
    assert "it was pickled, and its source is not at hand" in text
    with pytest.raises(errors.NoStandaloneError, match="bshd"):
        saved(made("handle", "bshd")).save(tmp_path / "file.py", head_dim=16, dtype=torch.float16)


def test_weights_only_says_no_to_handles_and_yes_to_states() -> None:
    """torch.load's default names what it does not know; a state_dict has nothing of flexmod."""
    import io

    file = io.BytesIO()
    torch.save(Biased(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(file)
    model, other = Biased(), Biased()
    with torch.no_grad():
        model.bias.mul_(5)
    state = WAYS["torch.save"](model.state_dict())
    assert list(state) == ["bias"]
    other.load_state_dict(state)
    assert torch.equal(other(*inputs()), model(*inputs()))


def test_inference_tensors() -> None:
    with torch.inference_mode():
        mask = block_mask(masks.document(ids()))
        wanted = results_without_gradients(mask)
        for way in WAYS.values():
            assert torch.equal(results_without_gradients(way(mask)), wanted)


def results_without_gradients(mask: Any) -> Tensor:
    with torch.no_grad():
        out = flex_attention(*inputs(), block_mask=mask)
    assert isinstance(out, Tensor)
    return out


# torch's own attention takes what was pickled


def test_torch_takes_what_was_pickled() -> None:
    tensors = [x.detach() for x in inputs()]
    score, mask = (WAYS["pickle"](made(*case)) for case in (("score", "chain"), ("mask", "combined")))
    theirs = torch_attention.create_block_mask(mask, None, 3, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    ours = block_mask(mask, B=None)
    assert torch.equal(theirs.to_dense().bool(), ours.to_dense().bool())
    compiled = torch.compile(torch_attention.flex_attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(*tensors, score_mod=score, block_mask=theirs), flex_attention(*tensors, score, ours)
        )


def test_a_replay_computes_as_the_graph_does() -> None:
    """On floats of 64 bits in these, on halves rounded as torch rounds them."""
    half = torch.linspace(0.1, 0.7, 3).half()
    score = WAYS["pickle"](mods.ScoreMod(lambda s, b, h, q, k: (s.half() * half[h] + q // 3) / 7))
    places = [torch.randint(0, 3, (50,)) for _ in range(4)]
    plain = mods.ScoreMod(lambda s, b, h, q, k: ((s.half() * half[h] + q // 3) / 7).float())
    x = torch.randn(50)
    assert torch.equal(score(x, *places), plain(x, *places))
    capped = WAYS["pickle"](mods.softcap(2.0))
    assert torch.equal(capped(x.double(), *places), mods.softcap(2.0)(x.double(), *places))
    assert shifted(1.0, 0, 0, torch.tensor(3), 5) == WAYS["pickle"](mods.ScoreMod(shifted))(1.0, 0, 0, 3, 5)


# threads


@pytest.mark.parametrize("backend", long_but({"cpu"}, ["cpu", "interpret"]))
def test_threads_call_and_copy_one_handle_and_one_mask(backend: str) -> None:
    attend = flexmod.compile(closure(), near(5), kernel_options=BACKENDS[backend])
    mask = block_mask(near(5), H=3)
    tensors = [x.detach() for x in inputs()]
    wanted = attend(*tensors), flex_attention(*tensors, block_mask=mask)
    workers, turns = (8, 6) if backend == "cpu" else (4, 3)
    together, faults = threading.Barrier(workers), []

    def work(number: int) -> None:
        together.wait()
        try:
            for turn in range(turns):
                way = [*WAYS.values()][(number + turn) % len(WAYS)]
                size = 8 + (number + turn) % workers
                attend(*[x[:, :, :size] for x in tensors])
                copied = way((attend, mask)) if number % 2 else (attend, mask)
                if not torch.equal(copied[0](*tensors), wanted[0]):
                    faults.append("handle")
                if not torch.equal(flex_attention(*tensors, block_mask=copied[1]), wanted[1]):
                    faults.append("mask")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults and not any(thread.is_alive() for thread in threads)


def test_a_copy_does_not_keep_the_original_alive() -> None:
    import weakref

    model = Biased()
    model(*inputs())
    copied, gone = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and copied(*inputs()) is not None
