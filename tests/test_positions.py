"""Offsets: calls on parts of the queries or keys agree with the whole, and mods see the same positions."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from position_cases import NAMES, attend, cases, keeps, merged
from tiers import long_but
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex

import flexmod
from flexmod import Offset, create_block_mask, create_mask, errors, flex_attention, masks, mods
from flexmod.codegen import compiler
from flexmod.codegen.spec import Tile
from flexmod.ir.trace import trace
from flexmod.runtime import config
from flexmod.runtime.offline import Report
from flexmod.runtime.target import named
from flexmod.tools.ahead import Built

LENGTH, HEADS, BLOCK = 96, 2, 32
BACKENDS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "interpret": {"BACKEND": "INTERPRET", "BLOCK_M": 32, "BLOCK_N": 32},
    "reference": {"BACKEND": "REFERENCE"},
}
CUTS = ((0, 32), (32, 96))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int = 1, length: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    return [random(batch, HEADS, n, 16, seed=i) for i, n in enumerate((length, keys, keys))]


def causal_at(q_len: int, offset: Any = None, batch: int | None = None, **others: Any) -> flexmod.BlockMask:
    mask = masks.causal()
    return create_block_mask(mask, batch, None, q_len, LENGTH, "cpu", BLOCK, q_offset=offset, **others)


# parts beside the whole


def on_backends(interpreted: set[str], others: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Each case on one backend, these in the interpreter, where the others are marked with `others`."""
    firsts = [
        (name, "interpret" if name in interpreted else ("cpu", "reference")[number % 2])
        for number, name in enumerate(NAMES)
    ]
    later = {"interpret": others, "cpu": pytest.mark.every, "reference": pytest.mark.every}
    cases = [
        pytest.param(name, backend, marks=() if (name, backend) in firsts else later[backend])
        for name in NAMES
        for backend in BACKENDS
    ]
    return pytest.mark.parametrize(("name", "backend"), cases)


@on_backends({"windows of heads", "learned distances"}, pytest.mark.long)
def test_parts_of_the_queries(name: str, backend: str) -> None:
    """out, lse and dQ of a part equal the whole's there; the other gradients are sums over the parts."""
    case, (query, key, value) = cases(LENGTH, HEADS)[name], inputs()
    grads = random(*query.shape, seed=9)
    options = BACKENDS[backend]
    whole = attend(case, (query, key, value), options, grads=grads)
    total = [torch.zeros_like(x) for x in whole[3:]]
    for first, last in CUTS:
        rows = slice(first, last)
        part = attend(
            case, (query[:, :, rows], key, value), options, grads=grads[:, :, rows], q_offset=first
        )
        for found, wanted in zip(part[:3], whole[:3], strict=True):
            if backend == "reference":
                torch.testing.assert_close(found, wanted[:, :, rows], atol=3e-6, rtol=3e-6)
            else:
                assert torch.equal(found, wanted[:, :, rows])
        total = [one + other for one, other in zip(total, part[3:], strict=True)]
    for found, wanted in zip(total, whole[3:], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@on_backends({"-inf branches", "learned columns"}, pytest.mark.every)
def test_parts_of_the_keys(name: str, backend: str) -> None:
    """A part is the whole under a mask that keeps its keys, and parts merge to the whole."""
    case, (query, key, value) = cases(LENGTH, HEADS)[name], inputs()
    options, parts = BACKENDS[backend], []
    for first, last in CUTS:
        keys = slice(first, last)
        part = attend(case, (query, key[:, :, keys], value[:, :, keys]), options, kv_offset=first)
        masked = attend(case, (query, key, value), options, mask=keeps(case.mask, first, last))
        for found, wanted in zip(part, masked, strict=True):
            torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
        parts.append(part)
    whole = attend(case, (query, key, value), options)
    for found, wanted in zip(merged(parts), whole, strict=True):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)


