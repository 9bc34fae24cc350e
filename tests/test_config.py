"""The environment switches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexmod.errors import EnvironmentSwitchError
from flexmod.runtime import config, tuned
from flexmod.tools.cli import main


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    read = config.read({"XDG_CACHE_HOME": str(tmp_path)})
    assert read == config.Config(debug=0, cache_dir=tmp_path / "flexmod")


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, Path.home() / ".cache" / "flexmod"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, Path.home() / ".cache" / "flexmod"),
        ("darwin", {}, Path.home() / "Library" / "Caches" / "flexmod"),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/flexmod")),
    ],
)
def test_user_cache_by_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], expected: Path
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert config.read(environment).cache_dir == expected


def test_empty_values_mean_the_defaults() -> None:
    assert config.read({config.DEBUG: "", config.CACHE_DIR: ""}) == config.read({})


@pytest.mark.parametrize("level", ["0", "1", "2", "3"])
def test_debug_levels(level: str) -> None:
    assert config.read({config.DEBUG: level}).debug == int(level)


@pytest.mark.parametrize(("value", "threads"), [("", None), ("1", 1), ("16", 16)])
def test_threads_that_compile(value: str, threads: int | None) -> None:
    assert config.read({config.COMPILE_THREADS: value}).compile_threads == threads


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "all", "1 "])
def test_wrong_number_of_threads(value: str) -> None:
    with pytest.raises(EnvironmentSwitchError) as raised:
        config.read({config.COMPILE_THREADS: value})
    assert str(raised.value) == (
        f"environment variable FLEXMOD_COMPILE_THREADS is {value!r}.\n"
        "  Instead: set it to a whole number from 1 to 9999."
    )


def test_wrong_debug_level() -> None:
    with pytest.raises(EnvironmentSwitchError) as raised:
        config.read({config.DEBUG: "verbose"})
    assert str(raised.value) == (
        "environment variable FLEXMOD_DEBUG is 'verbose'.\n  Instead: set it to 0, 1, 2 or 3."
    )


def test_cache_folder_is_absolute_and_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.read({config.CACHE_DIR: "kernels"}).cache_dir == tmp_path / "kernels"
    assert config.read({config.CACHE_DIR: "~/kernels"}).cache_dir == Path.home() / "kernels"


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(EnvironmentSwitchError, match="set it to a folder; this is a file"):
        config.read({config.CACHE_DIR: str(file)})


@pytest.mark.skipif(sys.platform == "win32", reason="homes of users are found in another way")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_: object) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)  # a container that runs as a number
    monkeypatch.setattr("sys.platform", "linux")
    assert config.read({}).cache_dir == Path("/.cache/flexmod")
    with pytest.raises(EnvironmentSwitchError, match="set it to a folder; no user has this home"):
        config.read({config.CACHE_DIR: "~/kernels"})


def test_cache_folder_in_the_home_of_nobody() -> None:
    with pytest.raises(EnvironmentSwitchError, match="set it to a folder; no user has this home"):
        config.read({config.CACHE_DIR: "~no-such-user/kernels"})


def test_cache_folder_that_cannot_be_looked_at(
    switch: Callable[[str, object], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # looking at a name of this length raises an OSError, as in a home that the process may not search
    folder = tmp_path / ("long" * 100) / "kernels"
    assert config.read({config.CACHE_DIR: str(folder)}).cache_dir == folder
    switch(config.CACHE_DIR, folder)
    key: Any = SimpleNamespace(path=tuned.folder() / "absent.json")
    assert tuned.read(key, ()) is None
    main(["doctor"])
    assert "0 generated modules, 0 tuned" in " ".join(capsys.readouterr().out.split())


def test_process_switches_are_read_once(
    switch: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    switch(config.DEBUG, 2)
    switch(config.CACHE_DIR, tmp_path)
    assert config.debug_level() == 2
    monkeypatch.setenv(config.DEBUG, "3")
    assert config.debug_level() == 2
    assert config.cache_dir() == tmp_path
