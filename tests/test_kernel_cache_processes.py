"""Several processes, one folder of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
import torch
import flexmod

mask = flexmod.create_block_mask(flexmod.masks.causal(), None, None, 40, 40, device="cpu")
q = torch.linspace(-1, 1, 640).view(1, 1, 40, 16).requires_grad_()
print("ready", flush=True)
sys.stdin.readline()
out = flexmod.flex_attention(
    q, q, q, lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - q_idx), mask,
    kernel_options={"BACKEND": "INTERPRET"},
)
out.sum().backward()
print(out.sum().item(), q.grad.abs().sum().item())
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "FLEXMOD_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run_at_once(folder: Path, count: int) -> list[str]:
    """What each of `count` processes prints; all of them are let go when the last one is ready."""
    processes = [start(folder) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == "ready\n", process.communicate()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = []
    for process in processes:
        output, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
        printed.append(output)
    return printed


@pytest.mark.long
def test_two_processes_compile_the_same_kernels_at_once(tmp_path: Path) -> None:
    printed = run_at_once(tmp_path, 2)
    assert printed[0] == printed[1]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    modules = [path for path in written if "__pycache__" not in path.parts]
    # the forward's module and the one with the backward; nothing half-written is left
    assert [path.suffix for path in modules] == [".py", ".py"]

    # a later process finds them and writes nothing
    script = SCRIPT.replace("sys.stdin.readline()", "")
    environment = {**os.environ, "FLEXMOD_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    later = forked.python(script, env=environment)
    assert later.returncode == 0 and later.stdout == f"ready\n{printed[0]}", later.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == written
