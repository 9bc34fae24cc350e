"""FLEXMOD_CHECK_BOUNDS=1: an index outside of a captured tensor is reported, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod.block_mask import generated
from flexmod.block_mask.tiles import MaskLayout
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.variant import variant
from flexmod.errors import CaptureBoundsError
from flexmod.ir.passes import fitted
from flexmod.ir.trace import Traced, trace
from flexmod.runtime import config
from flexmod.tools.ahead import jobs

LENGTH = 40
BLOCK_SIZE = (16, 16)
long, short, table = torch.linspace(-1, 1, LENGTH), torch.linspace(-1, 1, 30), torch.zeros(2, 3, 30)
ids = torch.arange(LENGTH, dtype=torch.int32) // 7


@pytest.fixture
def checked(switch: Callable[[str, object], None]) -> None:
    switch(config.CHECK_BOUNDS, 1)


def attend(
    score_mod: Any = None, block_mask: Any = None, backend: str = "INTERPRET", **options: Any
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, LENGTH, 16, generator=generator).requires_grad_() for _ in range(3))
    given = {"BACKEND": backend, **options}
    return flexmod.flex_attention(q, k, v, score_mod, block_mask, kernel_options=given)


def by_column(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[kv_idx]


def by_row(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[q_idx]


def by_pair(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[q_idx - kv_idx]


def by_head(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[h + 28]


def below(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[-kv_idx]


def in_the_middle(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + table[0, h, 5]


def by_a_loaded_index(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[ids[kv_idx] * 6]


# The mod, its captured tensor, the index and the dimension that are reported.
OUTSIDE: list[tuple[Callable[..., Any], str, Tensor, int, int]] = [
    (by_column, "short", short, 39, 0),
    (by_row, "short", short, 39, 0),
    (by_pair, "short", short, 39, 0),
    (by_head, "short", short, 31, 0),
    (below, "short", short, -39, 0),
    (in_the_middle, "table", table, 3, 1),
    (by_a_loaded_index, "short", short, 30, 0),
]


def message(mod: Callable[..., Any], name: str, tensor: Tensor, index: int, dim: int, kind: str) -> str:
    size = tensor.shape[dim]
    line = mod.__code__.co_firstlineno + 1
    return (
        f"{name}, of shape {tuple(tensor.shape)}, captured by {kind}, is indexed with {index} in dimension "
        f"{dim}, which has {size} elements.\n"
        f"  at {__file__}:{line}: {source_line(line)}\n"
        f"  Instead: use an index from -{size} to {size - 1}, e.g. index.clamp(0, {size - 1}): what a mask "
        "rules out counts too."
    )


def source_line(number: int) -> str:
    with open(__file__) as file:
        return file.readlines()[number - 1].strip()


@pytest.mark.parametrize("backend", ["INTERPRET", "AUTO"])
@pytest.mark.parametrize("case", OUTSIDE, ids=lambda case: case[0].__name__)
@pytest.mark.usefixtures("checked")
def test_outside(case: tuple[Callable[..., Any], str, Tensor, int, int], backend: str) -> None:
    with pytest.raises(CaptureBoundsError) as raised:
        attend(case[0], backend=backend)
    assert str(raised.value) == message(*case, "score_mod")
    with pytest.raises(IndexError):  # a second time: nothing is played that was not looked at
        attend(case[0], backend=backend)


def by_column_again(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + short[kv_idx]


@pytest.mark.parametrize("backend", ["INTERPRET", "AUTO"])
@pytest.mark.usefixtures("checked")
def test_each_of_two_equal_mods_has_its_own_line(backend: str) -> None:
    for mod in (by_column, by_column_again):
        with pytest.raises(CaptureBoundsError) as raised:
            attend(mod, backend=backend)
        assert raised.value.where is not None
        assert raised.value.where.line == mod.__code__.co_firstlineno + 1


def negative(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s * long[-1 - kv_idx] + long[q_idx - kv_idx]


@pytest.mark.usefixtures("checked")
def test_padding_and_negative_indices_are_inside() -> None:
    """Tiles of 32 reach over the 40 positions, and -40 is the first of 40."""
    plain = attend(negative, backend="AUTO")
    for tile in (16, 32):
        out = attend(negative, BLOCK_M=tile, BLOCK_N=tile)
        torch.testing.assert_close(out, plain)


@pytest.mark.usefixtures("checked")
def test_backward_and_captured_gradients() -> None:
    """Each kernel of the backward checks too, and makes the gradients that it makes without."""
    learned = torch.linspace(-1, 1, LENGTH).requires_grad_()
    bias = torch.linspace(-1, 1, 4 * LENGTH).view(4, LENGTH).requires_grad_()

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx).clamp(-5, 5)
        return s * learned[q_idx] + bias[h, kv_idx] + learned[near] + learned[(q_idx * kv_idx) % 40]

    found = []
    for backend in ("INTERPRET", "AUTO"):
        attend(score_mod, backend=backend).square().sum().backward()
        found.append([learned.grad, bias.grad])
        learned.grad = bias.grad = None
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("checked")
def test_a_derivative_that_loads_outside(switch: Callable[[str, object], None]) -> None:
    """What the forward lets pass while checks are off, the backward reports when they are on."""
    switch(config.CHECK_BOUNDS, 0)

    def scaled(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * short[kv_idx]

    out = attend(scaled)
    switch(config.CHECK_BOUNDS, 1)
    with pytest.raises(CaptureBoundsError, match=r"short, of shape \(30,\).* with 39 in dimension 0"):
        out.sum().backward()


@pytest.mark.usefixtures("checked")
def test_a_pair_that_the_mask_rules_out_counts() -> None:
    """In a tile that runs bias[q_idx - kv_idx] is loaded for all pairs; far off there is no tile."""
    mask = flexmod.create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 2, None, None, LENGTH, LENGTH,
        device="cpu", BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    enough, few = long[:32], long[:20]
    attend(lambda s, b, h, q_idx, kv_idx: s + enough[q_idx - kv_idx], mask)
    with pytest.raises(CaptureBoundsError, match=r"few.* with 31 in dimension 0"):
        attend(lambda s, b, h, q_idx, kv_idx: s + few[q_idx - kv_idx], mask)


def mask_by_row(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return short[q_idx] < kv_idx


def mask_by_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return short[(q_idx * kv_idx) % 31] > 0


def mask_by_difference(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return short[q_idx - kv_idx] > 0


def mask_by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < short[h + 28]


def build(mod: Callable[..., Any], sizes: Sequence[int] = (1, 4, LENGTH, LENGTH)) -> object:
    """A mask of generated kernels, in the interpreter."""
    found = trace(mod, "mask")
    traced = Traced(fitted(found.graph, sizes), found.tensors)  # type: ignore[arg-type]
    return generated.build(
        traced, MaskLayout(sizes, BLOCK_SIZE, torch.device("cpu"), True), interpreted=True
    )


@pytest.mark.parametrize(
    ("mod", "index"),
    [(mask_by_row, 39), (mask_by_pair, 30), (mask_by_difference, 39), (mask_by_head, 31)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.usefixtures("checked")
def test_masks(mod: Callable[..., Any], index: int) -> None:
    with pytest.raises(CaptureBoundsError) as raised:
        build(mod)
    assert str(raised.value) == message(mod, "short", short, index, 0, "mask_mod")
    with pytest.raises(CaptureBoundsError) as raised:
        # the builder may know what a tile is before it has looked at each element
        attend(None, flexmod.create_block_mask(mod, None, 4, LENGTH, LENGTH, device="cpu"), "AUTO")
    assert f"is indexed with {index} in dimension 0" in str(raised.value)


@pytest.mark.usefixtures("checked")
def test_masks_that_stay_inside() -> None:
    build(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (long[q_idx - kv_idx] > -2))


def test_the_cpu_reports_without_the_switch() -> None:
    with pytest.raises(CaptureBoundsError) as raised:
        attend(by_column, backend="AUTO")
    assert str(raised.value) == message(by_column, "short", short, 39, 0, "score_mod")


def test_without_the_switch_a_kernel_loads_0() -> None:
    padded = torch.cat([short, torch.zeros(LENGTH - 30)])
    out = attend(lambda s, b, h, q_idx, kv_idx: s + padded[kv_idx])
    assert torch.equal(attend(by_column), out)


def checked_variant(score_mod: Any, mask_mod: Any) -> Any:
    made = variant(score_mod, mask_mod, head_dim=64)
    assert made.score is not None and made.mask is not None
    return replace(made, score=replace(made.score, checked=True), mask=replace(made.mask, checked=True))


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_checked_kernels_compile(target: str) -> None:
    """For Hopper and for others: forward and backward, with checks in score and mask."""
    made = checked_variant(
        lambda s, b, h, q_idx, kv_idx: s * long[h] + long[kv_idx],
        lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
    )
    for way in ("forward", "backward"):
        kernels: Kernels = made.kernels(way)
        assert kernels.score and kernels.mask
        assert [check.name for check in kernels.score.checks] == ["long", "long"]
        assert [check.name for check in kernels.mask.checks] == ["ids", "ids"]
    found = [job.compile() for job in jobs(made, target)]
    templates = {"sm_90": {"hopper"}, "sm_80": {"portable"}}
    assert {built.template for built in found} == templates[target]
    assert [built.problem for built in found] == [""] * len(found)
