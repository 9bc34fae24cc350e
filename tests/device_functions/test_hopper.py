"""Functions of `codegen/device_functions/hopper.py` as plain Python, beside what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_gluon.language import names
from plain_gluon.memory import Pointer, Shared
from plain_gluon.order import Program
from plain_gluon.tasks import Tasks
from plain_gluon.tiles import tile

from flexmod.codegen import device_functions

TILE, BLOCK = 64, 128


@pytest.fixture(scope="module")
def hopper() -> dict[str, Any]:
    scope = names(1)
    text = "\n\n".join(device_functions.functions("hopper").values())
    exec(compile(text, "hopper.py", "exec"), scope)
    return scope


def in_a_program(work: Callable[[], object]) -> None:
    """Functions that touch shared memory or other programs' sums run in a program."""
    tasks = Tasks(0)

    def run() -> None:
        Program(0, tasks).enter()
        work()

    tasks.run([("program 0", run)])


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_ring_turns_its_phase_when_it_begins_again(hopper: dict[str, Any], stages: int) -> None:
    slot, phase, seen = 0, 1, []
    for _ in range(3 * stages):
        seen.append((slot, phase))
        slot, phase = hopper["advance"](slot, phase, stages)
    assert seen == [(place, turn) for turn in (1, 0, 1) for place in range(stages)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_summands_have_twice_the_digits(hopper: dict[str, Any], dtype: torch.dtype) -> None:
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(1)).double()
    first, second = (torch.from_numpy(hopper["summand"](tile(numbers.numpy()), dtype, n)) for n in (0, 1))
    assert torch.equal(first, numbers.to(dtype).double())
    digit = torch.finfo(dtype).eps / 2
    assert ((first + second - numbers).abs() <= digit**2 * numbers.abs() + 2**-25).all()
    assert second.count_nonzero() == 64


def test_infinity_and_nan_have_no_rest(hopper: dict[str, Any]) -> None:
    odd = tile(np.array([np.inf, -np.inf, np.nan, 1e6]))  # float16 has no 1e6
    with np.errstate(invalid="ignore"):
        assert np.array_equal(hopper["summand"](odd, torch.float16, 1), np.zeros(4))


