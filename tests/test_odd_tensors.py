"""Tensors that are not plain: torch dispatches them with equal results, or an error names them.

The kinds are in odd_tensors.py; each stands in each place of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import odd_tensors as odd
import pytest
import torch
from tiers import long_but
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexmod
from flexmod import AuxOutput, AuxRequest, BlockMask, create_block_mask, errors, flex_attention, masks

LENGTH, BLOCK = 32, 16
INTERPRET, REFERENCE = {"BACKEND": "INTERPRET"}, {"BACKEND": "REFERENCE"}
BACKENDS = pytest.mark.parametrize("options", [None, INTERPRET], ids=["cpu", "interpret"])
ALL = pytest.mark.parametrize(
    "options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"]
)
FORMS = pytest.mark.parametrize(
    ("form", "options"),
    [("eager", None), ("eager", INTERPRET), ("eager", REFERENCE), ("handle", INTERPRET)],
    ids=["cpu", "interpret", "reference", "handle"],
)
PLACES = ("query", "key", "value", "bias", "documents", "lists")
NAMED = (
    errors.TensorKindError, errors.FreedStorageError, errors.NestedTensorInput, errors.NotStrided,
    errors.UnsupportedDtype, errors.ModDtypeError, errors.DeviceMismatch, errors.BlockMaskPartsError,
)  # fmt: skip


def given() -> dict[str, Tensor]:
    """What a call is made of. Values that a quantized or a complex copy would change count too."""
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 2, LENGTH, 16, generator=draw) for name in ("query", "key", "value")}
    return tensors | {
        "bias": torch.randn(LENGTH, generator=draw),
        "documents": torch.arange(LENGTH, dtype=torch.int32) // 12,
        "lists": torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32),
    }


def mask_of(documents: Tensor, lists: Tensor) -> BlockMask:
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    return BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=BLOCK, mask_mod=same)


def attended(form: str, options: Any, **changed: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) by flex_attention or a handle."""
    parts = given() | changed
    bias, documents, lists = parts["bias"], parts["documents"], parts["lists"]

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score) + bias[kv_idx]

    mask = mask_of(documents, lists)
    tensors = parts["query"], parts["key"], parts["value"]
    if form == "handle":
        attend = flexmod.compile(biased, kernel_options=options)
        result: Any = attend(*tensors, mask, return_lse=True)
    else:
        result = flex_attention(*tensors, biased, mask, kernel_options=options, return_lse=True)
    return result  # type: ignore[no-any-return]


@pytest.mark.covering(1)
@FORMS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", odd.TAKEN)
def test_dispatched_or_read(kind: str, place: str, form: str, options: Any) -> None:
    """A mask holds no tensor that a kernel could not read: it is no argument of an operation."""
    wanted = attended(form, options)
    try:
        found = attended(form, options, **{place: odd.TAKEN[kind](given()[place])})
    except errors.TensorKindError:
        assert place in ("documents", "lists") and kind in odd.DISPATCHED
        return
    assert place not in ("documents", "lists") or kind not in odd.DISPATCHED
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(odd.plain(one), other, rtol=0, atol=1e-6)


@FORMS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", odd.REFUSED)
def test_refused(kind: str, place: str, form: str, options: Any) -> None:
    changed = {place: odd.REFUSED[kind](given()[place])}
    with pytest.raises(NAMED):
        attended(form, options, **changed)


@pytest.mark.parametrize("kind", ["nested", "jagged", "coo", "mkldnn", "complex", "freed", "meta"])
def test_refused_in_another_layout(kind: str) -> None:
    query = odd.REFUSED[kind](given()["query"])
    with pytest.raises((*NAMED, errors.NestedTensorInput)):
        flex_attention(query, given()["key"], given()["value"], layout="bshd")


def gradients(kind: Callable[[Tensor], Tensor], places: tuple[int, ...], options: Any) -> list[Tensor]:
    """Of query, key, value and bias, which are of a kind in these places."""
    parts = given()
    plain = [parts[name].requires_grad_() for name in ("query", "key", "value", "bias")]
    tensors = [kind(x) if place in places else x for place, x in enumerate(plain)]
    bias = tensors[3]
    out, lse = flex_attention(
        *tensors[:3], lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx],
        mask_of(parts["documents"], parts["lists"]), return_lse=True, kernel_options=options,
    )  # fmt: skip
    leaves = [x if x.is_leaf else leaf for x, leaf in zip(tensors, plain, strict=True)]
    return [odd.plain(x) for x in torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]


