"""What a handle shows of itself: graphs, modules, PTX, a file of its own; where there is none, why."""

from __future__ import annotations

import inspect
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmod
from flexmod import errors, explain, masks, mods
from flexmod.calls import prepared
from flexmod.runtime import target
from flexmod.runtime.offline import Report
from flexmod.tools import ahead, standalone

SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32}


def x(dim: int = 16, heads: int = 2, **options: Any) -> Tensor:
    return torch.randn(1, heads, 20, dim, **options)


def capped() -> flexmod.CompiledAttention:
    return flexmod.compile(mods.softcap(15.0), masks.causal())


# Graphs


def test_graphs() -> None:
    graphs = capped().graph
    assert list(graphs) == ["mask", "score", "grad"]
    assert str(graphs) == "\n\n".join(map(str, explain(mods.softcap(15.0), masks.causal()).graphs))
    assert list(flexmod.compile(mask_mod=masks.causal()).graph) == ["mask"]
    assert (flexmod.compile().graph, str(flexmod.compile().graph)) == ({}, "")
    assert list(flexmod.compile(mods.causal_score()).graph) == ["mask"]


def test_graphs_are_as_wide_as_the_call() -> None:
    attend = flexmod.compile(lambda score, b, h, q_idx, kv_idx: score + (q_idx * 100_000_000 > kv_idx))
    for length, wide in ((20, False), (30, True)):
        attend(torch.randn(1, 1, length, 8), *[torch.randn(1, 1, 5, 8)] * 2)
        assert ("int64" in str(attend.graph["score"])) == wide


def test_the_derivative_by_what_is_learned() -> None:
    slopes = torch.rand(2, requires_grad=True)
    by_score, by_slope, place = flexmod.compile(mods.alibi(slopes)).graph["grad"].results
    assert (by_score.value, by_slope.op, place.value) == ("grad", "mul", "h")


# Modules


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"dtype": "bf16"}, "give torch.float16, torch.bfloat16 or torch.float32."),
        ({"dtype": torch.float64}, "give torch.float16, torch.bfloat16 or torch.float32."),
        ({"head_dim": 0}, "give a whole number above 0, e.g. 64."),
        ({"head_dim": "64"}, "give a whole number above 0, e.g. 64."),
        ({"value_dim": 0}, "give a whole number above 0, e.g. 64."),
        ({"block_size": None}, "give e.g. 128 or (128, 64)."),
        ({"block_size": (64,)}, "give e.g. 128 or (128, 64)."),
    ],
)
def test_arguments_of_what_describes_a_variant(given: dict[str, Any], advice: str, tmp_path: Path) -> None:
    ((name, value),) = given.items()
    for describe in (flexmod.explain, partial(standalone.save, tmp_path / "attention.py")):
        with pytest.raises(errors.ArgumentTypeError) as caught:
            describe(None, masks.causal(), **given)
        assert str(caught.value) == f"{name} is {value!r}.\n  Instead: {advice}"


