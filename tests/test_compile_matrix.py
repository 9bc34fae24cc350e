"""The compile matrix: what it holds, how it goes on, what it finds fault with, and a sample of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import long_but

from benchmarks import compile_matrix, matrix_builds
from benchmarks.matrix_builds import (
    DIMS,
    DTYPES,
    MASKS,
    MODS,
    OF_BLOCK_MASKS,
    TARGETS,
    Build,
    builds,
    compile_build,
    faults,
)
from benchmarks.workers import Outcome
from flexmod import masks, mods
from flexmod.codegen.spec import Decoding
from flexmod.codegen.variant import variant
from flexmod.tools.ahead import GIVES_WAY, Built, Job, VariantCall, first_tile, kernels_on

NO_MASKS = {"Mask", "MaskMod", "morton_order", "tile_order"}
NO_MODS = {"ScoreMod", "alibi_slopes"}


def test_every_mask_and_mod_is_in_it() -> None:
    assert set(MASKS) == set(masks.__all__) - NO_MASKS
    assert set(MODS) == set(mods.__all__) - NO_MODS
    names = [str(build) for build in builds()]
    each = len(MASKS) + len(MODS)
    assert len(names) == len(set(names)) == len(TARGETS) * (len(DIMS) * len(DTYPES) * each + len(MASKS))


def test_any_part_of_it_is_a_sample_of_all() -> None:
    first = builds()[: len(TARGETS) * (len(DIMS) * len(DTYPES) + 1)]
    assert len({(b.target, b.dims, b.dtype) for b in first}) == len(first)


# Differing in all they can.
SAMPLE = [
    Build("mods", "alibi", "sm_90", (256, 256), "float16"),
    Build(OF_BLOCK_MASKS, "natten", "gfx942"),
    Build(OF_BLOCK_MASKS, "vision_cross", "sm_86"),
]
MORE = [
    Build("masks", "document", "sm_80", (192, 128), "bfloat16"),
    Build("mods", "softcap", "sm_86", (64, 64), "float16"),
    Build("masks", "natten", "sm_90", (128, 128), "bfloat16"),
    Build("mods", "temperature", "sm_100", (64, 64), "bfloat16"),
]


@pytest.mark.parametrize("build", long_but((), [*SAMPLE, *MORE], SAMPLE), ids=str)
def test_a_sample(build: Build) -> None:
    found = compile_build(build)
    assert found is not None and found["kernels"]
    assert [faults(build, kernel) for kernel in found["kernels"]] == [[]] * len(found["kernels"])


@pytest.mark.parametrize(
    ("target", "dims", "how", "form"),
    [
        ("sm_80", (192, 128), Decoding(16, 2, True), "lists"),
        ("sm_90", (64, 64), Decoding(64, 1, False), "runs"),
        ("gfx942", (64, 64), Decoding(64, 1, True), "runs"),
    ],
    ids=str,
)
def test_few_queries(target: str, dims: tuple[int, int], how: Decoding, form: str) -> None:
    of = variant(
        mods.alibi(2), masks.causal(),
        head_dim=dims[0], value_dim=dims[1], mask_form=form, decoding=how,
    )  # fmt: skip
    kernels, call = kernels_on(of, "forward", target), VariantCall(of)
    forward = first_tile(call, kernels, "forward", target)
    assert forward.fits and not forward.problem and forward.tile.block_m == how.rows
    assert forward.report is not None and forward.report.matrix_instructions
    if how.split:
        report = first_tile(call, kernels, "combine", target).report
        assert report is not None and report.fits and not report.spills


def test_what_runs_in_place_of_what_gives_way_is_compiled_too() -> None:
    of = variant(mask_mod=masks.causal())
    gives_way = Built("forward", "hopper", None, None, GIVES_WAY)
    job = Job("sm_90", "forward", "hopper", of.kernels("forward"), lambda: gives_way)
    first, second = matrix_builds._compiled(job, of)
    assert first is gives_way and (second.kernel, second.template) == ("forward", "portable")
    assert second.report is not None and second.report.matrix_instructions["HGMMA"]
    build = Build("masks", "causal", "sm_90", (64, 64), "bfloat16")
    assert faults(build, GOOD | {"problem": GIVES_WAY, "spills": 900}) == []


def test_what_is_known_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its text changes, or its tiles."""
    compiled: list[str] = []

    def compile(*given: Any) -> Any:
        compiled.append(given[1])
        return [matrix_builds.Built(given[1], "portable", None, None)]

    monkeypatch.setattr(matrix_builds, "_builder_kernel", compile)
    build = Build(OF_BLOCK_MASKS, "causal", "sm_80")
    found = compile_build(build)
    assert found is not None and compiled == ["squares_kernel", "elements_kernel", "runs_kernel"]
    assert compile_build(replace(build, known=found["digest"])) is None
    assert compile_build(replace(build, known="another")) == found
    other = compile_build(Build(OF_BLOCK_MASKS, "sliding_window", "sm_80"))
    assert other is not None and other["digest"] != found["digest"]