@pytest.mark.covering(1, long=1)
@BACKENDS
@pytest.mark.parametrize("places", [(0,), (3,), (0, 1, 2, 3)], ids=["query", "bias", "all"])
@pytest.mark.parametrize("kind", [kind for kind in odd.TAKEN if kind != "functional"])
def test_gradients(kind: str, places: tuple[int, ...], options: Any) -> None:
    found, wanted = gradients(odd.TAKEN[kind], places, options), gradients(lambda x: x, (), options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_wrapper_sees_the_operations_of_the_library() -> None:
    odd.Wrapper.seen.clear()
    gradients(odd.Wrapper, (0,), None)
    ours = torch.ops.flexmod
    wanted = [ours.attention.default, ours.attention_backward.default]
    assert [func for func in odd.Wrapper.seen if func.namespace == "flexmod"] == wanted


@pytest.mark.parametrize(
    "options", [None, pytest.param(INTERPRET, marks=pytest.mark.long)], ids=["cpu", "interpret"]
)
def test_a_wrapper_of_two(options: Any) -> None:
    """Each of the two tensors is attended to, compiled too."""
    plain = [given()[name] for name in ("query", "key", "value")]
    wanted = [flex_attention(*(x * by for x in plain), kernel_options=options) for by in (1, 2)]
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for attend in (flex_attention, compiled):
        found = attend(*(TwoTensor(x, x * 2) for x in plain), kernel_options=options)
        torch.testing.assert_close([found.a, found.b], wanted, rtol=0, atol=1e-6)


# wrappers that say other things of a tensor than they hold


def shorter(x: Tensor) -> Tensor:
    return odd.Wrapper(x[:, :, :-1], shape=x.shape)


@BACKENDS
@pytest.mark.parametrize(
    ("place", "lie", "error"),
    [
        ("query", shorter, errors.MaskLengthError),
        ("key", shorter, errors.LengthMismatch),
        ("query", lambda x: odd.Wrapper(x[:, :1], shape=x.shape), errors.HeadRatioError),
        ("key", lambda x: odd.Wrapper(x.to("meta"), device="cpu"), errors.DeviceMismatch),
        ("value", lambda x: odd.Wrapper(x.double(), dtype=torch.float32), TypeError),
        ("value", lambda x: odd.Wrapper(odd.freed(x)), errors.FreedStorageError),
        ("value", lambda x: odd.Wrapper(x.to_sparse(), strides=x.stride()), errors.NotStrided),
        ("bias", lambda x: odd.Wrapper(x.int(), dtype=torch.float32), errors.OperationTensorError),
        ("bias", lambda x: odd.Wrapper(x[None], shape=x.shape, strides=(1,)), errors.OperationTensorError),
        ("bias", lambda x: odd.Wrapper(odd.freed(x)), errors.FreedStorageError),
    ],
    ids=[
        "length of query", "length of key", "heads", "device", "dtype", "freed", "sparse", "dtype of bias",
        "rank of bias", "freed bias",
    ],
)  # fmt: skip
def test_a_wrapper_that_lies(place: str, lie: Callable[[Tensor], Tensor], error: Any, options: Any) -> None:
    with pytest.raises(error) as raised:
        attended("eager", options, **{place: lie(given()[place])})
    assert isinstance(raised.value, errors.FlexmodError)


@BACKENDS
def test_a_wrapper_with_other_strides_inside(options: Any) -> None:
    for view in (lambda x: x.mT.contiguous().mT, lambda x: x[:1].expand(x.shape)):
        query = view(given()["query"])
        wanted = attended("eager", options, query=query)
        found = attended("eager", options, query=odd.Wrapper(query, strides=given()["query"].stride()))
        torch.testing.assert_close(odd.plain(found[0]), wanted[0], rtol=0, atol=1e-6)


class LyingBackward(odd.Wrapper):
    """Hands on a gradient that is too short."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.flexmod.attention_backward.default:
            args = (cls(odd.plain(args[0])[:, :, :3]), *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


@BACKENDS
def test_a_backward_that_lies(options: Any) -> None:
    query = LyingBackward(given()["query"].requires_grad_())
    out = flex_attention(query, given()["key"], given()["value"], kernel_options=options)
    with pytest.raises(errors.OperationTensorError, match="attention_backward was given grad_out as"):
        out.backward(torch.ones_like(out))


# calls that are known


@pytest.mark.covering(1)
@BACKENDS
@pytest.mark.parametrize("form", ["eager", "handle"])
@pytest.mark.parametrize("place", ["query", "value", "bias", "documents", "lists"])
@pytest.mark.parametrize("size", [0, 8])
def test_storage_that_shrinks_after_a_call(size: int, place: str, form: str, options: Any) -> None:
    parts = given()
    bias, mask = parts["bias"], mask_of(parts["documents"], parts["lists"])

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    handle = flexmod.compile(biased, kernel_options=options)

    def run() -> Any:
        tensors = parts["query"], parts["key"], parts["value"]
        if form == "handle":
            return handle(*tensors, mask)
        return flex_attention(*tensors, biased, mask, kernel_options=options)

    for _ in range(4):
        run()
    parts[place].untyped_storage().resize_(size)
    with pytest.raises(errors.FreedStorageError):
        run()


READS_OF_A_NUMBER: dict[str, Callable[[Tensor], Any]] = {
    "t * 2": lambda t: t * 2,
    "torch.exp(t)": torch.exp,
    "t.item()": lambda t: t.item(),
    "if t > 3": lambda t: 1.0 if t > 3 else 2.0,
    "torch.stack([t, t])": lambda t: torch.stack([t, t]).sum(),
    "t.view(())": lambda t: t.view(()).clone(),
}


@pytest.mark.parametrize("read", READS_OF_A_NUMBER.values(), ids=READS_OF_A_NUMBER)
@pytest.mark.parametrize("mask", [False, True], ids=["score", "mask"])
def test_torch_computes_with_freed_storage(read: Callable[[Tensor], Any], mask: bool) -> None:
    """While a mod is traced; torch itself ends the process."""
    temperature = odd.freed(torch.tensor(0.5))
    parts = given()
    tensors = parts["query"], parts["key"], parts["value"]

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * read(temperature)

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= read(temperature)

    with pytest.raises(errors.FreedStorageError, match="needs 4 bytes"):
        if mask:
            create_block_mask(near, None, None, 64, 64, device="cpu")
        else:
            flex_attention(*tensors, scaled)
    with pytest.raises(errors.FreedStorageError, match="needs 4 bytes"):
        flexmod.compile(*(None, near) if mask else (scaled,))(*tensors)


@BACKENDS
@pytest.mark.parametrize("made", [odd.freed, odd.shrunk, odd.Wrapper, odd.Stored, lambda x: x.to_sparse()])
def test_gradients_of_the_output_of_other_kinds(made: Callable[[Tensor], Tensor], options: Any) -> None:
    """Also after a backward that is recorded."""
    query = given()["query"].requires_grad_()
    out = flex_attention(query, given()["key"], given()["value"], kernel_options=options)
    ones = torch.ones_like(out)
    for _ in range(3):
        torch.autograd.grad(out, query, ones, retain_graph=True)
    named = errors.TensorKindError, errors.FreedStorageError
    with pytest.raises(named, match="the gradient of the output"):
        torch.autograd.grad(out, query, made(ones))


@BACKENDS
def test_what_was_saved_and_then_freed(options: Any) -> None:
    parts = given()
    out = flex_attention(
        parts["query"].requires_grad_(), parts["key"], parts["value"], kernel_options=options
    )
    parts["key"].untyped_storage().resize_(0)
    with pytest.raises(errors.FreedStorageError, match="a tensor saved for the backward"):
        out.sum().backward()


# __torch_function__


@pytest.fixture
def seen() -> Iterator[list[Any]]:
    odd.Seeing.seen.clear()
    yield odd.Seeing.seen
    odd.Seeing.seen.clear()


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_class_sees_the_call(place: str, seen: list[Any]) -> None:
    parts = {name: given()[name] for name in ("query", "key", "value")}
    changed = parts | {place: parts[place].as_subclass(odd.Seeing)}
    handle = flexmod.compile()
    for attend in (flex_attention, handle):
        out = attend(*changed.values())
        assert type(out) is odd.Seeing and torch.equal(odd.plain(out), flex_attention(*parts.values()))
    assert [func for func in seen if func in (flex_attention, handle)] == [flex_attention, handle]


@pytest.mark.parametrize("request_", [AuxRequest(), AuxRequest(lse=True), AuxRequest(True, True)], ids=str)
def test_what_else_is_returned_is_of_the_class(request_: AuxRequest) -> None:
    plain = [given()[name] for name in ("query", "key", "value")]
    out, aux = flex_attention(plain[0].as_subclass(odd.Renamed), *plain[1:], return_aux=request_)
    _, wanted = flex_attention(*plain, return_aux=request_)
    assert type(out) is odd.Renamed and type(aux) is AuxOutput
    for one, other in zip(aux, wanted, strict=True):
        assert one is other is None or type(one) is odd.Renamed and torch.equal(odd.plain(one), other)


def test_a_captured_tensor_whose_class_decides_what_is_read() -> None:
    scales = given()["bias"].as_subclass(odd.Seeing)
    parts = given()
    with pytest.raises(errors.TensorKindError, match="of the class Seeing, whose own __torch_function__"):
        flex_attention(
            parts["query"], parts["key"], parts["value"], lambda s, b, h, q_idx, kv_idx: s * scales[kv_idx]
        )
    with pytest.raises(errors.TensorKindError, match="of the class Seeing, whose own __torch_function__"):
        create_block_mask(lambda b, h, q_idx, kv_idx: scales[q_idx] > 0, None, None, LENGTH, LENGTH, "cpu")


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


def test_a_function_mode_sees_the_call_and_nothing_inside() -> None:
    tensors = [given()[name] for name in ("query", "key", "value")]
    handle = flexmod.compile()
    with SeesFunctions() as mode:
        for attend in (flex_attention, handle):
            attend(*tensors)
    assert mode.seen == [flex_attention, handle]


@pytest.mark.parametrize("nested", [False, True])
def test_a_default_device_holds_inside_of_mods(nested: bool) -> None:
    tensors = [given()[name] for name in ("query", "key", "value")]

    def made_inside(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.zeros(LENGTH)[kv_idx]

    torch.set_default_device("cpu" if nested else None)
    try:
        with torch.device("meta"), pytest.raises(errors.DeviceMismatch, match="captured0"):
            flex_attention(*tensors, made_inside)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("handle", [False, True], ids=["eager", "handle"])
@BACKENDS
def test_a_derivative_is_made_inside_of_the_operation(options: Any, handle: bool) -> None:
    """torch's functions are off there; a rule of a derivative runs on proxies."""
    number = 1.37 + len(str(options)) + handle  # another graph for each case: derivatives are remembered

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(score > 0.12, score.clamp(max=number), torch.minimum(score, score * number))

    attend = flexmod.compile(capped, kernel_options=options) if handle else (
        lambda *tensors: flex_attention(*tensors, capped, kernel_options=options)
    )  # fmt: skip
    parts = [given()[name].requires_grad_() for name in ("query", "key", "value")]
    found = torch.autograd.grad(attend(parts[0].as_subclass(odd.Renamed), *parts[1:]).sum(), parts)
    expected = torch.autograd.grad(attend(*parts).sum(), parts)
    assert all(torch.equal(odd.plain(one), other) for one, other in zip(found, expected, strict=True))


# dispatch modes, tensors without values


class SeesOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


@BACKENDS
@pytest.mark.parametrize("form", ["eager", "handle"])
def test_a_dispatch_mode_sees_one_operation(form: str, options: Any) -> None:
    tensors = [given()[name] for name in ("query", "key", "value")]
    handle = flexmod.compile(kernel_options=options)

    def attend() -> Any:
        return handle(*tensors) if form == "handle" else flex_attention(*tensors, kernel_options=options)

    wanted = [attend() for _ in range(3)][0]  # the call is known, and recorded
    with SeesOperations() as mode:
        found = attend()
    assert torch.equal(found, wanted)
    assert mode.seen == [torch.ops.flexmod.attention.default]


@pytest.mark.parametrize("masked", [False, True])
def test_make_fx_records_the_operation(masked: bool) -> None:
    parts = given()
    outside = mask_of(parts["documents"], parts["lists"])

    def attend(query: Tensor, bias: Tensor) -> Any:
        mask = outside
        if masked:
            mask = create_block_mask(
                lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, LENGTH, LENGTH, "cpu"
            )
        score_mod = lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx]  # noqa: E731
        return flex_attention(query, parts["key"], parts["value"], score_mod, mask)

    recorded = make_fx(attend)(parts["query"], parts["bias"])
    other = parts["query"] * 2, parts["bias"] - 1
    torch.testing.assert_close(recorded(*other), attend(*other))


