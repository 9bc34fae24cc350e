"""The script that counts the files through which a call's arguments pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_ways_of_a_call() -> None:
    run = subprocess.run(
        [sys.executable, "tools/ways.py", "--files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    table, *named = run.stdout.strip().split("\n\n")
    counts = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in table.splitlines()[2:]}
    assert counts.keys() == {"query", "score_mod", "mask_mod", "block_mask"}
    lists = dict(line.split(": ") for line in named)
    for name, (files, steps, returns) in counts.items():
        entered = lists[name].split(", ")
        assert len(entered) == len(set(entered)) == files == steps + 1 - returns
    assert "attention.py" in lists["query"] and "runtime/interpreter.py" in lists["query"]
    assert "ir/trace.py" in lists["score_mod"] and "codegen/triton_text.py" in lists["score_mod"]
    assert "block_mask/build.py" in lists["mask_mod"] and "block_mask/tiles.py" in lists["block_mask"]
