"""What a user of torch's API may rely on, compared with torch.nn.attention.flex_attention itself."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from tiers import long_but
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.utils import _pytree as pytree
from torch_release import separates

import flexmod
from flexmod import BlockMask, create_block_mask, errors, flex_attention, masks
from flexmod.backends import options as kernel_options
from flexmod.block_mask.tiles import LISTS

WINDOW = masks.sliding_window(90)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def qkv(batch: int = 2, heads: int = 4, length: int = 300) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, heads, length, 16) for _ in range(3))


def built(
    module: Any, batch: int | None = 2, heads: int | None = 3, length: int = 300, **options: Any
) -> Any:
    return module.create_block_mask(WINDOW, batch, heads, length, length, "cpu", **options)


def same_attributes(ours: Any, other: Any, names: Any) -> None:
    for name in names:
        one, two = getattr(ours, name), getattr(other, name)
        assert torch.equal(one, two) if isinstance(two, Tensor) else one == two


# names and arguments


def test_every_public_name_is_there() -> None:
    assert set(theirs.__all__) <= set(flexmod.__all__)


@separates
@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask", "create_mask", "noop_mask"])
def test_arguments_have_torchs_names_order_and_defaults(name: str) -> None:
    ours, other = (inspect.signature(getattr(module, name)).parameters for module in (flexmod, theirs))
    by_place = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in by_place] == [p.name for p in other.values() if p.kind is not p.KEYWORD_ONLY]
    for parameter in other.values():
        own = ours[parameter.name]
        assert own.kind == parameter.kind
        if parameter.default is not parameter.empty:
            assert own.default == parameter.default


def test_methods_have_torchs_arguments() -> None:
    for name in ("__init__", "from_kv_blocks", "as_tuple", "to_string", "_adjust", "to"):
        ours, other = (inspect.signature(getattr(m.BlockMask, name)).parameters for m in (flexmod, theirs))
        assert list(ours)[: len(other)] == list(other)


def test_options_have_the_names_of_torchs_typed_dict() -> None:
    ours = typing.get_type_hints(flexmod.FlexKernelOptions)
    assert set(ours) == set(kernel_options.OPTIONS)
    assert set(typing.get_type_hints(theirs.FlexKernelOptions)) <= set(ours)


def test_metadata_of_torchs_flash_backward_is_accepted() -> None:
    mask = built(flexmod, compute_dq_write_order=True, dq_kv_order=False)
    assert mask.dq_write_order is None
    same_attributes(mask, built(theirs), LISTS)


# lists and pytrees


def test_lists_of_a_broadcast_mask_are_contiguous() -> None:
    mask, other = built(flexmod), built(theirs)
    for name in LISTS:
        assert getattr(mask, name).is_contiguous()
    same_attributes(mask, other, LISTS)


def test_torchs_paged_attention_converts_a_broadcast_mask() -> None:
    pages = PagedAttention(20, 128, 2, device="cpu")
    for entry in range(2):
        pages.reserve(torch.tensor(entry), torch.tensor(384))
    entries = torch.tensor([0, 1])
    ours, other = (
        pages.convert_logical_block_mask(built(module, 2, 1, 384), entries) for module in (flexmod, theirs)
    )
    same_attributes(ours, other, [name for name in LISTS if "kv" in name])


def test_torchs_paged_attention_gives_masks_and_mods() -> None:
    """The same attention on a cache of shuffled pages as on keys in order."""
    lengths, page = torch.tensor([300, 100, 384]), 128
    pages = PagedAttention(8, page, 3, device="cpu")
    query = torch.randn(3, 4, 1, 16).half()
    tensors = [torch.randn(3, 2, 384, 16).half() for _ in range(2)]
    caches = [torch.zeros(1, 2, 8 * page, 16).half() for _ in range(2)]
    for b in (2, 0, 1):
        entry, length = torch.tensor([b]), int(lengths[b])
        pages.reserve(entry, lengths[b : b + 1])
        pages.assign(entry, torch.arange(length)[None], *(x[b : b + 1, :, :length] for x in tensors), *caches)

    def known(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - (lengths[b] - kv_idx) * 0.01 * (h + 1)

    mask = create_block_mask(known, 3, None, 1, 384, "cpu")
    exact = flex_attention(query, *tensors, slope, mask, enable_gqa=True)
    paged = pages.convert_logical_block_mask(mask, kv_len=lengths)
    given = pages.get_score_mod(slope, lengths), paged
    for backend in ("AUTO", "INTERPRET"):
        out = flex_attention(query, *caches, *given, enable_gqa=True, kernel_options={"BACKEND": backend})
        torch.testing.assert_close(out, exact, atol=1e-3, rtol=1e-3)


@separates
def test_flattened_and_made_again() -> None:
    for separate in (True, False):
        mask = built(flexmod, separate_full_blocks=separate)
        other = built(theirs, separate_full_blocks=separate)
        leaves, context = mask._flatten()
        found, keyed = other._flatten(), other._flatten_with_keys()
        assert len(leaves) == len(found[0]) and context[-1] == found[1][-1]
        assert [key for key, _ in mask._flatten_with_keys()[0]] == [key for key, _ in keyed[0]]
        again = BlockMask._unflatten(leaves, context)
        assert list(mask._TENSOR_ATTRS) == other._TENSOR_ATTRS
        assert list(mask._CONTEXT_ATTRS) == other._CONTEXT_ATTRS
        same_attributes(again, mask, (*mask._TENSOR_ATTRS, *mask._CONTEXT_ATTRS))
        q, k, v = qkv(heads=3)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=again),
                                   flex_attention(q, k, v, block_mask=mask))  # fmt: skip


def test_registered_as_a_pytree() -> None:
    class Registered(BlockMask):
        pass

    pytree.register_pytree_node(
        Registered, Registered._flatten, Registered._unflatten,
        flatten_with_keys_fn=Registered._flatten_with_keys,
    )  # fmt: skip
    mask = built(flexmod)
    leaves, context = mask._flatten()
    found = pytree.tree_map(torch.clone, {"mask": Registered._unflatten(leaves, context)})["mask"]
    assert type(found) is Registered
    same_attributes(found, mask, (*mask._TENSOR_ATTRS, *mask._CONTEXT_ATTRS))


@separates
def test_parts_come_in_torchs_order() -> None:
    for flatten in (True, False):
        ours, other = built(flexmod).as_tuple(flatten), built(theirs).as_tuple(flatten)
        assert len(ours) == len(other)
        assert [type(x) for x in ours[:-1]] == [type(x) for x in other[:-1]]


@pytest.mark.parametrize("lengths", [(1, 300), (128, 300), (129, 300), (1, 200)], ids=str)
def test_fewer_queries_than_rows_of_tiles(lengths: tuple[int, int]) -> None:
    """As torch's paged decoding does: the first rows of tiles serve the call."""
    q, k, v = qkv(1, 3)
    call = q[:, :, : lengths[0]], k[:, :, : lengths[1]], v[:, :, : lengths[1]]
    dense = flexmod.create_mask(WINDOW, 1, 1, *lengths, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(*call, dense)
    for module in (flexmod, theirs):
        whole = built(module, 1)
        given = (*whole.as_tuple(flatten=False)[1:5], whole.BLOCK_SIZE, whole.mask_mod, lengths)
        assigned = built(module, 1)
        assigned.seq_lengths = lengths
        for mask in (assigned, module.BlockMask.from_kv_blocks(*given)):
            assert mask.shape == (1, 3, *lengths)
            out = flex_attention(*call, block_mask=mask)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


# exceptions

LISTED = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "not 4-D": lambda m: m.flex_attention(*(x[0] for x in qkv())),
    "nested": lambda m: m.flex_attention(*[torch.nested.nested_tensor([torch.ones(3, 5, 8)])] * 3),
    "jagged": lambda m: m.flex_attention(
        *[torch.nested.nested_tensor([torch.ones(3, 8)], layout=torch.jagged)] * 3
    ),
    "arity": lambda m: m.create_block_mask(lambda b: b, None, None, 128, 128, "cpu"),
    "arity of a dense mask": lambda m: m.create_mask(lambda b: b, None, None, 128, 128, "cpu"),
    "score mod as mask mod": lambda m: m.create_block_mask(
        lambda s, b, h, q, k: s, None, None, 128, 128, "cpu"
    ),
    "a mask that is a float": lambda m: m.create_block_mask(
        lambda b, h, q, k: q * 1.0, None, None, 128, 128, "cpu"
    ),
    "if": lambda m: m.create_block_mask(lambda b, h, q, k: bool(q > k), None, None, 128, 128, "cpu"),
    "item": lambda m: m.create_block_mask(lambda b, h, q, k: k < q.item(), None, None, 128, 128, "cpu"),
    "random": lambda m: m.flex_attention(*qkv(), lambda s, b, h, q, k: s + torch.rand(())),
    "counts without indices": lambda m: BlockMask.from_kv_blocks(*LISTED, LISTED[0], None)
    if m is flexmod
    else theirs.BlockMask.from_kv_blocks(*LISTED, LISTED[0], None),
    "lists of one dimension": lambda m: m.BlockMask.from_kv_blocks(LISTED[0][0, 0], LISTED[1][0, 0, 0]),
    "heads": lambda m: m.flex_attention(*qkv()[:1], *qkv(heads=2)[:2]),
    "a ratio of heads": lambda m: m.flex_attention(*qkv()[:1], *qkv(heads=3)[:2], enable_gqa=True),
    "head dimensions": lambda m: m.flex_attention(qkv()[0], qkv()[0][..., :8], qkv()[0]),
    "lengths of key and value": lambda m: m.flex_attention(qkv()[0], qkv()[0], qkv(length=20)[0]),
    "batches": lambda m: m.flex_attention(*qkv(4)[:1], *qkv(3)[:2]),
    "devices": lambda m: m.flex_attention(qkv()[0], *[x.to("meta") for x in qkv()[:2]]),
    "the mask's device": lambda m: m.flex_attention(*qkv(), block_mask=built(m).to("meta")),
    "the mask's lengths": lambda m: m.flex_attention(*qkv(length=500), block_mask=built(m, 1, 1)),
    "both requests": lambda m: m.flex_attention(*qkv(), return_lse=True, return_aux=m.AuxRequest(lse=True)),
    "no function": lambda m: m.and_masks(3),
    "no function to or_masks": lambda m: m.or_masks(causal, 3),
    "a backend": lambda m: m.flex_attention(*qkv(), kernel_options={"BACKEND": "FAST"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISTAKES)
def test_whoever_catches_torchs_exception_catches_ours(name: str) -> None:
    with pytest.raises(Exception) as raised:
        MISTAKES[name](theirs)
    with pytest.raises(errors.FlexmodError) as ours:
        MISTAKES[name](flexmod)
    assert isinstance(ours.value, type(raised.value))


# torch.compile

GRAPH_MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one kind of tiles": {"separate_full_blocks": False},
    "an offset": {"q_offset": 5},
    "offsets of entries": {"q_offset": torch.tensor([3, 40], dtype=torch.int32)},
}


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRAPH_MASKS)
def test_a_compiled_create_block_mask_gives_a_block_mask(name: str, dynamic: bool) -> None:
    ids = torch.randint(0, 3, (2, 400)).sort(-1).values

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    torch._dynamo.reset()
    made = torch.compile(create_block_mask, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    arguments = document, 2, None, 300, 300, "cpu"
    wanted = create_block_mask(*arguments, **GRAPH_MASKS[name])
    q, k, v = qkv(heads=3)
    expected = flex_attention(q, k, v, block_mask=wanted)
    for use in (
        lambda mask: same_attributes(mask, wanted, (*LISTS, "shape", "seq_lengths", "BLOCK_SIZE")),
        lambda mask: torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected),
        lambda mask: same_attributes(mask[1], wanted[1], ("kv_num_blocks", "shape")),
        lambda mask: same_attributes(mask.to("cpu"), wanted, LISTS),
        lambda mask: same_attributes(copy.copy(mask), wanted, LISTS),
        lambda mask: torch.testing.assert_close(
            flex_attention(q, k, v, block_mask=copy.deepcopy(mask)), expected
        ),
        lambda mask: same_attributes(pickle.loads(pickle.dumps(mask)), wanted, LISTS),
        lambda mask: same_attributes(mask & wanted, wanted, ("shape",)),
    ):
        mask = made(*arguments, **GRAPH_MASKS[name])
        assert isinstance(mask, BlockMask)
        use(mask)