@on_backends({"window", "learned buckets"}, pytest.mark.every)
def test_tensors_agree_with_a_loop_over_batch_entries(name: str, backend: str) -> None:
    case, (query, key, value) = cases(LENGTH, HEADS)[name], inputs(2, 32, 64)
    grads = random(*query.shape, seed=9)
    starts = {"q_offset": [13, 64], "kv_offset": [0, 32]}
    dtypes = {"q_offset": torch.int32, "kv_offset": torch.int64}
    offsets = {name: torch.tensor(values, dtype=dtypes[name]) for name, values in starts.items()}
    both = attend(case, (query, key, value), BACKENDS[backend], grads=grads, **offsets)
    total = [torch.zeros_like(x) for x in case.learned]
    for b in range(2):
        here = slice(b, b + 1)
        numbers = {name: values[b] for name, values in starts.items()}
        single = [x[here] for x in (query, key, value)]
        one = attend(case, single, BACKENDS[backend], grads=grads[here], **numbers)
        for found, wanted in zip(both[:5], one[:5], strict=True):
            torch.testing.assert_close(found[here], wanted, atol=3e-6, rtol=3e-6)
        total = [a + b for a, b in zip(total, one[5:], strict=True)]
    for found, wanted in zip(both[5:], total, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


# tiles

PLAIN_MASKS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(40),
    "both sides": masks.sliding_window(21, causal=False),
    "prefix": masks.prefix_lm(50),
    "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
    "documents": masks.document(torch.arange(300) // 70),
}


def kinds_of(dense: Tensor) -> Tensor:
    """0, 1 or 2 for each tile of 32 x 32: empty, partial, full."""
    tiles = dense.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).movedim(-2, -3)
    return tiles.any(-1).any(-1).to(torch.int8) + tiles.all(-1).all(-1).to(torch.int8)


@pytest.mark.parametrize("offsets", [(0, 1), (31, 0), (32, 64), (97, 5), (200, 200)])
@pytest.mark.parametrize("name", PLAIN_MASKS)
def test_tiles_are_those_of_the_whole(name: str, offsets: tuple[int, int]) -> None:
    q, kv = offsets
    dense = create_mask(PLAIN_MASKS[name], None, None, 300, 300, "cpu")[:, :, q : q + 64, kv : kv + 96]
    tables = []
    for q_offset, kv_offset in (
        (q, kv), (torch.tensor([q]), torch.tensor(kv)), (Offset(torch.tensor(q), 250), kv),
    ):  # fmt: skip
        mask = create_block_mask(
            PLAIN_MASKS[name], None, None, 64, 96, "cpu", BLOCK, q_offset=q_offset, kv_offset=kv_offset
        )
        assert torch.equal(create_mask(mask.mask_mod, None, None, 64, 96, "cpu"), dense)
        tables.append(mask.table())
    for table in tables:
        assert torch.equal(table, kinds_of(dense))


def test_bounds_decide_a_causal_mask_with_offsets_alone() -> None:
    """A tile is decided by arithmetic on its ends, as without offsets: no elements, nothing of a row."""
    from flexmod.ir.intervals import analyze
    from flexmod.ir.offsets import Positions
    from flexmod.ir.passes import fitted

    tensor = torch.tensor([3, 5], dtype=torch.int32)
    for positions in (Positions(500, 7), Positions(tensor, tensor), Positions(tensor, 9, q_bound=4096)):
        for mask in (masks.causal(), masks.sliding_window(64)):
            graph = trace(positions.mask(mask), "mask").graph
            extents = (2, 1, 1024, 1024)
            assert not analyze(fitted(graph, extents), extents).terms


# wide positions


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_arithmetic_on_positions_is_exact_up_to_the_largest_offset(as_tensor: bool, backend: str) -> None:
    query, key, value = inputs(1, 32, 64)
    largest = 2**30
    offsets: dict[str, Any] = {"q_offset": largest, "kv_offset": largest - 40}
    if as_tensor:
        offsets = {name: torch.tensor([x], dtype=torch.int32) for name, x in offsets.items()}

    def steps(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + ((q_idx * 5 + kv_idx * 3) % 11) + 0.5 * (q_idx - kv_idx)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx * 4 + kv_idx) % 7 != 2

    rows, keys = torch.arange(32) + largest, torch.arange(64) + largest - 40
    added = ((rows[:, None] * 5 + keys * 3) % 11) + 0.5 * (rows[:, None] - keys)
    keep = (rows[:, None] * 4 + keys) % 7 != 2
    scores = (query @ key.mT / 4 + added).masked_fill(~keep, -float("inf"))
    block_mask = create_block_mask(mask, None, None, 32, 64, "cpu", BLOCK, **offsets)
    out = flex_attention(query, key, value, steps, block_mask, kernel_options=BACKENDS[backend])
    torch.testing.assert_close(out, scores.softmax(-1) @ value, atol=1e-4, rtol=1e-4)


def test_a_bound_decides_whether_integers_are_wide() -> None:
    values = torch.tensor([5, 6], dtype=torch.int32)

    def wide(bound: int) -> bool:
        from flexmod.ir.offsets import Positions
        from flexmod.ir.passes import fitted

        at = Positions(values, 0, q_bound=bound).mask(lambda b, h, q, k: q * 4 > k)
        graph = fitted(trace(at, "mask").graph, (2, 1, 1024, 1024))
        return any(node.dtype == torch.int64 for node in graph.nodes)

    assert not wide(2**20)
    assert wide(2**30)


# masks carry their offsets


