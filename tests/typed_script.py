"""What a user writes, with every result in its own type: `mypy --strict` reads it beside the wheel.

The last lines are mistakes; strict mypy reports a `type: ignore` that hides none.
"""

import torch
from torch import Tensor

import flexmod
from flexmod import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
    masks,
    mods,
    nested_attention,
    varlen_attention,
)


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 30 * torch.tanh(score / 30)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def calls(q: Tensor, k: Tensor, v: Tensor, want_lse: bool) -> Tensor:
    mask: BlockMask = create_block_mask(causal, None, None, 64, 64, device="cpu")
    dense: Tensor = create_mask(masks.causal(), 1, 1, 64, 64)
    both: BlockMask = (mask & create_block_mask(dense))[0].to("cpu")
    total: Tensor = flex_attention(q, k, v).sum()
    out, lse = flex_attention(q, k, v, softcap, mask, return_lse=True)
    request = AuxRequest(lse=True)
    aux: AuxOutput
    out, aux = flex_attention(q, k, v, mods.alibi(4), return_aux=request, kernel_options={"num_warps": 4})
    either = flex_attention(q, k, v, block_mask=both, return_lse=want_lse)
    if isinstance(either, tuple):
        out = either[0]
    if aux.lse is not None:
        lse = lse + aux.lse
    starts = torch.tensor([0, 64])
    packed: Tensor = varlen_attention(q[0], k[0], v[0], starts, mask_mod=masks.causal())
    packed, lse = varlen_attention(q[0], k[0], v[0], starts, return_lse=True)
    nested: Tensor = nested_attention(q, k, v).sum()
    nested, lse = nested_attention(q, k, v, return_lse=True)
    out, lse = flexmod.apply_sink(out, lse, torch.zeros(4))
    quantized, of_heads = flexmod.quantize(out.detach(), torch.float8_e5m2, by="head", rotate=True)
    return total + out.sum() + packed.sum() + nested


def handles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend = flexmod.compile(softcap, masks.causal() & masks.sliding_window(8))
    total: Tensor = attend(q, k, v).sum()
    out, lse = attend(q, k, v, return_lse=True)
    out, aux = attend(q, k, v, return_aux=AuxRequest(max_scores=True))
    text: str = attend.source["forward"]
    return total + lse.sum() + out.sum() + len(text)


def mistakes(q: Tensor, k: Tensor, v: Tensor) -> None:
    create_block_mask(causal, None, None, 64, 64).sum()  # type: ignore[attr-defined]
    flex_attention(q, k, v, return_lse=True).sum()  # type: ignore[attr-defined]
    flex_attention(q, k, v, score_mod=3)  # type: ignore[call-overload]
    flexmod.flex_attentoin(q, k, v)  # type: ignore[attr-defined]
