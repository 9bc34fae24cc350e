"""Each function of `device_functions/attention.py` by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from device_functions.applied import applied, kernel, loaded

INF, NAN = math.inf, math.nan
ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, INF, -INF, NAN])

TILE = """

@triton.jit
def run(OUT, X, stride_b, stride_h, stride_m, stride_d, ROWS: tl.constexpr, DIMS: tl.constexpr):
    tile = tile_at(X, stride_b, stride_h, stride_m, stride_d, 1, 2, 5, ROWS, DIMS)
    place = tl.arange(0, ROWS)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    tl.store(OUT + place, tl.load(tile))
"""


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=str)
def test_a_tile_lies_where_its_strides_say(order: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(2, 3, 16, 8).permute(order).contiguous().permute(*map(order.index, range(4))).to(device)
    out = torch.empty(4, 8, device=device)
    kernel(loaded("attention", TILE), "run", out)[(1,)](out, x, *x.stride(), ROWS=4, DIMS=8)
    assert torch.equal(out, x[1, 2, 5:9])


PARTS_OF_RUNS = """

@triton.jit
def run(OUT, ROW, RUNS, PARTS, TILE: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    steps, run, start, stop = first_of_runs(ROW, RUNS, 0, TILE, BLOCK)
    steps, run, start, stop = part_of_runs(part, PARTS, steps, run, start, stop, TILE, BLOCK)
    for step in range(0, steps):
        tl.store(OUT + start // TILE, part)
        run, start, stop = next_of_runs(step, steps, run, start, stop, TILE, BLOCK)
"""


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("runs", [[], [(0, 1)], [(2, 9)], [(0, 2), (3, 4), (6, 11)], [(1, 2), (4, 5)]])
def test_parts_have_all_tiles_of_runs_once(
    runs: list[tuple[int, int]], parts: int, device: torch.device
) -> None:
    """Equal numbers of tiles, in order, but for the last parts. A block has two tiles."""
    row = torch.tensor([sum(stop - start for start, stop in runs), len(runs), 0], dtype=torch.int32)
    spans = torch.tensor(runs or [(0, 0)], dtype=torch.int32)
    out = torch.full((24,), -1, dtype=torch.int32, device=device)
    given = {"PARTS": parts, "TILE": 16, "BLOCK": 32}
    kernel(loaded("attention", PARTS_OF_RUNS), "run", out)[(parts,)](
        out, row.to(device), spans.to(device), **given
    )
    tiles = [tile for start, stop in runs for tile in range(2 * start, 2 * stop)]
    each = -(-len(tiles) // parts)
    expected = torch.full((24,), -1, dtype=torch.int32)
    for number, tile in enumerate(tiles):
        expected[tile] = number // each
    assert torch.equal(out.cpu(), expected)


PLACE = """

@triton.jit
def run(OUT, HQ, HKV, M, N, TILE: tl.constexpr, LAST_FIRST: tl.constexpr):
    out = OUT + tl.program_id(0) * 11
    batch, head, start = tile_of_queries(HQ, M, TILE, LAST_FIRST)
    tl.store(out, batch)
    tl.store(out + 1, head)
    tl.store(out + 2, start)
    batch, head, start = tile_of_keys(HKV, N, TILE)
    tl.store(out + 3, batch)
    tl.store(out + 4, head)
    tl.store(out + 5, start)
    batch, head, offset, diagonal, diagonals = diagonal_of_tiles(HQ, M, N, 2 * TILE, TILE)
    tl.store(out + 6, batch)
    tl.store(out + 7, head)
    tl.store(out + 8, offset)
    tl.store(out + 9, diagonal)
    tl.store(out + 10, diagonals)
"""


@pytest.mark.parametrize("last_first", [False, True])
def test_each_tile_is_a_programs(last_first: bool, device: torch.device) -> None:
    """2 batch entries, 3 query heads, 2 of keys, 5 tiles of queries, 4 of keys; 8 diagonals of tiles."""
    out = torch.empty(36, 11, dtype=torch.int32, device=device)
    given = {"HQ": 3, "HKV": 2, "M": 70, "N": 50, "TILE": 16, "LAST_FIRST": last_first}
    kernel(loaded("attention", PLACE), "run", out)[(36,)](out, **given)
    rows = out.tolist()
    starts = [0, 16, 32, 48, 64][:: -1 if last_first else 1]
    assert [row[:3] for row in rows[:30]] == [[b, h, m] for b in range(2) for h in range(3) for m in starts]
    tiles = [[b, h, n] for b in range(2) for h in range(2) for n in (0, 16, 32, 48)]
    assert [row[3:6] for row in rows[:16]] == tiles
    # start_n - start_m of tiles of 32 queries and 16 keys: the last keys beside the first queries come first
    offsets = [48, 32, 16, 0, -16, -32, -48, -64]
    found = [row[6:] for row in rows]
    expected = [[b, h, x, n, 8] for b in range(2) for h in range(3) for n, x in enumerate(offsets)]
    assert found == expected[:36]


WALK = """

@triton.jit
def run(OUT, OF_ROW, RUNS, FIRST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    steps, run, start, stop = first_of_runs(OF_ROW, RUNS, FIRST, TILE, BLOCK)
    tl.store(OUT, steps)
    for step in range(0, steps):
        tl.store(OUT + 1 + step, start)
        run, start, stop = next_of_runs(step, steps, run, start, stop, TILE, BLOCK)
"""


@pytest.mark.parametrize(
    "runs", [[], [(0, 1)], [(2, 5)], [(0, 2), (3, 4), (7, 9)], [(1, 2), (2, 3)]], ids=str
)
@pytest.mark.parametrize("first", [0, 3])
def test_a_walk_over_runs_meets_each_tile_once(
    first: int, runs: list[tuple[int, int]], device: torch.device
) -> None:
    """Other runs stand before them, and numbers behind them that are none."""
    blocks = [block for run in runs for block in range(*run)]
    of_row = torch.full((6,), -99)
    of_row[first : first + 3] = torch.tensor([len(blocks), len(runs), 2])
    table = torch.tensor([(90, 91), (92, 93), *runs, (-99, -99)])
    out = torch.full((40,), -1, dtype=torch.int32, device=device)
    run = kernel(loaded("attention", WALK), "run", out)
    given = (x.to(torch.int32).to(device).contiguous() for x in (of_row, table))
    run[(1,)](out, *given, FIRST=first, TILE=32, BLOCK=64)
    starts = [block * 64 + half for block in blocks for half in (0, 32)]
    assert out.tolist() == [len(starts), *starts, *[-1] * (39 - len(starts))]


def test_a_compensated_sum_keeps_what_rounding_takes(device: torch.device) -> None:
    """1 and 512 terms that float32 would all lose beside it."""
    total, lost = torch.ones(64, device=device), torch.zeros(64, device=device)
    term = torch.full((64,), 2.0**-25, device=device)
    for _ in range(512):
        total, lost = of_two("compensated(a, b, c)", total, lost, term)
    assert torch.equal(total, torch.full((64,), 1 + 2.0**-16, device=device))


def of_two(call: str, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, on the device of the arguments."""
    found = applied("attention", call, *given, dtypes=(torch.float32, torch.float32))
    return tuple(x.to(given[0].device) for x in found)  # type: ignore[return-value]


def test_the_exponential_is_near(device: torch.device) -> None:
    x = -torch.cat([torch.linspace(0, 87, 9999), 10.0 ** torch.linspace(-40, 1.9, 999)])
    found = applied("attention", "exponential(a)", x.to(device)).double()
    assert ((found / x.double().exp() - 1).abs() <= 1.5e-7).all()


def test_the_exponential_of_odd_values(device: torch.device) -> None:
    """Weights are e^x up to 1, nothing far below, and no number where a score is none."""
    found = applied("attention", "exponential(a)", ODD.to(device))
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, NAN])
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_a_settled_score_is_itself(device: torch.device) -> None:
    found = applied("attention", "unfused(a, b)", ODD.to(device), torch.tensor(INF, device=device))
    assert torch.equal(found.view(torch.int32)[:-1], ODD.view(torch.int32)[:-1])
    assert found[-1].isnan()


ADD = """

@triton.jit
def run(
    TERMS, PLACES, KEEP, SUMS, FIXED, LARGEST, room, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    terms, keep = tl.load(TERMS + place), tl.load(KEEP + place) != 0
    add_elements(terms, tl.load(PLACES + place), keep, SUMS, FIXED, LARGEST, room)
"""


def test_elements_are_added_in_any_order(device: torch.device) -> None:
    terms, places, keep = scattered(device)
    sums = torch.zeros(7, device=device)
    add(terms, places, keep, sums)
    expected = torch.zeros(7, dtype=torch.float64).index_add_(
        0, places[keep].cpu(), terms[keep].double().cpu()
    )
    torch.testing.assert_close(sums.cpu().double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1.0, 1e30, 3e38])
