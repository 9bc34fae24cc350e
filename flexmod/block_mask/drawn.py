"""What a BlockMask shows of itself: pictures, its parts in text, and counts of what it keeps."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from flexmod.block_mask import images
from flexmod.block_mask.cells import cells
from flexmod.block_mask.facts import Facts, facts
from flexmod.block_mask.picture import by_density, grid_of, picture, titled
from flexmod.block_mask.refresh import fresh
from flexmod.block_mask.tiles import EMPTY, LISTS

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask

# elements that a mask counts to be printed
COUNTED = 1 << 26


class Drawn:
    """What a mask looks like, as text, as SVG and with matplotlib, and how much it keeps."""

    def to_string(
        self,
        grid_size: int | tuple[int, int] = (20, 20),
        limit: int = 4,
        *,
        density: bool = False,
        color: bool = False,
    ) -> str:
        """The picture: solid where all tiles are listed, shaded where some are, blank where none is.

        `density` shades by the share of elements that the mask keeps instead; `color` does that in a
        terminal's colors, and tells full tiles from partial ones.

        At most `grid_size` rows and columns (-1: a cell for each tile), for the first `limit` pairs (b, h); a
        negative limit draws all of them. Raises GridSizeError.
        """
        mask = fresh(self)
        batch_shape = mask.held.batch
        count = math.prod(batch_shape) if limit < 0 else limit
        places = list(itertools.islice(itertools.product(*map(range, batch_shape)), count))
        if density or color:
            grid = grid_of(mask.held.grid, grid_size)
            shown = [cells(mask[place] if place else mask, grid) for place in places]
            return titled([by_density(one, color) for one in shown], batch_shape, limit)
        listed = (mask.table() != EMPTY).expand(*batch_shape, -1, -1)
        return picture([listed[place] for place in places], batch_shape, grid_size, limit)

    def to_svg(self, b: int = 0, h: int = 0) -> str:
        """The picture of one batch and head as the text of an SVG file.

        Full tiles, partial ones, and how much these keep have colors; up to 128 positions each element is
        drawn. Raises BlockMaskIndexError.
        """
        return images.svg(self._one(b, h))

    def plot(self, target: Any = None, b: int = 0, h: int = 0) -> Any:
        """The picture of one batch and head, drawn with matplotlib into `target`: the name of a file, axes,
        or None for a new figure. Returns the axes.

        Up to 1024 positions each element is drawn. Raises MissingMatplotlib, BlockMaskIndexError.

            mask.plot("mask.png")
        """
        return images.plot(self._one(b, h), target)

    def sparsity(self) -> float:
        """How much of the score matrix lies outside of the listed tiles, in per cent.

        Below zero where the padding of the tiles at the edge outweighs what is skipped.
        """
        mask = fresh(self)
        return 100 * (1 - mask.held.listed() * math.prod(mask.BLOCK_SIZE) / mask.numel())

    def facts(self, budget: float = math.inf) -> Facts:
        """What the mask turns out to be: density, whether every query has keys, and so on.

        Elements of partial tiles are counted where there are no more than `budget`.
        """
        mask = fresh(self)
        known = (mask.held.batch, mask.seq_lengths, mask.BLOCK_SIZE, mask.traced)
        return facts(mask.table(), *known, budget=budget)

    def __str__(self) -> str:
        """The picture, and the facts in a line."""
        mask = fresh(self)
        head = f"BlockMask(shape={mask.shape}, sparsity={mask.sparsity():.2f}%, "
        return f"{head}\n{self.to_string().strip()}\n{mask.facts(COUNTED)}\n)"

    def __repr__(self) -> str:
        mask = fresh(self)
        shapes = [(name, None if part is None else part.shape) for name, part in mask._parts(LISTS).items()]
        shown = [
            *shapes,
            ("BLOCK_SIZE", mask.BLOCK_SIZE),
            ("shape", mask.shape),
            ("sparsity", f"{mask.sparsity():.2f}%"),
            ("mask_mod", getattr(mask.mask_mod, "__name__", mask.mask_mod)),
        ]
        lines = [f"    {name}={value}" for name, value in shown]
        return "BlockMask(\n" + ",\n".join(lines) + "\n)"

    def _one(self, b: int, h: int) -> BlockMask:
        mask = fresh(self)
        return mask[b, h] if mask.held.batch else mask
