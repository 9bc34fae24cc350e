"""0-d tensors that mods capture are numbers of the call: each call reads them, whichever way it comes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import planned
import pytest
import torch
from torch import Tensor, nn

import flexmod
from flexmod import create_block_mask, create_mask, errors, flex_attention
from flexmod.block_mask import generated, refine
from flexmod.block_mask.parts import trace_mask
from flexmod.block_mask.tiles import MaskLayout
from flexmod.ir import evaluate
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace

LENGTH = 20
BACKENDS = {"cpu": {}, "interpret": {"BACKEND": "INTERPRET"}, "reference": {"BACKEND": "REFERENCE"}}
WAYS = ["eager", "handle", "compiled"]
NUMBER = torch.tensor(1.0)


class Scaled(nn.Module):
    """A score mod with a buffer."""

    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self.register_buffer("t", t)

    def forward(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.t * score


def times(factor: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return factor * score


def scaled_by_default(t: Tensor) -> Callable[..., Any]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, t: Tensor = t, *, u: Tensor = t) -> Any:
        return t * s + u

    return mod


def scaled_by_a_global(t: Tensor) -> Callable[..., Any]:
    global NUMBER
    NUMBER = t
    return lambda s, b, h, q, k: NUMBER * s


def steps(t: Any) -> Any:
    return t.to(torch.int64)


# Each is plain torch too, on tensors of all scores and positions.
SCORES: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "before": lambda t: lambda s, b, h, q, k: t * s,
    "after": lambda t: lambda s, b, h, q, k: s * t,
    "mul": lambda t: lambda s, b, h, q, k: torch.mul(s, t),
    "where": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, t),
    "minimum": lambda t: lambda s, b, h, q, k: torch.minimum(t, s),
    "soft cap": lambda t: lambda s, b, h, q, k: t * torch.tanh(s / t),
    "clamp": lambda t: lambda s, b, h, q, k: torch.clamp(s, max=t),
    "alpha": lambda t: lambda s, b, h, q, k: torch.sub(s, q * 0.1, alpha=t),
    "float64": lambda t: lambda s, b, h, q, k: (s * t.double()).float(),
    "a view": lambda t: (lambda views: lambda s, b, h, q, k: views[0] * s)(t.view(1)),
    "an element": lambda t: (lambda views: lambda s, b, h, q, k: views[0] * s)([t.view(1)[0]]),
    "an element, computed": lambda t: lambda s, b, h, q, k: s * (t.view(1)[0] * 2),
    "default": scaled_by_default,
    "global": scaled_by_a_global,
    "partial": lambda t: functools.partial(times, t),
    "buffer": Scaled,
    "item": lambda t: lambda s, b, h, q, k: torch.mul(s, t.item()),
    "if": lambda t: lambda s, b, h, q, k: s * 2 if t > 1.5 else s,
    "an offset": lambda t: lambda s, b, h, q, k: s + (q - k + steps(t)) * 0.1,
    "a table": lambda t: lambda s, b, h, q, k: s + TABLE[steps(t), k],
    "-inf": lambda t: lambda s, b, h, q, k: torch.where((q - k).abs() <= t, s, -math.inf),
}
TABLE = torch.linspace(-1, 1, 10 * LENGTH).view(10, LENGTH)
# torch.compile cannot bring these into one graph, or does not see them change.
BREAKING = ("item", "if", "global", "a table")

MASKS: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "window": lambda t: lambda b, h, q, k: (q - k).abs() <= t,
    "window, before": lambda t: lambda b, h, q, k: t >= (q - k).abs(),
    "offset": lambda t: lambda b, h, q, k: t + q >= k,
    "table": lambda t: lambda b, h, q, k: TABLE[t.to(torch.int64), k] <= TABLE[q // 2, 5],
    "computed": lambda t: lambda b, h, q, k: (q - k).abs() <= t * 2,
    "an element": lambda t: lambda b, h, q, k: (q - k).abs() <= t.view(1)[0],
    "item": lambda t: lambda b, h, q, k: (q - k).abs() <= t.item(),
    "if": lambda t: lambda b, h, q, k: q >= k if t > 3 else q <= k,
}


def assign_data(t: Tensor, value: float) -> None:
    t.data = torch.tensor(value, dtype=t.dtype)


CHANGES: dict[str, Callable[[Tensor, float], Any]] = {
    "fill_": lambda t, value: t.fill_(value),
    "add_": lambda t, value: t.add_(value - t),
    "copy_": lambda t, value: t.copy_(torch.tensor(value)),
    "data": assign_data,
    "swap": lambda t, value: torch.utils.swap_tensors(t, torch.tensor(value, dtype=t.dtype)),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 16, generator=generator).requires_grad_(grad) for _ in range(3)]


def positions() -> list[Tensor]:
    sizes = (1, 2, LENGTH, LENGTH)
    return [
        torch.arange(size, dtype=torch.int32).view([-1 if axis == own else 1 for axis in range(4)])
        for own, size in enumerate(sizes)
    ]


def truth(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, mask_mod: Any = None) -> Tensor:
    """Attention with the mods as plain functions of torch; a row of -inf gives 0."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if score_mod is not None:
        scores = score_mod(scores, *positions())
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*positions()), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def attention(way: str, options: Any, score_mod: Any = None, mask_mod: Any = None) -> Callable[..., Tensor]:
    if way == "handle":
        return flexmod.compile(score_mod, mask_mod, kernel_options=options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = None
        if mask_mod is not None:
            mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, score_mod, mask, kernel_options=options)

    return torch.compile(attend, backend="aot_eager") if way == "compiled" else attend


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-5)


