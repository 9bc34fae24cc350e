"""A third family of kernels, a toy: inserted, it is found by all that asks for families."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexmod import errors, explain, flex_attention, masks, mods
from flexmod.backends import families, triton
from flexmod.backends import options as kernel_options
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import Limits, Tile
from flexmod.codegen.variant import Variant, variant
from flexmod.runtime.target import named
from flexmod.tools import ahead
from flexmod.tools.mod_names import Mods, Setting
from flexmod.tools.tune import tune

CPU = torch.device("cpu")


class ToyKernels:
    """The portable forward with tiles of 16 queries."""

    family, limits, rungs = "toy", Limits(passing=64, gives_way=True), (Tile,)

    def __init__(self, portable: Kernels) -> None:
        self.portable, self.tiles = portable, dict[Any, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.portable, name)

    def ladder(self, kernel: Any) -> tuple[Tile, ...]:
        return (Tile(16, 16, 1, 1), Tile(16, 32, 1, 1))

    choices = ladder

    @property
    def text(self) -> str:
        return inspect.getsource(self.portable.module)


class Toy:
    name, title, target = "toy", "kernels of a toy", "sm_80"
    reduce_in_backward = reads_order = False
    made: dict[Kernels, ToyKernels] = {}

    def obstacle(self, variant: Variant, way: str, *_: Any, **__: Any) -> str | None:
        if variant.score and variant.score.graph and variant.score.graph.captures:
            return "a toy reads no tensors"
        return "a toy has no backward" if way == "backward" else None

    def call_obstacle(self, q: Any, k: Any, v: Any, by_column: Any) -> str | None:
        return "a toy takes 8 heads at most" if q.shape[1] > 8 else None

    def aligned_bytes(self, dtype: torch.dtype) -> int:
        return 16

    def kernels(self, portable: Kernels) -> Any:
        return self.made.setdefault(portable, ToyKernels(portable))

    forward, backward = staticmethod(triton.forward), staticmethod(triton.backward)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    remove = families.insert(Toy())
    yield
    remove()


@pytest.mark.parametrize(("heads", "served"), [(2, ["toy", "portable"]), (9, ["portable", "portable"])])
def test_a_call(heads: int, served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    made = families.Bound

    def bind(plan: Any, *rest: Any) -> Any:
        found.append([step.source.family for step in plan.launches() if step.rung][0])
        return made(plan, *rest)

    monkeypatch.setattr(families, "Bound", bind)
    given = [torch.randn(1, heads, 40, 16, requires_grad=True) for _ in range(3)]
    softcap, options = mods.softcap(5.0), {"BACKEND": "INTERPRET"}
    expected = flex_attention(*given, softcap, kernel_options={"BACKEND": "REFERENCE"})
    out = flex_attention(*given, softcap, kernel_options=options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.autograd.grad(out.sum(), given)  # type: ignore[union-attr]
    assert found == served
    way = "backward" if heads == 2 else "forward"
    with pytest.raises(errors.TemplateError, match=f"TEMPLATE is 'toy', but the {way} cannot run on"):
        out = flex_attention(*given, softcap, kernel_options={**options, "TEMPLATE": "toy"})
        torch.autograd.grad(out.sum(), given)  # type: ignore[union-attr]


def test_explain_and_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explain(mods.softcap(5.0), masks.causal())
    assert shown.templates[0].startswith("forward template: toy on sm_80, 16x16 (1 warp, 1 stage) first; h")
    assert "toy forward" in shown.plan and "def forward_kernel" in shown.sources["toy forward"]
    assert kernel_options.family_names() == tuple(family.name for family in families.families())
    doctor = importlib.import_module("flexmod.tools.cli.doctor")
    monkeypatch.setattr(doctor, "_targets", lambda: [(CPU, named("sm_80"))])
    said = [runs for _, runs, _ in doctor._runs() if "bfloat16" in runs]
    assert [runs.rpartition(": ")[2] for runs in said] == ["kernels of a toy", "portable Triton kernels"]


def test_a_family_sees_the_mods() -> None:
    table = torch.randn(40)
    reads = variant(lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    family, passed = families.serving(reads, "forward", "sm_80")
    assert (family.name, passed["toy"]) == ("portable", "a toy reads no tensors")
    assert families.serving(variant(mods.softcap(5.0)), "forward", "sm_80")[0].name == "toy"


def test_masks_are_ordered_for_who_reads_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    chips = ("sm_80", "sm_90", families.INTERPRETER)
    assert [chip for chip in chips if families.reads_order(chip)] == ["sm_90"]
    monkeypatch.setattr(Toy, "reads_order", True)
    assert [chip for chip in chips if families.reads_order(chip)] == ["sm_80", "sm_90"]


@pytest.mark.long
def test_tune_and_ahead(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXMOD_CACHE_DIR", str(tmp_path))
    setting = Setting(1, 1, 32, 16, torch.float32, CPU)
    found = tune(Mods(), setting, options={"BACKEND": "INTERPRET"}, seconds=4)
    assert [str(trial.choice) for trial in found.trials["forward"]][1:3] == [
        "forward 16x16 (1 warp, 1 stage)", "forward 16x32 (1 warp, 1 stage)",
    ]  # fmt: skip
    first, *others = ahead.jobs(variant(None, masks.causal(), head_dim=16), "sm_80")
    assert (first.template, {job.template for job in others}) == ("toy", {"portable"})
    assert first.compile().fits


def test_a_known_call_asks_an_inserted_family() -> None:
    given, options = [torch.randn(1, 2, 40, 16) for _ in range(3)], {"BACKEND": "INTERPRET"}
    flex_attention(*given, kernel_options=options)
    asked: list[str] = []

    class Other(Toy):
        name = "other"

        def obstacle(self, variant: Variant, way: str, *_: Any, **__: Any) -> str | None:
            asked.append(way)
            return "it only listens"

    remove = families.insert(Other())
    flex_attention(*given, kernel_options=options)
    remove()
    flex_attention(*given, kernel_options=options)
    assert asked == ["forward"]


def test_a_kernel_that_another_choice_adds_is_chosen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of dkdv_kernel has not all keys, and leaves dQ to a kernel of its own."""
    chosen: list[str] = []

    def last(kernels: Any, name: Any, device: Any, arguments: Any) -> Any:
        chosen.append(name)
        rung = kernels.ladder(name)[-1]
        assert arguments(rung)
        return rung

    monkeypatch.setattr(families.launch, "choose_tile", last)
    given = [torch.randn(1, 2, 40, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = flex_attention(*given, scale=0.17, kernel_options={"BACKEND": "INTERPRET"})
    torch.autograd.grad(out.sum(), given)  # type: ignore[union-attr]
    assert chosen == ["forward", "dkdv", "dq"]