def test_elements_are_added_as_whole_numbers(size: float, device: torch.device) -> None:
    """Two passes: the largest term gives the unit, then sums are the same bits in every order of terms."""
    terms, places, keep = scattered(device)
    terms = terms / terms.abs().max() * size
    found = [fixed_sums(terms, places, keep), fixed_sums(terms.flip(0), places.flip(0), keep.flip(0))]
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    fixed, shift = found[0]
    expected = torch.zeros(7, dtype=torch.float64).index_add_(
        0, places[keep].cpu(), terms[keep].double().cpu()
    )
    unit = 2.0**-shift
    assert ((fixed.double() * unit - expected).abs() <= len(terms.flatten()) * unit).all()


def test_terms_that_are_no_numbers_go_to_the_other_sums(device: torch.device) -> None:
    terms, places, keep = scattered(device)
    terms[0, 0], places[0, 0], keep[0, 0] = NAN, 2, True
    terms[1, 1], places[1, 1], keep[1, 1] = INF, 4, True
    terms[2, 2], places[2, 2], keep[2, 2] = NAN, 5, False
    sums = torch.zeros(7, device=device)
    fixed = torch.zeros(7, dtype=torch.int64, device=device)
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    add(terms, places, keep, sums, None, largest)
    assert largest.view(torch.float32).item() == terms[keep & terms.isfinite()].abs().max()
    add(terms, places, keep, sums, fixed, largest)
    assert sums.isnan().tolist() == [False, False, True, False, False, False, False]
    assert sums[4] == INF and sums[5] == 0