def test_a_mask_from_a_graph_goes_into_another_and_sees_writes() -> None:
    limit = torch.tensor(40)

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < limit) & (q_idx >= kv_idx)

    torch._dynamo.reset()
    made, attend = (
        torch.compile(f, backend="aot_eager", fullgraph=True) for f in (create_block_mask, flex_attention)
    )
    arguments = near, None, None, 300, 300, "cpu"
    q, k, v = qkv()
    mask = made(*arguments)
    for size in (40, 10, 200):
        limit.fill_(size)
        expected = flex_attention(q, k, v, block_mask=create_block_mask(*arguments))
        for call in (attend, flex_attention) if size == 40 else (flex_attention, attend):
            torch.testing.assert_close(call(q, k, v, block_mask=mask), expected)


def compiled(function: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, dynamic=True, fullgraph=True), counter


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("batches", [(2, 4, 6), (3, 5, 2)], ids=str)
def test_another_batch_does_not_compile_again(batches: tuple[int, ...], batched: bool) -> None:
    attend, counter = compiled(flex_attention)
    for batch in batches:
        mask = built(flexmod, batch if batched else None, None, 500)
        found = attend(*qkv(batch, 7, 500), block_mask=mask)
        assert found.shape == (batch, 7, 500, 16)
    assert counter.frame_count == 1


