"""KernelSpec and the ladder of tile sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flexmod.codegen.ladder import SHORT, ShortRow, ladder, short_length
from flexmod.codegen.spec import (
    Decoding,
    KernelName,
    KernelSpec,
    Limits,
    Tile,
    Verdict,
    choose,
    padded,
    statistics_rows,
)
from flexmod.errors import BlockSizeError, OptionValueError

KERNELS: tuple[KernelName, ...] = ("forward", "dq", "dkdv", "diagonal", "scatter")
SPEC = KernelSpec(torch.bfloat16, torch.bfloat16, torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    "dim, expected", [(1, 16), (16, 16), (17, 32), (64, 64), (80, 128), (192, 256), (512, 512)]
)
def test_padded(dim: int, expected: int) -> None:
    assert padded(dim) == expected


@pytest.mark.parametrize("name", ["q_dtype", "k_dtype", "v_dtype"])
def test_float8_has_no_backward(name: str) -> None:
    assert SPEC.directions == ("forward", "backward")
    assert replace(SPEC, **{name: torch.float8_e4m3fn}).directions == ("forward",)


@pytest.mark.parametrize(
    ("dtype", "precision", "dims", "family", "expected"),
    [
        (torch.float32, "ieee", (64, 64), "nvidia", "bf16x6"),
        (torch.float32, "ieee", (136, 256), "nvidia", "bf16x6"),
        (torch.float32, "ieee", (257, 64), "nvidia", "ieee"),
        (torch.float32, "ieee", (64, 257), "nvidia", "ieee"),
        (torch.float32, "ieee", (64, 64), "", "ieee"),
        (torch.float32, "tf32", (64, 64), "nvidia", "tf32"),
        (torch.bfloat16, "ieee", (64, 64), "nvidia", "ieee"),
    ],
)
def test_precision_of_a_family(
    dtype: torch.dtype, precision: Any, dims: tuple[int, int], family: str, expected: str
) -> None:
    spec = KernelSpec(dtype, dtype, dtype, *dims, precision=precision).on(family)
    assert spec.precision == expected
    assert spec.exact == (dtype is torch.float32 and precision == "ieee")
    assert ("out" in spec.compensates) == (spec.exact and expected == "ieee")
    of_heads = replace(spec, shared_kv=True)
    assert ("grad_v" in of_heads.compensates) == spec.exact
    assert spec.on(family) == spec


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block", [None, (16, 16), (48, 128), (64, 64), (128, 128), (1024, 256)], ids=str)
def test_tiles_divide_the_blocks_of_the_mask(kernel: KernelName, block: tuple[int, int] | None) -> None:
    for dtype, dim in product((torch.float16, torch.float32), (8, 64, 100, 256, 512, 700)):
        tiles = ladder(replace(SPEC, q_dtype=dtype, head_dim=dim, mask_block=block), kernel, {})
        assert len(set(tiles)) == len(tiles) > 0
        for tile in tiles:
            assert min(tile.block_m, tile.block_n) >= 16
            if block:
                assert block[0] % tile.block_m == 0 and block[1] % tile.block_n == 0
            if kernel == "diagonal":
                assert tile.block_m % tile.block_n == 0


@pytest.mark.parametrize("block", [(8, 128), (128, 24)], ids=str)
def test_blocks_that_no_tile_divides(block: tuple[int, int]) -> None:
    with pytest.raises(BlockSizeError, match="is no multiple of 16 on both sides"):
        ladder(replace(SPEC, mask_block=block), "forward", {})


def test_options_stand_on_every_rung() -> None:
    options = {
        "BLOCK_M": 32,
        "BLOCK_N": 64,
        "num_warps": 2,
        "num_stages": 1,
        "bwd_num_warps": 8,
        "BLOCK_N2": 16,
    }
    assert ladder(SPEC, "forward", options) == (Tile(32, 64, 2, 1),)
    assert {(t.block_n, t.warps, t.stages) for t in ladder(SPEC, "dq", options)} == {(16, 8, 1)}
    assert {(t.warps, t.stages) for t in ladder(SPEC, "dkdv", options)} == {(8, 1)}


def test_an_option_that_the_blocks_forbid() -> None:
    spec = replace(SPEC, mask_block=(64, 128))
    assert ladder(spec, "dkdv", {"BLOCK_N1": 128})[0].block_n == 128
    with pytest.raises(
        OptionValueError, match="kernel option BLOCK_M1 is 128.\n  Instead: give a divisor of"
    ):
        ladder(spec, "dkdv", {"BLOCK_M1": 128})


def test_sides_of_the_kernels_of_captured_tensors() -> None:
    options = {"BLOCK_M2": 16, "BLOCK_M3": 32, "BLOCK_N3": 64}
    assert {(t.block_m, t.block_n) for t in ladder(SPEC, "scatter", options)} == {(32, 64)}
    with pytest.raises(OptionValueError, match="BLOCK_N3 is 64.\n  Instead: give a divisor of BLOCK_M3, 32."):
        ladder(SPEC, "diagonal", options)


@pytest.mark.parametrize("dim, rows", [(16, 128), (128, 64), (512, 16), (2048, 16)])
def test_statistics_rows(dim: int, rows: int) -> None:
    assert statistics_rows(replace(SPEC, value_dim=dim)) == rows


def test_small_tiles_go_first_where_mods_hold_columns() -> None:
    usual, by_column = ladder(SPEC, "forward", {}), ladder(SPEC, "forward", {}, by_column=True)
    assert set(usual) == set(by_column)
    assert by_column[0].block_m * by_column[0].block_n <= 64 * 64 < usual[0].block_m * usual[0].block_n


@pytest.mark.parametrize("row", SHORT, ids=lambda row: f"{row.kernel}-{row.positions}-{row.widest}-{row.of}")
def test_short_calls_begin_with_a_small_tile(row: ShortRow) -> None:
    """Each row of the table is reached, and the usual tiles follow."""
    facts: dict[str, Any] = {"head_dim": row.widest, "value_dim": row.widest, "short": row.positions}
    facts["backward"] = row.kernel != "forward"
    facts["mask_block"] = (128, 128) if "mask" in row.of else None
    facts["pair_tile"] = 0 if "tile" in row.of else None
    spec = replace(SPEC, **facts)
    short = ladder(spec, row.kernel, {}, busy="busy" in row.of)
    assert short[0] == Tile(*row.tile) and short[0].passing > short[1].passing == 0
    assert set(short[1:]) <= set(ladder(replace(spec, short=0), row.kernel, {})) <= set(short)
    if row.kernel != "dq":
        assert short_length(spec, row.positions, {}) == row.positions


@pytest.mark.parametrize(("spills", "chosen"), [(0, 0), (64, 0), (320, 0), (321, 1)])
def test_a_small_tile_may_spill(spills: int, chosen: int) -> None:
    """Up to its own number of registers; another tile up to the family's."""
    tiles = Tile(32, 64, 4, 2, passing=320), Tile(64, 64, 4, 2)
    found = choose(tiles, lambda tile: Verdict(spills if tile.passing else 0), Limits(passing=64))
    assert found.rung == tiles[chosen]
    assert choose(tiles[::-1], lambda tile: Verdict(65), Limits(passing=64)).rung == tiles[0]


@pytest.mark.parametrize("family", ["", "nvidia"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("kernel", "few"),
    [("forward", None), ("forward", Decoding(16, group=4, split=False)), ("dq", None), ("dkdv", None)],
)
def test_exact_float32_takes_its_first_tile_however_much_it_spills(
    dim: int, kernel: KernelName, few: Decoding | None, family: str
) -> None:
    spec = replace(SPEC.of_dtype(torch.float32), head_dim=dim, value_dim=dim, decoding=few).on(family)
    tiles = ladder(spec, kernel, {})
    assert choose(tiles, lambda tile: Verdict(5000), Limits(passing=64)).rung == tiles[0]
    assert few is None or tiles[0].block_m == few.rows


def test_delta_is_summed_in_the_order_of_dq() -> None:
    spec = replace(SPEC, short=64)
    assert ladder(spec, "delta", {}) == ladder(spec, "dq", {})
