"""How many keys a window keeps, counted row by row, and what M != N keeps, with and without an offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

import flexmod
from flexmod import create_block_mask, create_mask, flex_attention, masks, mods
from flexmod.integrations.transformers import attention
from flexmod.tools.mod_names import choose_mask, usual_setting

LENGTH = 20
BACKENDS = ({}, {"BACKEND": "INTERPRET"}, {"BACKEND": "REFERENCE"})


def near(window: int, q: int) -> int:
    """The last `window` positions up to q."""
    return min(window, q + 1)


def around(window: int, q: int, length: int = LENGTH) -> int:
    return sum(abs(q - k) < window for k in range(length))


def square(window: int, q: int, width: int = 5) -> int:
    return around(window, q // width, LENGTH // width) * around(window, q % width, width)


# name: the mask of a window, and how many keys it keeps of a query
COUNTS: dict[str, tuple[Callable[[int], Any], Callable[[int, int], int]]] = {
    "sliding": (lambda n: masks.sliding_window(n), near),
    "both sides": (lambda n: masks.sliding_window(n, causal=False), around),
    "by head": (lambda n: masks.sliding_window(torch.tensor([n])), near),
    "of an expression": (lambda n: choose_mask(f"sliding_window:{n}", usual_setting("cpu")), near),
    "within causal": (lambda n: masks.causal() & masks.sliding_window(n, causal=False), near),
    "chosen by head": (lambda n: masks.by_head(torch.tensor([0]), masks.sliding_window(n)), near),
    "packed": (lambda n: masks.jagged(torch.tensor([0, LENGTH]), masks.sliding_window(n)), near),
    "dilated": (lambda n: masks.dilated_window(n, 3), lambda n, q: near(n, q // 3)),
    "dilated once": (lambda n: masks.dilated_window(n, 1), near),
    "global, no tokens": (lambda n: masks.global_window(n, tokens=0), near),
    "global": (lambda n: masks.global_window(n, tokens=2), lambda n, q: min(q + 1, near(n, q) + 2)),
    "image": (lambda n: masks.standalone_window(LENGTH // 5, 5, n), square),
    "causal line": (lambda n: masks.natten((LENGTH,), kernel=n, causal=True), near),
}


@pytest.mark.parametrize("window", (1, 2, 4, 7))
@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, window: int) -> None:
    made, count = COUNTS[name]
    kept = create_mask(made(window), None, None, LENGTH, LENGTH, device="cpu")[0, 0]
    assert kept.sum(1).tolist() == [count(window, q) for q in range(LENGTH)]
    assert kept.diagonal().all()
    block_mask = create_block_mask(made(window), None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=1)
    assert torch.equal(block_mask.to_dense()[0, 0].bool(), kept)


@pytest.mark.parametrize("window", (1, 4, 9))
def test_as_hugging_face(window: int) -> None:
    theirs = masking_utils.sliding_window_causal_mask_function(window)
    wanted = create_mask(theirs, None, None, LENGTH, LENGTH, device="cpu")
    assert torch.equal(create_mask(masks.sliding_window(window), None, None, LENGTH, LENGTH, "cpu"), wanted)
    query, key, value = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    out, _ = attention(torch.nn.Module(), query, key, value, None, sliding_window=window)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, wanted)
    torch.testing.assert_close(out, dense.transpose(1, 2))


@pytest.mark.parametrize("options", BACKENDS, ids=lambda options: options.get("BACKEND", "CPU"))
@pytest.mark.parametrize("window", (1, 4))
def test_attention_sees_so_many_keys(window: int, options: dict[str, Any]) -> None:
    """Equal scores, and values that are one-hot: the output of a row is its weights."""
    query, value = torch.zeros(1, 1, LENGTH, LENGTH), torch.eye(LENGTH)[None, None]
    mask = create_block_mask(masks.sliding_window(window), None, None, LENGTH, LENGTH, device="cpu")
    out = flex_attention(query, query, value, block_mask=mask, kernel_options=options)[0, 0]
    assert (out > 0).sum(1).tolist() == [near(window, q) for q in range(LENGTH)]


# name: a mask of positions, for a length
POSITIONS: dict[str, Callable[[int], Any]] = {
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.sliding_window(5),
    "dilated": lambda n: masks.dilated_window(3, 4),
    "global": lambda n: masks.global_window(4, tokens=2),
    "prefix": lambda n: masks.prefix_lm(3),
    "documents": lambda n: masks.document(torch.arange(n) // 7, causal=True),
    "shared prefix": lambda n: masks.shared_prefix(3, torch.arange(n) // 6),
    "image": lambda n: masks.standalone_window(n // 4, 4, 2),
    "natten": lambda n: masks.natten((n // 4, 4), 3),
    "diffusion": lambda n: masks.block_diffusion(n // 2, 2),
}


@pytest.mark.parametrize("last", (1, 3, 17))
@pytest.mark.parametrize("name", POSITIONS)
def test_the_last_queries_of_a_cache(name: str, last: int) -> None:
    """What the docstrings say to write gives the rows of the whole."""
    mask_mod, offset = POSITIONS[name](LENGTH), LENGTH - last
    whole = create_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")

    def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mask_mod(b, h, q + offset, k)

    assert torch.equal(create_mask(shifted, None, None, last, LENGTH, device="cpu"), whole[:, :, offset:])
    first = create_mask(mask_mod, None, None, last, LENGTH, device="cpu")
    assert torch.equal(first, whole[:, :, :last])  # aligned at the top left, as it stands


@pytest.mark.parametrize("options", BACKENDS, ids=lambda options: options.get("BACKEND", "CPU"))
@pytest.mark.parametrize(
    "made",
    [
        lambda: mods.alibi(2),
        lambda: mods.relative_position(),
        lambda: mods.causal_score(),
        lambda: mods.relative_bias(torch.arange(7.0)),
        lambda: mods.t5_bias(torch.arange(16.0).view(8, 2)),
        lambda: mods.sandwich(2, LENGTH, dim=6),
    ],
    ids=["alibi", "distance", "causal", "bias", "t5", "sandwich"],
)
def test_score_mods_of_a_cache(made: Callable[[], Any], options: dict[str, Any]) -> None:
    score_mod, offset = made(), LENGTH - 3
    query, key, value = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    whole = flex_attention(query, key, value, score_mod, kernel_options=options)

    def shifted(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score_mod(s, b, h, q + offset, k)

    last = flex_attention(query[:, :, offset:], key, value, shifted, kernel_options=options)
    torch.testing.assert_close(last, whole[:, :, offset:], rtol=0, atol=2e-6)


def test_causal_over_a_cache_as_it_stands() -> None:
    """One query over 64 keys keeps the first of them: so it is drawn, and so it is written."""
    assert create_mask(masks.causal(), None, None, 1, 64, device="cpu")[0, 0, 0].nonzero().tolist() == [[0]]
    for name in ("causal", "sliding_window", "dilated_window", "global_window", "prefix_lm", "document"):
        assert "With a key/value cache" in " ".join((getattr(masks, name).__doc__ or "").split())
    assert flexmod.create_block_mask(masks.causal(), None, None, 1, 64, device="cpu").to_dense().sum() == 1