@pytest.mark.parametrize(
    "options", [pytest.param(None, marks=pytest.mark.long), INTERPRET], ids=["cpu", "interpret"]
)
def test_make_fx_records_symbols(options: Any) -> None:
    """One graph for all lengths, with a learned table and a mask that is made inside."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, documents: Tensor) -> Any:
        tensors = [x.detach().requires_grad_() for x in (query, key, value, bias)]
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx),
            None, None, query.shape[2], key.shape[2], "cpu", BLOCK_SIZE=BLOCK,
        )  # fmt: skip
        score_mod = lambda s, b, h, q_idx, kv_idx: s + tensors[3][kv_idx]  # noqa: E731
        out = flex_attention(*tensors[:3], score_mod, mask, kernel_options=options)
        return out, *torch.autograd.grad(out.sin().sum(), tensors)

    names = "query", "key", "value", "bias", "documents"
    case = [given()[name] for name in names]
    recorded = make_fx(attend, tracing_mode="symbolic")(*case)
    shorter = [x[:, :, :21] for x in case[:3]] + case[3:]
    for tensors in (case, shorter):
        torch.testing.assert_close(recorded(*tensors), attend(*tensors))


@BACKENDS
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_transform_inside_of_make_fx_is_named(mode: str, options: Any) -> None:
    def attend(*tensors: Tensor) -> Any:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")
        return flex_attention(*tensors, None, mask, kernel_options=options).sum()

    case = [given()[name] for name in ("query", "key", "value")]
    with pytest.raises(errors.TensorKindError, match=r"inside of a transform.*\n.*query outside of it"):
        make_fx(grad(attend), tracing_mode=mode)(*case)


@ALL
@pytest.mark.parametrize("form", ["eager", "handle"])
def test_fake_tensors(form: str, options: Any) -> None:
    """Shapes, dtypes and the strides of results equal a real call's. A handle forgets its mask."""
    handle = flexmod.compile(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, kernel_options=options)

    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> list[Tensor]:
        if form == "handle":
            out, lse = handle(query, key, value, return_lse=True)
        else:
            mask = create_block_mask(
                lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx],
                None, None, LENGTH, LENGTH, "cpu",
            )  # fmt: skip
            out, lse = flex_attention(query, key, value, None, mask, return_lse=True, kernel_options=options)
        return [out, lse, *torch.autograd.grad(out.sum(), (query, key, value))]

    def tensors() -> list[Tensor]:
        parts = given()
        turned = [parts[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key")]
        return [x.requires_grad_() for x in (*turned, parts["value"])] + [parts["documents"]]

    with FakeTensorMode() as mode:
        fake = attend(*(mode.from_tensor(x) for x in tensors()))
    real = attend(*tensors())
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    assert [x.stride() for x in fake[:2]] == [x.stride() for x in real[:2]]


def test_a_fake_learned_tensor_in_the_reference() -> None:
    with FakeTensorMode() as mode:
        parts = {name: mode.from_tensor(x) for name, x in given().items()}
        leaves = [parts[name].requires_grad_() for name in ("query", "key", "value", "bias")]
        *of_call, bias = leaves
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")
        out = flex_attention(
            *of_call, lambda s, b, h, q, k: s + bias[k], mask, kernel_options={"BACKEND": "REFERENCE"}
        )
        found = torch.autograd.grad(out.sum(), leaves)
    assert [x.shape for x in found] == [x.shape for x in leaves]


def test_symbolic_sizes_in_the_reference() -> None:
    def attend(q: Tensor) -> Any:
        return flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, kernel_options={"BACKEND": "REFERENCE"})

    query = given()["query"]
    assert torch.equal(make_fx(attend, tracing_mode="symbolic")(query)(query), attend(query))


@pytest.mark.parametrize("form", ["eager", "reference", "handle"])
def test_meta_tensors(form: str) -> None:
    parts = {name: x.to("meta") for name, x in given().items()}
    leaves = [parts[name].requires_grad_() for name in ("query", "key", "value")]
    bias, documents = parts["bias"].requires_grad_(), parts["documents"]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    if form == "handle":
        result: Any = flexmod.compile(score_mod, mask_mod)(*leaves, return_lse=True)
    else:
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "meta")
        assert (mask.device.type, mask.shape) == ("meta", (1, 1, LENGTH, LENGTH))
        options: Any = {"BACKEND": "REFERENCE"} if form == "reference" else None
        result = flex_attention(*leaves, score_mod, mask, return_lse=True, kernel_options=options)
    out, lse = result
    assert (out.device.type, out.shape, lse.shape) == ("meta", leaves[0].shape, leaves[0].shape[:3])
    found = torch.autograd.grad(out.sum() + lse.sum(), (*leaves, bias))
    assert [x.shape for x in found] == [x.shape for x in (*leaves, bias)]