def assigned(mask: BlockMask) -> BlockMask:
    """As a decoding step does with a slice of a mask."""
    mask.mask_mod = WINDOW
    return mask


MADE_IN_A_GRAPH: dict[str, Callable[[BlockMask, Any], BlockMask]] = {
    "from_kv_blocks": lambda mask, lists: BlockMask.from_kv_blocks(
        *lists[:4], mask_mod=WINDOW, seq_lengths=(500, 500)
    ),
    "from_dense": lambda mask, lists: BlockMask.from_dense(
        lists[-1], mask_mod=WINDOW, seq_lengths=(500, 500)
    ),
    "BlockMask": lambda mask, lists: BlockMask((500, 500), *lists[:8], mask_mod=WINDOW),
    "cat": lambda mask, lists: BlockMask.cat([mask, mask])[:1],
    "slice": lambda mask, lists: mask[:, :, :4],
    "and": lambda mask, lists: mask & mask,
    "or": lambda mask, lists: mask | mask,
    "invert": lambda mask, lists: ~~mask,
    "resize": lambda mask, lists: mask.resize(600, 600).resize(500, 500),
    "to": lambda mask, lists: mask.to("cpu"),
    "assigned": lambda mask, lists: assigned(mask),
    "read": lambda mask, lists: mask if mask.kv_num_blocks.sum() >= 0 and len(mask.as_tuple()) else mask[:0],
}


