"""Handles, masks and mods of every kind, what they compute, and the ways in which users copy them."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_attention

import flexmod
from flexmod import BlockMask, create_block_mask, flex_attention, masks, mods
from flexmod.block_mask.format import from_torch
from flexmod.ir.trace import trace

BATCH, HEADS, LENGTH, DIM = 2, 3, 40, 16
BLOCK = 16
INTERPRET = {"BACKEND": "INTERPRET"}
BACKENDS: dict[str, Any] = {"cpu": None, "interpret": INTERPRET, "reference": {"BACKEND": "REFERENCE"}}


def ids(device: Any = "cpu") -> Tensor:
    return torch.arange(LENGTH, device=device) // 5


def slopes(device: Any = "cpu") -> Tensor:
    return torch.linspace(0.1, 0.9, HEADS, device=device).requires_grad_()


def shifted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, factor: float = 0.3) -> Any:
    return score - factor * (q_idx - kv_idx).abs()


class Biased(nn.Module):
    """A module that holds its own attention, of a method."""

    def __init__(self, device: Any = "cpu", **options: Any) -> None:
        super().__init__()
        self.factor = 0.7
        self.bias = nn.Parameter(slopes(device).detach())
        self.attend = flexmod.compile(self.biased, masks.document(ids(device), causal=True), **options)

    def biased(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.factor + self.bias[h] * (kv_idx - q_idx)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attend(query, key, value)


class Called:
    """A mod that is an object."""

    def __init__(self, device: Any = "cpu") -> None:
        self.state = {"bias": [slopes(device)]}

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.state["bias"][0][h] * (kv_idx - q_idx)


def closure(device: Any = "cpu") -> Callable[..., Any]:
    bias = slopes(device)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h] * (kv_idx - q_idx)


def near(reach: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= reach + h


def block_mask(mask_mod: Any, device: Any = "cpu", **other: Any) -> BlockMask:
    size = {"Q_LEN": LENGTH, "KV_LEN": LENGTH, "B": BATCH, "H": HEADS, **other}
    return create_block_mask(mask_mod, **size, device=device, BLOCK_SIZE=BLOCK)


def of_lists(device: Any = "cpu") -> BlockMask:
    """As a user gives it: its tiles are not what its mask_mod says."""
    made = block_mask(masks.causal(), device)
    lists = [getattr(made, name).clone() for name in ("kv_num_blocks", "kv_indices")]
    lists[0].clamp_(max=1)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=near(9), seq_lengths=(LENGTH, LENGTH))


def of_torch(device: Any = "cpu") -> BlockMask:
    made = torch_attention.create_block_mask(
        near(4), BATCH, HEADS, LENGTH, LENGTH, device=device, BLOCK_SIZE=BLOCK
    )
    return from_torch(made)


def assigned(device: Any = "cpu") -> BlockMask:
    """Lists that were made of ranges, and written to."""
    made = block_mask(masks.causal(), device)
    made.kv_num_blocks = made.kv_num_blocks.clone().clamp_(max=1)
    return made


HANDLES: dict[str, Callable[..., Any]] = {
    "library": lambda d, **o: flexmod.compile(mods.softcap(2.0), masks.sliding_window(6), **o),
    "closure": lambda d, **o: flexmod.compile(closure(d), near(7), scale=0.3, **o),
    "function": lambda d, **o: flexmod.compile(shifted, **o),
    "partial": lambda d, **o: flexmod.compile(functools.partial(shifted, factor=0.9), masks.causal(), **o),
    "object": lambda d, **o: flexmod.compile(Called(d), masks.causal() & near(9), **o),
    "module": lambda d, **o: Biased(d, **o).attend,
    "mask alone": lambda d, **o: flexmod.compile(None, masks.document(ids(d)), **o),
    "bshd": lambda d, **o: flexmod.compile(mods.alibi(slopes(d)), masks.causal(), layout="bshd", **o),
    "masked score": lambda d, **o: flexmod.compile(mods.causal_score(), **o),
}
BLOCK_MASKS: dict[str, Callable[..., BlockMask]] = {
    "causal": lambda d: block_mask(masks.causal(), d),
    "document": lambda d: block_mask(masks.document(ids(d), causal=True), d),
    "closure": lambda d: block_mask(near(5), d),
    "one for all": lambda d: block_mask(masks.causal(), d, B=None, H=None),
    "sliced": lambda d: block_mask(lambda b, h, q, k: q + b * h >= k, d, B=4, H=5)[1:3, [4, 0, 2]],
    "combined": lambda d: block_mask(near(5), d) & block_mask(masks.document(ids(d)), d),
    "either": lambda d: block_mask(near(2), d) | block_mask(masks.prefix_lm(3), d),
    "complement": lambda d: ~block_mask(near(5), d),
    "resized": lambda d: block_mask(near(5), d, Q_LEN=15, KV_LEN=15).resize(LENGTH, LENGTH),
    "cropped": lambda d: block_mask(near(5), d, Q_LEN=60, KV_LEN=60)._adjust(LENGTH, LENGTH),
    "lists": of_lists,
    "lists combined": lambda d: of_lists(d) & block_mask(near(3), d),
    "torch": of_torch,
    "assigned": assigned,
}
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda d: masks.causal(),
    "document": lambda d: masks.document(lengths=torch.tensor([7, 19, 14], device=d), total=LENGTH),
    "window of heads": lambda d: masks.sliding_window(torch.tensor([3, 5, 9], device=d)),
    "of a function": lambda d: masks.Mask(near(4), "near"),
    "combined": lambda d: ~masks.causal() | near(3) & masks.document(ids(d)),
    "jagged": lambda d: masks.jagged(torch.tensor([0, 9, 40], device=d), masks.prefix_lm(2), total=LENGTH),
    "sliced": lambda d: BLOCK_MASKS["sliced"](d).mask_mod,
    "lists combined": lambda d: BLOCK_MASKS["lists combined"](d).mask_mod,
}
SCORES: dict[str, Callable[..., Any]] = {
    "softcap": lambda d: mods.softcap(2.0),
    "approximate": lambda d: mods.softcap(2.0, approximate=True),
    "alibi": lambda d: mods.alibi(slopes(d)),
    "slopes": lambda d: mods.alibi(HEADS),
    "temperature": lambda d: mods.temperature(slopes(d)),
    "chain": lambda d: mods.chain(mods.alibi(slopes(d)), closure(d), mods.softcap(3.0)),
    "sink": lambda d: mods.sink(slopes(d)),
    "t5": lambda d: mods.t5_bias(torch.randn(8, HEADS, device=d).requires_grad_(), max_distance=9),
    "computed": lambda d: mods.alibi(slopes(d) * 2),
    "of a lambda": lambda d: mods.ScoreMod(lambda s, b, h, q, k: s * 0.5 + h, "half"),
    "relative": lambda d: mods.relative_position(),
}
KINDS = {"handle": HANDLES, "block mask": BLOCK_MASKS, "mask": MASKS, "score": SCORES}
EVERY = [(kind, name) for kind, made in KINDS.items() for name in made]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
    "twice": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(value)))),
}


def inputs(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(BATCH, HEADS, LENGTH, DIM, device=device).to(dtype).requires_grad_() for _ in range(3)
    ]


def results(kind: str, value: Any, options: Any = None, device: Any = "cpu") -> list[Tensor]:
    """The output, the log-sum-exp, and every gradient, those of captured tensors too."""
    tensors = inputs(device, torch.float16 if torch.device(device).type == "cuda" else torch.float32)
    learned: list[Tensor] = []
    if kind == "handle":
        given = [x.transpose(1, 2) for x in tensors] if value._layout.heads == 2 else tensors
        out, lse = value(*given, return_lse=True)
        traced = value._traced().get("score")
        learned = list(traced.tensors) if traced else []
    else:
        mask, score_mod = value if kind == "block mask" else None, value if kind == "score" else None
        if kind == "mask":
            mask = block_mask(value, device)
        if score_mod is not None:
            learned = list(trace(score_mod, "score", torch.device(device)).tensors)
        out, lse = flex_attention(*tensors, score_mod, mask, return_lse=True, kernel_options=options)
    learned = [x for x in learned if x.requires_grad]
    loss = out.float().square().sum() + lse.clamp(min=-9).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [*tensors, *learned])]


def made(kind: str, name: str, options: Any = None, device: Any = "cpu") -> Any:
    torch.manual_seed(1)
    if kind == "handle":
        return HANDLES[name](device, kernel_options=options)
    return KINDS[kind][name](device)
