"""The table of compiler bugs is whole; machine code says what the log of ptxas and the disassembler say."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from test_rooms import MODULES, ROOT, longest_module
from triton.backends.nvidia.compiler import get_ptxas
from triton_release import NEWEST

from flexmod import masks
from flexmod.codegen import cache
from flexmod.codegen.hopper import HopperKernels
from flexmod.codegen.spec import KernelSpec, padded
from flexmod.codegen.variant import variant
from flexmod.runtime import compiler_bugs, offline
from flexmod.runtime.compiler_bugs import EVEN_REGISTERS, SERIALIZED
from flexmod.tools import ahead
from flexmod.tools.ahead import VariantCall

PAGE = ROOT / "docs/archive/design_choices.md"
NO_TRACKER = "NVIDIA has no public list of ptxas's bugs"
ISSUE = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+")
# A compiler with a version, as whoever writes about a bug of it does.
VERSION = re.compile(r"\b(ptxas of|Triton|triton|CUDA|cuda|TorchDynamo of|torch|LLVM) (CUDA )?\d+\.\d+\b")
# They name versions for what these call otherwise, or tell a user which one to install.
OTHERS = {"runtime.private_triton", "runtime.gluon", "runtime.direct", "errors.kernels"}


class CompilerBug(NamedTuple):
    """A row of the table."""

    what: str
    since: str
    until: str
    issue: str
    workarounds: list[str]


def rows() -> list[CompilerBug]:
    section = PAGE.read_text().partition("\n## Compiler bugs\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [CompilerBug(*cells[:4], re.findall(r"`([\w.]+)`", cells[4])) for cells in table[1:]]


BUGS = rows()


def place(name: str) -> tuple[str, object]:
    """The module that a workaround stands in, and the workaround."""
    parts = name.split(".")
    module = longest_module(parts, MODULES)
    found: object = importlib.import_module(f"flexmod.{module}")
    for part in parts[len(module.split(".")) :]:
        found = inspect.getattr_static(found, part)
    return module, found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what[:30])
def test_a_row_is_whole(bug: CompilerBug) -> None:
    assert all(bug)
    assert re.search(r"\d+\.\d+", bug.since)
    assert re.search(r"\d+\.\d+|^none: |^not known: ", bug.until)
    assert ISSUE.fullmatch(bug.issue) or bug.issue in (NO_TRACKER, "not reported")
    for name in bug.workarounds:
        module, found = place(name)
        assert module != "__init__" and (callable(found) or isinstance(found, property))


def test_workarounds_elsewhere_refer_to_the_table() -> None:
    modules = {place(name)[0] for bug in BUGS for name in bug.workarounds}
    for module in modules - {"runtime.compiler_bugs", "runtime.interpreter_corrections"}:
        assert re.search("compiler.bugs", MODULES[module].read_text(), re.IGNORECASE), module


def test_no_other_file_writes_of_a_version_of_a_compiler() -> None:
    known = {place(name)[0] for bug in BUGS for name in bug.workarounds} | OTHERS
    files = [path for name, path in MODULES.items() if name not in known]
    files += [*(ROOT / "templates").rglob("*.jinja")]
    found = [f"{path}: {hit[0]}" for path in files for hit in VERSION.finditer(Path(path).read_text())]
    assert not found, f"a bug belongs into the table of {PAGE}: {'; '.join(found)}"


TEXT = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, warpgroup_mma, warpgroup_mma_wait
)


@gluon.jit
def product(A, B, Out, N, D: gl.constexpr, TOUCHED: gl.constexpr):
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D], gl.bfloat16)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    i, j = gl.arange(0, D, gl.SliceLayout(1, loaded)), gl.arange(0, D, gl.SliceLayout(0, loaded))
    place = i[:, None] * D + j[None, :]
    a = gl.allocate_shared_memory(gl.bfloat16, [D, D], shared, gl.load(A + place))
    b = gl.allocate_shared_memory(gl.bfloat16, [D, D], shared, gl.load(B + place))
    fence_async_shared()
    acc = gl.zeros([D, D], gl.float32, summed)
    for _ in range(N):
        acc = warpgroup_mma(a, b, acc, is_async=True)
        if TOUCHED:  # while the product may still be under way: the wait leaves one group
            acc = warpgroup_mma_wait(1, deps=(acc,)) * 2.0
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
    i, j = gl.arange(0, D, gl.SliceLayout(1, summed)), gl.arange(0, D, gl.SliceLayout(0, summed))
    gl.store(Out + i[:, None] * D + j[None, :], acc)
"""
SIGNATURE = {"A": "*bf16", "B": "*bf16", "Out": "*fp32", "N": "i32"}


