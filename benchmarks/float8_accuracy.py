"""The accuracy of attention on float8, against float64 of the operands before quantization.

    python -m benchmarks.float8_accuracy [--device cuda] [--seeds 3] [--length 2048] [--dim 128]
    python -m benchmarks.float8_accuracy --needles [--keys 131072]
    python -m benchmarks.float8_accuracy --chart

"RMSE" is the root mean square error relative to the root mean square output, over all seeds. "e4m3 weights"
is the RMSE of attention in plain torch that multiplies softmax weights by 256 and rounds them to e4m3. All
other columns are flexmod's own calls. `--needles` measures how much of its needle's value a query gets back.
`--chart` draws docs/images/float8.svg from the tables of docs/float8.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from flexmod import BlockMask, Scales, create_block_mask, flex_attention, masks, quantize
from flexmod.codegen.spec import SCALE_BLOCK
from tools import pictures

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHART = ROOT / "docs" / "float8.md", ROOT / "docs" / "images" / "float8.svg"
HEADS = 4
LARGEST_WEIGHT = 256
NEEDLES = 128
LOG_ODDS = 2.1  # a query gives its needle 0.89 of its weight
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Form(NamedTuple):
    """How operands are stored: the last `quantized` of query, key and value in float8, others in bfloat16."""

    dtype: torch.dtype = E4M3
    by: Any = "tensor"
    rotate: bool = False
    quantized: int = 3


FORMS = {
    "bfloat16": Form(quantized=0),
    "e4m3 by tensor": Form(),
    "e4m3 by head": Form(by="head"),
    "e4m3 by block": Form(by="block"),
    "e4m3 by tensor, rotated": Form(rotate=True),
    "e4m3 by head, rotated": Form(by="head", rotate=True),
    "e4m3 by block, rotated": Form(by="block", rotate=True),
    "e5m2 by head, rotated": Form(E5M2, by="head", rotate=True),
    "keys and values e4m3 by head": Form(by="head", quantized=2),
    "values e4m3 by head": Form(by="head", quantized=1),
}


def times_10_to_50(x: Tensor, hit: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(hit, x * (10 + 40 * uniform(x, generator)), x)


def plus_normal(x: Tensor, hit: Tensor, generator: torch.Generator) -> Tensor:
    """The data of Shah et al., FlashAttention-3, 2024."""
    return torch.where(hit, x + 10 * torch.randn(x.shape, generator=generator, dtype=x.dtype), x)


DATA: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "Normal": lambda x, hit, generator: x,
    "Outliers of 10 to 50": times_10_to_50,
    "Outliers of deviation 10": plus_normal,
}


def uniform(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator, dtype=x.dtype)


def drawn(data: str, shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers in float64, 0.1 % of them changed into outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return DATA[data](x, uniform(x, generator) < 1e-3, generator)


def stored(form: Form, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Scales | None]:
    """Query, key and value as a form stores them; only query and key are rotated."""
    found = [x.bfloat16() for x in tensors]
    scales: list[Tensor | None] = [None] * 3
    for number in range(3 - form.quantized, 3):
        rotate = form.rotate and number < 2
        found[number], scales[number] = quantize(tensors[number], form.dtype, form.by, rotate)
    return found, Scales(*scales) if form.quantized else None


def restored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Float32 values of a tensor as `quantize` returned it."""
    if scale is None or scale.dim() == 0:
        return x.float() * (1 if scale is None else scale)
    by_head = scale.dim() == 2
    rows = scale[..., None] if by_head else scale.repeat_interleave(SCALE_BLOCK, 2)[..., : x.shape[2]]
    return x.float() * rows[..., None]


