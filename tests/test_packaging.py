"""The wheel is complete: built, installed alone in a folder, and used from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "flexmod", "templates")

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")

# Runs where the checkout is out of sight. The length is no multiple of a tile.
KERNEL_RUN = """
import pathlib, sys, torch, flexmod

assert pathlib.Path(flexmod.__file__).is_relative_to(sys.argv[1]), flexmod.__file__
assert flexmod.__version__ == sys.argv[2], flexmod.__version__

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 70, 16)
causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
mask = flexmod.create_block_mask(causal, None, None, 70, 70, device="cpu", BLOCK_SIZE=64)
options = {"BACKEND": "INTERPRET", "BLOCK_M": 32, "BLOCK_N": 32}
out = flexmod.flex_attention(q, k, v, block_mask=mask, kernel_options=options)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
"""


def run(*command: object, **options: object) -> str:
    words = [str(part) for part in command]
    result = subprocess.run(words, capture_output=True, text=True, timeout=240, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing left there gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", source / "dist", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_carries_every_file(wheel: Path) -> None:
    expected = {
        f"{folder}/{path.relative_to(ROOT / source).as_posix()}"
        for source, folder in (("flexmod", "flexmod"), ("templates", "flexmod/templates"))
        for path in (ROOT / source).rglob("*")
        if path.suffix in (".py", ".jinja", ".typed")
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert any(name.endswith(".jinja") for name in packed)


def test_the_installed_wheel_runs_a_kernel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    environment = {**os.environ, "PYTHONPATH": str(site), "FLEXMOD_CACHE_DIR": str(tmp_path / "cache")}
    version = wheel.name.split("-")[1]
    run(sys.executable, "-c", KERNEL_RUN, site, version, cwd=tmp_path, env=environment)


def test_the_wheel_names_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "flexmod = flexmod.tools.cli:main" in archive.read(entry).decode()


def test_the_oldest_triton_is_what_tests_run_with() -> None:
    floor = re.search(r'"triton>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert floor is not None
    assert f"triton=={floor[1]}.0" in (ROOT / "tools" / "environment").read_text()