def kinds_of(seed: int, rows: int = 6, columns: int = 5) -> list[list[int]]:
    """What the blocks of a mask are: 0 empty, 1 partial, 2 full; the first row has none."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (rows, columns), generator=random)
    kinds[0] = 0
    return kinds.tolist()


def tiles_of(row: list[int]) -> tuple[list[int], list[int]]:
    """Where the tiles of partial and of full blocks begin."""
    found: tuple[list[int], list[int]] = ([], [])
    for block, kind in enumerate(row):
        if kind:
            found[kind - 1].extend(range(block * BLOCK, (block + 1) * BLOCK, TILE))
    return found


def as_runs(kinds: list[list[int]]) -> tuple[Pointer, Pointer]:
    """ROWS [rows, 2, 3] and RUNS [.., 2], see `block_mask/tiles.py`."""
    entries, runs = [], []
    for row in kinds:
        for kind in (1, 2):
            blocks = [block for block, found in enumerate(row) if found == kind]
            first = len(runs)
            for block in blocks:
                if len(runs) > first and runs[-1][1] == block:
                    runs[-1][1] += 1
                else:
                    runs.append([block, block + 1])
            entries.append([len(blocks), len(runs) - first, first])
    numbers = (torch.tensor(x, dtype=torch.int32).reshape(-1) for x in (entries, [*runs, [0, 0]]))
    return tuple(map(Pointer, numbers))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_over_runs_meets_each_tile_once(hopper: dict[str, Any], seed: int) -> None:
    kinds = kinds_of(seed)
    rows, runs = as_runs(kinds)
    mask = (None, rows, runs, 0, 0)
    for number, row in enumerate(kinds):
        partial, full = tiles_of(row)
        of_row, run, start, stop = hopper["first_tile"](mask, 0, 0, number, TILE, BLOCK)
        assert of_row[:2] == (len(partial), len(partial) + len(full))
        seen = []
        for step in range(of_row[1]):
            seen.append(start)
            run, start, stop = hopper["next_tile"](step + 1, of_row, run, start, stop, TILE, BLOCK)
        assert seen == partial + full


@pytest.mark.parametrize("with_full", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_walk_over_lists_meets_each_tile_once(hopper: dict[str, Any], seed: int, with_full: bool) -> None:
    kinds = kinds_of(seed)
    counts = torch.tensor([[sum(x == kind for x in row) for row in kinds] for kind in (1, 2)])
    lists = torch.full((2, len(kinds), len(kinds[0])), -99)
    for kind in (1, 2):
        for number, row in enumerate(kinds):
            blocks = [block for block, found in enumerate(row) if found == kind]
            lists[kind - 1, number, : len(blocks)] = torch.tensor(blocks)
    full_lists = (Pointer(counts[1]), Pointer(lists[1])) if with_full else (None, None)
    slots = len(kinds[0])
    mask = (Pointer(counts[0]), Pointer(lists[0]), slots, *full_lists, slots, 0, 0)
    for number, row in enumerate(kinds):
        partial, full = tiles_of(row)
        of_row = hopper["listed"](mask, 0, 0, number, TILE, BLOCK)
        seen = [hopper["listed_tile"](step, of_row, TILE, BLOCK) for step in range(of_row[1])]
        assert of_row[0] == len(partial)
        assert seen == partial + (full if with_full else [])
        assert hopper["listed_tile"](of_row[1], of_row, TILE, BLOCK) % TILE == 0  # behind the last: no fault


def test_strides_of_a_mask_by_batch_entry_and_head(hopper: dict[str, Any]) -> None:
    rows, runs = as_runs(kinds_of(1, rows=12))
    for batch, head, row in ((0, 0, 1), (1, 0, 2), (1, 2, 0)):
        of_row = hopper["first_tile"]((None, rows, runs, 6, 2), batch, head, row, TILE, BLOCK)[0]
        plain = hopper["first_tile"]((None, rows, runs, 0, 0), 0, 0, batch * 6 + head * 2 + row, TILE, BLOCK)[
            0
        ]
        assert of_row[:2] == plain[:2]


def test_tiles_by_the_order_of_their_rows(hopper: dict[str, Any]) -> None:
    order = Pointer(torch.tensor([2, 0, 1], dtype=torch.int32))
    ordered, plain = (order, None, None, 0, 0), (None, None, None, 0, 0)
    assert hopper["count_tiles"](ordered, 300, TILE, BLOCK) == 6
    assert hopper["count_tiles"](plain, 300, TILE, BLOCK) == 5
    starts = [hopper["nth_tile"](place, -1, ordered, 0, 0, TILE, BLOCK) for place in range(6)]
    assert starts == [256, 320, 0, 64, 128, 192]
    assert hopper["nth_tile"](3, 77, plain, 0, 0, TILE, BLOCK) == 77


@pytest.mark.parametrize("heads", [1, 8, 11, 16])
def test_sections_of_heads_run_side_by_side(hopper: dict[str, Any], heads: int) -> None:
    """Each tile of each head once; those of one place follow each other, of 8 heads or what is left."""
    found = [hopper["in_sections"](number, 5, 1, heads, 8) for number in range(5 * heads)]
    expected = [
        (head, place)
        for section in range(0, heads, 8)
        for place in range(5)
        for head in range(section, min(section + 8, heads))
    ]
    assert found == expected


@pytest.mark.parametrize("row", [32, 64])
@pytest.mark.parametrize("columns", [64, 128])
def test_sums_lie_as_warps_hold_them(hopper: dict[str, Any], columns: int, row: int) -> None:
    """A thread's numbers of eight columns lie side by side: rows 8 apart, two columns each."""
    tile = np.arange(64 * columns).reshape(64, columns)
    held = hopper["as_held"](tile, row)
    assert held.shape == (64 * columns // row, row)
    flat = held.ravel()
    for eight in range(0, columns, 8):
        for warp, lane in itertools.product(range(4), range(32)):
            start = (eight // 8 * 4 + warp) * 128 + lane * 4
            first, column = 16 * warp + lane // 4, eight + lane % 4 * 2
            expected = tile[[first, first, first + 8, first + 8], [column, column + 1] * 2]
            assert flat[start : start + 4].tolist() == expected.tolist()


def test_weights_in_fours(hopper: dict[str, Any]) -> None:
    """Layouts of the matrix unit: a lane's columns of a sum come to its places in an operand of float8."""
    tile = np.arange(64 * 128).reshape(64, 128)
    found = hopper["in_fours"](tile)
    for sixteen, lane in itertools.product(range(0, 128, 16), range(4)):
        summed = [sixteen + 2 * lane + step for step in (0, 1, 8, 9)]
        assert (found[:, sixteen + 4 * lane : sixteen + 4 * lane + 4] == tile[:, summed]).all()


def test_a_number_for_each_row(hopper: dict[str, Any]) -> None:
    assert hopper["by_row"](np.arange(3), None).tolist() == [[0], [1], [2]]


def test_a_note_carries_a_number(hopper: dict[str, Any]) -> None:
    def work() -> None:
        note = Shared.new("int32", [1], None, -1)
        hopper["write_message"](note, 4711)
        assert hopper["read_message"](note) == 4711

    in_a_program(work)


@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("distance", [0, -64, 64, 192, -256])
def test_sums_along_diagonals(hopper: dict[str, Any], distance: int, queries: int) -> None:
    """Each term goes to the sum of its q_idx - kv_idx; distances that do not exist are left out."""
    length, keys = 200, 230
    term = torch.randn(64, queries, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    sums = torch.zeros(length + keys - 1, dtype=torch.float64)
    given = (term.numpy(), distance, Pointer(sums), keys - 1, length, keys)
    in_a_program(lambda: hopper["add_diagonals"](*given))
    expected = torch.zeros_like(sums)
    place = distance + torch.arange(queries)[None, :] - torch.arange(64)[:, None]
    there = (place > -keys) & (place < length)
    expected.index_add_(0, (place + keys - 1)[there], term[there])
    torch.testing.assert_close(sums, expected)
