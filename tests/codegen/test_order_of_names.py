"""In the generated kernels, every name is set before it is read: for all mods, with and without offsets."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator

import pytest
import torch
from named_mods import NAMED
from position_cases import cases

from flexmod.codegen.variant import variant
from flexmod.ir.offsets import Positions
from flexmod.tools.ahead import kernels_on
from flexmod.tools.mod_names import Setting, choose

CPU = torch.device("cpu")
SETTING = Setting(batch=2, heads=2, seq=64, dim=64, dtype=torch.bfloat16, device=CPU)
STARTS = Positions(torch.tensor([13, 1000]), torch.tensor([0, 650], dtype=torch.int32), kv_bound=1024)
MODS = {name: (case.score, case.mask) for name, case in cases(64, 2).items()}
MODS |= {name: (found.score, found.mask) for name in NAMED if (found := choose(name, SETTING))}


def early(text: str) -> list[str]:
    """Names that a function reads above all lines that set them, as "function: name, line"."""
    tree = ast.parse(text)
    known = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and name.col_offset == 0}
    known |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    known |= {
        alias.asname or alias.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            here = known | set(dir(builtins)) | {argument.arg for argument in function.args.args}
            for name in (name for statement in function.body for name in in_order(statement)):
                if isinstance(name.ctx, ast.Store):
                    here.add(name.id)
                elif name.id not in here:
                    found.append(f"{function.name}: {name.id}, line {name.lineno}")
    return found


def in_order(node: ast.AST) -> Iterator[ast.Name]:
    """The names of a statement as they come about: the value of an assignment before its target."""
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value:
        yield from in_order(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from in_order(target)
    elif isinstance(node, ast.For):
        for part in (node.iter, node.target, *node.body, *node.orelse):
            yield from in_order(part)
    else:
        for part in ast.iter_child_nodes(node):
            yield from in_order(part)


def test_what_counts_as_early() -> None:
    body = "    for i in range(SIZE):\n        c = b + i\n    b = a + torch.pi\n"
    text = "import torch\nSIZE = 3\ndef f(a):\n" + body
    assert early(text) == ["f: b, line 5"]


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("positions", [None, STARTS], ids=["", "offsets"])
@pytest.mark.parametrize("name", sorted(MODS))
def test_names_are_set_before_they_are_read(name: str, positions: Positions | None, target: str) -> None:
    score, mask = MODS[name]
    if positions is not None:
        score, mask = score and positions.score(score), mask and positions.mask(mask)
    made = variant(score, mask, head_dim=64)
    for way in ("forward", "backward"):
        module = kernels_on(made, way, target).module  # type: ignore[arg-type]
        assert early(inspect.getsource(module)) == []
