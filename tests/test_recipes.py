"""The recipes of docs/recipes equal their dense twins in float64, with gradients; their pictures are theirs.

tests/test_readme.py compares what the pages print. `python tools/recipes.py` writes pictures and index.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tools import recipes

PAGES = recipes.recipes()
EXPECTED = {
    "native_sparse_attention", "mixture_of_block_attention", "sliding_tiles", "block_causal_registers",
    "image_spans", "differential_attention", "forgetting_transformer", "alternating_windows",
    "global_tokens", "t5_bias", "contextual_positions", "latent_attention", "graph_adjacency",
    "masked_diffusion", "speculative_trees", "attention_sinks",
}  # fmt: skip

made = functools.cache(recipes.run)


def test_all_recipes_are_there() -> None:
    assert {page.stem for page in PAGES} == EXPECTED


def gradients(out: Tensor, inputs: list[Any], weight: Tensor) -> list[Tensor]:
    learned = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad((out * weight).sum(), learned))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe_equals_its_dense_twin(page: Path) -> None:
    names = made(page)
    inputs, sizes = names["inputs"], names.get("sizes", {})
    outs = [names[function](*inputs, **sizes) for function in ("attend", "dense")]
    assert outs[0].dtype is torch.float64 and outs[0].isfinite().all()
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-9)
    weight = torch.randn(outs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [gradients(out, inputs, weight) for out in outs]
    assert found[0] and all(gradient.isfinite().all() and gradient.any() for gradient in found[0])
    torch.testing.assert_close(*found, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page: Path) -> None:
    text = page.read_text()
    code = recipes.CODE.search(text)
    assert code is not None and len(code[1].splitlines()) <= 20
    assert f"](pictures/{page.stem}.svg)" in text and "\nSource: " in text
    parts = [line for line in text.splitlines() if line.startswith("## ")][:3]
    assert parts == ["## Code", "## Cost", "## Dense twin"]


def test_files_are_what_the_tool_writes() -> None:
    """If the pages are right: python tools/recipes.py."""
    files = recipes.files({page: made(page) for page in PAGES})
    different = [str(path) for path, text in files.items() if (recipes.ROOT / path).read_text() != text]
    assert different == []
    folder = recipes.ROOT / recipes.FOLDER / "pictures"
    assert {path.relative_to(recipes.ROOT) for path in folder.iterdir()} == set(files) - {recipes.INDEX}