def product(dim: int = 64, touched: bool = False, **options: Any) -> offline.Report:
    kernel = cache.load(TEXT, "wgmma").product
    return offline.compile(kernel, SIGNATURE, {"D": dim, "TOUCHED": touched}, "sm_90", **options)


class Assembled(NamedTuple):
    cubin: bytes
    warnings: set[str]
    """Their numbers, e.g. C7514."""


def assemble(ptx: str, folder: Path, *flags: str) -> Assembled:
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(90).path, *flags, "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Assembled(source.with_suffix(".cubin").read_bytes(), set(re.findall(r"C75\d\d", log)))


@pytest.mark.parametrize(
    ("given", "warning", "losses"),
    [
        ({}, None, ()),
        ({"touched": True}, "C7514", (SERIALIZED,)),
        pytest.param(  # 256 registers of a thread for the sum
            {"dim": 256, "maxnreg": 168}, "C7511", (SERIALIZED,), marks=pytest.mark.long
        ),
    ],
    ids=["as written", "touched", "too large"],
)
def test_serialized_products(given: dict[str, Any], warning: str | None, losses: tuple[str, ...]) -> None:
    report = product(**given)
    assert report.losses == losses
    assert re.findall(r"C\d+", " ".join(report.warnings)) == [warning] * len(losses)


@pytest.mark.long
def test_a_report_has_the_numbers_of_the_machine_code(tmp_path: Path) -> None:
    """They come from a run of ptxas of its own, which must be as Triton's was."""
    report = product(dim=256, maxnreg=168)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(report.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (used,) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    assert tuple(map(int, used)) == (report.registers, report.local)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "float8"])
def forward(request: pytest.FixtureRequest) -> str:
    """The PTX of Hopper's forward."""
    causal = variant(None, masks.causal(), head_dim=64)
    dtypes = dict.fromkeys(("q_dtype", "k_dtype", "v_dtype"), request.param)
    spec = replace(causal.spec, **dtypes, out_dtype=torch.bfloat16, backward=False)
    causal = replace(causal, spec=spec)
    kernels = ahead.kernels_on(causal, "forward", "sm_90")
    assert isinstance(kernels, HopperKernels)
    last = {"forward": kernels.ladder("forward")[-1]}
    return str(ahead.compiled(VariantCall(causal), kernels, "forward", "sm_90", last).asm["ptx"])


def as_it_is(ptx: str) -> str:
    return ptx


def of_few_registers(ptx: str) -> str:
    """Too few for the products; float8 holds no sum of all columns while one runs."""
    few = 64 if "e4m3" in ptx else 80
    return re.sub(r"(setmaxnreg\S+\s+)240;", rf"\g<1>{few};", ptx)


def of_no_registers(ptx: str) -> str:
    return re.sub(r"(setmaxnreg\S+\s+)240;", r"\g<1>24;", ptx)


def of_unknown_registers(ptx: str) -> str:
    return re.sub(r"\.maxnreg \d+", "", ptx)


