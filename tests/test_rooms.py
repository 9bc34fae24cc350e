"""The house keeps its order: a room imports only from rooms above it, and no modules import in a circle.

A room is a module or a folder. An import counts wherever it stands: at the top of a file, in a function, or
under TYPE_CHECKING. A module that is in no room fails the test: give it a place in ROOMS and in
docs/design.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import pictures
from tools.pictures import groups

ROOT = Path(__file__).parents[1]

# from the top down: each imports only from those before it
ORDER = """
errors
runtime.private_torch runtime.locks runtime.private_triton
runtime.config
runtime.tensor_kinds
ir.graph
ir.bounds
ir.formulas ir.ops
ir.source ir.advice ir.proxy ir.vectors ir.vector_calls ir.torch_calls ir.trace
ir.evaluate
ir.replay ir.composed ir.offsets
ir.fingerprint ir.watched
ir.linear ir.integers
ir.passes
ir.exponents
ir.ends ir.intervals
ir.derivative
ir.recorder ir.record
runtime.plan
block_mask.tiles block_mask.parts block_mask.storage
block_mask.selection block_mask.refine
block_mask.data block_mask.combine block_mask.facts block_mask.pictures
block_mask.format
codegen.spec
codegen.ladder
codegen.kernels
runtime.gluon codegen.device_functions
codegen.expressions
codegen.triton_text codegen.term_text codegen.builder_text codegen.by_distance
codegen.render
codegen.compiled_kernels codegen.cache
codegen.hopper
codegen.compiler
codegen.variant
runtime.dequantize runtime.direct runtime.compiler_bugs
runtime.interpreter_corrections runtime.quick_interpreter runtime.interpreter
runtime.target runtime.offline runtime.tuned
runtime.launch runtime.bound runtime.side_by_side
backends
tools.ahead
tools.standalone_text tools.standalone_functions tools.standalone
block_mask.generated block_mask.build
calls.checks
calls.float8
calls.autograd
calls.prepared
calls.library
calls.attention
tools.inspection calls.compiled
masks mods
calls.packed
integrations
tools.terminal
tools.mod_names
tools.comparison
tools.tune
tools.cli
__init__ __main__
"""
ROOMS = tuple(ORDER.split())

# A chip's name, or that of its architecture. What stands here alone may know chips apart.
CHIP = re.compile(r"hopper|blackwell|ampere|(?<![a-z])sm_?\d+|gfx\d+", re.IGNORECASE)
KNOW_CHIPS = {
    "runtime.target",  # the table of chips
    "codegen.device_functions",  # the table of operations that a chip has text of its own for
    "runtime.compiler_bugs",  # each with the chip that it is seen on, and machine code for it
    "runtime.private_triton",  # a module of Triton is named for a chip
    # the registration of families
    "backends.options", "backends.families",
    # the family of kernels made for Hopper: its kernels, its plans, what its kernels call
    "codegen.hopper", "backends.hopper", "runtime.gluon",
    "codegen.device_functions.hopper", "codegen.device_functions.hopper_kernels",
}  # fmt: skip
# Examples in docstrings, each as often as it stands there.
EXAMPLES = {
    "tools.ahead": ['head_dim=128), "sm_90"):', 'targets=["sm_90"]):'],
    "ir.formulas": ["(sm_75 and newer;"],
    "tools.inspection": ['such as "hopper forward"', '("hopper forward")', 'e.g. "sm_90".'],
}


def modules(package: Path) -> dict[str, Path]:
    """Dotted names within a package, e.g. "ir.graph"; a folder's __init__ goes by the folder's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The flexmod modules that a file imports, wherever the import stands."""
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


def room_of(module: str, rooms: Sequence[str]) -> int | None:
    for number, name in enumerate(rooms):
        if module == name or module.startswith(name + "."):
            return number
    return None


def upward(module: str, known: dict[str, Path], rooms: Sequence[str]) -> list[str]:
    """The imports of a module from rooms below its own, as arrows."""
    here = room_of(module, rooms)
    assert here is not None, f"{module} is in no room: give it one in ROOMS and in docs/design.md"
    found = []
    for other in sorted(imported(known[module], known)):
        there = room_of(other, rooms)
        assert there is not None, f"{module} imports {other}, which is in no room"
        if there > here:
            found.append(f"{module} -> {other}")
    return found


def circles(known: dict[str, Path]) -> list[str]:
    """The imports by which a module comes back to itself, as arrows."""
    uses = {module: sorted(imported(path, known)) for module, path in known.items()}

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        queue = [module]
        while queue:
            new = set(uses[queue.pop()]) - found
            found |= new
            queue += new
        return found

    reach = {module: reached(module) for module in uses}
    return [f"{module} -> {other}" for module in uses for other in uses[module] if module in reach[other]]


MODULES = modules(ROOT / "flexmod")
# The __init__ of a folder that is split into several rooms holds nothing.
FOLDERS = {name for name in MODULES if any(other.startswith(name + ".") for other in MODULES)}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_come_from_above(module: str) -> None:
    if room_of(module, ROOMS) is None and module in FOLDERS:
        assert not imported(MODULES[module], MODULES), "the __init__ of a folder of rooms imports nothing"
        return
    arrows = upward(module, MODULES, ROOMS)
    assert not arrows, f"imports from a room below: {', '.join(arrows)}"


def test_rooms_exist() -> None:
    assert [name for name in ROOMS if name not in MODULES] == []


def test_no_modules_import_in_a_circle() -> None:
    arrows = circles(MODULES)
    assert not arrows, f"imports in a circle: {', '.join(arrows)}"


def test_a_class_name_occurs_once() -> None:
    """Leading underscores aside."""
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - KNOW_CHIPS))
def test_chips_have_names_in_few_modules(module: str) -> None:
    """In no line, of code, text or comment, but for the examples."""
    assert not CHIP.search(module)
    text = MODULES[module].read_text()
    for example in EXAMPLES.get(module, []):
        assert example in text, "take it out of EXAMPLES"
        text = text.replace(example, "", 1)
    named = [line.strip() for line in text.splitlines() if CHIP.search(line)]
    assert not named, "ask the family, or the table of chips"


def test_modules_that_know_chips_are_needed() -> None:
    """Each of them names one; modules with examples exist."""
    assert [name for name in KNOW_CHIPS if not CHIP.search(MODULES[name].read_text())] == []
    assert EXAMPLES.keys() <= MODULES.keys() - KNOW_CHIPS


@pytest.mark.parametrize("text", ["hopper", "HopperKernels", "sm_90", "of_sm90", "'sm_103'", "gfx942"])
def test_a_chip_is_known_by_its_name(text: str) -> None:
    assert CHIP.search(text)


IMPORTS = {
    "at the top": "from flexmod.b.deep import thing",
    "of a module": "from flexmod.b import deep",
    "whole": "import flexmod.b.deep as b",
    "in a function": "def f():\n    from flexmod.b import deep\n    return deep",
    "in a method": "class C:\n    def f(self):\n        import flexmod.b.deep",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flexmod.b.deep import thing",
}


@pytest.fixture
def planted(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """A package of a, which imports b.deep, and c; b.deep imports what it is told to."""
    back, text = request.param
    (tmp_path / "b").mkdir()
    files = {"a.py": text, "b/__init__.py": "", "b/deep.py": back, "c.py": "from flexmod import a"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return modules(tmp_path)


def with_back(*backs: str) -> list[object]:
    return [pytest.param((back, IMPORTS[name]), id=name) for back in backs for name in IMPORTS]


@pytest.mark.parametrize("planted", with_back("from flexmod.a import thing"), indirect=True)
def test_a_planted_circle_is_found(planted: dict[str, Path]) -> None:
    assert circles(planted) == ["a -> b.deep", "b.deep -> a"]


@pytest.mark.parametrize("planted", with_back("from flexmod.c import thing"), indirect=True)
def test_a_planted_circle_of_three_is_found(planted: dict[str, Path]) -> None:
    assert circles(planted) == ["a -> b.deep", "b.deep -> c", "c -> a"]


@pytest.mark.parametrize("planted", with_back("import torch"), indirect=True)
def test_a_planted_upward_arrow_is_found(planted: dict[str, Path]) -> None:
    assert circles(planted) == []
    assert upward("a", planted, ("a", "b", "c")) == ["a -> b.deep"]
    assert upward("a", planted, ("b", "a", "c")) == upward("c", planted, ("b", "a", "c")) == []
    with pytest.raises(AssertionError, match="^a imports b.deep, which is in no room"):
        upward("a", planted, ("a", "c"))


def test_a_module_that_imports_itself_is_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from flexmod.a import g\n    return g")
    assert circles(modules(tmp_path)) == ["a -> a"]


def test_design_page_lists_the_same_rooms() -> None:
    page = (ROOT / pictures.PAGE).read_text()
    listed = [room.rstrip("/") for floor in groups(page, "The house") for room in pictures.rooms(floor)]
    assert listed == [name.replace(".", "/") for name in ROOMS if name not in ("__init__", "__main__")]