def test_a_mask_shows_its_offsets() -> None:
    mask = causal_at(64, 32, kv_offset=4)
    assert "q_offset=32, kv_offset=4" in repr(mask)
    assert "q_offset=32, kv_offset=4" in str(mask)
    assert (mask.q_offset, mask.kv_offset) == (32, 4)
    assert "offset" not in repr(causal_at(64)) + str(causal_at(64))
    assert (causal_at(64).q_offset, causal_at(64).kv_offset) == (0, 0)


def saved(mask: Any) -> Any:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda mask: mask,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "torch.save": saved,
    "to": lambda mask: mask.to("cpu"),
    "and": lambda mask: mask & mask,
    "or": lambda mask: mask | mask,
    "not not": lambda mask: ~~mask,
    "resize": lambda mask: mask.resize(64, LENGTH),
    "adjust": lambda mask: mask._adjust(64, LENGTH),
    "slice of all": lambda mask: mask[:, :, :],
    "lists": lambda mask: flexmod.BlockMask(mask.seq_lengths, **lists_of(mask)),
}


def lists_of(mask: Any) -> dict[str, Any]:
    from flexmod.block_mask.tiles import LISTS

    parts = {name: getattr(mask, name) for name in LISTS}
    return {**parts, "BLOCK_SIZE": mask.BLOCK_SIZE, "mask_mod": mask.mask_mod}


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("way", WAYS)
def test_offsets_stay_with_a_mask(way: str, kind: str) -> None:
    """A call with the mask gives its score_mod the same positions."""
    query, key, value = inputs(2)
    starts = [32, 32] if kind == "number" else [9, 30]
    mask = causal_at(64, 32 if kind == "number" else torch.tensor(starts), 2)
    mask = WAYS[way](mask)
    assert torch.equal(torch.as_tensor(mask.q_offset).expand(2), torch.tensor(starts))
    rows = torch.stack([query[b, :, first : first + 64] for b, first in enumerate(starts)])
    whole = flex_attention(query, key, value, mods.alibi(HEADS), causal_at(LENGTH))
    wanted = torch.stack([whole[b, :, first : first + 64] for b, first in enumerate(starts)])
    found = flex_attention(rows, key, value, mods.alibi(HEADS), mask)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [slice(1, 3), [2], slice(2, None), slice(0, 3, 2), [2, 0], [0, 1]])
