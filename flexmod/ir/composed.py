"""Mods as objects that can be pickled. Masks combine: `causal & window | prefix`, and_masks, or_masks.

A Derived is a mod built from others: a slice of a mask, two masks combined, a mod at other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch

from flexmod.ir.replay import CopiesByAttribute, Replay, for_pickle, replay, traced_for_pickle
from flexmod.ir.source import check_arity, mod_name

MaskMod = Callable[..., Any]
Moved = TypeVar("Moved", bound="Movable")
# the fields of a Derived that are mods, and their kinds
MODS = {"mask_mod": "mask", "first": "mask", "second": "mask", "score_mod": "score"}


class _OfFunction(CopiesByAttribute):
    """Wraps a function as a mod that can be pickled.

    The pickle contains the graph and the captured tensors with their present values. It does not need the
    function: closures, lambdas and functions with other globals at the destination work too.
    """

    _kind: str
    __call__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        check_arity(function, self._kind)
        self.function = function
        self.__name__ = name or mod_name(function)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = Mask if self._kind == "mask" else ScoreMod
        if type(self) is plain and isinstance(self.function, Replay):
            return plain, (self.function, self.__name__)
        return plain, (replay(traced_for_pickle(self, self._kind), self.__name__), self.__name__)

    def __repr__(self) -> str:
        return f"<{self._kind} {self.__name__}>"


class ScoreMod(_OfFunction):
    """Wraps a score_mod so that it can be pickled. The library's score_mods are objects of this class.

    A call runs the wrapped function, and every function that takes a score_mod takes this object. The pickle
    records present behavior: numbers by value, and the captured tensors. `name` is the function's own if
    None. Raises NotCallable and ModArityError; pickling raises NotPicklableError if the mod cannot be traced.

    Example:

        @mods.ScoreMod
        def nearer(score, b, h, q_idx, kv_idx):
            return score - 0.1 * (q_idx - kv_idx).abs()

        out = flex_attention(query, key, value, score_mod=nearer)
    """

    _kind = "score"

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The modified score of the query at q_idx and the key at kv_idx: a scalar."""
        return self.function(score, b, h, q_idx, kv_idx)


class Mask(_OfFunction):
    """Wraps a mask_mod so that it combines with others by &, | and ~, and can be pickled.

    A call runs the wrapped function, and every function that takes a mask_mod takes this object. One side of
    a combination may be a plain function. The pickle records present behavior: numbers by value, and the
    captured tensors. Pictures show `name`, the function's own if None. Raises NotCallable and ModArityError;
    pickling raises NotPicklableError if the mod cannot be traced.

    Example:

        @masks.Mask
        def even_keys(b, h, q_idx, kv_idx):
            return kv_idx % 2 == 0

        block_mask = create_block_mask(masks.causal() & even_keys, None, None, 1024, 1024)
    """

    _kind = "mask"

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether the query at q_idx attends to the key at kv_idx, in batch b and head h: a scalar, bool."""
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: MaskMod) -> Mask:
        """Keeps the elements that both masks keep: and_masks(self, other)."""
        return and_masks(self, other) if callable(other) else NotImplemented

    def __rand__(self, other: MaskMod) -> Mask:
        return and_masks(other, self) if callable(other) else NotImplemented

    def __or__(self, other: MaskMod) -> Mask:
        """Keeps the elements that either mask keeps: or_masks(self, other)."""
        return or_masks(self, other) if callable(other) else NotImplemented

    def __ror__(self, other: MaskMod) -> Mask:
        return or_masks(other, self) if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        """Keeps exactly the elements that this mask drops."""
        mask_mod = self.function

        def not_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return ~(b.new_ones((), dtype=torch.bool) & mask_mod(b, h, q_idx, kv_idx))

        return Mask(not_mask, f"~{self.__name__}")


def and_masks(*mask_mods: MaskMod) -> Mask:
    """A mask_mod that keeps the elements that all masks keep; without masks, all.

    Raises NotCallable, NotMadeError and ModArityError.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        near = and_masks(masks.causal(), lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 100)
        block_mask = create_block_mask(near, None, None, 1024, 1024)
    """
    return _joined(_all_of, mask_mods, " & ", "all")


def or_masks(*mask_mods: MaskMod) -> Mask:
    """A mask_mod that keeps the elements that any mask keeps; without masks, none.

    Raises NotCallable, NotMadeError and ModArityError.

    Source: Dong et al., Flex Attention, 2024.

    Example:

        ends = or_masks(masks.sliding_window(100), lambda b, h, q_idx, kv_idx: kv_idx < 4)
        block_mask = create_block_mask(ends, None, None, 1024, 1024)
    """
    return _joined(_any_of, mask_mods, " | ", "none")


def _all_of(mask_mods: Sequence[MaskMod], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    result = b.new_ones((), dtype=torch.bool)
    for mask_mod in mask_mods:
        result = result & mask_mod(b, h, q_idx, kv_idx)
    return result


def _any_of(mask_mods: Sequence[MaskMod], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    result = b.new_zeros((), dtype=torch.bool)
    for mask_mod in mask_mods:
        result = result | mask_mod(b, h, q_idx, kv_idx)
    return result


def _joined(join: Callable[..., Any], mask_mods: Sequence[MaskMod], sign: str, without: str) -> Mask:
    """The mask of several, without nesting: a long a | b | c | ... would exceed Python's recursion limit."""
    for mask_mod in mask_mods:
        check_arity(mask_mod, "mask")
    parts = tuple([part for mask_mod in mask_mods for part in _parts(mask_mod, join)])
    name = f"({sign.join(map(mod_name, parts))})" if parts else without
    return Mask(partial(join, parts), name)


def _parts(mask_mod: MaskMod, join: Callable[..., Any]) -> tuple[MaskMod, ...]:
    function = mask_mod.function if isinstance(mask_mod, Mask) else None
    if isinstance(function, partial) and function.func is join:
        return function.args[0]
    return (mask_mod,)


class Movable:
    """Base of dataclasses with tensors of their own, in fields or in such objects."""

    def to(self: Moved, device: torch.device | str) -> Moved:
        """A copy with its tensors on `device`. Tensors that a user's mod captures do not move."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **{name: moved(part, device) for name, part in parts.items()})  # type: ignore[type-var]


def moved(part: Any, device: torch.device | str) -> Any:
    return part.to(device) if isinstance(part, (torch.Tensor, Movable)) else part


class Derived(CopiesByAttribute, Movable):
    """Base of dataclasses that are mods built from others, with tensors of their own. The pickle records what
    the inner mods do.
    """

    @property
    def __name__(self) -> str:
        """The name of the mod that gets the arguments."""
        return mod_name(next(getattr(self, name) for name in MODS if hasattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return type(self), tuple([for_pickle(x, MODS[name]) if name in MODS else x for name, x in values])


def may_change(mod: Callable[..., Any]) -> bool:
    """Is there a user's function in the mod, which may decide otherwise at another time?"""
    if isinstance(mod, Derived):
        names = [field.name for field in fields(mod)]
        return any(may_change(getattr(mod, name)) for name in names if name in MODS)
    inner = mod.function if isinstance(mod, _OfFunction) else mod
    return not isinstance(inner, Replay)
