"""The wheel is complete: built, installed alone in a folder, and used from there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "flexmod", "templates")

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


@pytest.mark.long
def test_the_installed_wheel_runs_a_kernel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    environment = {**os.environ, "PYTHONPATH": str(site), "FLEXMOD_CACHE_DIR": str(tmp_path / "cache")}
    version = wheel.name.split("-")[1]
    run(sys.executable, "-c", KERNEL_RUN, site, version, cwd=tmp_path, env=environment)


@pytest.mark.long
def test_a_users_script_is_typed_against_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = shutil.copy(ROOT / "tests" / "typed_script.py", tmp_path)
    options = "--strict", "--follow-imports=silent", "--cache-dir", tmp_path / "cache"
    path = {**os.environ, "MYPYPATH": str(tmp_path / "site")}
    run(sys.executable, "-m", "mypy", *options, script, cwd=tmp_path, env=path)


def test_the_wheel_names_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "flexmod = flexmod.tools.cli:main" in archive.read(entry).decode()


def test_the_index_shows_links_and_pictures_of_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        headers, _, readme = archive.read(name).decode().partition("\n\n")
    home = re.search(r"^Project-URL: Source, (.*)$", headers, re.MULTILINE)
    assert home is not None and "\nDescription-Content-Type: text/markdown" in headers
    links = [
        link for pair in re.findall(r"\]\(([^)#]+)|<img src=\"([^\"]+)", readme) for link in pair if link
    ]
    for link in links:
        assert link.startswith("https://"), link
        path = re.sub(f"^{home[1]}/(blob|raw)/main/", "", link)
        assert path == link or (ROOT / path).exists(), link
    assert f"{home[1]}/raw/main/docs/images/readme_mask.svg" in links and len(links) > 20
    assert all(f"\nClassifier: Programming Language :: Python :: 3.{n}\n" in headers for n in range(10, 15))
    assert '\nRequires-Dist: triton>=3.6; sys_platform == "linux"' in headers


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files, which git has")
def test_the_source_distribution_has_what_its_tests_need(tmp_path: Path) -> None:
    """Built from the tracked files alone; `make package` also runs tests in it."""
    source = tmp_path / "source"
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    script = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    run(sys.executable, "-c", script, cwd=source)
    (built,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    apart = {name for name in tracked if name.startswith(".")}  # of the repository alone
    assert {*tracked} - apart <= packed


def test_the_oldest_triton_is_what_tests_run_with() -> None:
    floor = re.search(r'"triton>=([\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert floor is not None
    assert f"triton=={floor[1]}.0" in (ROOT / "tools" / "environment").read_text()


# macOS, where Triton has no wheels: installing flexmod brings none.
ELSEWHERE = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
import torch

sys.platform = "darwin"
"""
CALLS_ELSEWHERE = """
import torch, flexmod
from flexmod import errors, masks, mods

q, k, v = torch.randn(3, 1, 2, 70, 16, requires_grad=True)
mask = flexmod.create_block_mask(masks.causal() & masks.sliding_window(20), None, None, 70, 70, device="cpu")
results = []
for backend in ("AUTO", "REFERENCE"):
    out = flexmod.flex_attention(q, k, v, mods.softcap(30.0), mask, kernel_options={"BACKEND": backend})
    results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
for ours, dense in zip(*results):
    torch.testing.assert_close(ours, dense)
attend = flexmod.compile(mods.softcap(30.0), masks.causal(), dtype=torch.float32, head_dim=16)
assert attend(q, k, v).isfinite().all()
try:
    flexmod.flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "INTERPRET"})
except errors.MissingPackage as error:
    print(error)
"""


def elsewhere(script: str) -> str:
    done = forked.python(ELSEWHERE + script, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_the_cpu_backends_run_and_kernels_are_refused() -> None:
    assert elsewhere(CALLS_ELSEWHERE) == (
        "this needs the package triton, which cannot be imported: No module named 'triton'.\n"
        "  Instead: Triton has wheels for Linux alone. On Windows use WSL; or run the CPU backend, which "
        'serves CPU tensors by default, or the dense one, kernel_options={"BACKEND": "REFERENCE"}.\n'
    )


COMMANDS = {
    "show causal": 0, "compare causal --seq 64 --heads 1 --dim 16": 0, "doctor": 0, "source causal": 2,
    "build causal": 2,
}  # fmt: skip


@pytest.mark.long
def test_commands_without_triton() -> None:
    printed = elsewhere(f"""
from flexmod.tools.cli import main

for command, status in {COMMANDS!r}.items():
    print("$", command)
    assert main(command.split()) == status, command
""")
    doctor = re.search(r"^\$ doctor\n(.*?)^\$ ", printed, re.MULTILINE | re.DOTALL)
    assert doctor is not None and "nothing is amiss" in doctor[1]
    assert re.search(r"^triton +- *$", doctor[1], re.MULTILINE)
    assert "no kernels without Triton, which has wheels for Linux alone" in doctor[1]
