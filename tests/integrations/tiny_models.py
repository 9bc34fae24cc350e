"""Tiny models of Hugging Face Transformers with random weights, and their truth in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers import models as families
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

WORDS = 61
LENGTH = 41
COMMON: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
CAPPED = {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
# by name: the family, and what its configuration has beside COMMON
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "head_dim": 8, **CAPPED, **LAYERS}),
    "gpt-oss": ("GptOss", {"sliding_window": 7, "head_dim": 8, **EXPERTS, **LAYERS}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6, "head_dim": 8}),
}


def make(
    name: str, implementation: str, dtype: torch.dtype = torch.float32, **changed: Any
) -> PreTrainedModel:
    """A model by its name in MODELS. `changed` are options."""
    family, options = MODELS[name]
    return build(f"{family}ForCausalLM", options | changed, implementation, dtype)


def build(name: str, options: dict[str, Any], implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model by the name of its class; its weights are the same at every call."""
    model_class = getattr(families, name)
    torch.manual_seed(3)
    config = model_class.config_class(**COMMON | options)
    made = model_class._from_config(config, attn_implementation=implementation)
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith(("sinks", "bias_table")):
            nn.init.normal_(parameter)
    return made.to(dtype).eval()


def truth(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Dense attention in the dtype of its inputs, in formulas of its own; eager's softmax is float32."""
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scaling * query @ key.repeat_interleave(group, 1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    # the lowest number and not -inf: a row of padding has no NaN
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        column = s_aux[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


def always_masked(**given: Any) -> Tensor:
    return sdpa_mask(**given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def register_truth() -> None:
    AttentionInterface.register("truth", truth)
    AttentionMaskInterface.register("truth", always_masked)


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and which tokens count."""

    inputs: dict[str, Tensor]
    valid: Tensor


def batch(kind: str) -> Batch:
    """ "plain", "right" or "left" padding, or two rows "packed" of sequences of several lengths."""
    ids = torch.randint(2, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    valid = torch.ones_like(ids, dtype=torch.bool)
    inputs = {"input_ids": ids}
    if kind == "packed":
        lengths = ((5, 20, 16), (40, 1))
        rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        inputs["position_ids"] = torch.stack(rows)
    elif kind != "plain":
        valid[0, slice(None, 9) if kind == "left" else slice(-9, None)] = False
        inputs["attention_mask"] = valid.long()
    return Batch(inputs, valid)


def results(model: PreTrainedModel, given: Batch) -> dict[str, Tensor]:
    """The logits of the tokens that count, and the gradient of each parameter that they reach."""
    return with_gradients(model, model(**given.inputs, use_cache=False).logits[given.valid])


def with_gradients(model: PreTrainedModel, out: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    (out * weights.to(out)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.detach(), **gradients}
