"""The pipeline: what is compiled again and what is not, and 64-bit positions, through the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmod import create_block_mask, flex_attention
from flexmod.codegen import compiler
from flexmod.codegen.compiler import Constants, compile_mod, lower
from flexmod.ir.passes import needs_int64, optimize, promote_constants
from flexmod.ir.trace import trace

EXTENTS = (1, 1, 48, 48)
SLOPES = torch.linspace(0.1, 1.0, 2)


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """One entry for each module that is rendered from here on; nothing is known from before."""
    seen: list[object] = []
    render = compiler.render

    def counted(*args: Any, **given: Any) -> str:
        seen.append(args)
        return render(*args, **given)

    monkeypatch.setattr(compiler, "render", counted)
    monkeypatch.setattr(compiler, "CONSTANTS", Constants())
    compiler.kernels_for.cache_clear()
    yield seen
    compiler.kernels_for.cache_clear()


def tensors(length: int = 48, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator, dtype=dtype) for _ in range(3))
    return q, k, v


def attend(
    *, score: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None, length: int = 48
) -> None:
    """Attention in the interpreter, held to the reference."""
    q, k, v = tensors(length)
    block_mask = create_block_mask(mask, 1, 2, length, length, BLOCK_SIZE=16) if mask else None
    found, expected = (
        flex_attention(q, k, v, score, block_mask, kernel_options={"BACKEND": backend})
        for backend in ("INTERPRET", "REFERENCE")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def window(size: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: abs(q - k) <= size


def soft_cap(cap: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def test_a_number_that_changes_becomes_an_argument(renders: list[object]) -> None:
    counts = []
    for size in (3, 5, 9, 1, 3, 0):
        attend(mask=window(size))
        counts.append(len(renders))
    assert counts == [1, 2, 2, 2, 2, 2], "the second value compiles once more, no later one does"


def test_numbers_of_a_score_mod(renders: list[object]) -> None:
    """Kernels know the bounds of a score by the range of a number: up to 50, up to 2048, and above."""
    counts = []
    for cap in (2.0, 3.0, 4.5, -2.0, 50.0, 60.0, 2048.0, 3.0):
        attend(score=soft_cap(cap))
        counts.append(len(renders))
    assert counts == [1, 2, 2, 2, 2, 3, 3, 3]
    bounds = [score.bounds for _, score, *_ in renders]  # type: ignore[misc]
    assert bounds == [(-2.0, 2.0), (-50.0, 50.0), (-2048.0, 2048.0)]


def test_a_derivative_has_the_parameters_of_its_score_mod() -> None:
    """So a kernel's compiler sees that both load and compute the same."""
    cap = torch.ones(2)
    tensors = optimize(trace(lambda s, b, h, q, k: cap[h] * torch.tanh(s / cap[h]), "score").graph)
    numbers = optimize(trace(soft_cap(3.0), "score").graph)
    promoted = promote_constants(numbers, frozenset({0, 1}))
    for graph, values in ((tensors, ()), (promoted, numbers.skeleton[1])):
        lowered = lower(graph, EXTENTS, tuple(enumerate(values)), split=False)
        assert lowered.text is not None and lowered.grad_text is not None
        assert set(lowered.text.parameters) == set(lowered.grad_text.parameters)
        assert lowered.text.parameters


def test_only_what_differs_is_promoted(renders: list[object]) -> None:
    def band(left: int, right: int) -> Callable[..., Any]:
        return lambda b, h, q, k: (q - k <= left) & (k - q <= right)

    counts = []
    for sides in ((4, 2), (4, 3), (4, 9), (5, 9), (7, 8), (4, 2)):
        attend(mask=band(*sides))
        counts.append(len(renders))
    assert counts == [1, 2, 2, 3, 3, 3]
    (spec, _, mask, *_) = renders[1]  # type: ignore[misc]
    assert [p.kind for p in mask.parameters] == ["number"]
    (spec, _, mask, *_) = renders[2]  # type: ignore[misc]
    assert [p.kind for p in mask.parameters] == ["number", "number"]


def test_all_that_differ_are_promoted_at_once() -> None:
    constants = Constants()

    def graph(*numbers: int) -> Any:
        return trace(lambda b, h, q, k: (q > numbers[0]) & (k > numbers[1]) & (q < numbers[2]), "mask").graph

    def parameters(*numbers: int) -> list[object]:
        promoted, values = constants.promote(graph(*numbers))
        assert values == numbers
        return [n.value for n in promoted.nodes if n.op == "param"]

    assert parameters(1, 2, 3) == []
    assert parameters(1, 2, 3) == []
    assert parameters(4, 2, 5) == [0, 2]
    assert parameters(1, 2, 3) == [0, 2]
    assert parameters(1, 7, 3) == [0, 1, 2]


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (0, False), (0.0, -0.0)])
def test_numbers_that_are_equal_to_python_differ(one: Any, other: Any) -> None:
    """1 and 1.0 make two graphs; 0.0 and -0.0 are two values of one."""
    constants = Constants()
    graphs = [trace(lambda s, b, h, q, k, c=c: s + c, "score").graph for c in (one, other)]
    skeletons = {g.skeleton[0] for g in graphs}
    promoted = [constants.promote(g)[0] for g in graphs]
    assert len(skeletons) == (1 if type(one) is type(other) else 2)
    assert len({g.key for g in promoted}) == 2


def test_nan_is_a_value_like_another() -> None:
    constants = Constants()
    graphs = [trace(lambda s, b, h, q, k: s + float("nan"), "score").graph for _ in range(2)]
    assert not [n for g in graphs for n in constants.promote(g)[0].nodes if n.op == "param"]