def in_torch(tensors: Sequence[Tensor], causal: bool, e4m3_weights: bool = False) -> Tensor:
    query, key, value = tensors
    scores = query @ key.mT * query.shape[3] ** -0.5
    if causal:
        scores.masked_fill_(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    if e4m3_weights:
        weights = (weights * LARGEST_WEIGHT).to(E4M3).to(value.dtype) / LARGEST_WEIGHT
    return weights @ value / total


@dataclass
class Sums:
    """Sums over outputs and the truth, in float64."""

    error: float = 0.0
    truth: float = 0.0
    out: float = 0.0
    product: float = 0.0
    largest: float = 0.0

    def add(self, out: Tensor, truth: Tensor) -> None:
        out = out.double()
        error = out - truth
        self.error += float(error.square().sum())
        self.truth += float(truth.square().sum())
        self.out += float(out.square().sum())
        self.product += float((out * truth).sum())
        self.largest = max(self.largest, float(error.abs().max()))

    @property
    def rmse(self) -> str:
        return f"{math.sqrt(self.error / self.truth):.4f}"

    @property
    def cosine(self) -> str:
        return f"{self.product / math.sqrt(self.truth * self.out):.5f}"


def attend(
    tensors: Sequence[Tensor], scales: Scales | None, device: str, mask: BlockMask | None = None
) -> Tensor:
    query, key, value = (x.to(device) for x in tensors)
    if scales is not None:
        scales = Scales(*(None if scale is None else scale.to(device) for scale in scales))
    return flex_attention(query, key, value, block_mask=mask, scales=scales).cpu()


def table(data: str, seeds: int, length: int, dim: int, device: str) -> str:
    lines: list[list[str]] = [[form] for form in FORMS]
    for causal in (False, True):
        found = {form: (Sums(), Sums()) for form in FORMS}
        mask = create_block_mask(masks.causal(), None, None, length, length, device) if causal else None
        for seed in range(seeds):
            tensors = [drawn(data, (1, HEADS, length, dim), 3 * seed + number) for number in range(3)]
            truth = in_torch(tensors, causal)
            for name, form in FORMS.items():
                operands, scales = stored(form, tensors)
                found[name][0].add(attend(operands, scales, device, mask), truth)
                if form.quantized == 3 and scales is not None:
                    values = [restored(*pair) for pair in zip(operands, scales, strict=True)]
                    found[name][1].add(in_torch(values, causal, e4m3_weights=True).bfloat16(), truth)
        for line, (own, rounded) in zip(lines, found.values(), strict=True):
            line += [own.rmse, rounded.rmse if rounded.truth else "-", f"{own.largest:.3g}", own.cosine]
    columns = ["RMSE", "e4m3 weights", "largest", "cosine"]
    headers = [data, *columns, *(f"causal {column}" for column in columns)]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def needles(keys: int, dim: int, device: str) -> str:
    """How much of its needle's value a query gets back, on average."""
    lines: list[list[str]] = [[form] for form in FORMS]
    for data in DATA:
        query, noise, value = (drawn(data, (1, 1, n, dim), n % 7) for n in (NEEDLES, keys, keys + 1))
        value = value[:, :, :keys]
        places = torch.randperm(keys, generator=torch.Generator().manual_seed(0))[:NEEDLES]
        others = torch.cat([(part @ noise.mT).logsumexp(-1) for part in (query * dim**-0.5).split(16, 2)], 2)
        factor = (others + LOG_ODDS) * dim**0.5 / query.square().sum(-1)
        key = noise.index_copy(2, places, query * factor[..., None])
        needle = value[:, :, places]
        for line, form in zip(lines, FORMS.values(), strict=True):
            operands, scales = stored(form, (query, key, value))
            out = attend(operands, scales, device).double()
            line.append(f"{float(((out * needle).sum(-1) / needle.square().sum(-1)).mean()):.4f}")
    return tabulate(lines, ["recall of needles", *DATA], tablefmt="github", disable_numparse=True)


# The chart.


def read(page: str) -> dict[str, dict[str, float]]:
    """The first column of RMSE of each table of the page: data, form, error."""
    found: dict[str, dict[str, float]] = {}
    rows: dict[str, float] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in DATA and len(cells) == 9:
            rows = found.setdefault(cells[0], {})
        elif cells[0] in FORMS and len(cells) == 9:
            rows[cells[0]] = float(cells[1])
    return found


def chart(page: str) -> str:
    found = read(page)
    left, right, step = 250, 640, 22
    largest = max(max(rows.values()) for rows in found.values())
    parts = [pictures.write(24, 38, "Relative error of the output, without a mask", 18, style="bold")]
    y = 60
    for data, rows in found.items():
        parts.append(pictures.write(24, y + 20, data, 14, style="bold"))
        y += 32
        for name, error in rows.items():
            color = "#8a8f98" if name == "bfloat16" else "#d97b29" if FORMS[name].rotate else "#3f6fb5"
            length = max(1.0, (right - left) * error / largest)
            parts.append(pictures.write(40, y + 13, name, 12))
            parts.append(pictures.box(left, y + 2, round(length, 1), step - 8, color, color, 1))
            parts.append(
                pictures.write(round(left + length + 8, 1), y + 13, f"{error:.4f}", 12, pictures.GREY)
            )
            y += step
        y += 10
    return pictures.svg(right + 90, y + 14, "Relative error of attention on float8", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--keys", type=int, default=131072, help="of --needles")
    parser.add_argument("--needles", action="store_true", help="the recall of needles alone")
    parser.add_argument("--chart", action="store_true", help="draw the chart alone")
    asked = parser.parse_args()
    if asked.chart:
        CHART.write_text(chart(PAGE.read_text()))
    elif asked.needles:
        print(needles(asked.keys, asked.dim, asked.device))
    else:
        for data in asked.data:
            print(table(data, asked.seeds, asked.length, asked.dim, asked.device), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
