"""What `import flexmod` and calls on CPU tensors leave out: torch at first, and Triton.

The modules that compile, launch or interpret kernels import Triton. They are imported inside functions, by
`lazy_imports`, as are the packages that write kernels and tables.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import forked
import pytest
from test_rooms import MODULES, ROOT, longest_module
from tiers import long_but

import flexmod
from flexmod.runtime.locks import REQUIREMENTS, lazy_imports, paused_collections

PACKAGES = {*REQUIREMENTS, "click", "torch._dynamo", "sympy", "statistics", "numpy.random"} - {"numpy"}

# In this order, in one process: what each one imports is told apart.
STEPS = {
    "import": "import flexmod; from flexmod import masks, mods; torch.ops.flexmod.attention  # is registered",
    "mask": "mask = flexmod.create_block_mask(masks.causal(), None, None, 64, 64, 'cpu', 32)",
    "lambda": "created(lambda b, h, q, k: (q - k < 9) & (k % 2 == 0))",
    "combined": "(mask & created(masks.sliding_window(9), 32))[:, :, :1]",
    "documents": "created(masks.causal() & masks.document(torch.arange(64) // 20))",
    "print": "print(mask, mask.facts, file=sys.stderr)",
    "svg": "mask.to_svg()",
    "create_mask": "flexmod.create_mask(masks.causal(), None, None, 64, 64, 'cpu')",
    "plain": "run(flexmod.flex_attention)",
    "masked": "run(flexmod.flex_attention, block_mask=mask)",
    "score_mod": "run(flexmod.flex_attention, mods.softcap(30.0), mask)",
    "-inf": "run(flexmod.flex_attention, lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf))",
    "learned": "run(flexmod.flex_attention, mods.relative_bias(torch.zeros(2, 9, requires_grad=True)))",
    "float64": "run(flexmod.flex_attention, mods.alibi(2), mask, dtype=torch.float64)",
    "reference": "run(flexmod.flex_attention, block_mask=mask, kernel_options={'BACKEND': 'REFERENCE'})",
    "autocast": "with torch.autocast('cpu'): run(flexmod.flex_attention, block_mask=mask)",
    "packed": "flexmod.varlen_attention(*torch.randn(3, 64, 2, 16), torch.tensor([0, 20, 64]))",
    "handle": "attend = flexmod.compile(mods.softcap(30.0), masks.causal()); run(attend); run(attend)",
    "graph": "print(attend.graph, file=sys.stderr)",
    "pickle": "import copy, pickle; run(copy.deepcopy(pickle.loads(pickle.dumps(attend))))",
}
SCRIPT = f"""
import gc, json, sys, torch

def created(mask_mod, block=128):
    return flexmod.create_block_mask(mask_mod, 1, 2, 64, 64, "cpu", block)

def run(attention, *args, dtype=torch.float32, **options):
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    attention(q, k, v, *args, **options).sum().backward()

seen = {{}}
before = set(sys.modules)
for name, step in {STEPS!r}.items():
    exec(step)
    seen[name] = sorted(set(sys.modules) - before)
    before = set(sys.modules)
assert gc.isenabled()

def drawn(b, h, q, k):
    import numpy
    return q - k < numpy.random.rand()

assert "numpy.random" not in sys.modules
try:
    created(drawn)
except flexmod.errors.RandomNumberError as error:
    seen["refused"] = str(error)
