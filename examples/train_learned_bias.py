"""Training: a small language model whose only sense of position is a bias that it learns.

The text is source code, character by character: these examples, or all of flexmod. Pieces of it are packed
into one sequence, with a document mask that keeps them apart. Each head has an ALiBi slope, an element of a
tensor that the score_mod captures and that gets a gradient like any other parameter. Slopes start at zero,
where a head sees which characters came before but hardly in what order; to predict the next one it must learn
to look near. For comparison the example also trains the same model with slopes fixed at zero.

    python examples/train_learned_bias.py                      on a CPU small, on a GPU large
    python examples/train_learned_bias.py --size small --device cuda --steps 300
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

import flexmod
from flexmod import BlockMask, create_block_mask, flex_attention


class Size(NamedTuple):
    """Of the model, of a step (`length` characters in `pieces`), and of the text: files under `text`."""

    layers: int
    heads: int
    width: int
    length: int
    pieces: int
    steps: int
    rate: float
    text: Path


SIZES = {
    "small": Size(2, 4, 64, 1024, 8, 150, 6e-3, Path(__file__).parent),
    "large": Size(6, 8, 512, 16384, 32, 300, 2e-3, Path(flexmod.__file__).parent),
}


class Result(NamedTuple):
    """Losses in nats per character, one a step, with learned slopes and with slopes of zero.

    `slopes` [steps, layers, heads] are the learned ones after each step.
    """

    losses: list[float]
    losses_without: list[float]
    slopes: Tensor


class Layer(nn.Module):
    """Attention with learned slopes, then a perceptron; both on a residual stream [batch, length, width]."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.slopes = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, block_mask: BlockMask) -> Tensor:
        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - self.slopes[h] * (q_idx - kv_idx)

        heads, width = len(self.slopes), x.shape[-1]
        q, k, v = self.qkv(rms_norm(x, (width,))).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attended = flex_attention(q, k, v, alibi, block_mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.inner(rms_norm(x, (width,)))


class Model(nn.Module):
    def __init__(self, size: Size, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, size.width)
        self.layers = nn.ModuleList(Layer(size.heads, size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, characters)

    def forward(self, tokens: Tensor, block_mask: BlockMask) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, block_mask)
        return self.head(rms_norm(x, x.shape[-1:]))


def read_text(folder: Path) -> tuple[Tensor, int]:
    """The characters of the Python files there as numbers, int64, and how many different ones there are."""
    text = "".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def pack(text: Tensor, length: int, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pieces of the text from random places, of random lengths, `length` characters in all.

    Returns the characters, the next characters, and each character's piece, int64 [length] each.
    """
    cuts = torch.randperm(length - 1)[: pieces - 1].sort().values + 1
    piece_of = torch.bucketize(torch.arange(length), cuts, right=True)
    starts = torch.randint(len(text) - length, (pieces,))
    places = starts[piece_of] + torch.arange(length)
    return text[places], text[places + 1], piece_of


def mask_of(piece_of: Tensor) -> BlockMask:
    def causal_pieces(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (piece_of[q_idx] == piece_of[kv_idx]) & (q_idx >= kv_idx)

    length, block = len(piece_of), 128 if piece_of.is_cuda else 64
    return create_block_mask(causal_pieces, None, None, length, length, piece_of.device, BLOCK_SIZE=block)


def train(size: Size, device: torch.device, steps: int, learn_slopes: bool) -> tuple[list[float], Tensor]:
    """The loss of each step, and the slopes after it, float32 [steps, layers, heads]."""
    torch.manual_seed(0)
    text, characters = read_text(size.text)
    model = Model(size, characters).to(device)
    slopes = [layer.slopes.requires_grad_(learn_slopes) for layer in model.layers]
    others = [p for p in model.parameters() if not any(p is s for s in slopes)]
    optimizer = torch.optim.Adam([{"params": others}, {"params": slopes}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[size.rate, 3e-2], total_steps=steps)
    losses, history = [], []
    for _ in range(steps):
        tokens, following, piece_of = (x.to(device) for x in pack(text, size.length, size.pieces))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[None], mask_of(piece_of))
        loss = cross_entropy(logits[0].float(), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        history.append(torch.stack([s.detach().clone() for s in slopes]))
    return torch.stack(losses).tolist(), torch.stack(history).cpu()


def curves(result: Result, lines: int = 10) -> str:
    """The losses as text: their means over stretches of steps, a bar for those with learned slopes."""
    stretch = math.ceil(len(result.losses) / lines)
    rows = ["    step  learned  zero"]
    for start in range(0, len(result.losses), stretch):
        learned, zero = (mean(losses[start : start + stretch]) for losses in result[:2])
        rows.append(f"  {start:>6}  {learned:>7.2f}  {zero:.2f}  {'#' * round(12 * learned)}")
    return "\n".join(rows)


def draw(result: Result, path: str) -> None:
    """The losses beside the slopes, a line a head, a color a layer."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("not drawn: matplotlib is not installed")
        return
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    loss, slope = figure.subplots(1, 2)
    loss.plot(result.losses_without, label="slopes held at zero", color="tab:gray")
    loss.plot(result.losses, label="learned slopes", color="tab:blue")
    loss.set(xlabel="step", ylabel="loss, nats per character", ylim=(0, None))
    loss.legend()
    for number, of_layer in enumerate(result.slopes.unbind(1)):
        lines = slope.plot(of_layer, color=f"C{number}")
        lines[0].set_label(f"layer {number}")
    slope.axhline(0, color="black", linewidth=0.5)
    slope.set(xlabel="step", ylabel="slope of a head, per position")
    slope.legend()
    figure.savefig(path, dpi=120)
    print(f"drawn in {path}")


def main(
    device: str | None = None, size: str | None = None, steps: int | None = None, picture: str | None = None
) -> Result:
    """On a GPU, if there is one, and then large; `steps` None: as many as the size has."""
    here = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = size or ("large" if here.type == "cuda" else "small")
    chosen = SIZES[name]
    steps = steps or chosen.steps
    print(f"{name}, on {here}")
    start = time.perf_counter()
    losses, slopes = train(chosen, here, steps, learn_slopes=True)
    losses_without, _ = train(chosen, here, steps, learn_slopes=False)
    result = Result(losses, losses_without, slopes)
    print("loss, in nats per character, with learned slopes and with slopes of zero:")
    print(curves(result))
    print(f"twice {steps} steps of {chosen.length} characters in {time.perf_counter() - start:.0f} s")
    for number, row in enumerate(result.slopes[-1]):
        print(f"slopes of layer {number}: " + "  ".join(f"{slope:+.3f}" for slope in row.tolist()))
    if picture is not None:
        draw(result, picture)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda (default: cuda, if there is one)")
    parser.add_argument("--size", choices=SIZES, help="default: large on cuda, small elsewhere")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--picture", default="train_learned_bias.png", help="where to draw, with matplotlib")
    main(**vars(parser.parse_args()))
