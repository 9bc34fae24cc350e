"""Each architecture of docs/transformers.md beside eager, both against float64; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="4.57")

from flexmod import create_block_mask, masks  # noqa: E402
from flexmod.errors import TransformersArgumentError, TransformersModelError  # noqa: E402
from flexmod.integrations.transformers import CarriedMask, attention, register  # noqa: E402
from integrations import architectures, tiny_models  # noqa: E402
from integrations.architectures import ARCHITECTURES, GENERATING, OPTIONS, REFUSED, make, results  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
QUICK = {"GPT2LMHeadModel", "DeepseekV3ForCausalLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration",
         "ViTForImageClassification", "WhisperForConditionalGeneration"}  # fmt: skip


def each(names: Any) -> pytest.MarkDecorator:
    """One of each kind in every run, the others in the long ones."""
    marks = {False: (pytest.mark.long,), True: ()}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n in QUICK]) for n in names])


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()
    tiny_models.register_truth()
    architectures.register_uniform()


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@each(OPTIONS)
def test_logits_and_gradients(name: str) -> None:
    """In float32, no further from float64 than three times eager's own distance; attention alike is far.

    SDPA counts too, which on the CPU is torch's flash attention, as flexmod is. On a chip with AVX-512,
    gradients of biases, which add up all rows, have four times eager's distance there. The gradient of a bias
    of keys is 0, since softmax does not change with it. What is left is rounding, and one order of sums makes
    a few times as much as another.
    """
    ours, eager = (results(name, implementation) for implementation in ("flexmod", "eager"))
    exact, alike = (results(name, implementation, torch.float64) for implementation in ("truth", "uniform"))
    assert ours.keys() == eager.keys() == exact.keys()
    limits = {key: 3 * rms(eager[key] - true) + 2e-7 * rms(true) for key, true in exact.items()}
    over = {key: rms(ours[key] - true) for key, true in exact.items() if rms(ours[key] - true) > limits[key]}
    sdpa = results(name, "sdpa") if over else {}
    for key, error in over.items():
        times = 1.5 if rms(exact[key]) < 1e-12 else 1.0 + 1e-6
        assert error <= times * rms(sdpa[key] - exact[key]), key
    assert rms(alike["logits"] - exact["logits"]) > 0.02 * rms(exact["logits"])


@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.every)])
@each(GENERATING)
def test_greedy_generation(name: str, cache: str) -> None:
    given, _ = architectures.inputs(name)
    given.pop("decoder_input_ids", None)
    tokens = [
        make(name, implementation).generate(
            **given, max_new_tokens=8, do_sample=False, cache_implementation=cache
        )
        for implementation in ("flexmod", "eager")
    ]
    assert torch.equal(*tokens) and tokens[0].shape[1] >= 8


@each(OPTIONS)
def test_refused_dropout_names_the_option_of_that_model(name: str) -> None:
    option, changed = architectures.dropout(name, 0.13)
    model = make(name, "flexmod", **changed).train()
    with pytest.raises(TransformersArgumentError) as raised:
        model(**architectures.inputs(name)[0])
    fact, advice = str(raised.value).splitlines()
    assert "dropout is 0.13" in fact
    assert advice == f"  Instead: set {option}=0.0 in the model's config."


def test_a_layer_without_options_is_named() -> None:
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(TransformersArgumentError, match=r"Instead: set the dropout of Identity to 0.0\."):
        attention(torch.nn.Identity(), q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_attention_of_their_own_are_refused_when_made(name: str) -> None:
    config = getattr(transformers, name).config_class()
    with pytest.raises(TransformersModelError, match=f"^{name} computes attention in its own code"):
        getattr(transformers, name)._from_config(config, attn_implementation="flexmod")


@pytest.mark.parametrize(
    ("used", "how"),
    [
        (lambda mask: torch.zeros(3) + mask, "calls add with its mask"),
        (lambda mask: torch.zeros(3).masked_fill(mask, 0.0), "calls masked_fill with its mask"),
        (lambda mask: mask.repeat(1, 4, 1, 1), "uses repeat of its mask"),
        (lambda mask: mask.dtype == torch.bool, "uses dtype of its mask"),
        (lambda mask: mask[:, 0, :, :], "indexes the elements of its mask"),
        (lambda mask: mask[:, :, ::2, :], "indexes the elements of its mask"),
        (lambda mask: mask[:, :, :, :8], "indexes the elements of its mask"),
    ],
)
def test_a_layer_that_uses_its_mask_as_a_tensor_is_refused(used: Any, how: str) -> None:
    mask = CarriedMask(create_block_mask(masks.causal(), None, None, 30, 30, "cpu"))
    with pytest.raises(TransformersModelError, match=how):
        used(mask)
    assert not hasattr(mask, "kept")


def test_the_page_lists_the_architectures() -> None:
    lines = PAGE.read_text().splitlines()
    for kind, models in ARCHITECTURES.items():
        assert f"| {kind} | {listed(models)} |" in lines
    assert f"{listed(REFUSED)}." in lines
    assert f"{len(OPTIONS)} architectures" in PAGE.read_text()


def listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