print(json.dumps(seen))
"""


def python(script: str, fresh: bool = False) -> str:
    """What a script prints; torch is imported before it, but for a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if fresh:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    else:
        done = forked.python(script, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """The modules that each step imported for the first time, and an error of the process."""
    found: dict[str, Any] = json.loads(python(SCRIPT))
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_call_on_the_cpu_imports_none_of(step: str, imported: dict[str, list[str]]) -> None:
    heavy = [name for name in imported[step] if any(f"{name}.".startswith(f"{p}.") for p in PACKAGES)]
    assert not heavy


def test_the_first_draw_of_a_process_from_numpy_is_refused(imported: dict[str, Any]) -> None:
    """The trace looks at numpy.random only where it is imported, and this mod imports it."""
    assert "numpy.random" in imported["refused"]


@pytest.mark.parametrize("imports", [lazy_imports, paused_collections])
@pytest.mark.parametrize("collecting", [True, False])
def test_collections_pause(imports: Callable[[], Any], collecting: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with imports():
            assert not gc.isenabled()
            with imports():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() is collecting
        with pytest.raises(ImportError), imports():
            raise ImportError("of another package")
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_the_requirements_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = (\[.*\])$", text, re.MULTILINE)
    assert found is not None and f'"{REQUIREMENTS["numpy"]}"' in text  # numpy is for tests
    dependencies = {each.partition(";")[0] for each in ast.literal_eval(found[1])}
    assert {*REQUIREMENTS.values()} <= {*dependencies, REQUIREMENTS["numpy"]}


@pytest.mark.long
def test_a_module_that_pages_name_is_there() -> None:
    """test_the_import_waits_for_torch asks for the other one."""
    python("import flexmod, sys; assert 'triton' not in sys.modules; assert flexmod.standalone.__file__")


def test_no_other_name_is_there() -> None:
    with pytest.raises(AttributeError, match="^module 'flexmod' has no attribute 'attend'$"):
        flexmod.attend  # noqa: B018  raises


# public names, which wait for torch


def test_the_import_waits_for_torch() -> None:
    python("""
import sys, flexmod

assert flexmod.__version__ and flexmod.errors.FlexmodError and "flex_attention" in dir(flexmod)
assert not {"torch", "click", "rich", "jinja2", "triton"} & set(sys.modules)
from flexmod import *
assert {*flexmod.__all__} <= {*globals()}
assert flex_attention is sys.modules["flexmod.calls.attention"].flex_attention
assert masks is sys.modules["flexmod.masks"] and "triton" not in sys.modules
assert "flexmod.tools.ahead" not in sys.modules and flexmod.ahead.__file__
""", fresh=True)


@pytest.mark.parametrize("module", long_but({"calls.attention"}, sorted(flexmod._DEFINED_IN)))
def test_a_module_may_be_imported_first(module: str) -> None:
    """Its public names are the same objects, and no module hides a function of its name."""
    python(f"""
import flexmod.{module} as module
import flexmod, pickle, types

for name in {flexmod._DEFINED_IN[module]!r}:
    assert getattr(flexmod, name) is getattr(module, name), name
    assert pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
found = {{name for name in flexmod.__all__ if isinstance(getattr(flexmod, name), types.ModuleType)}}
assert found == {{"errors", "masks", "mods"}}, found
""")


def test_type_checkers_see_the_public_names() -> None:
    """They read the imports under TYPE_CHECKING; a call reads _DEFINED_IN."""
    tree = ast.parse(MODULES["__init__"].read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.unparse(node.test)
                  and not isinstance(node.test, ast.UnaryOp))  # fmt: skip
    seen = {
        (node.module or "").removeprefix("flexmod."): tuple(alias.name for alias in node.names)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen.pop("flexmod") == flexmod._MODULES
    assert seen == flexmod._DEFINED_IN
    names = [name for names in flexmod._DEFINED_IN.values() for name in names]
    assert sorted([*names, *flexmod._MODULES]) == sorted(flexmod.__all__)


# the rule, read off the text


def import_statements(
    node: ast.AST, lazily: bool = False, guarded: bool = False
) -> Iterator[tuple[str, bool, bool]]:
    """What a file imports when it runs, whether inside a function, and whether under lazy_imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazily, guarded) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", lazily, guarded) for alias in child.names)
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        by_us = isinstance(child, ast.With) and "lazy_imports()" in map(ast.unparse, child.items)
        yield from import_statements(child, lazily or inside, guarded or by_us)


@cache
def statements_of(module: str) -> list[tuple[str, bool, bool]]:
    return [*import_statements(ast.parse(MODULES[module].read_text()))]


def ours(name: str) -> str | None:
    parts = name.split(".")
    return longest_module(parts[1:], MODULES) if parts[0] == "flexmod" else None


def at_import() -> set[str]:
    """The modules that `import flexmod` runs after `import torch`."""
    found, open_ones = set[str](), {"__init__", *flexmod._DEFINED_IN}
    while open_ones:
        module = open_ones.pop()
        found.add(module)
        names = (ours(name) for name, lazily, _ in statements_of(module) if not lazily)
        open_ones |= {name for name in names if name} - found
    return found


AT_IMPORT = at_import()


def test_the_walk_finds_the_modules_that_run(imported: dict[str, list[str]]) -> None:
    """Tests compare the rule below with these."""
    folders = {name for name in MODULES if MODULES[name].name == "__init__.py"}
    ran = {
        longest_module(name.split(".")[1:], MODULES)
        for name in imported["import"]
        if name.startswith("flexmod")
    }
    assert ran - folders == AT_IMPORT - folders


@pytest.mark.parametrize("module", sorted(AT_IMPORT))
def test_what_is_left_out_is_imported_lazily(module: str) -> None:
    for name, lazily, guarded in statements_of(module):
        package = name.partition(".")[0]
        left_out = package in REQUIREMENTS or ours(name) not in {None, *AT_IMPORT}
        assert guarded or not left_out, f"{module} imports {name} outside of lazy_imports"
        assert lazily or package not in PACKAGES, f"{module} imports {name} when flexmod is imported"


# without the packages, in threads, and in a forked child

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize("package", long_but({"triton"}, ["triton", "jinja2"]))
def test_without_a_package(package: str) -> None:
    script = f"""{WITHOUT}
import torch, flexmod
from flexmod import masks, mods

q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
mask = flexmod.create_block_mask(masks.causal(), None, None, 64, 64, "cpu")
flexmod.flex_attention(q, k, v, mods.softcap(30.0), mask).sum().backward()
attend = flexmod.compile(mods.softcap(30.0), dtype=torch.float16, head_dim=64)
attend(q, k, v)
interpret = {{"BACKEND": "INTERPRET"}}
refused = {{
    "interpret": lambda: flexmod.flex_attention(q, k, v, block_mask=mask, kernel_options=interpret),
    "again": lambda: flexmod.flex_attention(q, k, v, block_mask=mask, kernel_options=interpret),
    "handle": lambda: flexmod.compile(mods.softcap(30.0), kernel_options=interpret)(q, k, v),
    "source": lambda: attend.source,
    "ptx": lambda: attend.ptx_for("sm_90"),
    "save": lambda: attend.save("mine.py"),
}}
for name, call in refused.items():
    try:
        call()
        print(name, "ran")
    except flexmod.errors.MissingPackage as error:
        assert isinstance(error, ImportError)
        assert str(error) == (
            "this needs the package {package}, which cannot be imported: No module named '{package}'.\\n"
            "  Instead: pip install \\"{REQUIREMENTS[package]}\\"."
        ), error
"""
    assert python(script.replace("sys.argv[1]", repr(package))) == ""


def test_numpy_is_for_the_interpreter_alone() -> None:
    """Torch and Triton do without it."""
    python("""
import sys
sys.modules["numpy"] = None
import torch, flexmod
from flexmod.backends import backend

backend("triton")
q = torch.randn(1, 1, 20, 16)
assert flexmod.flex_attention(q, q, q).isfinite().all()
try:
    flexmod.flex_attention(q, q, q, kernel_options={"BACKEND": "INTERPRET"})
except flexmod.errors.MissingPackage as error:
    assert str(error).endswith("Instead: pip install \\"numpy<2.4\\"."), error
else:
    raise AssertionError("the interpreter needs numpy")
""", fresh=True)


def test_the_first_calls_of_threads() -> None:
    """All of them import: the CPU backend, the interpreter, the kernels for a chip, the writer of tables."""
    python("""
import sys, threading, torch, flexmod
from flexmod import masks, mods

q, k, v = torch.randn(3, 1, 2, 64, 16)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
together, errors = threading.Barrier(8), []

def work(number):
    try:
        together.wait()
        if number % 4 == 3:
            attend = flexmod.compile(mods.softcap(30.0), dtype=torch.float16, head_dim=64)
            assert "forward_kernel" in attend.source["forward"]
            return
        options = {"BACKEND": ("INTERPRET", "REFERENCE", "AUTO")[number % 4]}
        out = flexmod.flex_attention(q, k, v, kernel_options=options)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
assert "triton" not in sys.modules
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("pause", long_but({0.03}, [0.0, 0.03, 0.1]))
def test_a_fork_during_the_first_call_of_another_thread(pause: float) -> None:
    """The child gets no half of a module: it would wait for the rest for ever."""
    python(f"""
import os, signal, threading, time, torch, flexmod
from flexmod.backends import backend

q, k, v = torch.randn(3, 1, 1, 32, 16)
thread = threading.Thread(target=backend, args=("interpret",))
thread.start()
time.sleep({pause})
child = os.fork()
if not child:
    signal.alarm(60)
    flexmod.flex_attention(q, k, v, kernel_options={{"BACKEND": "INTERPRET"}})
    os._exit(7)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""")


@pytest.mark.parametrize(
    "module",
    long_but(
        {"triton.language.core"},
        ["triton.language.core", "triton.language.random", "triton.compiler.compiler"],
    ),
)
def test_ctrl_c_during_the_first_call(module: str) -> None:
    """It interrupts the call after the imports: the next call finds all of Triton."""
    python(f"""
import signal, sys, torch, flexmod

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
# a process that a shell starts in the background ignores the signal
signal.signal(signal.SIGINT, signal.default_int_handler)
q, k, v = torch.randn(3, 1, 1, 32, 16)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
handler = signal.getsignal(signal.SIGINT)
try:
    flexmod.flex_attention(q, k, v, kernel_options={{"BACKEND": "INTERPRET"}})
    raise AssertionError("the call went on")
except KeyboardInterrupt:
    pass
assert signal.getsignal(signal.SIGINT) is handler
out = flexmod.flex_attention(q, k, v, kernel_options={{"BACKEND": "INTERPRET"}})
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
""")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_other_handlers_of_ctrl_c_stay(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with lazy_imports():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_ctrl_c_is_called_once_after_the_imports() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with lazy_imports():
            with lazy_imports():
                signal.raise_signal(signal.SIGINT)
            assert not called
        assert called == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
