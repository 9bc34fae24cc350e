"""Offsets on a GPU: parts of the queries and keys beside the whole, portable kernels and those of Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from position_cases import NAMES, Case, attend, cases, keeps, merged
from torch import Tensor

import flexmod
from benchmarks.dense import Mods, attention
from flexmod import Offset, create_block_mask, create_mask, flex_attention, masks, mods
from flexmod.codegen import compiler

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
# cut where tiles of 64, 128, 192, 256 and 384 queries begin
LENGTH, CUT, HEADS, BLOCK = 1536, 768, 2, 128
TEMPLATES = ["portable", "auto"]
PARTS = ((0, CUT), (CUT, LENGTH))


def inputs(batch: int = 1, length: int = LENGTH, keys: int = LENGTH, dim: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, HEADS, n, dim) for n in (length, keys, keys, length)]
    return [torch.randn(size, generator=generator).to(DEVICE, torch.bfloat16) for size in sizes]


def case_of(name: str) -> Case:
    return cases(LENGTH, HEADS, DEVICE)[name]


def distance(found: Tensor, wanted: Tensor) -> float:
    """The norm of what differs; rows of nothing have one lse."""
    found, wanted = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, wanted))
    return (found - wanted).norm().item()


def near(found: Tensor, wanted: Tensor, limit: float = 0.02) -> bool:
    return distance(found, wanted) <= limit * (wanted.double().nan_to_num(0.0, 0.0, 0.0).norm().item() + 1.0)


def eager_gradients(case: Case, inputs: list[Tensor], grads: Tensor, q: int, kv: int) -> list[Tensor]:
    """Those of attention in plain torch, in the dtype of the inputs."""

    def at(mod: Any) -> Any:
        return mod and (lambda *given: mod(*given[:-2], given[-2] + q, given[-1] + kv))

    leaves = [x.detach().requires_grad_() for x in inputs]
    out, _ = attention(*leaves, Mods(at(case.score), at(case.mask)))
    return list(torch.autograd.grad(out, [*leaves, *case.learned], grads))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_queries(name: str, template: str) -> None:
    """out and lse of a part are those of the whole, bit for bit, and so is the deterministic dQ."""
    case, (query, key, value, grads) = case_of(name), inputs()
    # with tiles of 128 keys this forward for Hopper spills, with an offset less: both take 64
    block = (BLOCK, 64) if name == "learned distances" else BLOCK
    for options in ({"TEMPLATE": template}, {"TEMPLATE": template, "deterministic": True}):
        whole = attend(case, (query, key, value), options, block, grads)
        total = [torch.zeros_like(x, dtype=torch.float32) for x in whole[3:]]
        for first, last in PARTS:
            rows = slice(first, last)
            given = query[:, :, rows], key, value
            part = attend(case, given, options, block, grads[:, :, rows], q_offset=first)
            assert torch.equal(part[0], whole[0][:, :, rows])
            assert torch.equal(part[1], whole[1][:, :, rows])
            if "deterministic" in options:
                assert torch.equal(part[2], whole[2][:, :, rows])
            assert near(part[2], whole[2][:, :, rows])
            total = [one + other for one, other in zip(total, part[3:], strict=True)]
        for found, wanted in zip(total, whole[3:], strict=True):
            assert near(found, wanted)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_keys(name: str, template: str) -> None:
    case, (query, key, value, _) = case_of(name), inputs()
    options, parts = {"TEMPLATE": template}, []
    for first, last in PARTS:
        keys = slice(first, last)
        given = query, key[:, :, keys], value[:, :, keys]
        part = attend(case, given, options, BLOCK, kv_offset=first)
        kept = keeps(case.mask, first, last)
        masked = attend(case, (query, key, value), options, BLOCK, mask=kept)
        assert near(part[0], masked[0]) and near(part[1], masked[1], 1e-4)
        parts.append([x.float() for x in part])
    out, lse = attend(case, (query, key, value), options, BLOCK)
    found = merged(parts)
    assert near(found[0], out) and near(found[1], lse, 1e-4)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_tensors_agree_with_a_loop_over_batch_entries(name: str, template: str) -> None:
    case, (query, key, value, grads) = case_of(name), inputs(2, 500, 700)
    starts = {"q_offset": [13, 1000], "kv_offset": [0, 650]}
    offsets = {axis: torch.tensor(values, device=DEVICE) for axis, values in starts.items()}
    offsets["kv_offset"] = Offset(offsets["kv_offset"].to(torch.int32), 1024)  # type: ignore[assignment]
    options = {"TEMPLATE": template}
    both = attend(case, (query, key, value), options, BLOCK, grads, **offsets)
    total = [torch.zeros_like(x) for x in case.learned]
    for b in range(2):
        here = slice(b, b + 1)
        numbers = {axis: values[b] for axis, values in starts.items()}
        given = [x[here] for x in (query, key, value)]
        one = attend(case, given, options, BLOCK, grads[here], **numbers)
        assert all(near(x[here], y) for x, y in zip(both[:5], one[:5], strict=True))
        total = [x + y for x, y in zip(total, one[5:], strict=True)]
    assert all(near(x, y) for x, y in zip(both[5:], total, strict=True))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_the_reference(name: str, template: str) -> None:
    case, (query, key, value, grads) = case_of(name), inputs(1, 500, 700)
    numbers = {"q_offset": 600, "kv_offset": 300}
    found = attend(case, (query, key, value), {"TEMPLATE": template}, BLOCK, grads, **numbers)
    given = [x.double() for x in (query, key, value)]
    exact = attend(case, given, {"BACKEND": "REFERENCE"}, BLOCK, grads.double(), **numbers)
    assert near(found[0], exact[0]) and near(found[1], exact[1], 1e-4)
    # a sum over distances of hundreds tells how `out` was rounded, of eager attention too
    eager = eager_gradients(case, [query, key, value], grads, 600, 300)
    for own, other, truth in zip(found[2:], eager, exact[2:], strict=True):
        assert near(own, truth) or distance(own, truth) <= 1.5 * distance(other, truth)


@pytest.mark.parametrize("offsets", [(0, 1), (127, 0), (128, 256), (700, 5), (500, 500)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_tiles_are_those_of_the_whole(offsets: tuple[int, int], as_tensor: bool) -> None:
    """By the builder's kernels, whose bounds decide."""
    q, kv = offsets
    given: list[Any] = [torch.tensor(n, device=DEVICE) if as_tensor else n for n in offsets]
    for mask_mod in (masks.causal(), masks.sliding_window(300), case_of("documents").mask):
        dense = create_mask(mask_mod, None, None, LENGTH, LENGTH, DEVICE)[:, :, q : q + 512, kv : kv + 768]
        mask = create_block_mask(
            mask_mod, None, None, 512, 768, DEVICE, q_offset=given[0], kv_offset=given[1]
        )
        tiles = dense.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).movedim(-2, -3)
        wanted = tiles.any(-1).any(-1).to(torch.int8) + tiles.all(-1).all(-1).to(torch.int8)
        assert torch.equal(mask.table(), wanted)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_tensor_is_read_by_each_call(template: str) -> None:
    """Writes move the tiles and the score_mod; nothing is compiled for them."""
    query, key, value, _ = inputs(2)
    alibi, options = mods.alibi(HEADS), {"TEMPLATE": template}
    starts = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    sizes = (2, None, 1, LENGTH, DEVICE)
    mask = create_block_mask(masks.causal(), *sizes, q_offset=starts)
    handle = flexmod.compile(alibi, masks.causal(), q_offset=starts, kernel_options=options)
    whole_mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, DEVICE)
    whole = flex_attention(query, key, value, alibi, whole_mask, kernel_options=options)
    made = 0
    for step, values in enumerate(([5, 900], [6, 901], [700, 0], [1535, 1])):
        starts.copy_(torch.tensor(values))
        rows = torch.stack([query[b, :, n : n + 1] for b, n in enumerate(values)])
        wanted = torch.stack([whole[b, :, n : n + 1] for b, n in enumerate(values)])
        for _ in range(2):
            assert near(flex_attention(rows, key, value, alibi, mask, kernel_options=options), wanted)
            assert near(handle(rows, key, value), wanted)
        made = compiler.kernels_for.cache_info().misses if step == 0 else made
    assert compiler.kernels_for.cache_info().misses == made


