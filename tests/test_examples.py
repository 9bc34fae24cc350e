"""Every example runs, and says what it found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmod.runtime import offline
from tools import notebooks

FOLDER = Path(__file__).parents[1] / "examples"
TRAINING = ["train_learned_bias"]
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("common", *TRAINING))


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(f"examples.{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__doc__, "an example opens with what it shows"
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load(name, monkeypatch).main()
    printed = capsys.readouterr().out
    assert "largest difference" in printed or "@triton.jit" in printed


def test_online_softmax_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the example interprets its kernels; they must be a GPU's all the same."""
    example = load("online_softmax", monkeypatch)
    sizes = {"BLOCK_N": 32, "BLOCK_M": 64, "D": 32}
    types = {"N": "i32", "M": "i32", "WINDOW": "i32", "scale": "fp32"}
    for kernel in (example.three_loops, example.two_loops, example.one_loop, example.tiles):
        constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        others = [name for name in kernel.arg_names if name not in constants]
        signature = {name: types.get(name, "*fp32") for name in others}
        assert offline.compile(kernel, signature, constants, "sm_80").fits


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_shows_what_its_cells_give(name: str, request: pytest.FixtureRequest) -> None:
    """If the new outputs are right: pytest --update-golden."""
    found = notebooks.read(name)
    executed = notebooks.executed(found)
    if request.config.getoption("--update-golden"):
        notebooks.write(name, executed)
    assert notebooks.read(name) == executed
    assert any(cell.get("outputs") for cell in executed["cells"])


@pytest.mark.long
def test_training_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few steps: the losses fall, most where slopes are learned."""
    picture = tmp_path / "losses.png"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products are small here: on a busy machine threads would wait for each other
    try:
        result = load("train_learned_bias", monkeypatch).main("cpu", "small", 25, str(picture))
    finally:
        torch.set_num_threads(threads)
    assert result.losses[0] == result.losses_without[0]
    assert sum(result.losses[-5:]) < sum(result.losses_without[-5:]) < 0.8 * sum(result.losses[:5])
    assert result.slopes.shape == (25, 2, 4) and bool((result.slopes[-1] != 0).all())
    assert "slopes of layer 1" in capsys.readouterr().out
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.gpu
def test_training_learns_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = load("train_learned_bias", monkeypatch).main("cuda", "small", 60)
    assert sum(result.losses[-5:]) < sum(result.losses_without[-5:]) < 0.8 * sum(result.losses[:5])