def test_a_mask_without_values_is_for_tensors_without_values() -> None:
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, LENGTH, LENGTH, "meta")
    with pytest.raises(errors.DeviceMismatch, match="query is on cpu but block_mask is on meta"):
        flex_attention(*[given()["query"]] * 3, block_mask=mask)


@BACKENDS
@pytest.mark.parametrize("place", ["query", "bias"])
def test_zeros_without_storage(place: str, options: Any) -> None:
    zeros = torch.zeros_like(given()[place])
    found = attended("eager", options, **{place: torch._efficientzerotensor(zeros.shape)})
    torch.testing.assert_close(found, attended("eager", options, **{place: zeros}), rtol=0, atol=1e-6)


@BACKENDS
def test_functionalize(options: Any) -> None:
    parts = given()
    outside = mask_of(parts["documents"], parts["lists"])
    bias = parts["bias"]

    def attend(query: Tensor, mask: BlockMask | None = outside) -> Any:
        if mask is None:
            mask = create_block_mask(
                lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, LENGTH, LENGTH, "cpu"
            )
        score_mod = lambda s, b, h, q_idx, kv_idx: torch.tanh(s) + bias[kv_idx]  # noqa: E731
        return flex_attention(query, parts["key"], parts["value"], score_mod, mask, kernel_options=options)

    for mask in (outside, None):
        found = functionalize(lambda x, mask=mask: attend(x, mask))(parts["query"])
        torch.testing.assert_close(found, attend(parts["query"], mask), rtol=0, atol=1e-6)
    for transform in (lambda f: grad(functionalize(f)), lambda f: functionalize(grad(f))):
        with pytest.raises(errors.TensorKindError, match="functionaliz"):
            transform(lambda x: attend(x).sum())(parts["query"])


