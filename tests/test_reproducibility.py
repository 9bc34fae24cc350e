"""Reruns in the interpreter, whose kernels are those of a GPU; and that nothing is tuned unasked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import long_but

import flexmod
from benchmarks import reproducibility
from benchmarks.reproducibility import MASKS, Case, measure
from flexmod import masks
from flexmod.runtime import tuned

# makers of masks; the others there are orders of positions, or types
NO_MASKS = {"Mask", "MaskMod", "morton_order", "tile_order"}


def test_every_mask_of_the_library_is_run() -> None:
    assert set(MASKS) == set(masks.__all__) - NO_MASKS


@pytest.mark.parametrize(
    "name", long_but({"by_head"}, ["document", "by_head", "padding", "learned elements"])
)
def test_reruns(name: str) -> None:
    found = measure(Case(name, "float32", runs=2, device="cpu"))
    assert all(found["deterministic"]["same"].values())
    assert all(found["free"]["same"].values())  # the interpreter runs one program after the other
    assert all(found["neighbours"].values())


def test_a_difference_of_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = reproducibility.Call.run

    def changed(self: Any, *arguments: Any) -> dict[str, torch.Tensor]:
        found = run(self, *arguments)
        runs.append(found)
        if len(runs) == 2:
            found["dk"].view(torch.int32)[0, 0, 0, 0] ^= 1
        return found

    monkeypatch.setattr(reproducibility.Call, "run", changed)
    found = measure(Case("causal", "float32", runs=2, device="cpu"))
    assert [name for name, same in found["deterministic"]["same"].items() if not same] == ["dk"]
    assert 0 < found["deterministic"]["apart"]["dk"] < 1e-6


def test_nothing_is_tuned_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a call that did not ask for tuned kernels looked for them")

    monkeypatch.setattr(tuned, "read", asked)
    monkeypatch.setattr(tuned, "apply", asked)
    query = torch.randn(1, 2, 40, 16, requires_grad=True)
    out = flexmod.flex_attention(query, query, query, kernel_options={"BACKEND": "INTERPRET"})
    out.sum().backward()
    with pytest.raises(AssertionError, match="did not ask"):
        flexmod.flex_attention(query, query, query, kernel_options={"BACKEND": "INTERPRET", "tuned": True})