@pytest.mark.parametrize(
    "name", long_but({"from_kv_blocks", "slice"}, MADE_IN_A_GRAPH, {"from_dense", "cat", "and", "read"})
)
def test_a_mask_made_in_a_compiled_function(name: str) -> None:
    """The graph breaks at its making, and TorchDynamo compiles none of the functions behind it."""
    torch._dynamo.reset()
    mask, (q, k, v) = built(flexmod, None, None, 500), qkv(1, 2, 500)
    lists = (*mask.as_tuple()[2:10], mask.to_dense())

    def attend(mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, block_mask=MADE_IN_A_GRAPH[name](mask, lists))

    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    found = torch.compile(attend, backend="aot_eager")(mask)
    torch.testing.assert_close(found, flex_attention(q, k, v, block_mask=mask))
    assert frames["total"] <= 10


def test_a_graph_reads_the_sizes_of_a_mask_whose_lists_were_read() -> None:
    mask, (q, _, _) = built(flexmod, None, None, 500), qkv(1, 2, 500)
    assert mask.kv_num_blocks.shape == (1, 1, 4)
    sizes, _ = compiled(lambda q, mask: q * mask.shape[-1] + mask.numel())
    torch.testing.assert_close(sizes(q, mask), q * 500 + 250000)


def test_masks_of_a_compiled_builder_do_not_compile_attention_again() -> None:
    attend, counter = compiled(flex_attention)
    made = torch.compile(create_block_mask, backend="aot_eager", dynamic=True, fullgraph=True)
    for batch, length in ((2, 300), (3, 400)):
        q, k, v = qkv(batch, 4, length)
        mask = made(causal, batch, 4, length, length, "cpu")
        wanted = create_block_mask(causal, None, None, length, length, "cpu")
        expected = flex_attention(q, k, v, block_mask=wanted)
        torch.testing.assert_close(attend(q, k, v, block_mask=mask), expected)
    assert counter.frame_count == 1


