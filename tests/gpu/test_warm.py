"""A folder that `flexmod warm` filled serves a call on this device: its kernels are found, and run right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexmod.runtime import config
from flexmod.runtime.target import NAMES, target_of

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]

WARM = """
import sys
import torch
from flexmod import masks, mods
from flexmod.tools.ahead import warm

target, folder = sys.argv[1:]
made = {"head_dim": 64, "dtype": torch.float16, "targets": [target], "length": 1000}
assert all(built.fits for _, built in warm(folder, mods.softcap(30.0), masks.causal(), **made))
"""
CALL = """
import json
import torch, triton
import flexmod
from flexmod import masks, mods

found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
made = {"dtype": torch.float16, "device": "cuda", "requires_grad": True}
q, k, v = (torch.randn(2, 4, 1000, 64, **made) for _ in range(3))
mask = flexmod.create_block_mask(masks.causal(), None, None, 1000, 1000)
results = []
for options in ({}, {"BACKEND": "REFERENCE"}):
    out = flexmod.flex_attention(q, k, v, mods.softcap(30.0), mask, kernel_options=options)
    results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
for ours, theirs in zip(*results):
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
print(json.dumps(found))
"""


def output_of(script: str, *arguments: str, **variables: str) -> str:
    """Runs a script in a process that finds Triton's own ptxas: torch.compile sets the path of another."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    command = [sys.executable, "-c", script, *arguments]
    environment = {**own, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_call_finds_its_kernels(tmp_path: Path) -> None:
    target = target_of("cuda").name
    if target not in NAMES:
        pytest.skip(f"flexmod warm does not know {target}")
    output_of(WARM, target, str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    folders = {config.CACHE_DIR: str(tmp_path / "there"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = json.loads(output_of(CALL, **folders))
    assert "forward_kernel" in dict(found)
    of_masks = {"squares_kernel", "elements_kernel", "runs_kernel"}  # a thread compiles them
    assert [name for name, hit in found if not hit and name not in of_masks] == []
