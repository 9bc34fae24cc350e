"""The features of docs/support.md: for each a small computation, to be run with any dtype and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod
from flexmod import create_block_mask, flex_attention, masks, mods

LENGTH = 40


class Setting(NamedTuple):
    """Where a feature runs."""

    dtype: torch.dtype
    device: str
    options: dict[str, Any]

    def tensor(self, *shape: int, seed: int = 0) -> Tensor:
        """Numbers that every dtype has exactly, so that all settings get equal inputs."""
        drawn = torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 16
        return drawn.to(self.dtype).to(self.device).requires_grad_()

    def inputs(self, heads: int = 2, value_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
        q = self.tensor(1, 2, LENGTH, 16, seed=1)
        return q, self.tensor(1, heads, LENGTH, 16, seed=2), self.tensor(1, heads, LENGTH, value_dim, seed=3)

    def mask(self, mask_mod: Any = None, **options: Any) -> flexmod.BlockMask:
        mask_mod = masks.sliding_window(13) if mask_mod is None else mask_mod
        return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, self.device, 16, **options)

    def attend(self, *inputs: Any, **options: Any) -> Any:
        return flex_attention(*inputs, kernel_options=self.options, **options)


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    weight = torch.arange(out.numel(), device=out.device).view(out.shape) % 5 - 2
    return [out, *torch.autograd.grad((out * weight.to(out)).sum(), inputs)]


def forward(at: Setting) -> list[Tensor]:
    return [at.attend(*(x.detach() for x in at.inputs()))]


def backward(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    return gradients(at.attend(*inputs), *inputs)


def block_mask(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    return gradients(at.attend(*inputs, block_mask=at.mask()), *inputs)


def score_mod(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    return gradients(at.attend(*inputs, mods.chain(mods.alibi(2), mods.softcap(5.0))), *inputs)


def learned_bias(at: Setting) -> list[Tensor]:
    inputs, slopes, table = at.inputs(), at.tensor(2, seed=4), at.tensor(2, 2 * LENGTH, seed=5)

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (q_idx - kv_idx) / LENGTH + table[h, q_idx - kv_idx + LENGTH]

    return gradients(at.attend(*inputs, bias), *inputs, slopes, table)


def grouped_heads(at: Setting) -> list[Tensor]:
    inputs = at.inputs(heads=1)
    return gradients(at.attend(*inputs, enable_gqa=True), *inputs)


def value_dimension(at: Setting) -> list[Tensor]:
    inputs = at.inputs(value_dim=32)
    return gradients(at.attend(*inputs), *inputs)


def log_sum_exp(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    out, lse = at.attend(*inputs, return_lse=True)
    return [lse, *gradients(out + lse[..., None].to(out.dtype), *inputs)]


def sinks(at: Setting) -> list[Tensor]:
    inputs, sink = at.inputs(), at.tensor(2, seed=6)
    out, _ = flexmod.apply_sink(*at.attend(*inputs, return_lse=True), sink)
    return gradients(out, *inputs, sink)


def packed(at: Setting) -> list[Tensor]:
    inputs = [x[0].transpose(0, 1) for x in at.inputs()]
    ends = torch.tensor([0, 11, LENGTH], dtype=torch.int32, device=at.device)
    out = flexmod.varlen_attention(*inputs, ends, mask_mod=masks.causal(), kernel_options=at.options)
    return gradients(out, *inputs)


def offsets(at: Setting) -> list[Tensor]:
    q, k, v = at.inputs()
    q = q[:, :, -8:]
    mask = create_block_mask(masks.causal(), None, None, 8, LENGTH, at.device, 16, q_offset=LENGTH - 8)
    return gradients(at.attend(q, k, v, mods.alibi(2), mask), q, k, v)


def empty_rows(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    return gradients(at.attend(*inputs, block_mask=at.mask(lambda b, h, q, k: q > k + 3)), *inputs)


def deterministic(at: Setting) -> list[Tensor]:
    return backward(at._replace(options={**at.options, "deterministic": True}))


def second_derivative(at: Setting) -> list[Tensor]:
    inputs = at.inputs()
    _, gradient, *_ = gradients_with_graph(at.attend(*inputs), *inputs)
    return list(torch.autograd.grad(gradient.square().sum(), inputs))


def gradients_with_graph(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), inputs, create_graph=True)]


FEATURES: dict[str, Callable[[Setting], list[Tensor]]] = {
    "attention, forward": forward,
    "gradients of query, key and value": backward,
    "block masks": block_mask,
    "score mods": score_mod,
    "gradients of captured tensors": learned_bias,
    "groups of query heads": grouped_heads,
    "another head dimension for values": value_dimension,
    "log-sum-exp and its gradient": log_sum_exp,
    "attention sinks": sinks,
    "packed sequences": packed,
    "offsets of positions": offsets,
    "rows without keys": empty_rows,
    "deterministic gradients": deterministic,
    "second derivatives": second_derivative,
}
