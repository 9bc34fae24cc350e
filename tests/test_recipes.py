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
    "masked_diffusion", "speculative_trees", "attention_sinks", "paged_cache", "cache_eviction",
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


def moved(x: Any, device: str) -> Any:
    """An input for kernels: float32 in place of float64, on a device."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().to(device, torch.float32 if x.is_floating_point() else x.dtype)
    return x.requires_grad_(x.is_floating_point())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_kernels_compute_the_recipe(page: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels, in the interpreter or on a GPU; selections by data may round otherwise."""
    names = made(page)
    inputs, sizes = names["inputs"], names.get("sizes", {})
    options = {"BACKEND": "INTERPRET"} if device == "cpu" else {}
    for name in ("flex_attention", "compile"):
        if name in names:
            monkeypatch.setitem(names, name, functools.partial(names[name], kernel_options=options))
    given = [moved(x, device) for x in inputs]
    outs = names["attend"](*given, **sizes), names["dense"](*inputs, **sizes)
    torch.testing.assert_close(outs[0].cpu().double(), outs[1], atol=1e-4, rtol=1e-3)
    weight = torch.randn(outs[1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [
        gradients(out, learned, weight.to(out)) for out, learned in zip(outs, (given, inputs), strict=True)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page: Path) -> None:
    text = page.read_text()
    section = text.partition("## Code")[2].partition("\n## ")[0]
    lines = [line for block in recipes.CODE.findall(section) for line in block.splitlines()]
    assert 0 < sum(bool(line.strip()) for line in lines) <= 20
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