@pytest.mark.parametrize("made", [odd.Wrapper, odd.freed])
def test_below_the_wrappers_of_a_transform(made: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((errors.TensorKindError, errors.FreedStorageError), match="query"):
        grad(lambda x: attended("eager", INTERPRET, query=x)[0].sum())(made(given()["query"]))


# compiled, packed, distributed


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("place", ["query", "value"])
@pytest.mark.parametrize(
    "kind",
    [
        "negative",
        pytest.param("wrapper", marks=pytest.mark.long),
        pytest.param("asynchronous", marks=pytest.mark.every),
        pytest.param("parameter", marks=pytest.mark.every),
    ],
)
def test_compiled(kind: str, place: str) -> None:
    torch._dynamo.reset()
    changed = {place: odd.TAKEN[kind](given()[place])}
    found = torch.compile(attended, backend="aot_eager")("eager", None, **changed)
    torch.testing.assert_close(odd.plain(found[0]), attended("eager", None)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    long_but(
        {"jagged", "coo", "complex", "freed"},
        ["nested", "jagged", "coo", "mkldnn", "complex", "freed", "shrunk"],
    ),
)
def test_refused_in_a_graph(kind: str) -> None:
    torch._dynamo.reset()
    attend = torch.compile(lambda x, k, v: flex_attention(x, k, v), backend="aot_eager")
    with pytest.raises(NAMED):
        attend(odd.REFUSED[kind](given()["query"]), given()["key"], given()["value"])


@pytest.mark.parametrize("place", long_but({"score_mod"}, ["score_mod", "block_mask"]))
def test_a_tensor_without_values_is_refused_in_a_graph(place: str) -> None:
    """torch would run what computes shapes, and return uninitialized results."""
    torch._dynamo.reset()
    bias = given()["bias"].to("meta" if place == "score_mod" else "cpu")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        device = "meta" if place == "block_mask" else "cpu"
        mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH, device)
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + bias[k], mask)

    with pytest.raises(errors.DeviceMismatch):
        torch.compile(attend, backend="aot_eager")(*[given()[name] for name in ("query", "key", "value")])


