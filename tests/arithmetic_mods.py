"""Mods whose arithmetic is easily another than torch's, and what eager torch makes of them.

Where torch defines no result, a mod hides it behind a `where`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DIVISORS = torch.tensor([0, 3, -1, 7], dtype=torch.int32)
NARROW = torch.tensor([0, 3, -1, 7], dtype=torch.int8)
SMALLEST = torch.tensor([-(2**31), 5, 2**31 - 1, -7], dtype=torch.int32)
SHIFTS = torch.tensor([-1, 3, 32, 64], dtype=torch.int32)
TURNS = torch.tensor([1e-30, 0.1, -3e7, 49.0])
FAR = torch.tensor([3e38, -1.7e20, 1e-45, 12345.678])
SPREAD = 2654435761  # beyond int32


def divided(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    w = DIVISORS[h % 4]
    return score + torch.where(w > 0, q // w - k // w, 0) * 0.1


def divided_by_a_key(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    w = DIVISORS[k % 4]
    return score + torch.where(w != 0, torch.div(q - k, w, rounding_mode="trunc"), k) * 0.1


def rest(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    w = NARROW[q % 4]
    down, to_zero = (q - k) % w, torch.fmod(k - q, w)
    return score + torch.where(w == 0, 1, down) * 0.3 + torch.where(w == 0, 1, to_zero) * 0.1


def divided_number(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    w = q - k
    return torch.where(w != 0, score + 100 // w + 100 % w, score)


def smallest_by_minus_one(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    found = SMALLEST[q % 4] // DIVISORS[k % 4]
    return torch.where(DIVISORS[k % 4] > 0, score + found % 5 * 0.1, score)


def shifted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + ((q << SHIFTS[k % 4]) % 7 + ((q - k) >> SHIFTS[q % 4]) % 5) * 0.1


def hashed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = (q * SPREAD + k * 40503 + h).to(torch.int32)
    return score + mixed % 1000 * 1e-3


def hashed_in_steps(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = q.to(torch.int32) * SPREAD ^ k.int() * 40503
    mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B
    return score + (mixed >> 16) % 97 * 1e-2


def hashed_to_an_index(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = (q * SPREAD + k * 40503).type(torch.int32)
    return score + TURNS[mixed.abs() % 4].sign() + DIVISORS[mixed >> 30]


def hashed_beside_positions(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = ((q * SPREAD).to(torch.int32) + k) * 0x45D9F3B
    return score + mixed % 97 * 1e-2 + torch.where(q.int() * 70000 * k > 0, 0.3, 0.0)


def seeded(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = SMALLEST[h % 4] + q * 48271 + k * SPREAD
    return score + mixed % 97 * 1e-2 + torch.where(mixed > 0, 0.3, 0.0)


def seeded_in_steps(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = ((SMALLEST[h % 4] ^ q * SPREAD) & 0xFFFF) * 0x45D9F3B + k
    return score + mixed % 97 * 1e-2 + torch.where((NARROW[k % 4] + q) * 0x45D9F3B > 0, 0.3, 0.0)


def seeded_by_head(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = ((h * 40503 + 977).to(torch.int32) + q) * 0x45D9F3B
    return score + ((mixed ^ k * SPREAD) >> 16) % 97 * 1e-2


def seeded_beside_a_cast(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    mixed = q.to(torch.int32) * 70000 ^ (k + 1) * SPREAD
    return score + mixed % 97 * 1e-2 + torch.where(mixed > 0, 0.3, 0.0)


def narrow_casts(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    small, byte, short = (q * 300).to(torch.int8), (k * 99).to(torch.uint8), (q * 7000).to(torch.int16)
    return score + (small + k) * 0.01 + byte * short * 1e-4


def compared_casts(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where((q * 70000).int() * 70000 > (k * 70000).int() * 70000, score, score * 0.5)


def far_turns(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    x, y = FAR[q % 4], TURNS[k % 4]
    return score + x % y / y + torch.fmod(x, y) / y


def few_turns(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + (q * 100000) % 0.3 + torch.fmod(k * 31.0, -0.7) + (q - k) // 0.1 * 1e-2


def turns_of_the_score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(k >= 0, score, (score * 1e30) % 0.25)


def denormal_divisor(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.tanh(score * 1e-39 / 1e-39) + (q - k) * 1e-39 / 1e-39 * 0.01


def huge_divisor(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 1e30 / 3e38 * 1e8


def factors(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return (score * 0.5 + 0.0) * 1e25 * 1e-25 / 1e-30 * 1e-30


MODS: dict[str, Callable[..., Any]] = {
    mod.__name__: mod
    for mod in (
        divided, divided_by_a_key, rest, divided_number, smallest_by_minus_one, shifted, hashed,
        hashed_in_steps, hashed_to_an_index, hashed_beside_positions, seeded, seeded_in_steps,
        seeded_by_head, seeded_beside_a_cast, narrow_casts, compared_casts, far_turns, few_turns,
        turns_of_the_score, denormal_divisor, huge_divisor, factors,
    )
}  # fmt: skip


def as_mask(mod: Callable[..., Any]) -> Callable[..., Any]:
    """A mask_mod of what a score_mod makes of 0.5."""

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod((q * 0 + 0.5).to(torch.float32), b, h, q, k) > 0.6

    return mask_mod


def on_device(mod: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The mod with what it captures moved there."""
    assert isinstance(mod, FunctionType)
    scope = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in mod.__globals__.items()}
    return FunctionType(mod.__code__, scope, mod.__name__)


def eager(mod: Callable[..., Any], sizes: tuple[int, ...], scores: Tensor | None = None) -> Tensor:
    """A mod on int32 positions of all elements at once, on the CPU, by torch itself."""
    places = [
        torch.arange(size, dtype=torch.int32).view([-1 if dim == own else 1 for dim in range(4)])
        for own, size in enumerate(sizes)
    ]
    with _Hidden():
        return mod(*([] if scores is None else [scores.cpu()]), *places).expand(sizes)


class _Hidden(TorchFunctionMode):
    """What a `where` hides is divided by 1: torch raises an error where a whole number is divided by 0, and
    ends the process where the smallest one is divided by -1. Floats are divided in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", "").strip("_"), kwargs or {}
        bare = name.removeprefix("r") if name in ("rfloordiv", "rmod") else name
        if bare in ("floordiv", "floor_divide", "mod", "remainder", "fmod") or kwargs.get("rounding_mode"):
            turned = name != bare
            a, b = args[:2][::-1] if turned else args[:2]
            at = torch.result_type(a, b)
            if not at.is_floating_point:
                a, b = (torch.as_tensor(x).to(at) for x in (a, b))
                smallest = (a == torch.iinfo(at).min) & (b == -1) if at.is_signed else False
                b = torch.where((b == 0) | smallest, torch.ones_like(b), b)
                args = (b, a) if turned else (a, b)
            else:  # where torch's own on the CPU makes nan of large quotients
                a, b = (torch.as_tensor(x).to(at).double() for x in (a, b))
                return func(*((b, a) if turned else (a, b)), **kwargs).to(at)
        return func(*args, **kwargs)