def that_prints(ptx: str) -> str:
    declared = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);"
    call = """{ .param .b64 a0; .param .b64 a1; .param .b32 r0;
        st.param.b64 [a0], 0; st.param.b64 [a1], 0; call.uni (r0), vprintf, (a0, a1); }"""
    before, _, after = ptx.replace(".address_size 64", f".address_size 64\n{declared}", 1).rpartition("ret;")
    return f"{before}{call}\nret;{after}"


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize(
    ("change", "flags", "warnings", "losses"),
    [
        (as_it_is, (), set(), ()),
        (as_it_is, ("-g",), {"C7505"}, (SERIALIZED, EVEN_REGISTERS)),
        (of_few_registers, (), {"C7512"}, (SERIALIZED,)),
        pytest.param(of_no_registers, (), {"C7507"}, (EVEN_REGISTERS,), marks=pytest.mark.long),
        pytest.param(of_unknown_registers, (), {"C7508"}, (EVEN_REGISTERS,), marks=pytest.mark.long),
        pytest.param(that_prints, (), {"C7510"}, (SERIALIZED,), marks=pytest.mark.long),
    ],
)
def test_what_is_read_is_what_ptxas_warns_of(
    change: Any,
    flags: tuple[str, ...],
    warnings: set[str],
    losses: tuple[str, ...],
    forward: str,
    tmp_path: Path,
) -> None:
    ptx = change(forward)
    cubin, said = assemble(ptx, tmp_path, *flags)
    assert (said >= warnings) if warnings else not said
    assert compiler_bugs.losses(ptx, cubin) == losses
    # instruction by instruction, as the disassembler has them
    code = [(low & 0xFFF, high >> 20 & 7) for low, high in compiler_bugs.instructions(cubin)]
    groups = [group for operation, group in code if operation in compiler_bugs.MATRIX]
    listing = offline._disassemble(cubin)
    products = re.findall(r"[HQ]GMMA[^;]*;", listing)
    assert [group != compiler_bugs.NO_GROUP for group in groups] == ["gsb0" in line for line in products]
    assert len(products) >= ptx.count("wgmma.mma_async") > 0
    handing = sum(operation == compiler_bugs.REGISTERS for operation, _ in code)
    assert handing == listing.count("USETMAXREG")


def test_where_nothing_can_be_told() -> None:
    serialized = product(touched=True).asm
    assert compiler_bugs.losses(serialized["ptx"], serialized["cubin"]) == (SERIALIZED,)
    assert compiler_bugs.losses(serialized["ptx"], b"") == ()
    assert compiler_bugs.losses(serialized["ptx"], headed(0x6006402)) == ()  # sm_100
    # a group for each product is how it was written
    alone = re.sub(r"(wgmma.mma_async[^;]*;)", r"\1 wgmma.commit_group.sync.aligned;", serialized["ptx"])
    assert compiler_bugs.losses(alone, serialized["cubin"]) == ()


NUMBER, CARRIED = 0x7890, 1 << 10


def add(into: int, of: int, number: int = 32, carry_to: int = 7, carry_from: int = 7) -> tuple[int, int]:
    """UIADD3 of a register and a number, the upper half of a sum where it takes a carry."""
    low = number << 32 | of << 24 | into << 16 | NUMBER
    high = 0x3F | 7 << 13 | 1 << 16 | carry_to << 17 | 7 << 20 | carry_from << 23 | 3 << 26
    return low, high & ~(1 << 26) | CARRIED if carry_from != 7 else high


def headed(flags: int) -> bytes:
    """An ELF file up to its flags."""
    return b"\x7fELF".ljust(0x30, b"\0") + flags.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ([add(4, 8, carry_to=0), add(5, 9, carry_from=0)], False),
        ([add(4, 8, carry_to=0), add(5, 63, carry_from=0)], False),
        ([add(4, 63, carry_to=0), add(5, 63, carry_from=0)], False),
        ([add(4, 9, carry_to=0), add(5, 9, carry_from=0)], True),
        ([add(4, 9, carry_to=0), (9 << 16 | 0x882, 0), add(5, 9, carry_from=0)], False),  # UMOV UR9
        ([add(4, 9, carry_to=0), (9 << 16 | 0x220, 0), add(5, 9, carry_from=0)], True),  # FMUL R9
        ([add(4, 9, carry_to=1), add(6, 8, carry_to=0), add(5, 9, carry_from=0)], False),
        ([add(4, 9, carry_to=1), add(6, 8, carry_to=0), add(5, 9, carry_from=1)], True),
    ],
    ids=["two", "no upper half", "of nothing", "one", "written between", "another kind", "crossed", "late"],
)
def test_halves_of_an_address(
    code: list[tuple[int, int]], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_bugs, "instructions", lambda cubin: iter(code))
    for flags in (0x5A0D5A, 0x9005A04):  # of CUDA 12, of CUDA 13
        assert compiler_bugs.misaddressed(headed(flags)) is wrong
    for flags in (0x500550, 0x6005004, 0x600640A, 0x6006402):  # sm_80 and sm_100
        assert not compiler_bugs.misaddressed(headed(flags))
    assert not compiler_bugs.misaddressed(b"")


