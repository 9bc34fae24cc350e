"""Gradients of captured tensors from the generated kernels, in the interpreter, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from learned_mods import causal, every_third, learned_mods, random
from reference_case import LargestTensor, make_case
from tiers import long_but
from torch import Tensor

from flexmod import BlockMask, create_block_mask, errors, flex_attention
from flexmod.backends import families
from flexmod.runtime import launch

BATCH, HEADS, ROWS, COLUMNS = 2, 2, 23, 21
LEARNED = learned_mods(BATCH, HEADS, ROWS, COLUMNS)
TILES = dict.fromkeys([f"BLOCK_{side}{number}" for side in "MN" for number in (1, 2, 3)], 16)
INTERPRET = {"BACKEND": "INTERPRET", **TILES}
ONE_TILE = {"BACKEND": "INTERPRET"}  # where more of them would show nothing more
REFERENCE = {"BACKEND": "REFERENCE"}
# one for each way to sum, and several in one kernel
FEW = ("slopes", "bias of keys", "relative table", "bias of pairs", "indexed twice", "several")
# beside each of these is one that differs by less
LESS = (
    "alibi of the library", "slopes of distances as floats", "buckets of distances", "clamped distances",
    "bias of pairs and heads", "one element",
)  # fmt: skip
SINGLE = torch.float32


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under deterministic algorithms torch fills what it allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms("any_order" not in request.fixturenames)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def any_order() -> None:
    """For a test of the sums that atomics make."""


def mask_of(mask_mod: Any, rows: int = ROWS, columns: int = COLUMNS, block: Any = 16) -> Any:
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, None, None, rows, columns, device="cpu", BLOCK_SIZE=block)


def case(dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> Any:
    return make_case(
        batch=BATCH, kv_batch=1, heads=HEADS, kv_heads=1, q_len=rows, kv_len=columns, head_dim=8, dtype=dtype,
        seed=seed,
    )  # fmt: skip


def gradients(
    score_mod: Any, learned: list[Tensor], mask: Any, call: Any, *, lse: bool = True, **options: Any
) -> tuple[Tensor, ...]:
    """Of q, k, v and of what is learned, through out and lse."""
    inputs = [x.detach().requires_grad_() for x in call.inputs]
    out, lse_ = flex_attention(*inputs, score_mod, mask, enable_gqa=True, return_lse=True, **options)
    weights = random(*lse_.shape).to(lse_.dtype) if lse else torch.zeros_like(lse_)
    results = [out, lse_.nan_to_num(neginf=0.0)]
    return torch.autograd.grad(results, [*inputs, *learned], [call.grad_out, weights])


def check(
    make: Callable[..., Any], tensors: list[Tensor], mask: Any, dtype: torch.dtype = SINGLE,
    sizes: tuple[int, int] = (ROWS, COLUMNS), options: Any = INTERPRET, factor: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All gradients, held to those of float64 by the norm of what differs.

    The error of a gradient of few elements is a matter of luck. So a call over its limit is drawn eight times
    more, and the RMS of all draws decides.
    """
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, SINGLE: 4e-6}[dtype] * factor

    def drawn(seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        call = case(dtype, *sizes, seed=seed)
        learned = [x.detach().clone().requires_grad_() for x in tensors]
        found = gradients(make(*learned), learned, mask, call, kernel_options=options)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        exact_call = type(call)(*(x.double() for x in (*call.inputs, call.grad_out)), call.scale)
        exact = gradients(make(*wide), wide, mask, exact_call, kernel_options=REFERENCE)
        assert [x.shape for x in found] == [x.shape for x in exact]
        pairs = zip(found, exact, strict=True)
        return found, torch.stack([(x.double() - y).norm() / (tolerance * (y.norm() + 1)) for x, y in pairs])

    found, shares = drawn(0)
    if not bool((shares <= 1).all()):
        shares = torch.stack([shares, *(drawn(seed)[1] for seed in range(1, 9))]).square().mean(0).sqrt()
    assert bool((shares <= 1).all()), f"{shares.tolist()} of their limits"
    return found


def tensors_of(name: str, dtype: torch.dtype = SINGLE) -> list[Tensor]:
    return [random(*shape, seed=n).to(dtype) for n, shape in enumerate(LEARNED[name].shapes)]


@pytest.mark.parametrize("name", long_but(LEARNED.keys() - {*FEW, *LESS}, LEARNED, LESS))
def test_float32(name: str) -> None:
    check(LEARNED[name].make, tensors_of(name), None)


@pytest.mark.parametrize("name", long_but(FEW[::2], FEW))
def test_queries_that_see_nothing(name: str) -> None:
    check(LEARNED[name].make, tensors_of(name), mask_of(every_third))


@pytest.mark.parametrize("name", long_but(FEW[1::2], FEW))
def test_bfloat16(name: str) -> None:
    """Captured tensors are float32 still: their gradients are never rounded to less."""
    check(LEARNED[name].make, tensors_of(name), mask_of(causal), torch.bfloat16)


@pytest.mark.parametrize("name", long_but(FEW[::2], FEW))
def test_captures_of_half_precision(name: str) -> None:
    """Their gradients are rounded once; a mod that computes in float16 rounds more often."""
    tensors = tensors_of(name, torch.float16)
    found = check(LEARNED[name].make, tensors, mask_of(causal), torch.float16, factor=4.0)
    assert all(x.dtype == torch.float16 for x in found[3:])


@pytest.mark.parametrize(
    ("tile", "block"),
    [
        pytest.param((16, 16), None, marks=pytest.mark.long),
        ((32, 16), None),
        pytest.param((32, 32), None, marks=pytest.mark.long),
        ((16, 16), (16, 32)),
        pytest.param((16, 16), (64, 16), marks=pytest.mark.long),
        ((32, 16), (64, 16)),
    ],
    ids=str,
)
def test_tiles_along_diagonals(tile: tuple[int, int], block: tuple[int, int] | None) -> None:
    """Tiles and blocks of unequal sides, lengths that no tile divides; more keys than queries, too."""
    mask_mod = None if block is None else causal
    options = {**INTERPRET, "BLOCK_M3": tile[0], "BLOCK_N3": tile[1]}
    for sizes in ((35, 21), (21, 35)):
        make, shapes = learned_mods(BATCH, HEADS, *sizes)["relative table"]
        check(make, [random(*shapes[0]).float()], mask_of(mask_mod, *sizes, block), SINGLE, sizes, options)


def test_mask_of_each_batch_entry_and_head() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + b * 16 >= k) & (q < k + 9 + h * 20) & ((h > 0) | (k > 18))

    mask = create_block_mask(mask_mod, BATCH, HEADS, ROWS, COLUMNS, device="cpu", BLOCK_SIZE=16)
    for name in ("relative table", "bias of everything"):
        check(LEARNED[name].make, tensors_of(name), mask)


