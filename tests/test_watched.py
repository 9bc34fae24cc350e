"""Captured tensors that are written to, replaced or moved: what a handle and a block mask keep of them."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import flexmod
from flexmod import BlockMask, create_block_mask, flex_attention, masks
from flexmod.calls import autograd, compiled, prepared
from flexmod.ir.trace import trace
from flexmod.ir.watched import Watched

LENGTH = 40
BACKENDS = {"cpu": {}, "interpret": {"BACKEND": "INTERPRET"}, "reference": {"BACKEND": "REFERENCE"}}


def documents(count: int) -> Tensor:
    return torch.arange(LENGTH) // (LENGTH // count)


def assign_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other


def assign_data_of_another_dtype(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64)


def assign_longer_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = torch.cat([other, other[:7]])


def resize(tensor: Tensor, other: Tensor) -> None:
    tensor.resize_(LENGTH + 9)[:LENGTH].copy_(other)


def through_a_view(tensor: Tensor, other: Tensor) -> None:
    tensor[:].copy_(other)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda tensor, other: tensor.copy_(other),
    "through a view": through_a_view,
    "data": assign_data,
    "data of another dtype": assign_data_of_another_dtype,
    "longer data": assign_longer_data,
    "swap": torch.utils.swap_tensors,
    "set_": lambda tensor, other: tensor.set_(other),
    "resize_": resize,
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(3)]


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-5)


def truth(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias[:LENGTH]
    doc = doc[:LENGTH]
    return torch.softmax(scores.masked_fill(doc[:, None] != doc, -math.inf), -1) @ v


@pytest.mark.covering(1, costly=("interpret",))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_what_becomes_of_its_mask(backend: str, change: str) -> None:
    doc, tensors = documents(2), inputs()
    attend = flexmod.compile(mask_mod=lambda b, h, q, k: doc[q] == doc[k], kernel_options=BACKENDS[backend])
    for count in (2, 2, 2, 5, 4):
        CHANGES[change](doc, documents(count))
        assert near(attend(*tensors), truth(*tensors, doc)), count
        assert near(attend(*tensors), truth(*tensors, doc)), count


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_what_becomes_of_its_score_mod(backend: str, change: str) -> None:
    bias, tensors = documents(2), inputs()
    attend = flexmod.compile(
        lambda s, b, h, q, k: s + bias[k] / 7 * (bias.shape[0] - LENGTH + 1),
        kernel_options=BACKENDS[backend],
    )
    one = torch.zeros(LENGTH)
    for count in (2, 2, 2, 5, 4):
        CHANGES[change](bias, documents(count))
        added = bias / 7 * (bias.shape[0] - LENGTH + 1)
        assert near(attend(*tensors), truth(*tensors, one, added)), count


@torch.no_grad()
def test_a_handle_sees_the_size_of_a_tensor_that_it_does_not_load() -> None:
    table, tensors = torch.zeros(4), inputs()
    attend = flexmod.compile(lambda s, b, h, q, k: s * table.shape[0])
    for size in (4, 4, 2, 1):
        table.data = torch.zeros(size)
        wanted = flex_attention(*tensors, lambda s, b, h, q, k, size=size: s * size)
        assert near(attend(*tensors), wanted)


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doc", documents(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.attend = flexmod.compile(self.score, self.same)

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.temperature

    def same(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.doc[q_idx] == self.doc[kv_idx]


def load(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    module.load_state_dict({"doc": doc, "temperature": temperature})


def param_data(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    module.temperature.data = temperature
    module.doc.data = doc


def rounded(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    load(module, doc, temperature)
    module.to(torch.float64 if module.temperature.dtype == torch.float32 else torch.float32)


def swapped(module: Windowed, doc: Tensor, temperature: Tensor) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(module, doc, temperature)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.covering(1, costly=("interpret",))
@pytest.mark.parametrize("change", [load, param_data, rounded, swapped])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_handle_sees_what_a_module_does(backend: str, change: Callable[..., None]) -> None:
    module, tensors = Windowed(), inputs()
    module.attend = flexmod.compile(module.score, module.same, kernel_options=BACKENDS[backend])
    for count, temperature in ((2, 1.0), (2, 1.0), (2, 1.0), (5, 2.0), (4, 0.5)):
        change(module, documents(count), torch.tensor(temperature))
        found = module.attend(*tensors)
        assert near(found, truth(tensors[0] * temperature, *tensors[1:], documents(count)))
        (grad,) = torch.autograd.grad(found.sin().sum(), module.temperature)
        t = torch.tensor(temperature, requires_grad=True)
        wanted = truth(tensors[0] * t, *tensors[1:], documents(count)).sin().sum()
        assert torch.allclose(grad.float(), torch.autograd.grad(wanted, t)[0], rtol=1e-3, atol=1e-4)


def test_what_watched_sees() -> None:
    for change in CHANGES.values():
        doc = documents(2)
        watched = Watched([doc])
        assert watched.unchanged() and watched.unchanged()
        change(doc, documents(5))
        assert not watched.unchanged()
    with torch.inference_mode():
        uncounted = documents(2)
    assert not Watched([uncounted]).unchanged()


def test_an_address_that_is_used_again() -> None:
    """The memory is kept while it is watched: no other tensor can be taken for it."""
    doc = torch.zeros(1 << 16)
    watched = Watched([doc])
    for _ in range(20):
        doc.data = torch.ones(1)
        doc.data = torch.zeros(1 << 16)
        assert not watched.unchanged()


@torch.no_grad()
def test_memory_of_stale_masks_is_let_go() -> None:
    doc, tensors = documents(2), inputs()
    attend = flexmod.compile(mask_mod=lambda b, h, q, k: doc[q] == doc[k])
    for count in (2, 4, 5, 10) * 2:
        doc.data = documents(count)
        for length in (LENGTH, LENGTH // 2):
            attend(*(x[:, :, :length] for x in tensors))
            attend(*(x[:, :, :length] for x in tensors))
    (variant,) = attend._on.values()
    assert len(variant._masks._by_sizes) == len(attend._bound) == 2
    assert len({id(bound.watched) for bound in attend._bound.values()}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_a_handle_stay(backend: str) -> None:
    cap = 2.0

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * cap

    tensors = inputs()
    attend = flexmod.compile(score_mod, kernel_options=BACKENDS[backend])
    wanted = attend(*tensors)
    cap = 3.0
    assert torch.equal(attend(*tensors), wanted)


# block masks that were built


def mask_of(doc: Tensor) -> BlockMask:
    return create_block_mask(
        lambda b, h, q, k: doc[q] == doc[k], None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )


@pytest.mark.covering(1, costly=("interpret",))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["eager", "handle"])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_mask_finds_its_tiles_again(backend: str, way: str, change: str) -> None:
    doc, tensors = documents(2), inputs()
    mask = mask_of(doc)
    options = BACKENDS[backend]
    handle = flexmod.compile(kernel_options=options)
    for count in (2, 2, 2, 5, 4):
        CHANGES[change](doc, documents(count))
        if way == "handle":
            found = handle(*tensors, mask)
        else:
            found = flex_attention(*tensors, block_mask=mask, kernel_options=options)
        assert near(found, truth(*tensors, doc)), count
        assert torch.equal(mask.table(), mask_of(doc).table())


def shifted(mask: BlockMask) -> BlockMask:
    window = masks.sliding_window(12, causal=False)
    return mask & create_block_mask(window, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


USES: dict[str, Callable[[BlockMask], Any]] = {
    "text": str,
    "repr": repr,
    "dense": lambda mask: mask.to_dense().tolist(),
    "sparsity": lambda mask: mask.sparsity(),
    "facts": lambda mask: mask.facts(),
    "lists": lambda mask: [mask.kv_num_blocks.tolist(), mask.kv_indices.tolist(), mask.q_indices.tolist()],
    "tuple": lambda mask: [x.tolist() if isinstance(x, Tensor) else None for x in mask.as_tuple()],
    "slice": lambda mask: mask[:, :, 1:].table().tolist(),
    "crop": lambda mask: mask._adjust(17, 30).table().tolist(),
    "resize": lambda mask: mask.resize(30, 40).table().tolist(),
    "and": lambda mask: shifted(mask).table().tolist(),
    "or": lambda mask: (shifted(mask) | mask).table().tolist(),
    "not": lambda mask: (~mask).table().tolist(),
    "to": lambda mask: mask.to("cpu").table().tolist(),
    "deepcopy": lambda mask: copy.deepcopy(mask).to_dense().tolist(),
    "svg": lambda mask: mask.to_svg(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_mask_sees_its_captures(use: str) -> None:
    doc = documents(2)
    mask = mask_of(doc)
    USES[use](mask)
    doc.copy_(documents(5))
    assert USES[use](mask) == USES[use](mask_of(doc))


@pytest.mark.parametrize("made", ["slice", "and", "not", "copy"])
@torch.no_grad()
def test_masks_made_of_a_mask_find_their_tiles_too(made: str) -> None:
    make: dict[str, Callable[[BlockMask], BlockMask]] = {
        "slice": lambda mask: mask[:, :, 1:], "and": shifted, "not": lambda mask: ~mask, "copy": copy.copy,
    }  # fmt: skip
    doc = documents(2)
    mask = make[made](mask_of(doc))
    doc.copy_(documents(5))
    wanted = make[made](mask_of(doc))
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    rows = LENGTH - 16 if made == "slice" else LENGTH
    q, k, v = inputs()
    assert torch.equal(
        flex_attention(q[:, :, :rows], k, v, block_mask=mask),
        flex_attention(q[:, :, :rows], k, v, block_mask=wanted),
    )


@torch.no_grad()
def test_lists_that_a_user_gave_stay() -> None:
    doc, tensors = documents(2), inputs()
    built = mask_of(doc)
    lists = built.as_tuple()
    given = BlockMask((LENGTH, LENGTH), *lists[2:10], BLOCK_SIZE=16, mask_mod=built.mask_mod)
    before = given.to_dense()
    doc.copy_(documents(5))
    flex_attention(*tensors, block_mask=given)
    assert torch.equal(given.to_dense(), before)
    assert not torch.equal(built.to_dense(), before)


@torch.no_grad()
def test_a_mask_of_a_number() -> None:
    """The tiles move with the window."""
    window, tensors = torch.tensor(3), inputs()
    mask = create_block_mask(
        lambda b, h, q, k: (q - k).abs() <= window, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )
    for size in (3, 3, 3, 17, 0, 39):
        window.fill_(size)
        near = masks.sliding_window(size + 1, causal=False)
        wanted = create_block_mask(near, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        found = flex_attention(*tensors, block_mask=mask)
        assert torch.equal(found, flex_attention(*tensors, block_mask=wanted))
        assert torch.equal(mask.table(), wanted.table())


@torch.no_grad()
def test_tiles_are_found_again_only_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    find = BlockMask._find_tiles
    monkeypatch.setattr(
        BlockMask, "_find_tiles", staticmethod(lambda *given: counted.append(1) or find(*given))
    )
    with torch.inference_mode():
        uncounted = documents(2)
    doc, other, tensors = documents(2), documents(2), inputs()
    built = [mask_of(doc), mask_of(uncounted), mask_of(other)]
    for _ in range(3):
        for mask in built:
            flex_attention(*tensors, block_mask=mask)
    assert len(counted) == 3  # torch does not say whether `uncounted` has changed
    other += 1
    for _ in range(3):
        for mask in built:
            flex_attention(*tensors, block_mask=mask)
    assert len(counted) == 3 + 3 + 1


def test_a_write_between_forward_and_backward_is_refused() -> None:
    """A call after the write finds other tiles; the backward of the one before has nothing to go by."""
    doc = documents(2)
    mask = mask_of(doc)
    q, k, v = (x.requires_grad_() for x in inputs())
    first = flex_attention(q, k, v, block_mask=mask)
    doc.copy_(documents(5))
    second = flex_attention(q, k, v, block_mask=mask)
    wanted = flex_attention(q, k, v, block_mask=mask_of(doc))
    grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (second, wanted)]
    assert all(map(torch.equal, *grads))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


# what a mask_mod reads of tensors beside the elements that it loads


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "computed": lambda t: t * 1,
    "an element": lambda t: t.view(1)[0],
    "numpy": lambda t: int(t.numpy()),
    "item of a sum": lambda t: (t + t).item() // 2,
    "if": lambda t: 3 if t > 10 else 30,
}


class Near:
    """A mask_mod that Python copies with its tensors."""

    def __init__(self, read: Callable[[Tensor], Any], number: Tensor) -> None:
        self.read, self.number = read, number

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= self.read(self.number)


SAME_MASKS: dict[str, Callable[[BlockMask], BlockMask]] = {
    "itself": lambda mask: mask,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "slice": lambda mask: mask[0],
    "resize": lambda mask: mask.resize(LENGTH, LENGTH),
}


@pytest.mark.covering(1, long=1, costly=("interpret",))
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("made", SAME_MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_mask_sees_what_its_mask_mod_read(backend: str, made: str, read: str) -> None:
    tensors, number = inputs(), torch.tensor(4)

    def built(mod: Near) -> BlockMask:
        return create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    mask = SAME_MASKS[made](built(Near(READS[read], number)))
    mod = mask.mask_mod
    seen = getattr(mod, "mask_mod", mod).number  # of the copy, where the mask_mod was copied
    for value in (4, 30, 1, 1, 12):
        seen.fill_(value)
        wanted = built(Near(READS[read], seen))
        found = flex_attention(*tensors, block_mask=mask, kernel_options=BACKENDS[backend])
        assert torch.equal(mask.table(), wanted.table()), value
        assert torch.equal(
            found, flex_attention(*tensors, block_mask=wanted, kernel_options=BACKENDS[backend])
        )


@pytest.mark.parametrize("made", ["itself", "copy", "slice", "resize"])
@torch.no_grad()
def test_a_mask_sees_the_size_of_a_tensor_that_it_does_not_load(made: str) -> None:
    """Also where the trace was known from an earlier mask."""
    tensors, number = inputs(), torch.zeros(4)

    def built() -> BlockMask:
        return create_block_mask(
            lambda b, h, q, k: (q - k).abs() <= number.shape[0], None, None, LENGTH, LENGTH, device="cpu",
            BLOCK_SIZE=16,
        )  # fmt: skip

    built()
    mask = SAME_MASKS[made](built())
    for size in (4, 30, 1):
        number.resize_(size)
        assert torch.equal(
            flex_attention(*tensors, block_mask=mask), flex_attention(*tensors, block_mask=built())
        )
        assert torch.equal(mask.table(), built().table())


def test_what_was_read_is_known_and_what_was_computed_is_not_kept() -> None:
    number, other = torch.tensor(3), torch.tensor(4)

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k <= ((number + other) * 2 + other).item()

    read = trace(mod, "mask").read
    assert [*map(id, read)] == [id(number), id(other)]


# masks that a CUDA graph reads at each replay; that one is captured is made believe


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    gc.freeze()  # a collection looks at what a test makes alone
    state = [False]
    for module in (autograd, compiled, prepared):
        monkeypatch.setattr(module, "is_captured", lambda device: state[0])
    return state


def tiles_of(mask: Any) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(tensor) for tensor in mask.storage.tensors()]


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@torch.no_grad()
def test_a_graph_keeps_the_tiles_of_a_handle(capturing: list[bool], known: bool) -> None:
    number, tensors = torch.tensor(4), inputs()
    attend = flexmod.compile(None, lambda b, h, q, k: (q - k).abs() <= number)
    attend(*tensors)
    if not known:  # the mask is known, the call is not
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    (bound,) = attend._bound.values()
    tiles = tiles_of(bound.mask)
    del bound
    capturing[0] = True
    attend(*tensors)
    capturing[0] = False
    number.fill_(9)
    attend(*tensors)
    gc.collect()
    assert all(tile() is not None for tile in tiles)
    del attend
    gc.collect()
    assert not any(tile() is not None for tile in tiles)


@torch.no_grad()
def test_a_mask_that_a_graph_makes_is_for_the_graph_alone(capturing: list[bool]) -> None:
    """Its tiles are there after a replay; a call outside of the graph makes its own."""
    tensors = inputs()
    attend = flexmod.compile(None, masks.sliding_window(7))
    capturing[0] = True
    wanted = attend(*tensors)
    capturing[0] = False
    assert not attend._bound
    assert torch.equal(attend(*tensors), wanted)
    (bound,) = attend._bound.values()
    assert bound.mask is not None
    made = {id(tensor) for mask in attend._in_graphs.values() for tensor in mask.storage.tensors()}
    assert made and not made & {id(tensor) for tensor in bound.mask.storage.tensors()}


WAYS = ["eager", "handle", "operation"]


def attending(way: str, mod: Any) -> Any:
    """A callable that attends with a score_mod, in one of `WAYS`."""
    if way == "handle":
        return flexmod.compile(mod)
    if way == "operation":
        return torch.compile(lambda *x: flex_attention(*x, mod), backend="eager", fullgraph=True)
    return lambda *x: flex_attention(*x, mod)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_graph_keeps_the_tiles_of_minus_infinities(capturing: list[bool], way: str) -> None:
    tensors = inputs()
    far = 13 + WAYS.index(way)

    def near_ones(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q - k <= far, s, -math.inf)

    attend = attending(way, near_ones)
    prepared._remembered_mask.cache_clear()
    attend(*tensors)
    attend(*tensors)
    (mask,) = (ready.own for ready in prepared._known_calls.values())
    tiles = tiles_of(mask)
    del mask
    capturing[0] = True
    attend(*tensors)
    capturing[0] = False
    if way == "handle":
        attend._bound = {}  # as after other calls
    prepared.forget()
    prepared._remembered_mask.cache_clear()
    gc.collect()
    assert all(tile() is not None for tile in tiles)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_minus_infinities_that_a_graph_finds_are_for_the_graph_alone(capturing: list[bool], way: str) -> None:
    def near_ones(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q - k <= 19, s, -math.inf)

    capturing[0] = True
    attending(way, near_ones)(*inputs())
    assert not prepared._known_calls


# attributes of the objects that a mod reads are assigned


class Inner(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.bias = nn.Parameter(torch.rand(LENGTH, generator=generator))
        self.register_buffer("width", torch.tensor(3 + 5 * seed))
        self.scales = {"plain": torch.rand(LENGTH, generator=generator)}


class Outer(nn.Module):
    """Its mods read what a submodule holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(0)

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.inner.scales["plain"][q] + self.inner.bias[k]

    def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= self.inner.width