GOOD = {
    "kernel": "forward", "template": "portable", "tile": "-", "problem": "", "shared": 1000, "registers": 255,
    "spills": 256, "matrix": {"HGMMA": 8}, "warnings": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, []),
        ({"problem": "no tile fits 10 bytes of shared memory"}, ["no tile fits 10 bytes of shared memory"]),
        ({"shared": 227 * 1024 + 1}, ["232449 of 232448 bytes of shared memory"]),
        ({"spills": 260}, ["260 bytes of spills, 256 allowed"]),
        ({"matrix": {}}, ["no HGMMA"]),
        ({"matrix": {"HMMA": 8}}, ["no HGMMA"]),
    ],
)
def test_faults(changed: dict[str, Any], fault: list[str]) -> None:
    assert faults(Build("masks", "causal", "sm_90", (64, 64), "bfloat16"), GOOD | changed) == fault


def test_faults_of_float32_and_of_block_masks() -> None:
    single = Build("masks", "causal", "sm_80", (64, 64), "float32")
    assert faults(single, GOOD | {"matrix": {}}) == []
    assert faults(single, GOOD | {"matrix": {"HMMA": 4}}) == ["float32 products by HMMA"]
    assert faults(Build(OF_BLOCK_MASKS, "causal", "sm_80"), GOOD | {"matrix": {}}) == []


def test_it_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time was for three builds; then for the others, and for a second look at the first."""
    ran: list[list[str]] = []
    room = 3  # new ones

    def run(function: Any, groups: list[list[Build]], **limits: Any) -> Any:
        ran.append([f"{build.known}{build}" for (build,) in groups])
        for number, (build,) in enumerate(groups):
            error = "not run: 5 s were over" if number >= room else ""
            kernel = GOOD | {"spills": 512 * number}
            value = None if error or build.known else {"digest": "new ", "kernels": [kernel]}
            yield Outcome(build, value, error, 0.25)

    monkeypatch.setattr(compile_matrix.workers, "run", run)
    monkeypatch.setenv("FLEXMOD_CACHE_DIR", str(tmp_path))
    file = tmp_path / "matrix.jsonl"
    options = ["--results", str(file), "--only", "sm_90 block mask s"]
    names = [str(b) for b in builds() if "sm_90 block mask s" in str(b)]
    assert len(names) == 5
    assert compile_matrix.main(options) == 1
    assert "512 bytes of spills, 256 allowed" in capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["build"] for line in lines] == names[:room]
    file.write_text(file.read_text() + '{"build": "cut o')
    compile_matrix.main(options)
    assert set(compile_matrix.read(file)) == set(names)
    assert ran[1] == [*names[room:], *(f"new {name}" for name in names[:room])]
    ran.clear()
    compile_matrix.main([*options, "--seconds", "0"])
    assert not ran
