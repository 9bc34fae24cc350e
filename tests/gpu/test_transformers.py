"""`attn_implementation="flexmod"` on the GPU: logits, gradients and generation beside eager attention."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="4.57")

from integrations.tiny_models import MODELS, Batch, batch, make, results

from flexmod.integrations.transformers import register

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def on_gpu(kind: str) -> Batch:
    given = batch(kind)
    return Batch({name: x.cuda() for name, x in given.inputs.items()}, given.valid.cuda())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    """float32, products exact in both; padded at the left, where some queries see nothing."""
    given = on_gpu("left")
    ours, eager = (results(make(name, each).cuda(), given) for each in ("flexmod", "eager"))
    assert ours.keys() == eager.keys()
    for key, wanted in eager.items():
        assert (ours[key] - wanted).norm() <= 1e-4 * wanted.norm(), key


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_greedy_generation(name: str, cache: str) -> None:
    """A static cache makes transformers compile the steps; the graph breaks around attention at most."""
    given = on_gpu("left").inputs
    tokens = [
        make(name, each).cuda().generate(
            **given, max_new_tokens=8, do_sample=False, cache_implementation=cache
        )
        for each in ("flexmod", "eager")
    ]  # fmt: skip
    assert torch.equal(*tokens)


def test_half_precision() -> None:
    """bfloat16 is no further from float32 than eager's own bfloat16, by much."""
    given = on_gpu("packed")
    exact = results(make("llama", "eager").cuda(), given)
    ours, eager = (
        results(make("llama", each, torch.bfloat16).cuda(), given) for each in ("flexmod", "eager")
    )
    for key, true in exact.items():
        limit = 2 * (eager[key].float() - true).norm() + 2e-3 * true.norm()
        assert (ours[key].float() - true).norm() <= limit, key
