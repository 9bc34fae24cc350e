"""Hugging Face Transformers: after `register()`, models run with `attn_implementation="flexmod"`.

It registers two functions in the library's public interfaces. The first, `attention_mask`, makes a forward's
block mask from the model's masks (causal, window, chunks, padding, packed sequences), once for all layers of
a kind. The second, `attention`, runs each layer. A model that does not take these is refused when it is made.
Written for transformers 4.57 to 5.24, https://github.com/huggingface/transformers
(src/transformers/masking_utils.py, src/transformers/modeling_utils.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from flexmod import masks, mods
from flexmod.block_mask.build import and_masks, create_block_mask, create_mask
from flexmod.block_mask.format import BlockMask
from flexmod.calls.attention import flex_attention
from flexmod.calls.packed import apply_sink
from flexmod.errors import ArgumentTypeError, TransformersArgumentError, TransformersModelError
from flexmod.errors.base import a_type
from flexmod.runtime import private_torch

# Up to so many queries, as when decoding, the whole mask is evaluated; beyond, it is traced and bounded.
FEW_QUERIES = 16


def register(name: str = "flexmod") -> None:
    """Makes `attn_implementation=name` run flexmod, in every model that takes the attention interface.

    register()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="flexmod")

    Making any other model with this name raises TransformersModelError. Raises ArgumentTypeError.
    """
    advice = 'give the text of attn_implementation, e.g. "flexmod"'
    ArgumentTypeError.check(isinstance(name, str), "name", name, advice)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    PreTrainedModel.get_correct_attn_implementation = _checked
    _NAMES.add(name)


_NAMES: set[str] = set()
_unchecked = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_unchecked)
def _checked(model: Any, requested: str | None, *others: Any, **options: Any) -> Any:
    """Transformers would run a model that does not take the attention interface with its own attention."""
    if requested in _NAMES and not private_torch.takes_other_attention(model):
        raise TransformersModelError(model=type(model).__name__)
    return _unchecked(model, requested, *others, **options)


class CarriedMask(TorchBlockMask):
    """A flexmod BlockMask in the type that models hand on to their layers as it is."""

    ndim = 4  # some models ask

    def __init__(self, mask: BlockMask) -> None:
        self.mask = mask

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mask.shape

    def to(self, device: torch.device | str) -> CarriedMask:
        return CarriedMask(self.mask.to(device))

    def contiguous(self) -> CarriedMask:
        """Generation with a static cache asks for it."""
        return self

    def __getitem__(self, index: Any) -> CarriedMask:
        """As BlockMask's; mask[:, :, first:last, :] keeps single queries, as of a dense mask (Gemma 4)."""
        if not isinstance(index, tuple) or len(index) < 4:
            return CarriedMask(self.mask[index])
        batch, _, queries, keys = self.mask.shape
        whole, rows = slice(None), index[2]
        chosen = range(queries)[rows] if isinstance(rows, slice) else range(0)
        if [*index[:2], *index[3:]] != [whole] * 3 or not chosen or chosen.step != 1:
            raise TransformersModelError(model="a layer that indexes the elements of its mask")
        mask_mod = _at(self.mask.mask_mod, chosen.start, 0)
        return CarriedMask(create_block_mask(mask_mod, batch, None, len(chosen), keys, self.mask.device))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A layer with its own attention adds its mask to the scores."""
        raise TransformersModelError(model=f"a layer that calls {function.__name__} with its mask")

    def __getattr__(self, name: str) -> Any:
        """A layer with its own attention reads its mask as a tensor."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise TransformersModelError(model=f"a layer that uses {name} of its mask")

    def __repr__(self) -> str:
        return repr(self.mask)

    __str__ = __repr__