HANDLES: dict[str, Callable[[Outer], tuple[Any, Any]]] = {
    "method": lambda outer: (outer.score, outer.mask),
    "closure": lambda outer: (
        lambda s, b, h, q, k: outer.score(s, b, h, q, k), lambda b, h, q, k: outer.mask(b, h, q, k)
    ),
    "partial": lambda outer: (functools.partial(Outer.score, outer), functools.partial(Outer.mask, outer)),
    "object": lambda outer: (CalledScore(outer.score), CalledMask(outer.mask)),
}  # fmt: skip


class Called:
    def __init__(self, function: Any) -> None:
        self.function = function


class CalledScore(Called):
    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.function(s, b, h, q, k)


class CalledMask(Called):
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.function(b, h, q, k)


def assign_all(outer: Outer) -> None:
    states = {name: state.clone() for name, state in Outer().state_dict().items()}
    states["inner.width"].fill_(11)
    outer.load_state_dict({**states, "inner.bias": torch.rand(LENGTH)}, assign=True)


ASSIGNED: dict[str, Callable[[Outer], None]] = {
    "a parameter": lambda outer: setattr(outer.inner, "bias", nn.Parameter(torch.rand(LENGTH))),
    "a buffer": lambda outer: setattr(outer.inner, "width", torch.tensor(1)),
    "an entry of a dict": lambda outer: outer.inner.scales.update(plain=torch.rand(LENGTH)),
    "a dict": lambda outer: setattr(outer.inner, "scales", {"plain": torch.rand(LENGTH)}),
    "a submodule": lambda outer: setattr(outer, "inner", Inner(2)),
    "load_state_dict": assign_all,
    "another size": lambda outer: setattr(outer.inner, "bias", nn.Parameter(torch.rand(LENGTH + 3))),
}