def test_modules_are_those_that_run() -> None:
    """The interpreter's. They are shown when their files are gone, too."""

    def own(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Like none in another test: a number in which mods differ is an argument of what runs."""
        return (score * 0.75).sin().cos() * 1.5

    def own_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Its own too: comments in what runs quote the first of equal masks."""
        return (q_idx | 1) >= (kv_idx | 2)

    attend = flexmod.compile(own, own_mask, kernel_options={"BACKEND": "INTERPRET"})
    query = x(requires_grad=True)
    attend(query, x(), x()).sum().backward()
    modules = [m for name, m in list(sys.modules.items()) if "flexmod_generated" in name]
    ran = {inspect.getsource(module): Path(str(module.__file__)) for module in modules}
    ran[attend.source["forward"]].unlink()
    source = attend.source
    assert list(source) == ["forward", "backward"] and set(source.values()) <= set(ran)
    assert "def dq_kernel" in source["backward"] and "def dq_kernel" not in source["forward"]


def test_modules_follow_the_latest_call() -> None:
    attend = capped()
    for dim, heads, dtype in ((16, 2, torch.float16), (24, 1, torch.bfloat16)):
        key = x(dim, heads, dtype=dtype)
        attend = flexmod.compile(mods.softcap(15.0), masks.causal(), enable_gqa=True)
        attend(x(dim, dtype=dtype), key, key)
        head = attend.source["backward"].partition('"""\n')[0]
        assert f"q {str(dtype)[6:]}" in head and f"{dim} (queries and keys)" in head
        assert ("BATCHES" in attend.source["backward"]) == (heads == 1)


def test_modules_under_autocast() -> None:
    attend = capped()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(x(), x(), x())
    assert "q bfloat16, k bfloat16, v bfloat16" in attend.source["forward"]


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexmod.CompiledAttention, "_chip", lambda _: None)


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("without_a_gpu")
def test_modules_before_a_call(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a call with this dtype and these head dimensions; then the latest call decides."""
    monkeypatch.setattr(prepared, "float32_precision", lambda: "tf32")

    def handle(**described: Any) -> flexmod.CompiledAttention:
        return flexmod.compile(mods.softcap(15.0), None, scale=-1.0, enable_gqa=heads == 1, **described)

    attend, called = handle(dtype=dtype, head_dim=24, value_dim=8), handle()
    before = attend.source
    called(x(24, dtype=dtype), x(24, heads, dtype=dtype), x(8, heads, dtype=dtype))
    assert before == called.source
    other = [x(16, dtype=torch.float16)] * 3
    for handle_of in (attend, called):
        handle_of(*other)
    assert before != attend.source == called.source
    assert handle(dtype=dtype, head_dim=16).source == handle(dtype=dtype, head_dim=16, value_dim=16).source


def test_modules_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = capped()
    attend(*[x(64, dtype=torch.float16)] * 3)
    monkeypatch.setattr(type(attend), "_chip", lambda _: "sm_90")
    sources = explain(mods.softcap(15.0), masks.causal(), dtype=torch.float16).sources
    wanted = {way: sources[f"hopper {way}"] for way in ("forward", "backward")}
    assert attend.source == wanted
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert attend.source["forward"] == wanted["forward"] and "def dq_kernel" in attend.source["backward"]


# PTX


def test_ptx_of_a_chip_by_name() -> None:
    """The forward alone: others take long."""
    attend = flexmod.compile(mods.softcap(15.0), masks.causal(), kernel_options=SMALL)
    made: list[str] = []

    def jobs(variant: Any, chip: str, of: Any = ahead.jobs) -> Any:
        made.extend(job.kernel for job in of(variant, chip))
        return list(of(variant, chip))[:1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "jobs", jobs)
        texts = attend.ptx_for("sm_80", head_dim=16, dtype=torch.float16)
    assert made == ["forward", "dq", "dkdv"]
    assert list(texts) == ["forward"]
    assert ".target sm_80" in texts["forward"] and "forward_kernel" in texts["forward"]


def test_ptx_for_takes_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ahead, "ptx", lambda variant, chip: asked.append((variant, chip)) or {})
    attend = flexmod.compile(scale=-1.0, kernel_options=SMALL)
    attend.ptx_for("sm_80", head_dim=16, dtype=torch.float16)
    attend(x(), x(), x())
    attend.ptx_for("sm_90", head_dim=32)
    attend.ptx_for("sm_90", value_dim=8, dtype=torch.bfloat16)
    monkeypatch.setattr(type(attend), "_chip", lambda _: "sm_86")
    assert attend.ptx == {}
    chips = [chip for _, chip in asked]
    specs = [(v.spec.q_dtype, v.spec.head_dim, v.spec.value_dim) for v, _ in asked]
    assert chips == ["sm_80", "sm_90", "sm_90", "sm_86"]
    half, single, brain = torch.float16, torch.float32, torch.bfloat16
    assert specs == [(half, 16, 16), (single, 32, 32), (brain, 16, 8), (single, 16, 16)]
    assert all(not v.spec.positive_scale and dict(v.options) == SMALL for v, _ in asked)
    ladder = asked[0][0].kernels("forward").ladder("forward")
    assert {(tile.block_m, tile.block_n) for tile in ladder} == {(32, 32)}


@pytest.mark.usefixtures("without_a_gpu")
def test_ptx_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ahead, "ptx", lambda variant, chip: asked.append((chip, variant.spec)) or {})
    attend = flexmod.compile(dtype=torch.float16, head_dim=64)
    with pytest.raises(errors.NoPtxError):
        _ = attend.ptx
    attend.ptx_for("sm_90")
    attend.ptx_for("sm_90", value_dim=32, dtype=torch.bfloat16)
    monkeypatch.setattr(type(attend), "_chip", lambda _: "sm_80")
    assert attend.ptx == {}
    assert [(chip, spec.q_dtype, spec.head_dim, spec.value_dim) for chip, spec in asked] == [
        ("sm_90", torch.float16, 64, 64), ("sm_90", torch.bfloat16, 64, 32), ("sm_80", torch.float16, 64, 64),
    ]  # fmt: skip


def test_a_kernel_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(target.named("sm_86"), 200_000, 255, 0, 0)
    monkeypatch.setattr(ahead, "compiled", lambda *_: report)
    with pytest.raises(errors.NoPtxError) as raised:
        capped().ptx_for("sm_86", head_dim=16, dtype=torch.float16)
    assert str(raised.value) == (
        "there is no PTX of the forward on sm_86: no tile fits 101376 bytes of shared memory.\n"
        "  Instead: name another chip, or compile a handle with kernel_options={'TEMPLATE': 'portable'}."
    )


def test_options_that_insist_on_hopper() -> None:
    attend = flexmod.compile(kernel_options={"TEMPLATE": "hopper"})
    with pytest.raises(errors.TemplateError):
        attend.ptx_for("sm_80", head_dim=64, dtype=torch.float16)
    with pytest.raises(errors.UnknownTarget):
        attend.ptx_for("sm_9000", head_dim=64, dtype=torch.float16)


# A file


@pytest.mark.long
def test_a_file_of_its_own(tmp_path: Path) -> None:
    cap = 15.0

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    attend = flexmod.compile(mod, masks.causal(), scale=0.25, kernel_options=SMALL)
    attend(x(), x(), x())
    before = attend.save(tmp_path / "before.py").read_text()
    assert "where cap = 15.0" in before
    cap = 30.0
    path = attend.save(str(tmp_path / "mine.py"), target="sm_90")
    text = path.read_text()
    assert "def mod(" in text and "where cap" not in text and "chosen for\nsm_90." in text
    assert "BLOCK_M=32, BLOCK_N=32" in text and text.count("scale=0.25):") == 2
    switches = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(path)], env=switches, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    scope = runpy.run_path(str(path))
    q, k, v = x(), x(), x()
    torch.testing.assert_close(scope["dense_attention"](q, k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_file_is_in_utf_8(tmp_path: Path) -> None:
    """Whatever the locale is: a mod is quoted with its comments."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, flexmod\n"
        "def mod(score, b, h, q_idx, kv_idx):\n"
        "    return score * 0.5  # größer als null\n"
        f"attend = flexmod.compile(mod, kernel_options={SMALL})\n"
        "attend.save(sys.argv[1], head_dim=16, dtype=torch.float16)\n",
        encoding="utf-8",
    )
    switches = {
        **os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
        "PYTHONPATH": str(Path(flexmod.__file__).parents[1]),
    }  # fmt: skip
    command = [sys.executable, str(program), str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=switches, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "größer als null" in (tmp_path / "mine.py").read_text(encoding="utf-8")


def test_the_dtype_and_dims_of_a_file(tmp_path: Path) -> None:
    attend = flexmod.compile(kernel_options=SMALL)
    text = attend.save(tmp_path / "a.py", head_dim=24, value_dim=16, dtype=torch.bfloat16).read_text()
    assert "chosen for\nsm_80." in text
    assert "check_operands(q, k, v, scale, 24, 16, DTYPES, LONGEST)" in text


@pytest.mark.usefixtures("without_a_gpu")
def test_a_file_before_a_call(tmp_path: Path) -> None:
    attend = flexmod.compile(kernel_options=SMALL, head_dim=24, value_dim=16, dtype=torch.bfloat16)
    given = flexmod.compile(kernel_options=SMALL)
    wanted = given.save(tmp_path / "a.py", head_dim=24, value_dim=16, dtype=torch.bfloat16).read_text()
    assert attend.save(tmp_path / "b.py").read_text() == wanted


def test_options_that_ask_for_nothing_can_be_saved(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"head_dim": 32, "dtype": torch.bfloat16}
    wanted = flexmod.compile().save(tmp_path / "a.py", **sizes).read_text()
    names = ("deterministic", "bwd_deterministic", "tuned", "waves_per_eu")
    handle = flexmod.compile(kernel_options=dict.fromkeys(names, 0))
    assert handle.save(tmp_path / "b.py", **sizes).read_text() == wanted
    with pytest.raises(errors.NoPtxError, match="what it shows is for the CPU"):
        flexmod.compile(kernel_options={"tuned": False}, **sizes).ptx  # noqa: B018
    both = flexmod.compile(kernel_options={"bwd_deterministic": True, "deterministic": False})
    with pytest.raises(errors.NoStandaloneError, match="does not heed its kernel option deterministic"):
        both.save(tmp_path / "b.py", **sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kernel_options": {"bwd_deterministic": True}},
            "a file does not heed its kernel option deterministic.\n"
            "  Instead: compile a handle without the option, and save that.",
        ),
        (
            {"kernel_options": {"fwd_TEMPLATE": "hopper"}},
            "its kernel option TEMPLATE is 'hopper', and a file has the portable kernels.\n"
            "  Instead: compile a handle without the option, and save that.",
        ),
        (
            {"scale": -0.5},
            "its scale is -0.5, and a file takes a positive one.\n  Instead: scale query instead.",
        ),
    ],
)
def test_what_a_file_cannot_be(arguments: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    with pytest.raises(errors.NoStandaloneError) as raised:
        flexmod.compile(**arguments).save(path, head_dim=16, dtype=torch.float16)
    assert str(raised.value) == f"this handle cannot be saved as a file of its own: {message}"
    assert not path.exists()


def test_dtypes_of_a_file(tmp_path: Path) -> None:
    attend = flexmod.compile()
    attend(x(), x(dtype=torch.float16), x(dtype=torch.float16))
    with pytest.raises(errors.NoStandaloneError) as raised:
        attend.save(tmp_path / "mine.py")
    assert str(raised.value) == (
        "this handle cannot be saved as a file of its own: query was float32 and key float16, a file has "
        "one.\n"
        "  Instead: name the dtype, e.g. attend.save(path, dtype=torch.bfloat16)."
    )
    attend(*[x(dtype=torch.float64)] * 3)
    with pytest.raises(errors.UnsupportedDtype):
        _ = attend.source


@pytest.mark.parametrize(
    ("ask", "what", "advice"),
    [
        (lambda attend: attend.ptx, "PTX", "attend.ptx_for('sm_90', "),
        (lambda attend: attend.ptx_for("sm_80", head_dim=64), "PTX", "attend.ptx_for('sm_80', "),
        (lambda attend: attend.save("mine.py"), "file", "attend.save('mine.py', "),
    ],
)
def test_before_the_first_call(ask: Any, what: str, advice: str) -> None:
    with pytest.raises(errors.NotCalledError) as raised:
        ask(flexmod.compile())
    assert str(raised.value) == (
        f"this handle was not called yet, and its {what} depends on the dtype and the head dimensions of a "
        "call.\n  Instead: call it once, give flexmod.compile a dtype and a head_dim, or write "
        f"{advice}head_dim=64, dtype=torch.bfloat16)."
    )


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"dtype": torch.float16}, "head_dim is None; it must be a whole number above 0, with dtype"),
        ({"head_dim": 64}, "dtype is None; it must be a floating-point torch.dtype, with head_dim"),
        ({"value_dim": 64}, "dtype is None; it must be a floating-point torch.dtype, with head_dim"),
        (
            {"dtype": "fp16", "head_dim": 64},
            "dtype is 'fp16'; it must be a floating-point torch.dtype, with head_dim",
        ),
        (
            {"dtype": torch.int8, "head_dim": 64},
            "dtype is torch.int8; it must be a floating-point torch.dtype, with head_dim",
        ),
        (
            {"dtype": torch.float16, "head_dim": 64, "value_dim": 0},
            "value_dim is 0; it must be a whole number above 0, with dtype",
        ),
    ],
)
def test_what_cannot_be_described(given: Any, mistake: str) -> None:
    with pytest.raises(errors.LibraryArgumentError) as raised:
        flexmod.compile(**given)
    assert str(raised.value) == (
        f"compile: {mistake} beside it.\n  Instead: write head_dim=64, dtype=torch.bfloat16, or neither."
    )


@pytest.mark.usefixtures("without_a_gpu")
def test_a_dtype_without_kernels() -> None:
    """It can be called on the CPU, and there is nothing to show."""
    attend = flexmod.compile(dtype=torch.float64, head_dim=16)
    with pytest.raises(errors.UnsupportedDtype):
        _ = attend.source
