"""A folder that `flexmod warm` filled: a process that uses it compiles none of its kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import biased
import pytest
import torch

from flexmod import masks, mods
from flexmod.codegen.compiled_kernels import COMPILED
from flexmod.errors.base import WarmFolderError
from flexmod.runtime import config, side_by_side
from flexmod.tools.ahead import Built, checked_folder, warm
from flexmod.tools.cli import main

ROOT = Path(__file__).parents[1]

# A call as on an H200, whose launches compile and run nothing: prints each kernel, and whether it was found.
CALL = """
import contextlib, json, sys
sys.path[:0] = [{root!r}, {tests!r}]
from unittest import mock
import torch, biased, stand_in_driver
from benchmarks.host_path import _compiled, on_an_h200
import flexmod
from flexmod import masks, mods
from flexmod.runtime import direct, side_by_side
from flexmod.runtime.direct import COUNTER

def compile_only(function, grid, device, arguments):
    counter = torch.zeros(1, dtype=torch.int32)
    given = {{name: counter if value is COUNTER else value for name, value in arguments.items()}}
    function.warmup(grid=grid, **{{**direct.options_of(function), **given}})
    return _compiled()

stand_in_driver.install()
batch, heads, length = {sizes}
mask = {mask} and flexmod.create_block_mask({mask}, None, None, length, length, device="cpu")
threads, compiled = side_by_side.threads, direct.compiled
with (
    on_an_h200(), mock.patch.multiple(direct, start=compile_only, compiled=compiled),
    mock.patch.object(side_by_side, "threads", threads),
    mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
):
    made = lambda: torch.randn(batch, heads, length, {dim}, dtype=torch.{dtype}, requires_grad={grad})
    q, k, v = made(), made(), made()
    out = flexmod.flex_attention(q, k, v, {score}, mask)
    if {grad}:
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
print(json.dumps(stand_in_driver.compiled))
"""


def called(
    folder: Path, triton_folder: Path, threads: str = "4", grad: bool = True, **facts: object
) -> list[tuple[str, bool]]:
    environment = {
        **os.environ,
        config.CACHE_DIR: str(folder),
        "TRITON_CACHE_DIR": str(triton_folder),
        config.COMPILE_THREADS: threads,
        "OMP_NUM_THREADS": "1",
    }
    script = CALL.format(root=str(ROOT), tests=str(ROOT / "tests"), grad=grad, **facts)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return [(name, found) for name, found in json.loads(done.stdout)]


HOPPER = ["forward_kernel", "statistics_kernel", "backward_kernel", "round_kernel"]
EXACT = ["forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel"]


SOFTCAP: dict[str, Any] = {
    "score": "mods.softcap(30.0)", "mask": "masks.causal()", "dim": 64, "dtype": "float16",
}  # fmt: skip
IN_FLOAT32: dict[str, Any] = {"score": "None", "mask": "masks.causal()", "dim": 32, "dtype": "float32"}
Filled = tuple[Path, list[tuple[str, Built]]]


def warmed(
    folder: Path, score: str, mask: str, dim: int, dtype: str, length: int | None = None
) -> Filled:
    known = {"mods": mods, "masks": masks, "biased": biased}
    score_mod, mask_mod = (eval(text, known) for text in (score, mask))
    made = {"head_dim": dim, "dtype": getattr(torch, dtype), "length": length}
    built = warm(folder, score_mod, mask_mod, targets=["sm_90"], **made)
    return folder, [*built]


def warmed_by_threads(folder: Path, facts: dict[str, Any]) -> Filled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "threads", lambda count=4: count)
        return warmed(folder / "here", **facts)


@pytest.fixture(scope="module")
def softcap(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """A folder that four threads filled."""
    return warmed_by_threads(tmp_path_factory.mktemp("warm"), SOFTCAP)


@pytest.mark.long
def test_a_process_compiles_nothing(softcap: Filled, tmp_path: Path) -> None:
    there = tmp_path / "there"
    shutil.copytree(softcap[0], there)
    softcap[0].rename(tmp_path / "away")
    try:
        for number, sizes in enumerate(((2, 2, 1100), (1, 2, 2000))):
            found = called(there, tmp_path / f"triton{number}", sizes=sizes, **SOFTCAP)
            assert sorted(found) == sorted((name, True) for name in HOPPER)
        found = called(there, tmp_path / "triton2", grad=False, sizes=(1, 2, 2000), **SOFTCAP)
        assert found == [("forward_kernel", True)]
    finally:
        (tmp_path / "away").rename(softcap[0])
    # and without the folder, the first of them: the kernels above were found in it. With one thread, no
    # second process compiles one that this one finds.
    bare = called(tmp_path / "bare", tmp_path / "triton-bare", "1", False, sizes=(2, 2, 1100), **SOFTCAP)
    assert bare == [("forward_kernel", False)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    """Another folder that four threads filled, with portable kernels."""
    return warmed_by_threads(tmp_path_factory.mktemp("exact"), IN_FLOAT32)


@pytest.mark.long
def test_a_process_compiles_no_portable_kernels(exact: Filled, tmp_path: Path) -> None:
    there = shutil.copytree(exact[0], tmp_path / "there")
    found = called(there, tmp_path / "triton", sizes=(1, 2, 1000), **IN_FLOAT32)
    assert sorted(found) == sorted((name, True) for name in EXACT)


@pytest.mark.every
def test_a_process_compiles_nothing_of_others(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"score": "mods.alibi(2)", "mask": "None", "dim": 128, "dtype": "bfloat16"}
    folder, built = warmed(tmp_path / "here", **facts)
    assert all(one.fits and target == "sm_90" for target, one in built)
    found = called(folder.rename(tmp_path / "there"), tmp_path / "triton", sizes=(1, 2, 1000), **facts)
    assert sorted(found) == sorted((name, True) for name in HOPPER)


@pytest.mark.parametrize(
    ("mask", "dim", "lengths", "kernels"),
    [
        pytest.param("None", 32, (64, 33), ["forward_kernel", "dkdv_kernel"], marks=pytest.mark.every),
        ("masks.causal()", 32, (16, 9), ["forward_kernel", "statistics_kernel", "dq_kernel", "dkdv_kernel"]),
        pytest.param("masks.causal()", 64, (1000, 300), HOPPER, marks=pytest.mark.every),
    ],
)
@pytest.mark.long
def test_short_calls(
    mask: str, dim: int, lengths: tuple[int, int], kernels: list[str], tmp_path: Path
) -> None:
    facts: dict[str, Any] = {"score": "None", "mask": mask, "dim": dim, "dtype": "bfloat16"}
    folder, built = warmed(tmp_path / "here", length=lengths[0], **facts)
    assert [one.kernel + "_kernel" for _, one in built[:-1]] == kernels and len(built) == len(kernels) + 1
    found = called(folder, tmp_path / "triton", sizes=(1, 2, lengths[1]), **facts)
    assert sorted(found) == sorted((name, True) for name in kernels)


@pytest.mark.long
def test_a_bias_that_large_calls_copy(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"score": "biased.biased", "mask": "None", "dim": 16, "dtype": "float16"}
    folder, built = warmed(tmp_path / "here", length=biased.LENGTH, **facts)
    assert [one.kernel for _, one in built].count("forward, bias copied") == 1
    for batch in (1, 4):
        sizes = (batch, 2, biased.LENGTH)
        found = called(folder, tmp_path / f"triton{batch}", sizes=sizes, **facts)
        assert ("forward_kernel", True) in found and all(known for _, known in found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my kernels"
    before = config.cache_dir()
    command = ["warm", "noop", "--into", str(folder), "--dim", "16", "--target", "sm_80"]
    assert main(command) == 0
    out = capsys.readouterr().out
    table = [line.split(maxsplit=3) for line in out.splitlines() if line.startswith("sm_80")]
    names = ["forward ", "statistics ", "dq ", "dkdv ", "forward, no grad "]
    assert all(row[1:3] == ["16", "bfloat16"] for row in table)
    assert all(row[3].startswith(name) for row, name in zip(table, names, strict=True))
    assert all(row[3].endswith(" fits") for row in table)
    kernels = [path for path in (folder / COMPILED).iterdir() if [*path.glob("*.json")]]
    line = f"{folder}: {len(kernels)} compiled kernels. To use them: FLEXMOD_CACHE_DIR="
    assert out.endswith(f"{line}'{folder}'\n") and len(kernels) >= 5
    assert [*folder.glob("*.py")]
    # what is there is found, and the process keeps its own folders
    changed = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert main([*command[:-1], "sm_80"]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == changed
    assert config.cache_dir() == before


@pytest.mark.parametrize(
    ("filled", "facts", "kernels"),
    [
        pytest.param("exact", IN_FLOAT32, EXACT, marks=pytest.mark.long),
        pytest.param("softcap", SOFTCAP, HOPPER, marks=pytest.mark.every),
    ],
    ids=["portable", "Hopper"],
)
def test_threads_fill_it_as_one_does(
    filled: str, facts: dict[str, Any], kernels: list[str], tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same kernels in the same order, and the same machine code."""
    by_threads = request.getfixturevalue(filled)
    monkeypatch.setattr(side_by_side, "threads", lambda count=1: 1)
    found = []
    for folder, built in (by_threads, warmed(tmp_path / "in turn", **facts)):
        assert all(one.fits and target == "sm_90" for target, one in built)
        code = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.cubin")}
        found.append(([(one.kernel, one.template, one.tile) for _, one in built], code))
    assert found[0] == found[1] and len(found[0][0]) == len(kernels) + 1


def test_a_folder_that_cannot_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WarmFolderError) as caught:
        checked_folder(tmp_path / "file")
    assert str(caught.value) == (
        f"compiled kernels cannot be kept in {tmp_path / 'file'}: Not a directory.\n"
        "  Instead: name a folder that can be written, e.g. --into kernels."
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(WarmFolderError) as caught:
        checked_folder(tmp_path / "folder")
    assert str(caught.value) == (
        f"compiled kernels cannot be kept in {tmp_path / 'folder'}: Permission denied.\n"
        "  Instead: name a folder that can be written, e.g. --into kernels."
    )
    monkeypatch.setattr("flexmod.tools.ahead.keeps_elsewhere", lambda: True)
    with pytest.raises(WarmFolderError) as caught:
        checked_folder(tmp_path / "folder")
    assert str(caught.value) == (
        f"compiled kernels cannot be kept in {tmp_path / 'folder'}: TRITON_CACHE_MANAGER has Triton keep "
        "kernels elsewhere.\n  Instead: unset TRITON_CACHE_MANAGER for this command."
    )