def cases(forms: Iterable[str], breaking: Sequence[str]) -> list[tuple[str, str, str]]:
    """Backend, way and form. Compiled calls run on the CPU, with forms that give one graph."""
    return [
        case
        for case in itertools.product(BACKENDS, WAYS, forms)
        if case[1] != "compiled" or (case[0] == "cpu" and case[2] not in breaking)
    ]


@pytest.mark.covering(1, long=1, costly=("compiled",))
@pytest.mark.parametrize(("backend", "way", "form"), cases(SCORES, BREAKING))
@torch.no_grad()
def test_a_score_mod_reads_its_number_at_each_call(backend: str, way: str, form: str) -> None:
    t = torch.tensor(2.0)
    score_mod = SCORES[form](t)
    attend = attention(way, BACKENDS[backend], score_mod)
    tensors = inputs()
    for value in (2.0, 2.0, 2.0, 3.0, 1.0):
        t.fill_(value)
        assert near(attend(*tensors), truth(*tensors, score_mod)), value


@pytest.mark.covering(1, long=1, costly=("compiled",))
@pytest.mark.parametrize(("backend", "way", "form"), cases(MASKS, (*BREAKING, "table")))
@torch.no_grad()
def test_a_mask_mod_reads_its_number_at_each_call(backend: str, way: str, form: str) -> None:
    t = torch.tensor(5)
    mask_mod = MASKS[form](t)
    attend = attention(way, BACKENDS[backend], None, mask_mod)
    tensors = inputs()
    for value in (5, 5, 5, 2, 7):
        t.fill_(value)
        assert near(attend(*tensors), truth(*tensors, None, mask_mod)), value