@pytest.mark.parametrize("offset", [None, 7, "tensor"])
def test_a_slice_of_a_mask_is_at_the_positions_of_the_whole(offset: Any, rows: Any, backend: str) -> None:
    """Of the score_mod too, and a slice of the slice."""
    first = torch.tensor([7, 7]) if offset == "tensor" else offset
    query, key, value = inputs(2)
    mask = causal_at(LENGTH, first, 2)
    options = {"kernel_options": BACKENDS[backend]}
    whole = flex_attention(query, key, value, mods.alibi(HEADS), mask, **options)
    numbers = range(3)[rows] if isinstance(rows, slice) else rows
    taken = torch.cat([torch.arange(n * BLOCK, (n + 1) * BLOCK) for n in numbers])
    part = mask[:, :, rows]
    found = flex_attention(query[:, :, taken], key, value, mods.alibi(HEADS), part, **options)
    torch.testing.assert_close(found, whole[:, :, taken], atol=3e-6, rtol=3e-6)
    last = taken[-BLOCK:]
    found = flex_attention(query[:, :, last], key, value, mods.alibi(HEADS), part[:, :, -1:], **options)
    torch.testing.assert_close(found, whole[:, :, last], atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("chosen", [1, slice(1, 3), [2, 0], slice(0, None, 2)])
def test_a_slice_of_batch_entries_has_their_offsets(chosen: Any) -> None:
    query, key, value = inputs(3)
    starts = torch.tensor([3, 20, 32])
    mask = causal_at(64, starts, 3)
    whole = flex_attention(query[:, :, :64], key, value, mods.alibi(HEADS), mask)
    index = [chosen] if isinstance(chosen, int) else chosen
    part = mask[chosen]
    assert torch.equal(torch.as_tensor(part.q_offset), starts[index])
    found = flex_attention(
        query[index][:, :, :64], key[index], value[index], mods.alibi(HEADS), part
    )
    torch.testing.assert_close(found, whole[index], atol=3e-6, rtol=3e-6)


def test_masks_with_other_offsets_do_not_combine() -> None:
    ours = causal_at(64, 32)
    tensor = torch.tensor([32])
    for other in (causal_at(64, 31), causal_at(64), causal_at(64, 32, kv_offset=1), causal_at(64, tensor)):
        for combine in (lambda a, b: a & b, lambda a, b: a | b):
            with pytest.raises(errors.BlockMaskCombineError, match="q_offset=32, kv_offset=0 in one and"):
                combine(ours, other)
    assert torch.equal((ours & causal_at(64, 32)).table(), ours.table())
    same = causal_at(64, tensor) & causal_at(64, tensor)
    assert same.q_offset is tensor
    with pytest.raises(errors.BlockMaskCombineError):
        causal_at(64, tensor) & causal_at(64, tensor.clone())
    written = causal_at(64, 32)
    written.kv_num_blocks = written.kv_num_blocks.clone()
    with pytest.raises(errors.BlockMaskCombineError, match="lists of one were written to"):
        _ = ~written


def test_an_assigned_mask_mod_sees_indices() -> None:
    """As in torch; one that was taken from a mask with offsets brings them."""
    mask = causal_at(64, 32)
    first = mask.mask_mod
    mask.mask_mod = masks.causal()
    assert mask.q_offset == 0
    mask.mask_mod = first
    assert mask.q_offset == 32
    again = create_block_mask(first, None, None, 64, LENGTH, "cpu", BLOCK)
    assert again.q_offset == 32
    assert torch.equal(again.table(), causal_at(64, 32).table())
    with pytest.raises(errors.OffsetMismatchError):
        create_block_mask(first, None, None, 64, LENGTH, "cpu", BLOCK, q_offset=31)


def test_torch_takes_the_mask_mod() -> None:
    query, key, value = inputs()
    mask = causal_at(64, 32)
    theirs = torch_flex.create_block_mask(mask.mask_mod, 1, 1, 64, LENGTH, "cpu", BLOCK)
    assert torch.equal(theirs.to_dense(), mask.to_dense())
    ours = flex_attention(query[:, :, 32:], key, value, None, mask)
    found = torch_flex.flex_attention(query[:, :, 32:], key, value, None, theirs)
    torch.testing.assert_close(ours, found, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("compiled", long_but([False], [False, True]))
def test_a_mask_of_torch_brings_the_offsets_of_its_mask_mod(compiled: bool) -> None:
    torch.compiler.reset()
    query, key, value = inputs()
    alibi = mods.alibi(HEADS)
    mask = causal_at(64, 32)
    theirs = torch_flex.create_block_mask(mask.mask_mod, 1, 1, 64, LENGTH, "cpu", BLOCK)
    wanted = flex_attention(query[:, :, 32:], key, value, alibi, mask)
    attend = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
    found = attend(query[:, :, 32:], key, value, alibi, theirs)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    handle = flexmod.compile(alibi)
    torch.testing.assert_close(handle(query[:, :, 32:], key, value, theirs), wanted, atol=3e-6, rtol=3e-6)


def test_another_layout_and_shared_heads() -> None:
    query, key, value = inputs(2)
    whole = flex_attention(query, key, value, mods.alibi(HEADS), causal_at(LENGTH))
    part, offset = causal_at(64, 32), torch.tensor([32, 32])
    swapped = [x.transpose(1, 2) for x in (query[:, :, 32:], key, value)]
    found = flex_attention(*swapped, mods.alibi(HEADS), part, layout="bshd")
    torch.testing.assert_close(found.transpose(1, 2), whole[:, :, 32:], atol=3e-6, rtol=3e-6)
    shared = [x[:, :1] for x in (key, value)]
    wanted = flex_attention(query, *shared, mods.alibi(HEADS), enable_gqa=True)[:, :, 32:]
    found = flex_attention(query[:, :, 32:], *shared, mods.alibi(HEADS), enable_gqa=True, q_offset=offset)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)


def test_a_class_of_tensors_sees_the_offsets() -> None:
    seen: dict[str, Any] = {}

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is flex_attention:
                seen.update(kwargs)
            return super().__torch_function__(func, types, args, kwargs or {})

    query, key, value = inputs()
    wanted = flex_attention(query, key, value, mods.alibi(HEADS), q_offset=5)
    found = flex_attention(query.as_subclass(Seeing), key, value, mods.alibi(HEADS), q_offset=5)
    assert seen["q_offset"] == 5
    torch.testing.assert_close(found.as_subclass(Tensor), wanted)


def test_transforms_of_torch() -> None:
    query, key, value = inputs(2, 32)
    starts = torch.tensor([3, 9])

    def loss(query: Tensor) -> Tensor:
        return flex_attention(query, key, value, mods.alibi(HEADS), q_offset=starts).square().sum()

    leaf = query.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(query), wanted)
    with pytest.raises(errors.VmapError):
        torch.vmap(lambda n: flex_attention(query, key, value, mods.alibi(HEADS), q_offset=n))(starts)


# calls and their masks


