"""The search for tiles, in the interpreter: what it tries, keeps, and when calls use it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmod import errors, flex_attention
from flexmod.codegen.hopper import ForwardShape, HopperKernels
from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import Tile
from flexmod.errors import base
from flexmod.runtime import config, launch, tuned
from flexmod.tools import tune as tune_module
from flexmod.tools.mod_names import Setting, choose
from flexmod.tools.tune import tune

INTERPRET = {"BACKEND": "INTERPRET"}
SETTING = Setting(1, 1, 64, 16, torch.float16, torch.device("cpu"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, switch: Callable[[str, object], None]) -> Path:
    switch(config.CACHE_DIR, tmp_path)
    return tmp_path / "tuned"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) by kernel, as they were launched last."""
    seen: dict[str, tuple[Any, ...]] = {}
    start = launch.start

    def spy(kernels: Any, name: str, device: Any, grid: Any, arguments: Any) -> int:
        seen[name] = tuple(arguments.get(a) for a in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
        return start(kernels, name, device, grid, arguments)

    monkeypatch.setattr(launch, "start", spy)
    return seen


def times(monkeypatch: pytest.MonkeyPatch, launched: dict[str, tuple[Any, ...]], fastest: Tile) -> None:
    """Every tile takes 2 ms, but for one, which takes 1."""

    def median(call: Any, device: torch.device) -> float:
        launched.clear()
        call()
        sides = (fastest.block_m, fastest.block_n, fastest.warps, fastest.stages)
        return 1.0 if sides in launched.values() else 2.0

    monkeypatch.setattr(tune_module, "median_ms", median)


def few(monkeypatch: pytest.MonkeyPatch, *tiles: Tile) -> None:
    monkeypatch.setattr(tune_module, "_tiles", lambda block: iter(tiles))


def attend(**options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, 64, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    score_mod = choose("noop", SETTING, "softcap(3.0)").score
    out = flex_attention(*inputs, score_mod, kernel_options={**INTERPRET, **options})
    return [out, *torch.autograd.grad(out.sum(), inputs)]


def test_what_is_found_is_kept_and_used_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any], folder: Path
) -> None:
    fastest = Tile(16, 32, 8, 4)
    few(monkeypatch, Tile(32, 32, 4, 1), fastest)
    times(monkeypatch, launched, fastest)
    steps: list[tuple[str, int, int]] = []
    mods = choose("noop", SETTING, "softcap(2.0)")
    found = tune(mods, SETTING, name="capped", options=INTERPRET, progress=lambda *step: steps.append(step))
    assert list(found.trials) == ["forward", "dq", "dkdv"]
    assert {part: found.best(part).choice.tiles for part in found.trials} == {
        part: {part: fastest} for part in found.trials
    }
    # flexmod's own choice, the rungs of the ladder, these two
    counts = [len(trials) for trials in found.trials.values()]
    assert counts == [1 + 4 + 2] * 3
    assert steps[-1] == ("dkdv", 7, 7)
    text = str(found)
    assert text.startswith("capped, B=1 H=1 S=64 D=16 float16 on cpu\n\nkernel ")
    assert "forward" in text and "16x32 (8 warps, 4 stages)" in text and "2.00x" in text

    forward, backward = sorted(folder.iterdir(), key=lambda path: "backward" in path.name)
    assert [forward, backward] == found.paths
    assert forward.name.startswith("Triton_s_interpreter_forward_")
    kept = json.loads(backward.read_text())
    assert kept["name"] == "capped"
    assert set(kept["tiles"]) == {"dq", "dkdv"}

    sides = (16, 32, 8, 4)
    launched.clear()
    plain = attend()
    assert sides not in launched.values()
    # another cap, and other lengths, are the same variant
    launched.clear()
    for ours, theirs in zip(attend(tuned=True), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert [launched[f"{name}_kernel"] for name in ("forward", "dq", "dkdv")] == [sides] * 3
    launched.clear()
    attend(fwd_tuned=True)
    assert [launched[f"{name}_kernel"] == sides for name in ("forward", "dkdv")] == [True, False]


def test_a_variant_that_was_not_tuned(folder: Path) -> None:
    with pytest.raises(errors.NotTunedError) as raised:
        attend(tuned=True)
    assert str(raised.value) == (
        "kernel option tuned is True, but nothing was tuned for the forward of this variant on Triton's "
        "interpreter.\n"
        "  Instead: run flexmod tune with the same mods, dtype and head dimension (what it finds is in "
        f"{folder}), or leave the option out."
    )


def test_choices_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any]) -> None:
    few(monkeypatch, Tile(32, 32, 4, 1), Tile(24, 32, 4, 1))  # no power of two
    times(monkeypatch, launched, Tile(24, 32, 4, 1))
    found = tune(choose("noop", SETTING), SETTING, options=INTERPRET)
    problems = [trial.problem for trial in found.trials["forward"]]
    assert [bool(problem) for problem in problems] == [False] * (len(problems) - 1) + [True]
    assert str(found.best("forward").choice) == "flexmod's own choice"


