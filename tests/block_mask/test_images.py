"""Pictures by density, SVG and matplotlib: against the mask itself, element by element."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest
import torch
from tiers import long_but

from block_mask.zoo import ZOO
from flexmod import errors, masks
from flexmod.block_mask import facts as facts_module
from flexmod.block_mask.build import create_block_mask, create_mask
from flexmod.block_mask.facts import cells, tokens
from flexmod.block_mask.format import BlockMask
from flexmod.block_mask.pictures import (
    EMPTY_COLOR,
    FULL_COLOR,
    FULL_TEXT,
    KEPT_COLOR,
    MASKED_COLOR,
    PARTIAL_TEXT,
    colors,
)
from flexmod.block_mask.tiles import PARTIAL

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
SVG = "{http://www.w3.org/2000/svg}"


def small(length=40, block=16):
    return create_block_mask(masks.causal(), None, None, length, length, "cpu", block)


def painted(mask, kept):
    """uint8 [Q, KV, 3]: the color of each element."""
    rows, columns = (
        torch.arange(n) // size for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    )
    kinds = mask.table()[0, 0][rows][:, columns]
    colors = torch.tensor([EMPTY_COLOR, MASKED_COLOR, FULL_COLOR], dtype=torch.uint8)[kinds.long()]
    colors[(kinds == PARTIAL) & kept] = torch.tensor(KEPT_COLOR, dtype=torch.uint8)
    return colors


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("grid", [(7, 5), (100, 100)])
def test_cells_count_what_is_kept(name, grid):
    mask_mod, batch, heads, queries, keys = ZOO[name]
    mask = create_block_mask(mask_mod, batch, heads, queries, keys, "cpu", (32, 48))
    b, h = (n - 1 for n in mask.shape[:2])
    found = cells(mask[b, h], grid)
    dense = create_mask(mask_mod, batch, heads, queries, keys, "cpu")[b, h].float()
    rows, columns = (torch.arange(n) // step for n, step in zip((queries, keys), found.step, strict=True))
    sums = [torch.zeros(len(found.area), columns[-1] + 1).index_put_((rows[:, None], columns), x, True)
            for x in (dense, torch.ones_like(dense))]  # fmt: skip
    assert found.area.shape[0] <= grid[0] and found.area.shape[1] <= grid[1]
    assert torch.equal(found.area, sums[1])
    assert torch.equal(found.full + found.kept, sums[0])
    assert torch.allclose(found.density(), sums[0] / sums[1])
    assert bool((found.kept <= found.partial).all())


def test_partial_tiles_count_half_where_they_are_too_many(monkeypatch):
    monkeypatch.setattr(facts_module, "COUNTED", 100)
    found = cells(small(64), (4, 4))
    assert torch.equal(found.kept, found.partial / 2)
    assert found.density().diagonal().tolist() == [0.5] * 4


def test_tokens_are_the_mask():
    mask = create_block_mask(masks.natten((6, 7), 3), None, None, 42, 42, "cpu", 16)
    kept = create_mask(masks.natten((6, 7), 3), None, None, 42, 42, "cpu")[0, 0]
    found = tokens(mask)
    assert torch.equal(found.density() > 0, kept)
    assert torch.equal(colors(found), painted(mask, kept))


def test_shades():
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: kv_idx % 100 < q_idx // 100 * 25, None, None, 500, 200, "cpu", 100
    )
    assert mask.to_string(density=True) == "(0, 0)\n    \n░░░░\n▒▒▒▒\n▓▓▓▓\n████\n"
    assert mask.to_string(grid_size=(2, 1), density=True) == "(0, 0)\n░░\n▓▓\n"


def test_a_shade_for_each_head():
    mask = create_block_mask(masks.sliding_window(torch.tensor([1, 300])), None, 2, 256, 256, "cpu")
    assert mask.to_string(density=True) == "(0, 0)\n░░  \n  ░░\n\n(0, 1)\n▒▒  \n██▒▒\n"
    assert mask.to_string(density=True, limit=1).startswith(
        "(0, 0)\n░░  \n  ░░\n\n...\nThe first 1 are shown"
    )


@pytest.mark.parametrize("density", [False, True])
def test_a_cell_for_each_tile_that_lists_leave_out(density):
    """Lists with room for one tile a row, of a mask with four."""
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(64, 64))
    assert mask.to_string(-1, density=density) == "(0, 0)\n" + 4 * "██      \n"


@pytest.mark.parametrize("options", [{}, {"density": True}, {"color": True}])
def test_a_picture_of_no_head(options):
    assert small().to_string(limit=0, **options).startswith("...\nThe first 0 are shown")


def test_colors_of_a_terminal():
    text = small(64).to_string(color=True)
    full, partial = ("\x1b[38;2;{};{};{}m".format(*color) for color in (FULL_TEXT, PARTIAL_TEXT))
    lines = text.splitlines()
    assert lines[0] == "(0, 0)"
    assert lines[4] == f"{full}██████\x1b[0m{partial}▒▒\x1b[0m"
    assert re.sub("\x1b\\[[0-9;]*m", "", text) == small(64).to_string(density=True)


def test_a_cell_with_partial_tiles_has_their_color():
    (line,) = small(64).to_string(1, color=True).splitlines()[1:]
    assert line == "\x1b[38;2;{};{};{}m▒▒\x1b[0m".format(*PARTIAL_TEXT)


def drawn_area(svg):
    """The area of each color among the rectangles of the mask, in elements."""
    areas = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("fill") != "none":
            shapes = re.findall(r"M\d+ \d+h(\d+)v(\d+)h-\1z", path.get("d"))
            assert len(shapes) == path.get("d").count("M")
            areas[path.get("fill")] = sum(int(width) * int(height) for width, height in shapes)
    return areas


def test_svg_of_elements():
    """Tiles of 16: one is full, three on the diagonal and two at the lower edge are partial."""
    areas = drawn_area(small().to_svg())
    kept, full, partial = sum(range(1, 41)), 16 * 16, 2 * 16 * 16 + 8 * 8 + 2 * 8 * 16
    expected = {"#233d65": full, "#e07b00": kept - full, "#fdecd0": partial - (kept - full)}
    assert areas == expected


def test_svg_of_a_long_mask_is_small():
    mask = create_block_mask(masks.sliding_window(1000), None, None, 100_000, 100_000, "cpu")
    svg = mask.to_svg()
    assert len(svg) < 60_000
    # cells of 100000 / 96 positions on the window's edge mix colors; those in it are whole
    assert "sliding_window_causal, 100000 x 100000" in svg
    assert sum(drawn_area(svg).values()) >= 1000 * 99_000
    ElementTree.fromstring(svg)


def test_svg_draws_what_is_asked_for():
    mask = create_block_mask(masks.prefix_lm(torch.tensor([0, 30])), 2, None, 40, 40, "cpu", 16)
    assert mask.to_svg(b=1) == mask[1].to_svg() != mask.to_svg()
    with pytest.raises(errors.BlockMaskIndexError):
        mask.to_svg(b=2)


def test_svg_escapes_names():
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, "cpu", 4)
    assert "&lt;lambda&gt;, 8 x 8" in mask.to_svg()


def test_plot_of_elements():
    mask = small()
    axes = mask.plot()
    kept = create_mask(masks.causal(), None, None, 40, 40, "cpu")[0, 0]
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), painted(mask, kept))
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 39.5), (39.5, -0.5))
    assert [line.get_xdata()[0] for line in axes.lines[2:]] == [15.5, 31.5]
    assert axes.get_title() == "causal_mask, 40 x 40, tiles 16 x 16, sparsity 4.00%"
    matplotlib.pyplot.close(axes.figure)


def test_plot_into_axes():
    figure = matplotlib.figure.Figure()
    axes = figure.subplots()
    mask = create_block_mask(masks.causal(), None, None, 5000, 3000, "cpu", 64)
    assert mask.plot(axes) is axes
    assert axes.images[0].get_array().shape == (79, 47, 3)
    assert axes.get_xlim() == (-0.5, 2999.5)
    assert not axes.lines


@pytest.mark.parametrize("name", long_but({"mask.png"}, ["mask.png", "mask.pdf", "mask.svg"]))
def test_plot_into_a_file(name, tmp_path):
    before = matplotlib.pyplot.get_fignums() if "matplotlib.pyplot" in sys.modules else []
    small().plot(tmp_path / name)
    small().plot(str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000
    assert matplotlib.pyplot.get_fignums() == before