def test_full_tiles_that_reach_over_the_end() -> None:
    counts, indices = torch.full((1, 1, 2), 2), torch.arange(2).expand(1, 1, 2, 2)
    none = torch.zeros_like(counts), torch.zeros_like(indices)
    mask = BlockMask.from_kv_blocks(*none, counts, indices, 16, None, (ROWS, COLUMNS))
    assert mask.full_tiles_padded
    for name in ("several", "bias of keys", "bias of pairs"):
        check(LEARNED[name].make, tensors_of(name), mask, torch.bfloat16)


def test_lists_that_change_in_place() -> None:
    mask = mask_of(causal)
    name = "relative table"
    check(LEARNED[name].make, tensors_of(name), mask)
    for part in (mask.kv_num_blocks, mask.q_num_blocks):
        part[..., 0] -= 1  # the tile of the first queries and keys; of this column there is one more
    mask.q_indices[..., 0, 0] = 1
    check(LEARNED[name].make, tensors_of(name), mask)


def test_a_table_for_a_window_alone() -> None:
    """What the mask rules out is outside of the table: it reaches no element, and no error."""

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k <= 4) & (k - q <= 4)

    lookup = torch.arange(9)
    for make in (
        lambda t: lambda s, b, h, q, k: s + t[q - k + 4],
        lambda t: lambda s, b, h, q, k: s + t[lookup[q - k + 4]],
        lambda t: lambda s, b, h, q, k: s + t[(q - k + 4) * (q + 1 - q)],
    ):
        wide = random(9).float()
        learned = wide.clone().requires_grad_()
        mask, call = mask_of(window, block=64), case(SINGLE)
        found = gradients(make(learned), [learned], mask, call, kernel_options=ONE_TILE)[3]
        clamped = wide.clone().requires_grad_()

        def safe(s: Any, b: Any, h: Any, q: Any, k: Any, t: Tensor = clamped) -> Any:
            return s + t[(q - k + 4).clamp(0, 8)]

        expected = gradients(safe, [clamped], mask, call, kernel_options=REFERENCE)[3]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_infinite_derivative_under_the_mask() -> None:
    """sqrt of 0 where the mask says no: 0 * inf reaches nothing, in any kernel."""
    shapes = [(ROWS,), (COLUMNS,), (ROWS + COLUMNS,), (ROWS, COLUMNS)]

    def make(t: list[Tensor], nothing: float) -> Any:
        def root(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            allowed = torch.where(q >= k, 1.0, nothing)
            loaded = (t[0][q], t[1][k], t[2][q - k + COLUMNS], t[3][q, k])
            return s + sum(torch.sqrt(x * allowed) for x in loaded)

        return root

    call, found = case(SINGLE), []
    for options, nothing in ((ONE_TILE, 0.0), (REFERENCE, 1.0)):
        learned = [(random(*shape).abs().float() + 0.1).requires_grad_() for shape in shapes]
        score_mod = make(learned, nothing)
        found.append(gradients(score_mod, learned, mask_of(causal, block=64), call, kernel_options=options))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_captures_of_any_strides() -> None:
    bias = random(COLUMNS, ROWS).float().T
    row = random(1, COLUMNS).float().expand(ROWS, -1)
    table = random(2 * (ROWS + COLUMNS)).float()[::2]

    def make(t: Tensor, u: Tensor, v: Tensor) -> Any:
        return lambda s, b, h, q, k: s + t[q, k] * u[q, k] + v[q - k + COLUMNS]

    found = []
    for tensors in ((bias, row, table), tuple(x.contiguous() for x in (bias, row, table))):
        learned = [x.detach().requires_grad_() for x in tensors]
        found.append(gradients(make(*learned), learned, None, case(SINGLE), kernel_options=ONE_TILE))
    assert found[0][4].shape == row.shape
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_promoted_numbers() -> None:
    """Numbers that change from call to call are in the indices and in the terms."""
    for shift, rate in ((3, 0.5), (4, 0.25), (7, 2.0)):

        def make(t: Tensor, u: Tensor, shift: int = shift, rate: float = rate) -> Any:
            return lambda s, b, h, q, k: s + t[q - k + COLUMNS + shift] * rate + u[k // shift]

        check(make, [random(ROWS + COLUMNS + 7).float(), random(COLUMNS).float()], None, options=ONE_TILE)


def test_wide_indices() -> None:
    """Index arithmetic that int32 would not hold."""
    million = 1_000_000

    def make(t: Tensor, u: Tensor) -> Any:
        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            wide = q * million * 70 + k
            return s + t[(q * million - k * million) // million] + u[wide // million // 70, k]

        return score_mod

    check(make, [random(2 * ROWS).float(), random(ROWS, COLUMNS).float()], None, options=ONE_TILE)


# What is asked for


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset of q, k, v and four captured tensors gets what all of them would get."""
    asked: list[tuple[bool, ...]] = []
    backward = families.Generated.backward

    def watch(self: Any, problem: Any, *args: Any, **options: Any) -> Any:
        bound = backward(self, problem, *args, **options)
        asked.append(tuple(place is not None for place in bound.plan.results))
        return bound

    monkeypatch.setattr(families.Generated, "backward", watch)
    call = case(torch.bfloat16)
    tensors = [*call.inputs, *tensors_of("slopes"), *tensors_of("bias of rows"), random(COLUMNS).float()]
    tensors += [random(ROWS + COLUMNS).float(), random(ROWS, COLUMNS).float()]

    def run(wanted: set[int]) -> dict[int, Tensor]:
        q, k, v, slopes, rows, columns, table, pairs = leaves = [
            x.detach().requires_grad_(n in wanted) for n, x in enumerate(tensors)
        ]

        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * rows[q] + slopes[h] * columns[k] + table[q - k + COLUMNS] + pairs[q, k]

        mask = mask_of(causal, block=64)
        out = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, kernel_options=ONE_TILE)
        found = torch.autograd.grad(out, [leaves[n] for n in sorted(wanted)], call.grad_out)
        return dict(zip(sorted(wanted), found, strict=True))

    together = run(set(range(8)))
    for wanted in ({0}, {3}, {4, 1}, {5}, {5, 2}, {5, 1}, {6}, {7}, {0, 6}, {3, 5, 6, 7}):
        found = run(wanted)
        assert all(torch.equal(found[n], together[n]) for n in wanted), wanted
    captures = (3, 4, 5, 6, 7)
    order = [4, 3, 5, 6, 7]  # in which the mod meets them
    assert asked[0] == (True,) * 8
    assert asked[1] == (True, False, False)
    assert asked[2] == (False, False, False, *(n == 3 for n in order))
    assert asked[4] == (False, False, False, *(n == 5 for n in order))
    assert asked[-1] == (False, False, False, *(n in captures and n != 4 for n in order))


def test_a_capture_that_only_decides_gets_no_gradient() -> None:
    table, bias = random(COLUMNS).float().requires_grad_(), random(COLUMNS).float().requires_grad_()
    call = case(SINGLE)
    for learned in ([table], [table, bias]):
        for x in (table, bias):
            x.requires_grad_(any(x is y for y in learned))
        q, k, v = (x.requires_grad_() for x in call.inputs)
        out = flex_attention(
            q, k, v, lambda s, b, h, q, k: torch.where(table[k] > 0, s + bias[k], s), enable_gqa=True,
            kernel_options=ONE_TILE,
        )  # fmt: skip
        found = torch.autograd.grad(out.sum(), [q, *learned], allow_unused=True)
        assert found[0] is not None and found[1] is None and all(x is not None for x in found[2:])


def test_memory_is_linear() -> None:
    """No tensor is of the size of the scores, 1024 x 1024."""
    call = make_case(q_len=1024, heads=1, head_dim=16, dtype=torch.bfloat16)
    slopes, bias = torch.zeros(1, requires_grad=True), torch.zeros(1024, requires_grad=True)
    table = torch.zeros(1, 2047, requires_grad=True)
    near = create_block_mask(
        lambda b, h, q, k: (q - k < 9) & (q >= k), None, None, 1024, 1024, device="cpu", BLOCK_SIZE=128
    )
    out = flex_attention(
        *call.inputs, lambda s, b, h, q, k: s + slopes[h] * (q - k) + bias[k] + table[h, q - k + 1023], near,
        kernel_options={"BACKEND": "INTERPRET"},
    )  # fmt: skip
    with LargestTensor() as seen:
        out.backward(call.grad_out)
    assert seen.elements <= 8 * 2048


# Sums of elements


@pytest.mark.parametrize("name", ["bias of pairs", "by the score", "indexed twice"])
def test_sums_in_any_order(name: str, any_order: None) -> None:
    check(LEARNED[name].make, tensors_of(name), mask_of(causal))


def crowded(terms: Tensor, **options: Any) -> Tensor:
    """Gradient of a table of which queries and keys share elements; grad_out of a query is its `terms`."""
    table = torch.zeros(9, requires_grad=True)
    rows = len(terms)
    q, k = torch.zeros(2, 1, 1, rows, 16)
    v = torch.ones(1, 1, rows, 16)
    out, lse = flex_attention(
        q, k, v, lambda s, b, h, q, k: s + table[(q * k) % 9], return_lse=True,
        kernel_options={**INTERPRET, **options},
    )  # fmt: skip
    (found,) = torch.autograd.grad(lse, table, terms[None, None])
    return found


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 1e-42])
def test_fixed_point_of_any_size(size: float) -> None:
    terms = random(40).float() * size
    weight = torch.zeros(9, dtype=torch.float64)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    weight.index_add_(0, (i * j % 9).flatten(), (terms.double()[:, None] / 40).expand(-1, 40).flatten())
    found = crowded(terms)
    # what is below the least normal number is lost
    assert float((found.double() - weight).abs().max()) <= 2e-6 * size + 40 * 40 * 2**-126


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_fixed_point_with_what_is_not_finite(value: float) -> None:
    """It comes out where it belongs, and nowhere else."""
    terms = torch.ones(40)
    terms[39] = value  # 39 * k % 9 is 0, 3 or 6
    found = crowded(terms)
    place = torch.arange(9) % 3 == 0
    assert bool(torch.isfinite(found[~place]).all()) and not bool(torch.isfinite(found[place]).any())
    assert torch.equal(found[place].sign(), torch.full((3,), value).sign()) or math.isnan(value)


def test_the_option_asks_for_fixed_point(any_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    start = launch.start

    def watch(kernels: Any, name: Any, *rest: Any) -> Any:
        launched.extend(["scatter"] * (name == "scatter_kernel"))
        return start(kernels, name, *rest)

    monkeypatch.setattr(launch, "start", watch)
    terms = random(40).float()
    plain, fixed = crowded(terms), crowded(terms, deterministic=True)
    assert launched == ["scatter"] * 3
    torch.testing.assert_close(plain, fixed, rtol=1e-5, atol=1e-6)
    crowded(terms, bwd_deterministic=True)
    assert launched == ["scatter"] * 5


def test_two_runs_agree_bit_for_bit() -> None:
    name, mask, call = "several", mask_of(causal), case(torch.bfloat16)
    learned = [x.requires_grad_() for x in tensors_of(name)]
    make = LEARNED[name].make
    runs = [gradients(make(*learned), learned, mask, call, kernel_options=INTERPRET) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# What is refused


def test_tiles_of_diagonals_are_at_least_as_long_as_wide() -> None:
    name = "relative table"
    with pytest.raises(errors.OptionValueError, match="BLOCK_N3 is 32.\n.* a divisor of BLOCK_M3, 16"):
        check(LEARNED[name].make, tensors_of(name), None, options={**INTERPRET, "BLOCK_N3": 32})