@pytest.mark.covering(1, long=1, costly=("interpret",))
@pytest.mark.parametrize("way", ["itself", "copy", "deepcopy"])
@pytest.mark.parametrize("assigned", ASSIGNED)
@pytest.mark.parametrize("mods", HANDLES)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_handle_sees_what_is_assigned_to_objects(backend: str, mods: str, assigned: str, way: str) -> None:
    outer, tensors, options = Outer(), inputs(), BACKENDS[backend]
    outer.attend = flexmod.compile(*HANDLES[mods](outer), kernel_options=options)
    if way == "copy":
        outer.attend = copy.copy(outer.attend)
    elif way == "deepcopy" and mods != "closure":  # Python copies no function
        outer = copy.deepcopy(outer)

    def agree() -> bool:
        mask = create_block_mask(outer.mask, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        wanted = flex_attention(*tensors, outer.score, mask, kernel_options=options)
        return all(near(outer.attend(*tensors), wanted) for _ in range(3))

    assert agree()
    for _ in range(2):
        ASSIGNED[assigned](outer)
        assert agree()


class Named:
    """Reaches its tensors by several names. A mod reads `self.second.bias`."""

    def __init__(self, seed: int = 0, many: int = 0) -> None:
        self.first = self.second = Inner(seed)
        self.bias = self.first.bias
        self.others = [SimpleNamespace(bias=self.bias) for _ in range(many)]

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.second.bias[k]


class InItself(Named):
    def __init__(self) -> None:
        super().__init__()
        self.me = self

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.me.bias[k]


class OfTheClass(Named):
    shared = torch.rand(LENGTH)

    def __init__(self) -> None:
        super().__init__()
        self.bias = self.shared  # type: ignore[assignment]

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.shared[k]


class OfTheUser(OfTheClass):
    __module__ = "types_of_the_user"  # begins like the name of one of Python's
    shared = torch.rand(LENGTH)


class OfAModule(Named):
    def __init__(self) -> None:
        super().__init__()
        settings.bias = self.bias

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + settings.bias[k]


class OfAWrapped(OfAModule):
    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + settings.bias[k]

    score.__module__ = "torch"  # as functools.wraps does


class InAHelper(OfAModule):
    """Its mod reads the tensor in methods, and inner functions, of names that occur in code only."""

    def read(self) -> Tensor:
        return (lambda: settings.inner.bias)()

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.read()[k]

    def __init__(self) -> None:
        super().__init__()
        settings.inner = ModuleType("inner")
        settings.inner.bias = self.bias
        self.score = self  # type: ignore[assignment,method-assign]


class OfAProperty(InAHelper):
    @property
    def here(self) -> Tensor:
        module = settings
        return module.bias

    def read(self) -> Tensor:
        return self.here


class InADeque(Named):
    def __init__(self) -> None:
        super().__init__()
        self.last = deque([self.bias])

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.last[-1][k]


settings: Any = ModuleType("settings")
OTHER_NAMES: dict[str, tuple[Callable[[], Named], Callable[[Any], None]]] = {
    "an object by two names": (Named, lambda named: setattr(named, "second", Inner(2))),
    "an object in itself": (InItself, lambda named: setattr(named, "me", Named(2))),
    "among many objects": (lambda: Named(many=20_000), lambda named: setattr(named, "second", Inner(2))),
    "the class": (OfTheClass, lambda named: setattr(OfTheClass, "shared", torch.rand(LENGTH))),
    "a class of another file": (OfTheUser, lambda named: setattr(OfTheUser, "shared", torch.rand(LENGTH))),
    "in place of the class": (OfTheClass, lambda named: setattr(named, "shared", torch.rand(LENGTH))),
    "a Python module": (OfAModule, lambda named: setattr(settings, "bias", torch.rand(LENGTH))),
    "a wrapped function": (OfAWrapped, lambda named: setattr(settings, "bias", torch.rand(LENGTH))),
    "a module in it": (InAHelper, lambda named: setattr(settings.inner, "bias", torch.rand(LENGTH))),
    "another module in it": (
        InAHelper, lambda named: setattr(settings, "inner", SimpleNamespace(bias=torch.rand(LENGTH)))
    ),
    "a property": (OfAProperty, lambda named: setattr(settings, "bias", torch.rand(LENGTH))),
    "a deque": (InADeque, lambda named: named.last.append(torch.rand(LENGTH))),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
@torch.no_grad()
def test_a_tensor_by_several_names(name: str) -> None:
    """A handle sees that the mod reads another tensor by one of them."""
    make, assign = OTHER_NAMES[name]
    named, tensors = make(), inputs()
    attend = flexmod.compile(named.score)
    for _ in range(2):
        for _ in range(2):
            assert near(attend(*tensors), flex_attention(*tensors, named.score))
        assign(named)


class WithDefaults(Named):
    """Its attributes have values in classes too, which its own ones hide."""

    bias = None

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (self.bias if self.other is None else self.other)[k]


class WithTwoDefaults(WithDefaults):
    other = None
    second = None
    bias = torch.rand(LENGTH)


@torch.no_grad()
def test_values_of_a_class_that_an_object_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    named, tensors = WithTwoDefaults(), inputs()
    attend = flexmod.compile(named.score)
    attend(*tensors)
    with monkeypatch.context() as known:
        known.setattr(compiled, "trace", None)
        attend(*tensors)
    for change in (lambda: setattr(named, "other", torch.rand(LENGTH)), lambda: delattr(named, "other"),
                   lambda: delattr(named, "bias")):  # fmt: skip
        change()
        for _ in range(2):
            assert near(attend(*tensors), flex_attention(*tensors, named.score))


class Raises:
    """Any use raises an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class RaisesInSlots:
    __slots__ = ("first",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class RaisesInDict(dict[str, Any]):
    def __len__(self) -> int:
        raise RuntimeError


class RaisesInClass(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


STRANGE: dict[str, Callable[[], Any]] = {
    "attributes": Raises, "slots": RaisesInSlots, "dict": RaisesInDict,
    "proxy": lambda: weakref.proxy(Inner(0)),  # which is dead at once
    "class": lambda: RaisesInClass("Made", (), {}), "no module": type("Made", (), {"__module__": None}),
}  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE)
@torch.no_grad()
def test_objects_that_raise_errors_beside_a_tensor(strange: str) -> None:
    """They are the user's own, and a mod may never read them."""
    named, tensors = Named(), inputs()
    named.other = STRANGE[strange]()  # type: ignore[attr-defined]
    attend = flexmod.compile(named.score)
    for _ in range(2):
        for _ in range(2):
            assert near(attend(*tensors), flex_attention(*tensors, named.score))
        named.second = Inner(2)


@torch.no_grad()
def test_a_search_in_vain_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    named, tensors = Named(many=20_000), inputs()
    attend = flexmod.compile(named.score)
    attend(*tensors)
    monkeypatch.setattr(compiled, "links_of", None)
    assert near(attend(*tensors), flex_attention(*tensors, named.score))


@torch.no_grad()
def test_what_was_assigned_before_the_first_call_is_seen() -> None:
    outer, tensors = Outer(), inputs()
    attend = flexmod.compile(outer.score, outer.mask)
    outer.inner = Inner(2)
    again = flexmod.compile(outer.score, outer.mask)
    assert torch.equal(attend(*tensors), again(*tensors))


def test_a_known_call_does_not_trace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, tensors = Outer(), inputs()
    outer.attend = flexmod.compile(outer.score, outer.mask)
    outer.attend(*tensors)
    monkeypatch.setattr(compiled, "trace", None)
    for _ in range(3):
        outer.attend(*tensors)
    with torch.no_grad():
        outer.inner.width.fill_(9)
        outer.attend(*tensors)
        outer.attend(*tensors)


def mask_of_mod(mask_mod: Any, batch: int = 2) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def offset(near: Any, shift: Tensor) -> BlockMask:
    causal = masks.causal()
    return create_block_mask(causal, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16, q_offset=shift)


def shortened(near: Any, shift: Tensor) -> BlockMask:
    mask = create_block_mask(near, 2, None, 2 * LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    mask.seq_lengths = (LENGTH, LENGTH)
    return mask


def listed(near: Any, shift: Tensor) -> BlockMask:
    """A look at the lists changes nothing."""
    mask = mask_of_mod(near)
    assert mask.kv_indices.shape[0] == 2 and not mask.kv_num_blocks.is_inference()
    return mask


MADE: dict[str, Callable[[Any, Tensor], BlockMask]] = {
    "mask": lambda near, shift: mask_of_mod(near),
    "offset": offset,
    "and": lambda near, shift: mask_of_mod(near) & mask_of_mod(masks.sliding_window(LENGTH, causal=False), 1),
    "not": lambda near, shift: ~mask_of_mod(lambda b, h, q, k: q + shift[b] < k),
    "entries": lambda near, shift: mask_of_mod(near)[[0, 1]],
    "rows": lambda near, shift: mask_of_mod(near)[:, :, :],
    "shortened": shortened,
    "listed": listed,
}


@pytest.mark.covering(1, long=1, costly=(True,))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MADE)
@torch.inference_mode()
def test_writes_of_inference_mode_count(name: str, compiled: bool) -> None:
    """torch counts no writes to a tensor of inference mode, such as the position of a decoder's token."""
    shift = torch.zeros(2, dtype=torch.int32)
    mask = MADE[name](lambda b, h, q, k: q + shift[b] >= k, shift)
    q, k, v = (torch.randn(2, 1, LENGTH, 8) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    call = torch.compile(attend, backend="aot_eager") if compiled else attend
    for value in (0, 60, 20):
        shift.copy_(torch.tensor([value, value // 2]))
        at = torch.arange(LENGTH)
        kept = at[:, None] + shift[:, None, None, None] >= at
        exact = scaled_dot_product_attention(q, k, v, kept)
        torch.testing.assert_close(call(q, k, v), exact, atol=1e-5, rtol=1e-5)


def test_full_tiles_that_a_list_of_inference_mode_gets_later() -> None:
    """A write lists the last tile, which reaches past the end, as full."""
    tensors = tuple(torch.randn(1, 1, n, 8) for n in (16, 40, 40))
    with torch.inference_mode():
        none, one = (torch.full((1, 1, 1), n, dtype=torch.int32) for n in (0, 1))
        tiles = torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(
            none, tiles.clone(), one, tiles, 16, seq_lengths=(16, 40), compute_q_blocks=False
        )
        options = {"BACKEND": "INTERPRET"}
        for count in (1, 3):
            one.fill_(count)
            out = flex_attention(*tensors, block_mask=mask, kernel_options=options)
            exact = scaled_dot_product_attention(*tensors, torch.arange(40)[None] < 16 * count)
            torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