def scattered(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Terms, their places among 7, and which of them count."""
    random = torch.Generator().manual_seed(3)
    terms = torch.randn(8, 16, generator=random)
    places = torch.randint(0, 7, (8, 16), generator=random)
    keep = torch.rand(8, 16, generator=random) < 0.7
    return terms.to(device), places.to(device), keep.to(device)


def fixed_sums(terms: Tensor, places: Tensor, keep: Tensor, room: int = 40) -> tuple[Tensor, int]:
    """The whole sums, and how many binary places of a sum they count in."""
    fixed = torch.zeros(7, dtype=torch.int64, device=terms.device)
    largest = torch.zeros(1, dtype=torch.int32, device=terms.device)
    sums = torch.zeros(7, device=terms.device)
    add(terms, places, keep, sums, None, largest, room)
    add(terms, places, keep, sums, fixed, largest, room)
    assert not sums.any()
    return fixed.cpu(), min(room + 126 - (int(largest) >> 23), 126)


def add(
    terms: Tensor, places: Tensor, keep: Tensor, sums: Tensor,
    fixed: Tensor | None = None, largest: Tensor | None = None, room: int = 40,
) -> None:  # fmt: skip
    rows, columns = terms.shape
    run = kernel(loaded("attention", ADD), "run", terms)
    run[(1,)](
        terms.contiguous(), places.contiguous(), keep.to(torch.int32).contiguous(), sums, fixed, largest,
        room, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


ENDS = """

@triton.jit
def run(OUT, X, BLOCK: tl.constexpr):
    x = tl.load(X + tl.arange(0, BLOCK))
    tl.store(OUT, lowest(x))
    tl.store(OUT + 1, highest(x))
    if x.dtype.is_floating():
        tl.store(OUT + 2, lowest_float(x))
        tl.store(OUT + 3, highest_float(x))
"""


def ends(x: Tensor) -> list[float]:
    out = torch.zeros(4, dtype=x.dtype, device=x.device)
    kernel(loaded("attention", ENDS), "run", x)[(1,)](out, x, BLOCK=len(x))
    return out.tolist()


def test_ends_of_values(device: torch.device) -> None:
    assert ends(torch.tensor([3, -7, 2**31 - 1, -(2**31)], device=device))[:2] == [-(2**31), 2**31 - 1]
    assert ends(torch.tensor([3.0, -INF, 1e-45, 2.0], device=device)) == [-INF, 3.0, -INF, 3.0]


@pytest.mark.parametrize("place", range(4))
def test_nothing_is_known_of_values_that_are_no_numbers(place: int, device: torch.device) -> None:
    x = torch.tensor([1.0, -INF, INF, 0.0], device=device)
    x[place] = NAN
    assert all(math.isnan(end) for end in ends(x)[2:])


def test_a_rectangle_is_judged_by_its_diagonals(device: torch.device) -> None:
    """Counts of the differences q_idx - kv_idx at which a term holds say it of all rectangles."""
    queries, keys = 6, 5
    holds = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 1, 0])  # of the differences from 1 - keys on
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), holds.cumsum(0)]).to(torch.int32)
    corners = torch.cartesian_prod(*[torch.arange(n) for n in (queries, queries, keys, keys)])
    corners = corners[(corners[:, 0] <= corners[:, 1]) & (corners[:, 2] <= corners[:, 3])]
    source = """

@triton.jit
def run(ALL, ANY, COUNTS, CORNERS, COUNT, N, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = place < COUNT
    q_low = tl.load(CORNERS + place * 4, mask=inside, other=0)
    q_high = tl.load(CORNERS + place * 4 + 1, mask=inside, other=0)
    kv_low = tl.load(CORNERS + place * 4 + 2, mask=inside, other=0)
    kv_high = tl.load(CORNERS + place * 4 + 3, mask=inside, other=0)
    every, some = over_diagonals(COUNTS, q_low, q_high, kv_low, kv_high, N)
    tl.store(ALL + place, every.to(tl.int32), mask=inside)
    tl.store(ANY + place, some.to(tl.int32), mask=inside)
"""
    given = [x.to(device) for x in (counts, corners.to(torch.int32).contiguous())]
    every, some = (torch.zeros(len(corners), dtype=torch.int32, device=device) for _ in range(2))
    run = kernel(loaded("attention", source), "run", every)
    run[(1,)](every, some, *given, len(corners), keys, BLOCK=512)
    for corner, all_hold, any_holds in zip(corners.tolist(), every.tolist(), some.tolist(), strict=True):
        low, high = corner[0] - corner[3] + keys - 1, corner[1] - corner[2] + keys - 1
        expected = holds[low : high + 1].bool()
        assert (all_hold, any_holds) == (expected.all().item(), expected.any().item())


B, HQ, M = 2, 3, 70


@pytest.mark.parametrize("dim, tile", [(16, 16), (24, 32)], ids=["whole", "padded"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("grad_lse", [False, True])
def test_statistics(dim: int, tile: int, large: bool, grad_lse: bool, device: torch.device) -> None:
    """A dead row, rows past the last, and one head with a row whose lse is large."""
    pitch = 80
    out, grad_out = (torch.randn(B, M, HQ, dim, device=device).transpose(1, 2) for _ in range(2))
    lse, grad = torch.randn(B, HQ, M, device=device), torch.randn(M, HQ, B, device=device).permute(2, 1, 0)
    row_max, rest = torch.randn(B, HQ, M, device=device), torch.randn(B, HQ, M, device=device)
    lse[0, 1, 3], lse[1, 2, 5], lse[1, 2, 6] = -INF, 5000.0, -5000.0
    lse2, delta, maxima = (torch.full((B, HQ, pitch), NAN, device=device) for _ in range(3))
    heads = torch.zeros(B, HQ, device=device)
    kernel(loaded("attention", ""), "statistics_kernel", out)[(B * HQ * pitch // 16,)](
        out, *out.stride(), grad_out, *grad_out.stride(), lse,
        grad if grad_lse else None, *(grad.stride() if grad_lse else (0, 0, 0)), lse2, delta,
        *((row_max, rest, maxima, heads) if large else (None,) * 4),
        HQ, M, pitch, DV=dim, DV_TILE=tile, FROM=1000.0, BLOCK_M=16,
    )  # fmt: skip
    dead = lse == -INF
    wanted = (out * grad_out).sum(-1) - (grad if grad_lse else 0.0)
    torch.testing.assert_close(delta[..., :M], wanted.masked_fill(dead, 0.0))
    assert torch.equal(delta[..., M:], torch.zeros_like(delta[..., M:]))
    in_base_2 = (lse * math.log2(math.e)).masked_fill(dead, INF)
    is_large = (lse.abs() > 4000) & ~dead
    if large:
        in_base_2 = torch.where(is_large, rest, in_base_2)
        assert torch.equal(maxima[..., :M], row_max.masked_fill(~is_large, 0.0))
        assert torch.equal(heads != 0, is_large.any(-1))
    torch.testing.assert_close(lse2[..., :M], in_base_2)
    assert torch.equal(lse2[..., M:], torch.full_like(lse2[..., M:], INF))


def test_statistics_without_an_lse(device: torch.device) -> None:
    out = torch.randn(B, HQ, M, 16, device=device)
    lse, delta = torch.zeros(B, HQ, M, device=device), torch.full((B, HQ, M), NAN, device=device)
    kernel(loaded("attention", ""), "statistics_kernel", out)[(B * HQ * 5,)](
        out, *out.stride(), out, *out.stride(), lse, None, 0, 0, 0, None, delta, *(None,) * 4,
        HQ, M, M, DV=16, DV_TILE=16, FROM=1000.0, BLOCK_M=16,
    )  # fmt: skip
    torch.testing.assert_close(delta, out.square().sum(-1))