def attention_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    use_vmap: bool = True,
    device: torch.device | str | None = None,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **others: Any,
) -> CarriedMask | None:
    """Makes the block mask of one forward, [batch_size, 1, q_length, kv_length]; for the mask interface.

    None stands for all pairs, where allow_is_bidirectional_skip says that mask_function has no other
    restriction than a window of local_size.

        mask_function   (batch, head, query, key) -> bool on positions of the sequence; the call's positions
                        begin at q_offset and kv_offset
        attention_mask  bool or integer [batch_size, seen tokens], nonzero for tokens, zero for padding
        cache_position  integer [q_length], the positions of the queries; transformers 4 passes it in place of
                        q_length, q_offset and device
        use_vmap        False: mask_function accepts tensors that broadcast

    Raises TransformersArgumentError for an attention_mask of another shape.
    """
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    assert q_length is not None
    if isinstance(q_offset, Tensor):
        # a static cache gives its own counter; each layer adds to it before it attends
        q_offset = q_offset.clone()
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
            raise TransformersArgumentError(
                name="attention_mask", value=f"a tensor of shape {tuple(attention_mask.shape)}",
                advice=f"give a mask of the tokens, [{batch_size}, tokens], or one of the scores, "
                f"[{batch_size} or 1, heads or 1, queries, keys]",
            )  # fmt: skip
        kept = attention_mask.bool()
        missing = kv_offset + kv_length - kept.shape[-1]
        if missing > 0:  # a static cache has places that no token was seen for
            kept = nn.functional.pad(kept, (0, missing))
        # to look would make the host wait, and has no answer while a graph is made
        if kept.device.type != "cpu" or torch.compiler.is_compiling() or not kept.all():

            def not_padding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return kept[b, kv_idx]

            mask_function = and_masks(mask_function, not_padding)
            allow_is_bidirectional_skip = False
    if allow_is_bidirectional_skip and local_size is None:
        return None
    mask_mod = _at(mask_function, q_offset, kv_offset)
    if q_length <= FEW_QUERIES:
        mask_mod = _by_rows(mask_mod, (batch_size, q_length, kv_length), device, use_vmap)
    return CarriedMask(create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device))