def test_a_changed_closure_never_meets_a_stale_kernel(renders: list[object]) -> None:
    state = {"window": 3, "causal": True, "slope": 1.0}

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        near = abs(q - k) <= state["window"]
        return near & (q >= k) if state["causal"] else near

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (q - k) * state["slope"]

    for change in (
        {},
        {"window": 7},
        {"causal": False},
        {"slope": -0.5},
        {"slope": SLOPES[1]},
        {"window": 20},
        {"slope": 1},
    ):
        state.update(change)  # type: ignore[arg-type]
        attend(mask=mask, score=score)


def test_other_lengths_and_contents_compile_nothing(renders: list[object]) -> None:
    def same(docs: Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: docs[q] == docs[k]

    for length in (48, 33, 64, 17):
        docs = torch.arange(length) // 7 * (length % 5)
        attend(mask=same(docs), score=lambda s, b, h, q, k: s * SLOPES[h], length=length)
    assert len(renders) == 1


def test_the_same_mod_from_other_lines_compiles_nothing(renders: list[object]) -> None:
    attend(mask=lambda b, h, q, k: q * 3 >= k)
    attend(mask=lambda b, h, q, k: q * 3 >= k)
    assert len(renders) == 1


def test_another_dtype_of_a_capture_compiles(renders: list[object]) -> None:
    for dtype in (torch.int64, torch.int32):
        docs = (torch.arange(48) // 7).to(dtype)
        attend(mask=lambda b, h, q, k: docs[q] == docs[k])  # noqa: B023
    assert len(renders) == 2


@pytest.mark.parametrize("number", [0, 1, 2**31, -(2**40), True, 0.5, -float("inf"), float("nan"), 1e300])
def test_promoted_numbers_of_every_size(renders: list[object], number: Any) -> None:
    """The number comes first as another of its type, and so as an argument."""
    first = type(number)(3)
    for value in (first, number):
        attend(mask=lambda b, h, q, k: (q < value) | (q == k))  # noqa: B023
    assert len(renders) in (1, 2)


def test_a_promoted_number_indexes_within_bounds(renders: list[object]) -> None:
    """A number that stands for an index loses what tracing knew of it."""
    for index in (0, 1, -1, -2):
        attend(score=lambda s, b, h, q, k: s * SLOPES.clone()[h] + TABLE[k % 3, index])  # noqa: B023
    assert len(renders) == 2


TABLE = torch.randn(3, 2)


# 64-bit positions


def far_apart(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q * 2**26 - k * 2**26 <= 2**27


def test_positions_widen_where_int32_would_overflow(renders: list[object]) -> None:
    """At 48 positions the products reach 2**31.5."""
    graph = trace(far_apart, "mask").graph
    assert [n.dtype for n in lower(graph, (1, 1, 16, 16), split=False).graph.nodes if n.op == "input"] == [
        torch.int32
    ] * 2  # type: ignore[union-attr]
    assert [n.dtype for n in lower(graph, EXTENTS, split=False).graph.nodes if n.op == "input"] == [
        torch.int64
    ] * 2  # type: ignore[union-attr]
    attend(mask=far_apart)
    attend(score=lambda s, b, h, q, k: torch.where(far_apart(b, h, q, k), s, s - 3.0))
    q, k = torch.arange(48)[:, None], torch.arange(48)
    found = create_block_mask(far_apart, 1, 1, 48, 48, BLOCK_SIZE=16)
    assert found.kv_num_blocks[0, 0].tolist() == [
        sum(0 < (near := q[i : i + 16] - k[j : j + 16] <= 2).sum() < near.numel() for j in (0, 16, 32))
        for i in (0, 16, 32)
    ]


def test_a_promoted_number_may_ask_for_64_bits(renders: list[object]) -> None:
    for factor in (3, 5, 2**27, 7, 2**28, 11, 2**27 + 1):
        attend(mask=lambda b, h, q, k: (q - k) * factor <= 2**20)  # noqa: B023
    assert len(renders) == 4, "narrow and wide, each with a number and with an argument"


def test_powers_and_shifts_are_seen_to_overflow() -> None:
    for mod in (lambda b, h, q, k: q**2 > k, lambda b, h, q, k: (q << 15) > k):
        graph = trace(mod, "mask").graph
        assert needs_int64(graph, {"b": 1, "h": 1, "q_idx": 1 << 17, "kv_idx": 1 << 17})
        widened = lower(graph, (1, 1, 1 << 17, 1 << 17), split=False).graph
        assert widened is not None
        assert {n.dtype for n in widened.nodes if n.op == "input"} == {torch.int64}


def test_threads_share_one_compiler(renders: list[object]) -> None:
    failures: list[BaseException] = []

    def work(size: int) -> None:
        try:
            graph = trace(window(size), "mask").graph
            mod = compile_mod(graph, EXTENTS)
            assert mod.numbers == (size,)
            assert mod.lowered.text is not None
            literal = f", {2 * size + 1})" in mod.lowered.text.text  # |q - k| <= size, as a range
            assert literal != bool(mod.lowered.text.parameters)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(3, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# the split


def test_infinite_branches_run_as_a_mask(renders: list[object]) -> None:
    attend(score=lambda s, b, h, q, k: torch.where(q >= k, s * 2, -float("inf")))
    attend(score=lambda s, b, h, q, k: s + torch.where(abs(q - k) < 9, 0.0, -float("inf")))
    (first, second) = renders
    assert first[1] is not None and first[2] is not None  # type: ignore[index]
    assert second[1] is None and second[2] is not None  # type: ignore[index]
