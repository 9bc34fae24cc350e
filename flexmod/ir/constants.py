"""Writes the constants of a compiled graph as text that means the same in every process.

An operation of torch.library takes tensors, numbers and strings. The text becomes part of the graph that
torch.compile caches and torch.export saves; `decoded` evaluates nothing.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flexmod.errors import ConstantError

NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encoded(value: Any) -> str:
    """Text for tuples, None, bools, integers, floats, strings, dtypes, devices and slices.

    Raises ConstantError for anything else.
    """
    return json.dumps(_plain(value), separators=(",", ":"))


def decoded(text: str) -> Any:
    """The value that `encoded` wrote. Raises ConstantError for any other text."""
    try:
        return _value(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConstantError(problem=f"the text {text[:80]!r}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [_plain(part) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    raise ConstantError(problem=f"a {type(value).__name__}")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple([_value(item) for item in plain])
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "float":
        return float.fromhex(value)
    if kind == "torch":
        found = getattr(torch, value)
        if isinstance(found, NAMED):
            return found
    if kind == "device":
        return torch.device(value)
    if kind == "slice":
        return slice(*map(_value, value))
    if kind == "ellipsis":
        return Ellipsis
    raise ValueError(kind)
