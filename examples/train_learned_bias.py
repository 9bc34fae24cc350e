"""Training: a small language model whose only sense of position is a bias that it learns.

The text is the source of these examples, character by character. Pieces of it are packed into one sequence,
with a document mask that keeps them apart. Each head has an ALiBi slope, an element of a tensor that the
score_mod captures and that gets a gradient like any other parameter. Slopes start at zero, where a head sees
which characters came before but hardly in what order; to predict the next one it must learn to look near. The
same model with its slopes held at zero is trained beside it.

Gradients of captured tensors exist on the CPU so far, so the model trains there, on a machine with a GPU too.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from flexmod import BlockMask, create_block_mask, flex_attention

HEADS, WIDTH, LAYERS = 4, 64, 2
LENGTH, PIECES = 1024, 8


class Result(NamedTuple):
    """Losses in nats per character, one a step, with learned slopes and with slopes of zero.

    `slopes` [LAYERS, HEADS] are those learned.
    """

    losses: list[float]
    losses_without: list[float]
    slopes: Tensor


class Layer(nn.Module):
    """Attention with learned slopes, then a perceptron; both on a residual stream [batch, length, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.slopes = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, block_mask: BlockMask) -> Tensor:
        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - self.slopes[h] * (q_idx - kv_idx)

        q, k, v = self.qkv(rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = flex_attention(q, k, v, alibi, block_mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.inner(rms_norm(x, (WIDTH,)))


class Model(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor, block_mask: BlockMask) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, block_mask)
        return self.head(rms_norm(x, (WIDTH,)))


def read_text() -> tuple[Tensor, int]:
    """The characters of the examples as numbers, int64, and how many different ones there are."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def pack(text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PIECES pieces of the text from random places, of random lengths, LENGTH characters in all.

    Returns the characters, those that come next, and the piece that each belongs to, int64 [LENGTH] each.
    """
    cuts = torch.randperm(LENGTH - 1)[: PIECES - 1].sort().values + 1
    piece_of = torch.bucketize(torch.arange(LENGTH), cuts, right=True)
    starts = torch.randint(len(text) - LENGTH, (PIECES,))
    places = starts[piece_of] + torch.arange(LENGTH)
    return text[places], text[places + 1], piece_of


def mask_of(piece_of: Tensor) -> BlockMask:
    def causal_pieces(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (piece_of[q_idx] == piece_of[kv_idx]) & (q_idx >= kv_idx)

    return create_block_mask(causal_pieces, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=64)


def train(steps: int, learn_slopes: bool) -> tuple[list[float], Tensor]:
    """The loss of each step, and the slopes after the last."""
    torch.manual_seed(0)
    text, characters = read_text()
    model = Model(characters)
    slopes = [layer.slopes.requires_grad_(learn_slopes) for layer in model.layers]
    others = [p for p in model.parameters() if not any(p is s for s in slopes)]
    optimizer = torch.optim.Adam([{"params": others}, {"params": slopes}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[6e-3, 3e-2], total_steps=steps)
    losses = []
    for _ in range(steps):
        tokens, following, piece_of = pack(text)
        logits = model(tokens[None], mask_of(piece_of))
        loss = cross_entropy(logits[0], following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, torch.stack([s.detach() for s in slopes])


def curves(result: Result, lines: int = 10) -> str:
    """The losses as text: their means over stretches of steps, a bar for those with learned slopes."""
    stretch = math.ceil(len(result.losses) / lines)
    rows = ["    step  learned  zero"]
    for start in range(0, len(result.losses), stretch):
        learned, zero = (mean(losses[start : start + stretch]) for losses in result[:2])
        rows.append(f"  {start:>6}  {learned:>7.2f}  {zero:.2f}  {'#' * round(12 * learned)}")
    return "\n".join(rows)


def draw(result: Result, path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(result.losses, label="learned slopes")
    axes.plot(result.losses_without, label="slopes of zero")
    axes.set(xlabel="step", ylabel="loss, nats per character")
    axes.legend()
    figure.savefig(path)
    print(f"drawn in {path}")


def main(steps: int = 150, picture: str | None = None) -> Result:
    print("backend: cpu, which computes gradients of captured tensors")
    start = time.perf_counter()
    losses, slopes = train(steps, learn_slopes=True)
    losses_without, _ = train(steps, learn_slopes=False)
    result = Result(losses, losses_without, slopes)
    print("loss, in nats per character, with learned slopes and with slopes of zero:")
    print(curves(result))
    print(f"twice {steps} steps of {LENGTH} characters in {time.perf_counter() - start:.0f} s")
    for number, row in enumerate(result.slopes):
        print(f"slopes of layer {number}: " + "  ".join(f"{slope:+.3f}" for slope in row.tolist()))
    if picture is not None:
        draw(result, picture)
    return result


if __name__ == "__main__":
    main(picture="train_learned_bias.png")