@pytest.mark.covering(1, long=1, costly=("compiled",))
@pytest.mark.parametrize(("backend", "way", "change"), cases(CHANGES, ("swap",)))
@torch.no_grad()
def test_every_change_of_a_number_is_seen(backend: str, way: str, change: str) -> None:
    """An annealed temperature and window, and an offset that a -inf branch compares with."""
    temperature, window, offset = torch.tensor(2.0), torch.tensor(9), torch.tensor(-3)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return temperature * torch.where(q - k >= offset, s, -math.inf)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return window >= (q - k).abs()

    tensors, numbers = inputs(), (temperature, window, offset)
    split = attention(way, BACKENDS[backend], score_mod)
    both = attention(way, BACKENDS[backend], score_mod, mask_mod)
    for values in [(2, 9, -3)] * 3 + [(1, 4, -3), (0.5, 4, -8), (3, 12, 2)]:
        for t, value in zip(numbers, values, strict=True):
            CHANGES[change](t, value)
        assert near(split(*tensors), truth(*tensors, score_mod)), values
        assert near(both(*tensors), truth(*tensors, score_mod, mask_mod)), values


@torch.no_grad()
def test_an_assigned_buffer() -> None:
    """An eager call and a handle see the new tensor."""
    module, tensors = Scaled(torch.tensor(2.0)), inputs()
    attend = flexmod.compile(module)
    for value in (2.0, 2.0, 3.0):
        module.t = torch.tensor(value)
        assert near(flex_attention(*tensors, module), truth(*tensors, module))
        assert near(attend(*tensors), truth(*tensors, module))


LEARNED: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    name: SCORES[name] for name in ("before", "after", "mul", "soft cap", "a view", "an element, computed")
}