@pytest.mark.parametrize("kind", [*odd.REFUSED])
@pytest.mark.parametrize("place", ["query", "cu_seqlens"])
def test_packed_sequences(kind: str, place: str) -> None:
    packed = given()["query"][0].transpose(0, 1).contiguous()
    parts = {"query": packed, "cu_seqlens": torch.tensor([0, 12, LENGTH])}
    if kind == "jagged" and place == "cu_seqlens":
        parts[place] = odd.nested(parts[place].view(3, 1), layout=torch.jagged)
    else:
        parts[place] = odd.REFUSED[kind](parts[place])
    with pytest.raises((*NAMED, errors.PackedShapeError, errors.LibraryArgumentError)):
        flexmod.varlen_attention(parts["query"], packed, packed, parts["cu_seqlens"])


FREED = ("freed", "view of freed storage", "shrunk")


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, kind) for place in ("query", "key", "value") for kind in FREED),
        *((f"scales.{name}", kind) for name in ("query", "value") for kind in odd.REFUSED),
    ],
)
@pytest.mark.parametrize("form", ["eager", "handle"])
def test_float8(form: str, place: str, kind: str) -> None:
    """Converting a freed tensor in torch would end the process."""
    tensors = {name: flexmod.quantize(given()[name])[0] for name in ("query", "key", "value")}
    parts = tensors | {f"scales.{name}": torch.ones(x.shape[:2]) for name, x in tensors.items()}
    parts[place] = odd.REFUSED[kind](parts[place])
    attend: Any = flex_attention if form == "eager" else flexmod.compile()
    scales = flexmod.Scales(*(parts[f"scales.{name}"] for name in tensors))
    named = (*NAMED, errors.ScalesTypeError, errors.ScalesShapeError)
    with pytest.raises(named, match=place if kind in FREED else None):
        attend(*(parts[name] for name in tensors), scales=scales)


