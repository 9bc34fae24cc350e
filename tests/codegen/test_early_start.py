"""Kernels that start before the kernels of earlier launches have ended: each waits first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from flexmod import masks, mods
from flexmod.backends.families import kernels_of
from flexmod.codegen.device_functions import EARLY, WAIT, Family
from flexmod.codegen.hopper import hopper_kernels
from flexmod.codegen.spec import Decoding
from flexmod.codegen.variant import Variant, variant
from flexmod.runtime.direct import options_of
from flexmod.tools import ahead

E4M3 = torch.float8_e4m3fn


def learned_table() -> Any:
    table = torch.zeros(64, requires_grad=True)
    return lambda score, b, h, q_idx, kv_idx: score + table[(q_idx - kv_idx).abs()] * table[q_idx]


VARIANTS: dict[str, Variant] = {
    "plain": variant(),
    "causal": variant(mods.softcap(20.0), masks.causal()),
    "float32": variant(None, masks.causal(), dtype=torch.float32),
    "learned": variant(learned_table()),
    "few queries": variant(decoding=Decoding(16, 1, True)),
    "by distance": variant(lambda s, b, h, q_idx, kv_idx: s - torch.log1p((q_idx - kv_idx).abs().float())),
    "float8": variant(None, masks.causal(), dtype=E4M3, head_dim=128),
}


def first_statements(text: str) -> Iterator[tuple[str, str]]:
    """Each kernel of a module, with its first statement after the docstring."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            first = node.body[1] if ast.get_docstring(node) else node.body[0]
            yield node.name, ast.unparse(first)


def texts(made: Variant, chips: Family) -> Iterator[str]:
    for direction in made.spec.directions:
        kernels = made.kernels(direction, family=chips)
        source = kernels.module.__file__
        assert source is not None
        yield Path(source).read_text()


@pytest.mark.parametrize("made", VARIANTS.values(), ids=VARIANTS)
def test_kernels_wait_first_on_chips_that_start_them_early(made: Variant) -> None:
    for chips in get_args(Family):
        for text in texts(made, chips):
            found = list(first_statements(text))
            waiting = [name for name, first in found if first == WAIT]
            assert waiting == ([name for name, _ in found] if chips in EARLY else [])
            assert len(found) == text.count("_kernel(\n") and text.count(WAIT) == len(waiting)


@pytest.mark.parametrize("name", ["plain", "causal", "learned", "float8"])
def test_kernels_for_hopper_wait_first(name: str) -> None:
    for direction in VARIANTS[name].spec.directions:
        made: Any = hopper_kernels(VARIANTS[name].kernels(direction, True, "nvidia_early"))
        found = list(first_statements(made.text))
        assert {first for _, first in found} == {WAIT} and len(found) == made.text.count("_kernel(\n")


def test_only_kernels_that_wait_start_early() -> None:
    """What a text does not wait for, it must not overtake: also the kernels of a user's own family."""
    usual = {"enable_fp_fusion": True}
    assert options_of(SimpleNamespace(src=f"def run():\n    {WAIT}\n")) == {**usual, "launch_pdl": True}
    for body in ("pass", f"pass  # not {WAIT}", f"if FIRST:\n        {WAIT}"):
        assert options_of(SimpleNamespace(src=f"def run():\n    {body}\n")) == usual
    assert options_of(object()) == usual


MEMORY = re.compile(r"\b(?:ld|st|red|atom|prefetch)\.(?:\w+\.)*global|\bcp\.|\bld\.acquire")


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["causal", "float32", "learned", "float8"])
def test_nothing_touches_memory_before_the_wait(name: str, target: str) -> None:
    """In the compilers' text, where an instruction could have moved."""
    for job in ahead.jobs(VARIANTS[name], target, every=True):
        built = job.compile()
        assert built.report is not None, built.problem
        before, wait, after = built.report.asm["ptx"].partition("griddepcontrol.wait;")
        assert wait and not MEMORY.search(before) and MEMORY.search(after), job.kernel


def test_older_chips_have_no_such_instruction() -> None:
    for target in ("sm_80", "gfx942"):
        family, _ = ahead.families.serving(VARIANTS["causal"], "forward", target)
        kernels: Any = kernels_of(family, VARIANTS["causal"], "forward", ahead.family_of(target))
        assert WAIT not in Path(kernels.module.__file__).read_text()
