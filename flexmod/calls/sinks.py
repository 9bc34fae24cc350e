"""Adds attention sinks to a call's results, from its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmod.errors import LibraryArgumentError


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one more score, sink[h], to each row's softmax, without a value for it. Returns (out, lse):

        out * sigmoid(lse - sink),  log(exp(lse) + exp(sink))

    flex_attention returns `out` [B, Hq, M, Dv] and `lse` [B, Hq, M] with return_lse=True. The parameter
    `sink` is a floating-point tensor [Hq]. Results keep their dtypes. Gradients reach all three arguments, so
    you can train sinks. A row that attends to nothing keeps its output of 0.

    Raises LibraryArgumentError. Source: OpenAI, gpt-oss, 2025; Xiao et al., Efficient Streaming Language
    Models with Attention Sinks, 2023.

    Example:

        sink = torch.zeros(8, device=query.device, requires_grad=True)
        out, lse = flex_attention(query, key, value, return_lse=True)
        out, lse = apply_sink(out, lse, sink)
    """
    heads = out.shape[1]
    if not isinstance(sink, Tensor) or not sink.is_floating_point() or sink.shape != (heads,):
        given = f"{sink.dtype} {list(sink.shape)}" if isinstance(sink, Tensor) else f"a {type(sink).__name__}"
        raise LibraryArgumentError(
            function="apply_sink", name="sink", value=given,
            rule=f"a floating-point tensor of shape [{heads}], one number for each query head",
            advice=f"make it with torch.zeros({heads}, device=out.device), a parameter if it is learned",
        )  # fmt: skip
    logits = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logits)
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, logits)