def _at(mask_function: masks.MaskMod, q_offset: int | Tensor, kv_offset: int) -> masks.MaskMod:
    """The mask_function of positions of the sequence, for positions of the call."""

    def mask_at(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return mask_at


def _by_rows(
    mask_mod: masks.MaskMod, sizes: tuple[int, int, int], device: torch.device | str | None, use_vmap: bool
) -> masks.MaskMod:
    """The mask that reads the mask itself, bool [batch, queries, keys].

    At each step of decoding other constants and lengths come; a mask that is read from a tensor has the same
    graph at all of them.
    """
    batch, queries, keys = sizes
    if use_vmap:
        rows = create_mask(mask_mod, batch, None, queries, keys, device)[:, 0]
    else:
        b, q_idx, kv_idx = (torch.arange(size, device=device) for size in sizes)
        none = torch.zeros((), dtype=torch.int64, device=device)
        rows = mask_mod(b[:, None, None], none, q_idx[:, None], kv_idx).expand(sizes)

    def row(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rows[b, q_idx, kv_idx]

    return row


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CarriedMask | BlockMask | TorchBlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    kernel_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention, [B, M, Hq, Dv], without weights; for the attention interface.

        query           [B, Hq, M, D]
        key, value      [B, Hkv, N, D or Dv]
        attention_mask  the result of `attention_mask` above, or a tensor [B or 1, Hq or 1, M or 1, N or more]
                        A bool tensor is True for allowed pairs. A floating-point tensor is added to scores;
                        its dtype's lowest number forbids a pair. None is causal, within sliding_window, if
                        is_causal or else the module says so and there are several queries.
        softcap         scores become softcap * tanh(score / softcap), before any addition
        s_aux           [Hq], a learned sink: one more score in each row's softmax
        position_bias   [B or 1, Hq or 1, M or 1, N or more], added to the scores

    Raises TransformersArgumentError for an unsupported argument, and the errors of flex_attention.
    """
    _refuse(module, {"dropout": dropout, **others})
    sizes = (*query.shape[:3], key.shape[2])
    biases = [] if position_bias is None else [_dense("position_bias", position_bias, sizes)]
    if isinstance(attention_mask, Tensor):
        dense = _dense("attention_mask", attention_mask, sizes)
        if dense.dtype != torch.bool:
            biases.append(dense)
        kept = dense if dense.dtype == torch.bool else dense.detach() > torch.finfo(dense.dtype).min
        mask: Any = create_block_mask(kept)
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _causal(query, key, sliding_window) if causal and query.shape[2] > 1 else None
    else:
        mask = attention_mask.mask if isinstance(attention_mask, CarriedMask) else attention_mask
    found: Any = flex_attention(
        query, key, value, _score_mod(softcap, biases), mask, scaling, enable_gqa=True,
        return_lse=s_aux is not None, kernel_options=kernel_options,
    )  # fmt: skip
    out = found if s_aux is None else apply_sink(found[0], found[1], s_aux.flatten())[0]
    return out.transpose(1, 2).contiguous(), None


_EAGER = 'load the model with attn_implementation="eager"'
_REFUSED = {
    "dropout": "",  # the option's name depends on the model
    "output_attentions": f"no kernel holds the weights: {_EAGER}",
    "head_mask": f"multiply the heads' outputs, or {_EAGER}",
    "cache": 'flexmod reads no paged cache: generate with cache_implementation="dynamic" or "static"',
    # keys chosen for each query, and sinks of each query
    **dict.fromkeys(("indices", "block_indices", "sinks"), _EAGER),
}


def _refuse(module: nn.Module, given: Mapping[str, Any]) -> None:
    """The layers of a model hand on whatever it was called with; these would change the result."""
    for name, advice in _REFUSED.items():
        value = given.get(name)
        if value is None or isinstance(value, (bool, int, float)) and not value:
            continue
        shown = value if isinstance(value, (bool, int, float)) else a_type(value)
        raise TransformersArgumentError(
            name=name, value=shown, advice=advice or _without_dropout(module, value)
        )


def _without_dropout(module: nn.Module, dropout: float) -> str:
    """What turns a layer's dropout off: the options of its config with this value, attention's own first."""
    options = vars(getattr(module, "config", module))
    found = [name for name, value in options.items() if "drop" in name and value == dropout]
    found = [name for name in found if "att" in name] or found
    if not found:
        return f"set the dropout of {type(module).__name__} to 0.0"
    return f"set {' and '.join(f'{name}=0.0' for name in found)} in the model's config"


def _dense(name: str, given: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """[B or 1, Hq or 1, queries, keys] of a mask or bias; it may have one row for all queries, or more keys.

    `sizes`: of the scores. Raises TransformersArgumentError for a tensor that does not fit them: a
    kernel reads nothing outside of it, and would compute something else.
    """
    is_mask = name == "attention_mask"
    of_dtype = given.is_floating_point() or (is_mask and given.dtype == torch.bool)
    fits = given.dim() == 4 and given.shape[3] >= sizes[3]
    # `in` compares no symbols of a graph
    shared = all(given.shape[axis] == 1 or given.shape[axis] == sizes[axis] for axis in range(3))
    if not (fits and of_dtype and shared):
        kinds, tokens = "floating-point", ""
        if is_mask:
            kinds = "bool or floating-point"
            tokens = "; give a mask of the tokens, [batch, tokens], to the model"
        raise TransformersArgumentError(
            name=name, value=f"a tensor of shape {tuple(given.shape)} and {given.dtype}",
            advice=f"give a {kinds} tensor of the scores' shape, {sizes}, with 1 for what they share{tokens}",
        )  # fmt: skip
    return given[..., : sizes[3]].expand(-1, -1, sizes[2], -1)


def _causal(query: Tensor, key: Tensor, sliding_window: int | None) -> BlockMask:
    mask_mod = masks.causal() if sliding_window is None else masks.sliding_window(sliding_window)
    return create_block_mask(mask_mod, None, None, query.shape[2], key.shape[2], query.device)


def _score_mod(softcap: float | None, biases: list[Tensor]) -> Callable[..., Any] | None:
    if softcap is None and not biases:
        return None
    capped = None if softcap is None else mods.softcap(softcap)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if capped is not None:
            score = capped(score, b, h, q_idx, kv_idx)
        for bias in biases:
            score = score + bias[b if len(bias) > 1 else 0, h if bias.shape[1] > 1 else 0, q_idx, kv_idx]
        return score

    return score_mod