def gqa(value: Tensor) -> Any:
    """Key has one head, value two."""
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 1, 3, 8)
    return flex_attention(query, key, value, enable_gqa=True)


STARTS = torch.zeros(3, dtype=torch.int32)
LSE = torch.ones(1, 8, 1)


@pytest.mark.parametrize("kind", FREED)
@pytest.mark.parametrize(
    ("name", "tensor", "read"),
    [
        ("value", torch.zeros(1, 2, 3, 8), gqa),
        ("q_offset", STARTS, lambda x: flex_attention(*torch.zeros(3, 3, 1, 4, 8), q_offset=x)),
        ("lengths", STARTS, lambda x: masks.document(lengths=x)),
        ("cu_seqlens", STARTS, lambda x: masks.document(cu_seqlens=x, total=4)),
        ("offsets", STARTS, lambda x: masks.jagged(x, total=4)),
        ("parents", STARTS - 1, masks.tree),
        ("sink", torch.zeros(8), lambda x: flexmod.apply_sink(torch.ones(1, 8, 1, 8), LSE, x)),
    ],
)
def test_what_torch_would_read(name: str, tensor: Tensor, read: Callable[[Tensor], Any], kind: str) -> None:
    with pytest.raises(errors.FreedStorageError, match=f"^{name} needs"):
        read(odd.REFUSED[kind](tensor))