def test_a_wrong_result_is_left_out(monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any]) -> None:
    few(monkeypatch)
    times(monkeypatch, launched, Tile(64, 64, 4, 2))
    attend_ = tune_module.flex_attention
    calls = iter(range(1000))
    monkeypatch.setattr(
        tune_module, "flex_attention", lambda *a, **k: attend_(*a, **k) * (1 + 0.1 * (next(calls) > 1))
    )
    found = tune(choose("noop", SETTING), SETTING, options=INTERPRET)
    assert [trial.problem for trial in found.trials["forward"]][1:] == ["wrong by 1.0e-01"] * 4


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch, launched: dict[str, Any]) -> None:
    times(monkeypatch, launched, Tile(0, 0, 0, 0))
    found = tune(choose("causal", SETTING), SETTING, seconds=0.0, options=INTERPRET)
    assert [len(trials) for trials in found.trials.values()] == [1, 1, 1]


def test_tiles_divide_the_blocks_of_the_mask() -> None:
    tiles = list(tune_module._tiles((64, 128)))
    assert max(tile.block_m for tile in tiles) == 64
    assert max(tile.block_n for tile in tiles) == 128
    assert len(set(tiles)) == len(tiles)


def test_on_the_cpu_it_says_why_it_cannot() -> None:
    with pytest.raises(base.TuneDeviceError) as raised:
        tune(choose("causal", SETTING), SETTING)
    assert str(raised.value) == (
        "tune times kernels on a GPU, and cpu is none.\n"
        "  Instead: run it on a machine with CUDA; flexmod build compiles for chips that are not here."
    )


def test_a_shape_for_hopper_comes_back_from_its_file() -> None:
    key = tuned.Key("forward", "a chip", _spec(), None, None)
    assert tuned.read(key, HopperKernels.rungs) is None
    tuned.write(key, tuned.Choice({"forward": ForwardShape(3, 128)}), {})
    again = tuned.read(key, HopperKernels.rungs)
    assert again is not None and (again.tiles, again.family) == ({"forward": ForwardShape(3, 128)}, "")
    assert tuned.read(key, Kernels.rungs) is None  # of a family that is not there
    tuned.write(key, tuned.Choice(family="portable"), {})
    again = tuned.read(key, Kernels.rungs)
    assert again is not None and again.family == "portable" and str(again) == "portable template"


def _spec() -> Any:
    from flexmod.codegen.variant import variant

    return variant(head_dim=64).spec_of("forward")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tiles": {"forward": 3}, "family": ""}'])
def test_a_damaged_file_counts_as_none(folder: Path, launched: dict[str, Any], damage: str) -> None:
    attend()
    keys = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "read", lambda key, kinds: keys.append(key))
        with pytest.raises(errors.NotTunedError):
            attend(tuned=True)
    folder.mkdir()
    keys[0].path.write_text(damage)
    with pytest.raises(errors.NotTunedError):
        attend(tuned=True)


def test_what_another_process_finds_is_used(folder: Path, launched: dict[str, Any]) -> None:
    """Also after a call that found nothing. Other users may read the file, as the umask says."""
    with pytest.raises(errors.NotTunedError):
        attend(fwd_tuned=True)
    tune(choose("noop", SETTING, "softcap(2.0)"), SETTING, options=INTERPRET, seconds=0)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o044 for path in folder.iterdir()} == {0o044}
    for path in folder.iterdir():
        path.unlink()
    tuned._read.cache_clear()
    with pytest.raises(errors.NotTunedError):
        attend(fwd_tuned=True)
    for name, text in written.items():
        (folder / name).write_text(text)
    attend(fwd_tuned=True)
    assert "forward_kernel" in launched


def keys(bias: torch.Tensor, batch: int = 1) -> set[tuned.Key]:
    """The keys of a forward with a bias, `tuned`."""
    q = torch.zeros(batch, 1, bias.shape[0], 16, dtype=torch.bfloat16)
    options = {"BACKEND": "INTERPRET", "tuned": True}
    with tuned.trying("forward", tuned.Choice()) as seen, torch.no_grad():
        flex_attention(q, q, q, lambda score, b, h, i, j: score + bias[i, j], kernel_options=options)
    return {applied.key for applied in seen}


def test_a_bias_that_comes_in_tiles_has_a_choice_of_its_own() -> None:
    """Its tile takes shared memory, so that a shape may fit beside another bias alone."""
    aligned, odd = (keys(torch.zeros(16, width)[:, :16]) for width in (16, 17))
    assert len(aligned) == len(odd) == 1
    assert aligned != odd


def test_batches_of_any_size_have_one_choice() -> None:
    """A batch of four copies such a bias to aligned rows, a batch of three does not."""
    odd = torch.zeros(70, 71)[:, :70]
    assert keys(odd, batch=3) == keys(odd, batch=4)