def test_another_length_does_not_compile_again() -> None:
    attend, counter = compiled(flex_attention)
    for length in (500, 620):
        q, k, v = qkv(2, 7, length)
        mask = built(flexmod, None, None, length)
        torch.testing.assert_close(attend(q, k, v, block_mask=mask), flex_attention(q, k, v, block_mask=mask))
    assert counter.frame_count == 1


def test_kernel_options_of_a_dynamic_graph() -> None:
    options = {"num_warps": 4, "fwd_BLOCK_N": 32}
    attend, counter = compiled(flex_attention)
    for length in (200, 300):
        q, k, v = qkv(2, 7, length)
        torch.testing.assert_close(attend(q, k, v, kernel_options=options), flex_attention(q, k, v))
    assert counter.frame_count == 1


def test_a_mask_of_symbolic_lengths() -> None:
    def run(q: Tensor) -> Tensor:
        length = q.shape[2]

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx >= kv_idx) & (kv_idx >= length // 4)

        mask = create_block_mask(mask_mod, q.shape[0], q.shape[1], length, length, device=q.device)
        return flex_attention(q, q, q, lambda s, b, h, q_idx, kv_idx: s + length, mask)

    attend, counter = compiled(run)
    for batch, length in ((2, 200), (4, 200), (3, 333)):
        q = qkv(batch, 7, length)[0]
        torch.testing.assert_close(attend(q), run(q))
    assert counter.frame_count == 1


def test_a_scalar_of_the_shape_of_an_index() -> None:
    def shifted(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + h.new_zeros(h.shape) + h.new_full(h.shape, 2)

    attend, _ = compiled(flex_attention)
    q, k, v = qkv()
    torch.testing.assert_close(attend(q, k, v, shifted), flex_attention(q, k, v, shifted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs.flex_attention(q, k, v, shifted)
    torch.testing.assert_close(attend(q, k, v, shifted), expected, atol=1e-5, rtol=1e-5)


def test_a_capture_on_another_device_in_a_compiled_function() -> None:
    ids = torch.zeros(64, dtype=torch.int32, device="meta")

    @torch.compile(backend="eager")
    def attend(query: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], 1, 1, 64, 64, "cpu")
        return flex_attention(query, query, query, block_mask=mask)

    with pytest.raises(errors.DeviceMismatch, match="the mask is on cpu but .* is on meta"):
        attend(torch.randn(1, 1, 64, 16))


@pytest.mark.parametrize("flag", [1, np.bool_(True)], ids=["1", "numpy"])
def test_what_counts_as_true_in_torch(flag: Any) -> None:
    """heads != kv_heads of numpy's integers is numpy's bool."""
    (q, k, v), shared = qkv(length=40), {"enable_gqa": flag, "return_lse": flag}
    expected = theirs.flex_attention(q, k[:, :2], v[:, :2], **shared)
    for attend in (flex_attention, torch.compile(flex_attention, backend="eager")):
        found = attend(q, k[:, :2], v[:, :2], **shared)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert type(dict(kernel_options.parse({"bwd_deterministic": flag}).tiles)["bwd_deterministic"]) is bool
    assert built(flexmod, separate_full_blocks=not flag).full_kv_num_blocks is None