@pytest.mark.parametrize("kind", ["wrapper", "subclass with __torch_dispatch__", "negative", "subclass"])
def test_packed_sequences_that_are_dispatched(kind: str) -> None:
    packed, lengths = given()["query"][0].transpose(0, 1).contiguous(), torch.tensor([0, 12, LENGTH])
    found = flexmod.varlen_attention(odd.TAKEN[kind](packed), packed, packed, lengths)
    wanted = flexmod.varlen_attention(packed, packed, packed, lengths)
    torch.testing.assert_close(odd.plain(found), wanted, rtol=0, atol=1e-6)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of a process that stands for two, in which nothing is sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_dispatched(mesh: Any) -> None:
    """Without a strategy for the operation torch says that there is none."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    plain = [given()[name] for name in ("query", "key", "value")]
    tensors = [distribute_tensor(x, mesh, [Replicate()]) for x in plain]
    with pytest.raises(NotImplementedError, match="flexmod.attention.default"):
        flex_attention(*tensors)
    assert torch.equal(flex_attention(*(x.to_local() for x in tensors)), flex_attention(*plain))
    with pytest.raises(errors.TensorKindError, match=r"query is of .* DTensor.*\n.*query\.to_local\(\)"):
        flex_attention(tensors[0], *plain[1:])
    bias = distribute_tensor(torch.randn(plain[1].shape[2]), mesh, [Replicate()])
    for options in ({}, INTERPRET, {"BACKEND": "REFERENCE"}):
        with pytest.raises(errors.TensorKindError, match=r"pass bias\.to_local\(\) or bias\.full_tensor\(\)"):
            flex_attention(*plain, lambda s, b, h, q, k: s + bias[k], kernel_options=options)
        with pytest.raises(errors.TensorKindError, match=r"pass bias\.to_local\(\) or bias\.full_tensor\(\)"):
            flexmod.compile(lambda s, b, h, q, k: s + bias[k], kernel_options=options)(*plain)
    documents = distribute_tensor(given()["documents"], mesh, [Replicate()])
    with pytest.raises(errors.TensorKindError, match=r"pass documents\.to_local\(\) or"):
        mask_of(documents, given()["lists"])


@BACKENDS
def test_a_list_that_is_assigned(options: Any) -> None:
    parts = given()
    mask = mask_of(parts["documents"], parts["lists"])
    wanted = flex_attention(parts["query"], parts["key"], parts["value"], None, mask, kernel_options=options)
    for kind in ("negative", "subclass"):
        mask.kv_indices = odd.TAKEN[kind](parts["lists"])
        found = flex_attention(
            parts["query"], parts["key"], parts["value"], None, mask, kernel_options=options
        )
        assert torch.equal(found, wanted)
    for make in (odd.Wrapper, odd.freed, odd.nested, lambda x: x.tolist()):
        with pytest.raises((*NAMED, errors.BlockMaskPartsError)):
            mask.kv_indices = make(parts["lists"])
    assert torch.equal(mask.kv_indices, parts["lists"])


@ALL
@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.rand(1, requires_grad=True), "0.3", [0.3]])
def test_a_scale_that_is_no_number(scale: Any, options: Any) -> None:
    """The gradient of a tensor would be lost."""
    with pytest.raises(errors.ScaleError):
        flex_attention(*[given()["query"]] * 3, scale=scale, kernel_options=options)
    with pytest.raises(errors.ScaleError):
        flexmod.compile(scale=scale, kernel_options=options)(*[given()["query"]] * 3)


def test_a_scale_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    query = given()["query"]
    wanted = flex_attention(query, query, query, scale=0.25)
    for scale in (np.float32(0.25), np.float64(0.25), np.array(0.25)):
        assert torch.equal(flex_attention(query, query, query, scale=scale), wanted)
