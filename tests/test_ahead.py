"""A kernel compiled ahead of time is the one that a launch would run, with the tile it would settle on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexmod import errors, masks, mods
from flexmod.codegen.spec import Tile
from flexmod.codegen.variant import variant
from flexmod.runtime.offline import Report
from flexmod.runtime.target import named
from flexmod.tools import ahead
from flexmod.tools.ahead import VariantCall, first_tile, jobs


def kernels(*arguments: Any, target: str = "sm_80", **options: Any) -> list[tuple[str, str]]:
    return [(job.kernel, job.template) for job in jobs(variant(*arguments, **options), target)]


def test_the_kernels_of_a_chip() -> None:
    portable = [("forward", "portable"), ("dq", "portable"), ("dkdv", "portable")]
    assert kernels(None, masks.causal()) == portable
    assert kernels(None, masks.causal(), target="sm_90") == [("forward", "hopper"), ("backward", "hopper")]
    wide = kernels(None, masks.causal(), target="sm_90", head_dim=264)
    assert wide == portable
    exact = kernels(dtype=torch.float32, target="sm_90")
    assert exact == [portable[0], ("delta", "portable"), *portable[1:]]


def test_kernels_for_captured_tensors() -> None:
    table = torch.zeros(4, 64, 64, requires_grad=True)
    by_distance = kernels(lambda s, b, h, q_idx, kv_idx: s + table[h, 0, q_idx - kv_idx])
    assert by_distance[-1] == ("diagonal", "portable")

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, q_idx, kv_idx]

    assert kernels(biased)[-1] == ("scatter", "portable")
    assert kernels(biased, target="sm_90")[-1] == ("backward", "hopper")  # which adds these gradients itself
    scaled = kernels(lambda s, b, h, q_idx, kv_idx: s * table[h, q_idx, kv_idx], target="sm_90")
    assert scaled[-2:] == [("backward", "hopper"), ("scatter", "portable")]


def test_an_unknown_chip() -> None:
    with pytest.raises(errors.UnknownTarget):
        jobs(variant(), "sm_9000")


def test_compiled_for_chips() -> None:
    """Forward kernels, and one backward: others take long."""
    ids = torch.arange(64, dtype=torch.uint8)
    small = variant(mods.softcap(15.0), masks.document(ids), head_dim=64, dtype=torch.float16)
    for target, instruction in (("sm_80", "HMMA"), ("sm_90", "HGMMA")):
        built = next(iter(jobs(small, target))).compile()
        assert (built.kernel, built.fits, built.problem) == ("forward", True, "")
        assert built.report is not None and built.report.matrix_instructions[instruction] > 0
        assert "ptx" in built.report.asm
    (backward,) = (job for job in jobs(variant(None, masks.causal()), "sm_90") if job.kernel == "backward")
    built = backward.compile()
    assert (built.template, built.fits, built.problem) == ("hopper", True, "")


@pytest.mark.parametrize(
    ("outcomes", "expected", "tried"),
    [
        ([(True, 0)], 0, 1),
        ([(False, 0), (True, 4 * 64), (True, 0)], 1, 2),  # what little it spills is no reason to go on
        ([(True, 400), (False, 0), (True, 300), (True, 500), (True, 0)], 4, 5),
        ([(True, 400), (False, 0), (True, 300), (True, 500), (True, 600)], 2, 5),  # all spill: the one least
        ([(False, 0)] * 5, 4, 5),
    ],
)
def test_tiles_are_judged_as_a_launch_does(
    outcomes: list[tuple[bool, int]], expected: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = variant(None, masks.causal(), head_dim=128)
    rungs = made.kernels("forward").ladder("forward")
    seen: list[Tile] = []

    def compiled(call: Any, kernels: Any, name: str, target: str, rungs: Any) -> Report:
        seen.append(rungs[name])
        fits, local = outcomes[len(seen) - 1]
        return Report(named(target), 0 if fits else 1 << 20, 255, local, local)

    monkeypatch.setattr(ahead, "compiled", compiled)
    built = first_tile(VariantCall(made), made.kernels("forward"), "forward", "sm_80")
    assert (built.tile, len(seen)) == (rungs[expected], tried)
    assert built.fits == outcomes[expected][0]


def test_tiles_that_the_tensor_memory_lacks_room_for_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = variant(None, masks.causal(), head_dim=128, dtype=torch.float32)
    kernels = made.kernels("forward", family="nvidia_early")
    first, second, *_ = kernels.ladder("forward")
    columns = {first: 1280, second: 512}

    def compiled(call: Any, kernels: Any, name: str, target: str, rungs: Any) -> Report:
        return Report(named(target), 1000, 255, 0, 0, tensor_columns=columns.get(rungs[name], 768))

    monkeypatch.setattr(ahead, "compiled", compiled)
    built = first_tile(VariantCall(made), kernels, "forward", "sm_100")
    assert (built.tile, built.problem) == (second, "")
    columns.clear()
    built = first_tile(VariantCall(made), kernels, "forward", "sm_100")
    assert not built.fits and built.problem == "no tile fits 512 columns of tensor memory"
