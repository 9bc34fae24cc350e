"""The architectures of docs/transformers.md: tiny, with random weights, by the names of their classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, models
from transformers.masking_utils import AttentionMaskInterface

from integrations import tiny_models
from integrations.tiny_models import COMMON, LAYERS, MODELS, WORDS

EAGER_EXPERTS = {"experts_implementation": "eager"}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **EAGER_EXPERTS}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, **EAGER_EXPERTS,
}  # fmt: skip
CHUNKS = {
    "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
    "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1, **EAGER_EXPERTS,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 1,
    "dropout_rate": 0.0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
    "init_std": 0.2, "forced_eos_token_id": None,
}  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 8}
BEIT = {"use_relative_position_bias": True, "layer_scale_init_value": 1.0, **IMAGE}
SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "window_size": 4,
    "num_attention_heads": [2, 4],
}  # fmt: skip
VIDEO = {"num_frames": 4, **IMAGE}
WAVE = {
    "conv_dim": [16, 16], "conv_kernel": [5, 3], "conv_stride": [4, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
    "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
MEL = {"max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
WHISPER = {
    "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "begin_suppress_tokens": None,
    "suppress_tokens": None, **BART,
}  # fmt: skip
SPEECH = {
    "conv_channels": 16, "num_conv_layers": 2, "conv_kernel_sizes": [5, 5], "input_feat_per_channel": 8,
    "max_source_positions": 60, "max_target_positions": 64, **BART,
}  # fmt: skip
MOONSHINE = {
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4,
}  # fmt: skip
ALTERNATING = {"head_dim": 8, "sliding_window": 7, **LAYERS}
PICTURE_WORD = WORDS - 1  # the token in whose place a picture stands
SEEING = {"model_type": "clip_vision_model", **COMMON, **IMAGE}
LLAVA = {
    "text_config": {"model_type": "llama", **COMMON}, "vision_config": SEEING,
    "image_token_index": PICTURE_WORD, "vision_feature_layer": -1,
}  # fmt: skip
GEMMA3 = {
    "text_config": {"model_type": "gemma3_text", **COMMON, **ALTERNATING},
    "vision_config": {**SEEING, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
    "image_token_index": PICTURE_WORD, "boi_token_index": 58, "eoi_token_index": 59,
}  # fmt: skip

# by kind: the model's class, and what its configuration has beside tiny_models.COMMON
ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "decoders": {
        "GPT2LMHeadModel": {},
        "GPTNeoXForCausalLM": {},
        "GPTBigCodeForCausalLM": {},
        "GPTJForCausalLM": {"rotary_dim": 4},
        "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "LlamaForCausalLM": MODELS["llama"][1],
        "MistralForCausalLM": MODELS["mistral"][1],
        "Gemma2ForCausalLM": MODELS["gemma2"][1],
        "Gemma3ForCausalLM": ALTERNATING,
        "Cohere2ForCausalLM": {"sliding_window": 7},
        "Olmo2ForCausalLM": {},
        "Phi3ForCausalLM": {},
        "Qwen3ForCausalLM": MODELS["qwen3"][1],
        "Starcoder2ForCausalLM": {"sliding_window": 7},
    },
    "mixture of experts": {
        "DeepseekV3ForCausalLM": LATENT,
        "GptOssForCausalLM": MODELS["gpt-oss"][1],
        "Llama4ForCausalLM": CHUNKS,
        "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, **EAGER_EXPERTS},
        "OlmoeForCausalLM": FEW_EXPERTS,
        "Qwen3MoeForCausalLM": {"head_dim": 8, **FEW_EXPERTS},
        "SwitchTransformersForConditionalGeneration": {"num_experts": 2, **EAGER_EXPERTS, **T5},
    },
    "encoders": {
        "AlbertForMaskedLM": {"embedding_size": 16},
        "BertForMaskedLM": {},
        "DistilBertForMaskedLM": {"hidden_dim": 48},
        "EsmForMaskedLM": {"token_dropout": False, "position_embedding_type": "rotary"},
        "ModernBertForMaskedLM": {"local_attention": 8, "global_attn_every_n_layers": 2},
        "NomicBertForMaskedLM": {},
        "XLMRobertaForMaskedLM": {},
    },
    "encoder-decoders": {
        "BartForConditionalGeneration": BART,
        "M2M100ForConditionalGeneration": BART,
        "MarianMTModel": BART,
        "PegasusForConditionalGeneration": BART,
        "T5ForConditionalGeneration": T5,
        "UMT5ForConditionalGeneration": T5,
    },
    "vision": {
        "BeitForImageClassification": BEIT,
        "CLIPVisionModel": IMAGE,
        "DeiTForImageClassification": IMAGE,
        "Dinov2ForImageClassification": {"mlp_ratio": 2, **IMAGE},
        "DINOv3ViTModel": {"num_register_tokens": 4, **IMAGE},
        "PixtralVisionModel": IMAGE,
        "SiglipVisionModel": IMAGE,
        "SwinModel": SWIN,
        "ViTForImageClassification": IMAGE,
        "VideoMAEModel": VIDEO,
        "VivitModel": {"tubelet_size": [2, 8, 8], **VIDEO},
    },
    "audio": {
        "ASTModel": MEL,
        "HubertForCTC": WAVE,
        "MoonshineForConditionalGeneration": MOONSHINE,
        "Speech2TextForConditionalGeneration": SPEECH,
        "Wav2Vec2ForCTC": WAVE,
        "WhisperForConditionalGeneration": WHISPER,
    },
    "text and images": {
        "Gemma3ForConditionalGeneration": GEMMA3,
        "LlavaForConditionalGeneration": LLAVA,
    },
}
OPTIONS = {name: options for models in ARCHITECTURES.values() for name, options in models.items()}
GENERATING = [name for name in OPTIONS if name.endswith(("CausalLM", "LMHeadModel", "Generation", "MTModel"))]
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate")
# models that compute attention in their own code
REFUSED = (
    "BigBirdModel", "BlipModel", "BloomForCausalLM", "DebertaV2Model", "DogeForCausalLM",
    "FalconForCausalLM", "FunnelModel", "GitModel", "GPTNeoForCausalLM", "LEDModel", "LongformerModel",
    "MPNetModel", "MptForCausalLM", "RoFormerModel", "SamModel", "Swinv2Model", "WavLMModel",
    "XGLMForCausalLM", "XLNetModel",
)  # fmt: skip


def make(name: str, implementation: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    return tiny_models.build(name, OPTIONS[name] | changed, implementation, dtype)


def inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor | None]:
    """What a model is called with, some of it padded; which outputs count, None for all."""
    given, valid = dict(_inputs(name)), None
    if "attention_mask" in given and "decoder_input_ids" not in given:
        valid = given["attention_mask"].bool()
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()}, valid


def _inputs(name: str) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    options = OPTIONS[name]
    if "num_frames" in options:
        yield "pixel_values", numbers(2, 4, 3, 32, 32)
    elif "image_size" in options:
        yield "pixel_values", numbers(2, 3, 32, 32)
    elif options in (WAVE, MOONSHINE):
        yield "input_values", numbers(2, 2000 if options is MOONSHINE else 400)
    elif options is MEL:
        yield "input_values", numbers(2, 24, 16)
    elif options in (WHISPER, SPEECH):
        yield "input_features", numbers(2, 8, 40) if options is WHISPER else numbers(2, 40, 8)
    else:
        given = tiny_models.batch("left" if name in GENERATING else "right").inputs
        if options in (LLAVA, GEMMA3):
            given["input_ids"].clamp_(max=PICTURE_WORD - 1)
            given["input_ids"][:, 12 : 28 if options is LLAVA else 16] = PICTURE_WORD
            yield "pixel_values", numbers(2, 3, 32, 32)
        if options is GEMMA3:
            yield "token_type_ids", (given["input_ids"] == PICTURE_WORD).long()
        yield from given.items()
        if options in (LLAVA, GEMMA3):
            return
    if name.endswith(("ConditionalGeneration", "MTModel")):
        yield "decoder_input_ids", torch.randint(2, WORDS, (2, 17), generator=generator)


def results(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The output of a model, and the gradient of each parameter that it reaches."""
    model = make(name, implementation, dtype)
    given, valid = inputs(name, dtype)
    made = model(**given)
    out = made.logits if "logits" in made else made.last_hidden_state
    return tiny_models.with_gradients(model, out if valid is None else out[valid])


def register_uniform() -> None:
    """Adds a third implementation, which weighs all keys alike: a model without its scores and its mask."""
    AttentionInterface.register("uniform", uniform)
    AttentionMaskInterface.register("uniform", tiny_models.always_masked)


def uniform(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    mean = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], 1)
    return mean.expand(-1, -1, query.shape[2], -1).transpose(1, 2), None


def dropout(name: str, value: float) -> tuple[str, dict[str, Any]]:
    """The option of a model's configuration for attention's dropout: its name, and it as options of make."""
    parts = {part: it for part, it in OPTIONS[name].items() if part.endswith("_config")}
    config = getattr(models, name).config_class()
    option = next(option for option in DROPOUTS if parts or hasattr(config, option))
    return option, {part: {**it, option: value} for part, it in parts.items()} or {option: value}