@pytest.mark.long
def test_a_lost_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values lie where keys lay, in rows of fewer bytes: the ptxas of Triton 3.6 loses what both begin at."""
    with monkeypatch.context() as patch:  # rows as short as they can be
        patch.setattr(KernelSpec, "value_tile", property(lambda spec: padded(spec.value_dim)))
        plain = variant(None, None, head_dim=64, value_dim=16)
        kernels = plain.kernels("forward")
        first = kernels.ladder("forward")[0]
        report = ahead.compiled(VariantCall(plain), kernels, "forward", "sm_90", {"forward": first})
        wrong = compiler_bugs.misaddressed(report.asm["cubin"])
        # halves of a sum, one after the other
        halves = r"UIADD3 UR\d+, UP(\d), UR(\d+), [^;]*;[^;]*UIADD3\.X UR\d+, UR(\d+), [^;]*UP(\d), !UPT ;"
        pairs = re.findall(halves, report.sass)
        assert any(here == there and made == taken for made, here, there, taken in pairs) is wrong
        assert wrong is not NEWEST
        built = ahead.first_tile(VariantCall(plain), kernels, "forward", "sm_90")
        assert (built.tile != first) is wrong
        assert built.report is not None and built.fits
        assert not compiler_bugs.misaddressed(built.report.asm["cubin"])
    plain = variant(None, None, head_dim=128, value_dim=16)
    kernels = plain.kernels("forward")
    built = ahead.first_tile(VariantCall(plain), kernels, "forward", "sm_90")
    assert built.tile == kernels.ladder("forward")[0]


@pytest.mark.parametrize(
    ("dims", "dtype", "tile"),
    [
        ((64, 16), torch.float16, 64),
        ((256, 16), torch.bfloat16, 64),
        ((32, 16), torch.bfloat16, 32),
        ((16, 64), torch.float16, 64),
        ((128, 16), torch.float32, 16),  # no matrix unit takes part
    ],
)
def test_rows_of_values(dims: tuple[int, int], dtype: torch.dtype, tile: int) -> None:
    assert KernelSpec(dtype, dtype, dtype, *dims).value_tile == tile
    if dtype is torch.float32:
        assert KernelSpec(dtype, dtype, dtype, *dims, precision="tf32").value_tile == 32


def kept_at_first(source: str) -> list[str]:
    """The assignments in loops that Triton leaves out, without a word.

    Triton takes a variable for unchanged by a loop if it ends a first walk over the body with the value that
    it had before. One does so that is another name of a second variable before the loop, and in the loop
    again, before the second one changes.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [
            (node.lineno, node.targets[0].id, ast.unparse(node.value))
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For | ast.While):
                continue
            before = {name: (line, value) for line, name, value in sorted(names) if line < loop.lineno}
            inside = [x for x in names if loop.lineno <= x[0] <= (loop.end_lineno or 0)]
            for line, name, value in inside:
                changes = [at for at, other, _ in inside if other == value]
                named, was = before.get(name, (0, ""))
                same = was == value and before.get(value, (0, ""))[0] < named
                if name != value and same and changes and min(changes) > line:
                    found.append(f"{function.name}: {name} = {value}")
    return found


def test_no_text_has_a_variable_that_a_loop_would_lose() -> None:
    lost = "def f(n):\n  now = g()\n  last = now\n  for i in range(n):\n    last = now\n    now = g()\n"
    assert kept_at_first(lost) == ["f: last = now"]
    assert kept_at_first(lost.replace("last = now\n  for", "last = g()\n  for")) == []
    folders = (ROOT / "tests/golden", "*_*ward*.txt"), (ROOT / "flexmod/codegen/device_functions", "*.py")
    texts = [path for folder, pattern in folders for path in folder.glob(pattern)]
    assert len(texts) > 12
    assert {path.name: kept_at_first(path.read_text()) for path in texts} == {path.name: [] for path in texts}
