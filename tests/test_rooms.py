"""The house keeps its order: a room imports only from rooms above it.

A room is a module, or a folder whose modules may import one another. A module that is in no room fails the
test: give it a place in ROOMS and in docs/design.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flexmod"

ROOMS = (
    ("errors", "command_errors"),
    ("locks", "lazy_imports"),
    ("config", "syntax"),
    ("kernel_options",),
    ("transforms", "tensor_kinds"),
    ("ir.graph",),
    ("ir.bounds",),
    ("ir.divisions", "ir.ops", "ir.formulas"),
    (
        "ir.sizes",
        "ir.approximate",
        "ir.source",
        "ir.names",
        "ir.proxy",
        "ir.torch_calls",
        "ir.eager",
        "ir.trace",
        "ir.copies",
    ),
    ("ir.host_numbers",),
    ("ir.evaluate",),
    ("ir.replay", "ir.composed"),
    ("ir.fingerprint", "ir.traces", "ir.watched"),
    ("ir.integers",),
    ("ir.positions",),
    ("ir.passes",),
    ("ir.tanhs",),
    ("ir.exponents",),
    ("ir.ends", "ir.linear", "ir.casts", "ir.sources", "ir.intervals"),
    ("ir.ranges",),
    ("ir.derivative",),
    ("ir.reductions",),
    ("ir.constants", "ir.kept", "ir.record"),
    (
        "block_mask.tiles",
        "block_mask.runs",
        "block_mask.mask_mod",
        "block_mask.parts",
        "block_mask.held",
        "block_mask.rebase",
        "block_mask.selection",
        "block_mask.spans",
        "block_mask.refine",
        "block_mask.derived",
        "block_mask.launched",
        "block_mask.data",
        "block_mask.combine",
        "block_mask.cuts",
        "block_mask.facts",
        "block_mask.pictures",
        "block_mask.format",
    ),
    (
        "codegen.mod_text",
        "codegen.prelude",
        "codegen.expressions",
        "codegen.functions",
        "codegen.costs",
        "codegen.rounding",
        "codegen.triton_text",
        "codegen.exponent_text",
        "codegen.term_text",
        "codegen.torch_text",
        "codegen.builder_text",
    ),
    ("codegen.spec",),
    ("codegen.choose",),
    ("codegen.schedule",),
    ("codegen.render",),
    ("codegen.watch",),
    ("codegen.kernels", "codegen.builder_kernels"),
    ("codegen.cache",),
    ("codegen.hopper",),
    ("compiler",),
    ("mask_compiler",),
    ("variant",),
    ("explain",),
    ("runtime",),
    ("backends",),
    ("ahead",),
    ("quotes", "standalone"),
    ("block_mask.generated", "block_mask.find_tiles", "block_mask.in_graph", "block_mask.build"),
    ("layouts",),
    ("checks",),
    ("saved",),
    ("autograd",),
    ("calls",),
    ("library",),
    ("attention",),
    ("shown", "compiled"),
    ("masks", "mods"),
    ("packed",),
    ("sinks",),
    ("integrations",),
    ("mod_names",),
    ("peers",),
    ("compare",),
    ("bench",),
    ("tune",),
    ("cli",),
    ("__init__", "__main__"),
)


def modules() -> dict[str, Path]:
    """Dotted names within flexmod, e.g. "ir.graph"; a folder's __init__ goes by the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> int | None:
    for number, room in enumerate(ROOMS):
        if any(module == name or module.startswith(name + ".") for name in room):
            return number
    return None


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The flexmod modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import out, from flexmod."
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "flexmod":
                found.add(longest_module(parts[1:], known))
    return found


def longest_module(parts: list[str], known: dict[str, Path]) -> str:
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    return "__init__"


MODULES = modules()
# The __init__ of a folder that is split into several rooms holds nothing.
FOLDERS = {name for name in MODULES if any(other.startswith(name + ".") for other in MODULES)}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_come_from_above(module: str) -> None:
    here = room_of(module)
    if here is None and module in FOLDERS:
        assert not imported(MODULES[module], MODULES), "the __init__ of a folder of rooms imports nothing"
        return
    assert here is not None, f"{module} is in no room: give it one in ROOMS and in docs/design.md"
    for other in imported(MODULES[module], MODULES):
        there = room_of(other)
        assert there is not None, f"{module} imports {other}, which is in no room"
        assert there <= here, f"{module} imports {other}, which is a room below it"


def test_design_page_lists_the_same_rooms() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall(r"`(.+?)(?:\.py|/)?`", cell)]
    ours = [name.replace(".", "/") for room in ROOMS[:-1] for name in room]
    assert [name for name in listed if name in ours] == ours