def test_a_cuda_graph_reads_the_tensor_of_a_score_mod_at_each_replay() -> None:
    query, key, value, _ = inputs(1, 1)
    starts = torch.tensor([5], device=DEVICE)
    alibi = mods.alibi(HEADS)
    call = lambda: flex_attention(query, key, value, alibi, q_offset=starts)  # noqa: E731
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for first in (5, 800):
        starts.fill_(first)
        graph.replay()
        assert torch.equal(out, flex_attention(query, key, value, alibi, q_offset=starts))


def test_a_growing_offset_compiles_nothing_from_the_second_one_on() -> None:
    query, key, value, _ = inputs(1, 1)
    alibi, made = mods.alibi(HEADS), []
    for first in range(3, 10):
        mask = create_block_mask(masks.causal(), None, None, 1, LENGTH, DEVICE, q_offset=first)
        flex_attention(query, key, value, alibi, mask)
        made.append(compiler.kernels_for.cache_info().misses)
    assert made[-1] == made[-4]


def test_a_tensor_elsewhere_is_a_number_of_the_host_or_refused() -> None:
    query, key, value, _ = inputs()
    alibi, number = mods.alibi(HEADS), torch.tensor(40)
    for first in (40, 41):
        number.fill_(first)
        found = flex_attention(query, key, value, alibi, q_offset=number)
        assert torch.equal(found, flex_attention(query, key, value, alibi, q_offset=first))
    with pytest.raises(flexmod.errors.DeviceMismatch, match="q_offset is on cpu"):
        flex_attention(query, key, value, alibi, q_offset=torch.tensor([40]))


def test_the_largest_positions() -> None:
    """Distances stay exact where float32 does not hold positions."""
    query, key, value, _ = inputs(1, 256, 512)
    largest = 2**30

    def steps(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + ((q_idx * 5 + kv_idx * 3) % 11) + 0.25 * (kv_idx - q_idx)

    for q, kv in ((largest, largest - 200), (torch.tensor([largest], device=DEVICE), largest - 200)):
        offsets = {"q_offset": q, "kv_offset": kv}
        mask = create_block_mask(masks.sliding_window(300), None, None, 256, 512, DEVICE, **offsets)
        exact = flex_attention(
            *(x.double() for x in (query, key, value)), steps, mask,
            kernel_options={"BACKEND": "REFERENCE"},
        )  # fmt: skip
        assert near(flex_attention(query, key, value, steps, mask), exact)