def test_what_a_call_may_state_beside_its_mask() -> None:
    query, key, value = inputs()
    part, alibi = query[:, :, 32:], mods.alibi(HEADS)
    wanted = flex_attention(query, key, value, alibi, causal_at(LENGTH))[:, :, 32:]
    mask, tensor = causal_at(64, 32), torch.tensor([32])
    at_tensor = causal_at(64, tensor)
    for block_mask, offsets in (
        (mask, {}), (mask, {"q_offset": 32}), (mask, {"q_offset": 32, "kv_offset": 0}),
        (mask, {"kv_offset": 0}),
        (at_tensor, {"q_offset": tensor}), (at_tensor, {"q_offset": Offset(tensor, 99)}),
        (at_tensor, {"q_offset": tensor.view(1)}),
    ):  # fmt: skip
        assert torch.equal(flex_attention(part, key, value, alibi, block_mask, **offsets), wanted)
    for block_mask, offsets in (
        (mask, {"q_offset": 31}), (mask, {"q_offset": 0}), (mask, {"kv_offset": 1}),
        (mask, {"q_offset": tensor}), (at_tensor, {"q_offset": 32}),
        (at_tensor, {"q_offset": tensor.clone()}), (causal_at(64), {"q_offset": 32}),
        (causal_at(LENGTH)[:, :, 1:], {"q_offset": 31}),
    ):  # fmt: skip
        with pytest.raises(errors.OffsetMismatchError):
            flex_attention(part, key, value, alibi, block_mask, **offsets)
        with pytest.raises(errors.OffsetMismatchError):
            flex_attention(part, key, value, None, block_mask, **offsets)
    theirs = torch_flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 64, LENGTH, "cpu", BLOCK)
    with pytest.raises(errors.OffsetMismatchError):
        flex_attention(part, key, value, alibi, theirs, q_offset=32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_of_one_mod_with_other_offsets_do_not_meet(backend: str) -> None:
    """In turn, known calls too: each has its own positions."""
    query, key, value = inputs()
    alibi, options = mods.alibi(HEADS), BACKENDS[backend]
    mask_of = {first: causal_at(32, first) for first in (0, 5, 17, 64)}
    whole = flex_attention(query, key, value, alibi, causal_at(LENGTH), kernel_options=options)
    for first in (0, 5, 17, 64, 5, 0, 64, 17):
        rows = slice(first, first + 32)
        for offsets in ({}, {"q_offset": first}):
            found = flex_attention(
                query[:, :, rows], key, value, alibi, mask_of[first], kernel_options=options, **offsets
            )
            torch.testing.assert_close(found, whole[:, :, rows], atol=3e-6, rtol=3e-6)


def test_growing_offsets_compile_nothing_from_the_second_one_on() -> None:
    query, key, value = inputs(1, 1)
    alibi, options = mods.alibi(HEADS), {"BACKEND": "INTERPRET"}
    made = []
    for first in range(3, 9):
        flex_attention(query, key, value, alibi, causal_at(1, first), kernel_options=options)
        made.append(compiler.kernels_for.cache_info().misses)
    assert made[-1] == made[-3] == made[-4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_is_read_by_each_call(backend: str) -> None:
    """A write to it moves the tiles and the score_mod, and a known call stays known."""
    query, key, value = inputs(2)
    alibi, options = mods.alibi(HEADS), BACKENDS[backend]
    starts = torch.tensor([0, 0], dtype=torch.int32)
    mask = causal_at(32, starts, 2)
    handle = flexmod.compile(alibi, masks.causal(), q_offset=starts, kernel_options=options)
    whole = flex_attention(query, key, value, alibi, causal_at(LENGTH), kernel_options=options)
    for values in ([0, 0], [3, 64], [64, 5]):
        starts.copy_(torch.tensor(values))
        rows = torch.stack([query[b, :, n : n + 32] for b, n in enumerate(values)])
        wanted = torch.stack([whole[b, :, n : n + 32] for b, n in enumerate(values)])
        for _ in range(2):
            found = flex_attention(rows, key, value, alibi, mask, kernel_options=options)
            torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
            torch.testing.assert_close(handle(rows, key, value), wanted, atol=3e-6, rtol=3e-6)
    starts[1] = -1
    for call in (handle, lambda *given: flex_attention(*given, alibi, mask)):
        with pytest.raises(errors.OffsetValueError, match="q_offset is -1"):
            call(rows, key, value)


def test_a_write_between_forward_and_backward_is_refused() -> None:
    query, key, value = (x.requires_grad_() for x in inputs(1, 32))
    starts = torch.tensor([5])
    out = flex_attention(query, key, value, mods.alibi(HEADS), q_offset=starts)
    starts += 1
    with pytest.raises(errors.ModifiedBeforeBackwardError, match="q_offset"):
        out.sum().backward()


# handles and compiled graphs


@pytest.mark.covering(1, long=1, costly=("interpret",))
@pytest.mark.parametrize("way", ["as it is", "copy", "deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_a_handle_has_offsets_for_both_mods(backend: str, way: str) -> None:
    query, key, value = inputs()
    options = BACKENDS[backend]
    wanted = flex_attention(query, key, value, mods.alibi(HEADS), causal_at(LENGTH))[:, :, 32:]
    handle = flexmod.compile(mods.alibi(HEADS), masks.causal(), q_offset=32, kernel_options=options)
    handle = WAYS[way](handle)
    for _ in range(3):
        found = handle(query[:, :, 32:], key, value)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    # a mask in place of its own, with the same offsets
    found = handle(query[:, :, 32:], key, value, causal_at(64, 32))
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    with pytest.raises(errors.OffsetMismatchError, match="the handle states q_offset=32"):
        handle(query[:, :, 32:], key, value, causal_at(64, 31))
    plain = WAYS[way](flexmod.compile(mods.alibi(HEADS), kernel_options=options))
    found = plain(query[:, :, 32:], key, value, causal_at(64, 32))
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)


def test_a_handle_of_the_mask_mod_of_a_slice() -> None:
    """It has all of the slice's offsets, and no other slice goes with it."""
    query, key, value = inputs(2)
    whole = causal_at(LENGTH, torch.tensor([3, 7]), 2)
    wanted = flex_attention(query, key, value, mods.alibi(HEADS), whole)[:, :, 32:64]
    part = whole[:, :, 1]
    handle = flexmod.compile(mods.alibi(HEADS), part.mask_mod)
    rows = query[:, :, 32:64]
    torch.testing.assert_close(handle(rows, key, value), wanted, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(handle(rows, key, value, part), wanted, atol=3e-6, rtol=3e-6)
    for other in (whole[:, :, 0], whole[:, :, 2]):
        with pytest.raises(errors.OffsetMismatchError, match="the handle states"):
            handle(rows, key, value, other)


def test_a_saved_file_says_at_which_positions(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that nothing compiles here."""
    built = Built("forward", "portable", Tile(64, 64, 4, 1), Report(named("sm_90"), 1000, 100, 0, 0))
    monkeypatch.setattr("flexmod.tools.standalone.first_tile", lambda *_: built)
    monkeypatch.setattr("flexmod.tools.standalone.wrong", lambda *_: None)
    handle = flexmod.compile(mods.alibi(8), masks.causal(), q_offset=4096)
    text = handle.save(tmp_path / "file.py", head_dim=64, dtype=torch.float16).read_text()
    assert "at the positions of q_offset=4096, kv_offset=0" in text


def in_graph(query: Tensor, key: Tensor, value: Tensor, first: Any) -> Any:
    sizes = (query.shape[0], None, query.shape[2], key.shape[2], "cpu", BLOCK)
    mask = create_block_mask(masks.causal(), *sizes, q_offset=first)
    return flex_attention(query, key, value, mods.alibi(HEADS), mask)


def no_mask(query: Tensor, key: Tensor, value: Tensor, first: Any) -> Any:
    return flex_attention(query, key, value, mods.alibi(HEADS), q_offset=first)


def stated_twice(query: Tensor, key: Tensor, value: Tensor, first: Any) -> Any:
    sizes = (query.shape[0], None, query.shape[2], key.shape[2], "cpu", BLOCK)
    mask = create_block_mask(masks.causal(), *sizes, q_offset=first)
    return flex_attention(query, key, value, mods.alibi(HEADS), mask, q_offset=first)


@pytest.mark.parametrize("function", long_but([in_graph], [in_graph, no_mask, stated_twice]))
def test_a_growing_offset_in_a_compiled_graph(function: Callable[..., Any]) -> None:
    torch.compiler.reset()
    counters.clear()
    query, key, value = inputs()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for first in (3, 4, 17):
        rows = query[:, :, first : first + 4]
        found, wanted = compiled(rows, key, value, first), function(rows, key, value, first)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_bound_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    query, key, value = inputs(2, 32)
    compiled = torch.compile(no_mask, backend="aot_eager", fullgraph=True)
    for values in ([3, 60], [0, 7]):
        first = Offset(torch.tensor(values), 100)
        found, wanted = compiled(query, key, value, first), no_mask(query, key, value, first)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("function", long_but([stated_twice], [in_graph, no_mask, stated_twice]))
def test_an_offset_that_is_a_tensor_in_a_compiled_graph(function: Callable[..., Any]) -> None:
    torch.compiler.reset()
    counters.clear()
    query, key, value = inputs(2, 32)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for values in ([3, 60], [0, 7]):
        first = torch.tensor(values)
        found, wanted = compiled(query, key, value, first), function(query, key, value, first)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_mask_from_outside_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    counters.clear()
    query, key, value = inputs(1, 32)
    eager = lambda *given: flex_attention(*given[:3], mods.alibi(HEADS), given[3])  # noqa: E731
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    for first in (3, 4, 17, 33, 40):
        made = counters["stats"]["unique_graphs"]
        mask = causal_at(32, first)
        found, wanted = compiled(query, key, value, mask), eager(query, key, value, mask)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-6)
    assert counters["stats"]["unique_graphs"] == made


def test_a_mistake_in_a_compiled_graph_is_told_outside_of_it() -> None:
    torch.compiler.reset()
    query, key, value = inputs()
    compiled = torch.compile(no_mask, backend="eager")
    with pytest.raises(errors.OffsetValueError, match="q_offset is -3"):
        compiled(query, key, value, -3)


# sizes


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_beyond_the_entries_of_a_mod_are_refused(backend: str) -> None:
    query, key, value = inputs(1, 32, 32)
    sandwich = mods.sandwich(HEADS, length=LENGTH, dim=4)
    options = {"kernel_options": BACKENDS[backend]}
    flex_attention(query, key, value, sandwich, q_offset=64, kv_offset=64, **options)
    for offsets in ({"q_offset": 65}, {"kv_offset": 65}):
        with pytest.raises(errors.CallSizeError, match="32, from position 65 on"):
            flex_attention(query, key, value, sandwich, **offsets, **options)
    documents = masks.document(torch.zeros(LENGTH, dtype=torch.int32))
    with pytest.raises(errors.CallSizeError, match="from position 65 on"):
        create_block_mask(documents, None, None, 32, 32, "cpu", q_offset=65)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_table_beyond_its_end_is_found_at_positions(backend: str) -> None:
    query, key, value = inputs(1, 32, 32)
    table = torch.zeros(LENGTH)
    options = {"kernel_options": BACKENDS[backend]}

    def call(first: Any) -> Any:
        return flex_attention(
            query, key, value, lambda s, b, h, q, k: s + table[q], q_offset=first, **options
        )

    call(64)
    for first in (65, torch.tensor([65])):
        with pytest.raises(errors.CaptureBoundsError, match="table, of shape"):
            call(first)


def test_checked_kernels_look_at_positions(switch: Callable[[str, object], None]) -> None:
    switch(config.CHECK_BOUNDS, 1)
    query, key, value = inputs(1, 32, 32)
    table = torch.zeros(LENGTH)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[q_idx]

    options = {"kernel_options": {"BACKEND": "INTERPRET"}}
    flex_attention(query, key, value, score, q_offset=64, **options)
    for first in (65, torch.tensor([65])):
        with pytest.raises(errors.CaptureBoundsError, match="is indexed with 96 in dimension 0"):
            flex_attention(query, key, value, score, q_offset=first, **options)


def test_a_handle_of_another_batch_is_refused() -> None:
    query, key, value = inputs(2)
    handle = flexmod.compile(mods.alibi(HEADS), q_offset=torch.tensor([1, 2, 3]))
    with pytest.raises(errors.CallSizeError, match="q_offset is made for 3 batch entries"):
        handle(query, key, value)


WRONG: dict[str, tuple[Any, type[errors.FlexmodError]]] = {
    "bool": (True, errors.OffsetTypeError),
    "float": (1.0, errors.OffsetTypeError),
    "text": ("3", errors.OffsetTypeError),
    "list": ([1, 2], errors.OffsetTypeError),
    "floats": (torch.rand(2), errors.OffsetTypeError),
    "bools": (torch.zeros(2, dtype=torch.bool), errors.OffsetTypeError),
    "bytes": (torch.zeros(2, dtype=torch.uint8), errors.OffsetTypeError),
    "sparse": (torch.zeros(2, dtype=torch.int32).to_sparse(), errors.OffsetTypeError),
    "negative": (-1, errors.OffsetValueError),
    "too large": (2**30 + 1, errors.OffsetValueError),
    "a negative entry": (torch.tensor([3, -1]), errors.OffsetValueError),
    "a large entry": (torch.tensor([3, 2**31]), errors.OffsetValueError),
    "beyond the bound": (Offset(torch.tensor([3, 9]), 8), errors.OffsetValueError),
    "another batch": (torch.tensor([1, 2, 3]), errors.OffsetShapeError),
    "two dimensions": (torch.tensor([[1], [2]]), errors.OffsetShapeError),
    "elsewhere": (torch.zeros(2, dtype=torch.int32, device="meta"), errors.DeviceMismatch),
}


@pytest.mark.parametrize("argument", ["q_offset", "kv_offset"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_offsets_are_refused(name: str, argument: str) -> None:
    query, key, value = inputs(2)
    offset, error = WRONG[name]
    for backend in BACKENDS.values():
        for score in (None, mods.alibi(HEADS)):
            with pytest.raises(error, match=argument):
                flex_attention(query, key, value, score, kernel_options=backend, **{argument: offset})
    with pytest.raises(error, match=argument):
        create_block_mask(masks.causal(), 2, None, LENGTH, LENGTH, "cpu", **{argument: offset})
    if name not in ("another batch", "elsewhere"):  # what a call alone can tell
        with pytest.raises(error, match=argument):
            flexmod.compile(mods.alibi(HEADS), **{argument: offset})


def test_numbers_of_other_classes() -> None:
    import numpy as np

    query, key, value = inputs()
    wanted = flex_attention(query, key, value, mods.alibi(HEADS), q_offset=7)
    assert torch.equal(flex_attention(query, key, value, mods.alibi(HEADS), q_offset=np.int64(7)), wanted)


def test_absent_offsets_leave_graphs_as_they_are() -> None:
    mask = causal_at(64, 0, kv_offset=0)
    assert mask.positions is None
    assert mask._traced.graph == trace(masks.causal(), "mask").graph


def hashed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A hash of positions, whose products leave int32 from position 30 on."""
    return ((q_idx * 73856093) ^ ((kv_idx + h + b) * 19349663)) % 7 < 4


def hashed_score(score: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
    return torch.where(hashed(b, h, q_idx, kv_idx), score, score - 2.0)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [[2, 0], slice(0, 3, 2)], ids=["list", "range"])
def test_positions_of_a_slice_do_not_wrap(index: Any, backend: str) -> None:
    query, key, value = inputs()
    mask = create_block_mask(hashed, None, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=BLOCK)
    rows = torch.arange(LENGTH).view(-1, BLOCK)[index].flatten()
    for score_mod in (None, hashed_score):
        whole = flex_attention(query, key, value, score_mod, mask, kernel_options=BACKENDS[backend])
        sliced = mask[:, [0, 1]][:, :, index]
        part = flex_attention(
            query[:, :, rows], key, value, score_mod, sliced, kernel_options=BACKENDS[backend]
        )
        torch.testing.assert_close(part, whole[:, :, rows], atol=1e-5, rtol=1e-5)


def test_batch_entries_and_heads_of_a_slice_do_not_wrap() -> None:
    def of_all(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((b * 1640531527 + h * 1013904223) // 256 + q_idx + kv_idx) % 7 < 4

    mask = create_block_mask(of_all, 3, 3, 8, 8, "cpu", BLOCK_SIZE=4)
    dense = create_mask(of_all, 3, 3, 8, 8, "cpu")
    for b, h in (([2, 0, 1], slice(None)), (slice(None), [2, 2, 0])):
        assert torch.equal(create_mask(mask[b, h].mask_mod, 3, 3, 8, 8, "cpu"), dense[b][:, h])


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_in_packed_sequences_do_not_wrap(backend: str) -> None:
    length = 48
    query, key, value = inputs(2, length, length)
    ends = torch.tensor([0, length, 2 * length])
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    mask = create_block_mask(hashed, 2, HEADS, length, length, "cpu", BLOCK_SIZE=BLOCK)
    options = BACKENDS[backend]
    for score_mod, block_mask, mask_mod in ((None, mask, hashed), (hashed_score, None, None)):
        whole = flex_attention(query, key, value, score_mod, block_mask, kernel_options=options)
        out = flexmod.varlen_attention(
            *packed, ends, score_mod=score_mod, mask_mod=mask_mod, kernel_options=options
        )
        torch.testing.assert_close(out, whole.transpose(1, 2).flatten(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_reordered_positions_do_not_wrap(dtype: torch.dtype) -> None:
    order = masks.tile_order((8, 12), (2, 4)).to(dtype)
    for mask_mod in (hashed, masks.sliding_window(9), lambda b, h, q_idx, kv_idx: q_idx - kv_idx > -5):
        whole = create_mask(mask_mod, None, HEADS, LENGTH, LENGTH, "cpu")
        found = create_mask(masks.reordered(mask_mod, order), None, HEADS, LENGTH, LENGTH, "cpu")
        assert torch.equal(found, whole[:, :, order.long()][..., order.long()])


def test_a_deep_copy_of_a_slice_sees_writes_to_the_copied_offset() -> None:
    offset = torch.tensor([0, 40], dtype=torch.int32)
    rows = causal_at(64, offset, batch=2)[:, :, 1:]
    copied, other = copy.deepcopy((rows, offset))
    other.copy_(torch.tensor([32, 0]))
    wanted = causal_at(64, other, batch=2)[:, :, 1:]
    assert torch.equal(copied.to_dense(), wanted.to_dense())