@pytest.mark.covering(1, costly=("compiled", "interpret"))
@pytest.mark.parametrize(("backend", "way", "form"), cases(LEARNED, ()))
def test_a_learned_number(backend: str, way: str, form: str) -> None:
    """It gets its gradient, and the optimizer's steps are seen."""
    t = nn.Parameter(torch.tensor(2.0))
    score_mod = SCORES[form](t)
    attend = attention(way, BACKENDS[backend], score_mod)
    tensors = inputs(grad=True)
    optimizer = torch.optim.SGD([t], lr=0.05)
    values = set()
    for _ in range(3):
        found, wanted = attend(*tensors), truth(*tensors, score_mod)
        grads = [torch.autograd.grad(out.sin().sum(), (*tensors, t)) for out in (found, wanted)]
        assert near(found, wanted)
        for one, other in zip(*grads, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        t.grad = grads[1][-1]
        optimizer.step()
        values.add(t.item())
    assert len(values) == 3


@pytest.mark.parametrize("way", ["eager", "handle"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_learns_no_number(backend: str, way: str) -> None:
    window = torch.tensor(4.0, requires_grad=True)
    attend = attention(way, BACKENDS[backend], None, lambda b, h, q, k: window >= (q - k).abs())
    with pytest.raises(errors.MaskCaptureGradientError, match="window"):
        attend(*inputs(grad=True))
    with torch.no_grad():
        assert attend(*inputs()).isfinite().all()


def test_a_mask_of_a_parameter_is_refused_where_it_is_made() -> None:
    window = torch.nn.Parameter(torch.tensor(4.0))
    with pytest.raises(errors.MaskCaptureGradientError, match="window") as caught:
        flexmod.create_block_mask(lambda b, h, q, k: window >= (q - k).abs(), None, None, 20, 20, "cpu")
    assert "window >= (q - k)" in str(caught.value)
    with torch.no_grad():
        mask = flexmod.create_block_mask(
            lambda b, h, q, k: window >= (q - k).abs(), None, None, 20, 20, "cpu"
        )
        assert mask.sparsity() >= 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_is_written_to_before_the_backward(backend: str) -> None:
    """As in torch: what the backward needs was saved, and a write to it is an error."""
    t = torch.tensor(2.0, requires_grad=True)
    out = flex_attention(*inputs(True), lambda s, b, h, q, k: t * s, kernel_options=BACKENDS[backend])
    with torch.no_grad():
        t.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dtypes_are_those_of_torch() -> None:
    """A 0-d tensor has a dtype of its own: float64 computes in float64, int64 in int64."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        t = torch.tensor(3, dtype=dtype)
        graph = trace(lambda s, b, h, q, k, t=t: s + (q * t), "score").graph
        (product,) = (n for n in graph.nodes if n.op == "mul")
        assert product.dtype == (torch.tensor(1, dtype=torch.int32) * t).dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["window", "window, before", "offset"])
def test_bounds_decide_the_tiles(dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements are looked at: none would be more than a tile's corners and samples."""
    looked: list[int] = []
    kept = refine.Refined._kept

    def watch(self: Any, *arguments: Any) -> Tensor:
        found = kept(self, *arguments)
        looked.append(found.numel())
        return found

    monkeypatch.setattr(refine.Refined, "_kept", watch)
    length, t = 2048, torch.tensor(100, dtype=dtype)
    mask = create_block_mask(MASKS[form](t), None, None, length, length, device="cpu")
    assert sum(looked) <= length
    numbers = create_block_mask(MASKS[form](100), None, None, length, length, device="cpu")  # type: ignore[arg-type]
    assert torch.equal(mask.table(), numbers.table())


@pytest.mark.parametrize("form", [form for form in MASKS if form != "table"])
def test_generated_builders_read_the_number(form: str) -> None:
    """The kernels that build masks, in the interpreter."""
    sizes = (1, 1, 100, 90)
    for value in (5, 2, 7):
        t = torch.tensor(value)
        traced = trace_mask(MASKS[form](t), torch.device("cpu"))
        fits = Traced(fitted(traced.graph, sizes), traced.tensors)
        made = generated.build(
            fits, MaskLayout(sizes, (16, 16), torch.device("cpu"), True), interpreted=True
        )
        wanted = create_block_mask(MASKS[form](t), None, None, 100, 90, device="cpu", BLOCK_SIZE=16)
        assert made["kv"] is not None
        assert torch.equal(made["kv"].table(6), wanted.table())


def test_create_mask_reads_the_number() -> None:
    t = torch.tensor(3)
    for value in (3, 5, 1):
        t.fill_(value)
        for form in ("window, before", "computed", "item"):
            found = create_mask(MASKS[form](t), None, None, LENGTH, LENGTH, device="cpu")
            assert torch.equal(found[0, 0], MASKS[form](t)(*positions()).expand(1, 2, -1, -1)[0, 0])


def test_numbers_in_files() -> None:
    """explain() and a saved file have the number as an argument, not as a value."""
    t = torch.tensor(7.25)
    text = flexmod.explain(SCORES["before"](t)).source
    assert "7.25" not in text and "tl.load(t" in text


# calls on another device, acted out on the CPU: each number counts as one of the host


@pytest.fixture
def another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    brought: dict[int, Tensor] = {}  # by address, which they keep

    def is_host_number(tensor: Tensor, device: torch.device) -> bool:
        return tensor.dim() == 0 and tensor.data_ptr() not in brought

    def on_device(tensor: Tensor, device: torch.device) -> Tensor:
        if not is_host_number(tensor, device):
            return tensor
        made = tensor.clone() if evaluate._is_differentiated(tensor) else torch.full_like(tensor, tensor)
        brought[made.data_ptr()] = made.detach()
        return made

    monkeypatch.setattr(evaluate, "is_host_number", is_host_number)
    monkeypatch.setattr(evaluate, "on_device", on_device)
    monkeypatch.setattr("flexmod.calls.prepared.is_host_number", is_host_number)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that were run again."""
    return planned.reruns(monkeypatch)


@pytest.mark.parametrize("way", ["eager", "handle"])
@torch.no_grad()
def test_a_replayed_call_gets_the_number_as_it_is_now(
    way: str, another_device: None, played: list[Any]
) -> None:
    temperature, window = torch.tensor(2.0), torch.tensor(9)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return temperature * s

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return window >= (q - k).abs()

    tensors = inputs()
    attend = attention(way, BACKENDS["interpret"], score_mod, mask_mod)
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    for number in range(5):
        temperature.fill_(number + 1)
        with_mask = flex_attention(*tensors, score_mod, mask, kernel_options=BACKENDS["interpret"])
        assert near(with_mask, truth(*tensors, score_mod, mask_mod)), number
        assert near(attend(*tensors), truth(*tensors, score_mod, mask_mod)), number
    assert played


@pytest.mark.parametrize("way", ["eager", "handle"])
def test_a_replayed_backward_of_a_learned_number(way: str, another_device: None, played: list[Any]) -> None:
    """The backward has the number of its forward, whatever became of it."""
    t = nn.Parameter(torch.tensor(2.0))
    score_mod = SCORES["soft cap"](t)
    attend = attention(way, BACKENDS["interpret"], score_mod)
    tensors = inputs(grad=True)
    for number in range(4):
        with torch.no_grad():
            t.fill_(number + 1)
        found, wanted = attend(*tensors), truth(*tensors, score_mod)
        reference = torch.autograd.grad(wanted.sin().sum(), (*tensors, t))
        with torch.no_grad():
            t.fill_(100.0)
        for one, other in zip(torch.autograd.grad(found.sin().sum(), (*tensors, t)), reference, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert len(set(map(id, played))) >= 2


# numbers at the ends of their dtype: arithmetic with a captured integer wraps in torch's dtype


ENDS = {
    "int32": [torch.tensor(value, dtype=torch.int32) for value in (2**31 - 1, 2**31 - 6, -(2**31))],
    "int8": [torch.tensor(value, dtype=torch.int8) for value in (127, -128)],
    "int64": [torch.tensor(value, dtype=torch.int64) for value in (2**63 - 1, 2**63 - 10)],
}
SUMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "i + t >= j": lambda t, i, j: i + t >= j,
    "i - j <= t": lambda t, i, j: i - j <= t,
    "i >= j - t": lambda t, i, j: i >= j - t,
    "-t < j": lambda t, i, j: -t < j,
    "t - j > i": lambda t, i, j: t - j > i,
    "i * t >= j": lambda t, i, j: i * t >= j,
    "abs": lambda t, i, j: torch.abs(t) > j - i,
}


def by_scalars(keep: Callable[[Any, Any, Any], Any], number: Tensor) -> Tensor:
    """What torch has for 0-d tensors, whose positions are int32."""
    positions = [torch.tensor(place, dtype=torch.int32) for place in range(LENGTH)]
    return torch.stack([torch.stack([keep(number, i, j) for j in positions]) for i in positions])


@pytest.mark.covering(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", ENDS)
@pytest.mark.parametrize("name", SUMS)
def test_numbers_at_the_ends_of_their_dtype(name: str, dtype: str, rank: int) -> None:
    """On every way that a mask takes: elements, tiles, kernels, and a score's -inf branches."""
    zeros, ones = torch.zeros(1, 1, LENGTH, 16), torch.eye(LENGTH).view(1, 1, LENGTH, LENGTH)
    for number in ENDS[dtype]:
        captured = number if rank == 0 else number.expand(LENGTH).contiguous()

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, t: Tensor = captured) -> Any:
            return SUMS[name](t if rank == 0 else t[q_idx], q_idx, kv_idx)

        def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, mod: Any = mask_mod) -> Any:
            return torch.where(mod(b, h, q_idx, kv_idx), s, -math.inf)

        wanted = by_scalars(SUMS[name], number)
        elements = create_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")
        assert torch.equal(elements.expand(1, 1, LENGTH, LENGTH)[0, 0], wanted)
        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        for options in BACKENDS.values():
            for out in (
                flex_attention(zeros, zeros, ones, block_mask=mask, kernel_options=options),
                flex_attention(zeros, zeros, ones, score_mod, kernel_options=options),
                flexmod.compile(None, mask_mod, kernel_options=options)(zeros, zeros, ones),
            ):
                assert isinstance(out, Tensor)
                assert torch.equal(out[0, 0] > 0, wanted)
