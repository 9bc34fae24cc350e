"""The launcher of Hopper's kernels, as far as no GPU is needed: the tensors it takes, shapes, arguments."""

from __future__ import annotations

import ast
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import planned
import pytest
import torch
from reference_case import make_case
from torch import Tensor
from triton.compiler.errors import CompilationError

from flexmod import create_block_mask, mods
from flexmod.backends import arguments, hopper, triton
from flexmod.backends.arguments import Problem
from flexmod.backends.families import families, obstacle
from flexmod.codegen.compiler import Lowered, kernels_for, lower
from flexmod.codegen.hopper import LIMITS, LONGEST, HopperKernels, Shape
from flexmod.codegen.spec import Verdict, choose, statistics_rows
from flexmod.codegen.variant import variant
from flexmod.ir.trace import trace
from flexmod.runtime import compiler_bugs, config, launch
from flexmod.runtime.compiler_bugs import SERIALIZED
from flexmod.runtime.offline import Report
from flexmod.runtime.target import named
from flexmod.tools import ahead
from flexmod.tools.ahead import VariantCall

CPU = torch.device("cpu")
HALF = torch.bfloat16


def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx + 3


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 3.0 * torch.tanh(score / 3.0)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=HALF)


# Tensors


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (zeros(2, 4, 100, 64), None),
        (zeros(2, 100, 4, 64).transpose(1, 2), None),
        (zeros(2, 4, 100, 72)[..., :64], None),
        (zeros(1, 4, 100, 64).as_strided((1, 4, 100, 64), (3, 6400, 64, 1)), None),
        (zeros(2, 4, 64, 100).transpose(2, 3), True),
        (zeros(2, 4, 100, 68)[..., :64], True),
        (zeros(2, 4, 100, 72)[..., 4:68], True),
        (zeros(2, 1, 100, 64).expand(2, 4, 100, 64), True),
    ],
    ids=["whole", "by position", "cut", "one batch entry", "across", "odd rows", "odd start", "expanded"],
)
def test_what_the_tma_unit_addresses(key: Tensor, why: Any) -> None:
    whole = zeros(2, 4, 100, 64)
    said = hopper.call_obstacle(whole, key, whole)
    assert said == (why and "key's rows, heads or storage are not at multiples of 16 bytes")


def test_a_plan_copies_long_tensors_that_the_tma_unit_cannot_address() -> None:
    whole, odd = zeros(2, 4, 512, 64), zeros(2, 4, 512, 68)[..., :64]
    assert hopper.call_obstacle(odd, odd, odd) is None
    assert hopper.call_obstacle(whole, zeros(2, 1, 512, 64).expand(2, 4, 512, 64), whole) is not None
    assert hopper.call_obstacle(odd, whole[:, :, :511], whole[:, :, :511]) is not None


def test_numbers_of_rows_that_are_too_many() -> None:
    rows = torch.empty(2**12, 2**12, 128, 64, dtype=HALF, device="meta")
    assert (
        hopper.call_obstacle(rows, zeros(1, 1, 1, 64), zeros(1, 1, 1, 64)) == "2^31 rows of queries or more"
    )


# Shapes


def made(
    way: str, mask: bool = True, head_dim: int = 64, **other: Any
) -> tuple[HopperKernels, dict[str, Any]]:
    """Kernels for a call with a score mod, and the call's arguments."""
    case = make_case(q_len=300, kv_len=260, head_dim=head_dim, dtype=HALF, **other)
    block_mask = create_block_mask(far, None, None, 300, 260, device="cpu").snapshot() if mask else None
    problem = Problem(None, None, block_mask, case.scale)
    spec = triton.kernel_spec(*case.inputs, problem, backward=way == "backward")
    extents = (case.q.shape[0], case.q.shape[1], 300, 260)
    lowered: list[Lowered | None] = [lower(trace(capped, "score", CPU).graph, extents, split=False)]
    lowered.append(lower(block_mask.traced.graph, extents, split=False) if block_mask else None)
    q, k, v = case.inputs
    call = {"q": q, "k": k, "v": v, "scale": case.scale, "mask": block_mask}
    if way == "backward":
        out, lse = torch.empty_like(case.grad_out), torch.empty(q.shape[:3])
        call |= {"out": out, "lse": lse, "grad_out": case.grad_out, "grad_lse": None, "needs": (True,) * 3}
        call["kept"] = (lse, lse)
    return HopperKernels(kernels_for(spec, *lowered)), call


LOST = (SERIALIZED,)
BESIDE = ("dq_kernel", "scatter_kernel")  # of portable kernels, for captured tensors


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([Verdict(32)], 0),
        ([Verdict(33), Verdict(10)], 1),
        ([Verdict(60), Verdict(50), Verdict(40)], 2),
        ([Verdict(40), Verdict(50), Verdict(60)], 0),
        ([RuntimeError("PassManager::run failed"), Verdict(5)], 1),
        ([Verdict(0, LOST), Verdict(32)], 1),
        ([Verdict(0, LOST), Verdict(64), Verdict(65)], 1),
        ([Verdict(0, LOST), Verdict(65), Verdict(20, LOST)], 0),
        ([Verdict(40, LOST), Verdict(20, LOST), Verdict(30, LOST)], 1),
        ([Verdict(65, LOST), RuntimeError("PassManager::run failed"), Verdict(64, LOST)], 2),
    ],
    ids=str,
)
def test_the_ladder(
    found: list[Any],
    chosen: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher's choice, and that of a build ahead of time."""
    kernels, _ = made("backward")
    ladder = kernels.ladder("backward")
    tried: list[Shape] = []

    def outcome(shape: Shape) -> Verdict:
        tried.append(shape)
        verdict: Verdict | Exception = found[ladder.index(shape)]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(launch, "verdict", lambda kernels, way, device, shape: outcome(shape))
    monkeypatch.setattr(config, "debug_level", lambda: 1)
    for _ in range(2):
        assert launch.choose_tile(kernels, "backward", CPU, lambda shape: [shape]) == ladder[chosen]  # type: ignore
    assert tried == [*ladder[: len(found)], ladder[chosen]]  # and what is known is judged again
    gave_way = [
        f"flexmod: backward of hopper: {shape} gives way: {verdict}"
        for shape, verdict in zip(ladder, found, strict=False)
        if isinstance(verdict, Verdict) and not LIMITS.passed(verdict, shape)
    ]
    taken = f"flexmod: backward of hopper: {ladder[chosen]}"
    assert capsys.readouterr().err.splitlines() == [*gave_way, taken]

    def compiled(call: Any, kernels: Any, way: Any, target: str, rungs: Any) -> Report:
        spills, losses, *_ = outcome(rungs[way])
        return Report(named(target), 0, 255, 8 * spills, 4 * spills, losses=losses)

    tried.clear()
    monkeypatch.setattr(ahead, "compiled", compiled)
    call = VariantCall(variant(head_dim=64, block_size=128))
    built = ahead.first_tile(call, kernels, "backward", "sm_90")
    assert (built.tile, built.problem) == (ladder[chosen], "")
    assert tried == list(ladder[: len(found)])


class Compiled:
    """What Triton gives before a launch."""

    n_spills = 7.0

    def __getitem__(self, grid: tuple[int]) -> None:
        """Loads it."""

    def __init__(self, cubin: bytes, **kept: str) -> None:
        self.asm = {**kept, "cubin": cubin}


def test_a_variant_that_the_compilers_made_wrong_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is judged again where strides or lengths make another kernel of it."""
    kernels, _ = made("forward")
    first, second = kernels.ladder("forward")[:2]

    def warmup(variant: str, shape: Shape, **_: Any) -> Compiled:
        return Compiled(b"wrong" if (variant, shape) == ("odd", first) else b"right")

    monkeypatch.setattr(kernels, "module", SimpleNamespace(forward_kernel=SimpleNamespace(warmup=warmup)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch.compiler_bugs, "losses", lambda *asm: ())
    monkeypatch.setattr(compiler_bugs, "misaddressed", lambda cubin: cubin == b"wrong")

    def settled(variant: str) -> Shape:
        shape = launch.choose_tile(
            kernels, "forward", CPU, lambda shape: [{"variant": variant, "shape": shape}]
        )
        return cast(Shape, shape)

    assert [settled(x) for x in ("even", "even", "odd", "even")] == [first, first, second, second]


def test_a_verdict_in_words() -> None:
    assert str(Verdict(3)) == "a thread spills 3 registers"
    assert str(Verdict(3, LOST)) == "a thread spills 3 registers, its matrix instructions are serialized"
    assert str(Verdict(0, size=5000)) == "a thread spills 0 registers, 4 KB of instructions"


@pytest.mark.parametrize(
    ("way", "score_mod", "chosen"),
    [
        ("forward", capped, 1), ("forward", mods.relative_bias(torch.ones(4, 15)), 1),
        ("forward", mods.alibi(4), 0), ("forward", None, 0), ("backward", capped, 0),
    ],
)  # fmt: skip
def test_a_forward_of_expensive_elements_has_no_long_code(way: str, score_mod: Any, chosen: int) -> None:
    """A processor waits for instructions that it has no room for. A backward has no shorter shape.

    What takes little for an element has long code too: steep slopes have a loop of their own.
    """
    kernels = ahead.kernels_on(variant(score_mod, far, head_dim=64), way, "sm_90")
    ladder = kernels.ladder(way)
    found = choose(ladder, lambda shape: Verdict(size=LONGEST + (shape is ladder[0])), LIMITS)
    assert found.rung == ladder[chosen]


@pytest.mark.parametrize("kept", [{"ptx": "text"}, {}], ids=["all", "TRITON_STORE_BINARY_ONLY"])
def test_what_a_compiled_shape_is_judged_by(kept: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, _ = made("forward")

    def warmup(**_: Any) -> Compiled:
        return Compiled(b"code", **kept)

    monkeypatch.setattr(kernels, "module", SimpleNamespace(forward_kernel=SimpleNamespace(warmup=warmup)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch.compiler_bugs, "losses", lambda *asm: asm)
    said = (kept.get("ptx", ""), b"code")
    assert launch.verdict(kernels, "forward", CPU, {}) == Verdict(7, said)  # type: ignore
    monkeypatch.setattr(compiler_bugs, "misaddressed", lambda cubin: cubin == b"code")
    refused = launch.verdict(kernels, "forward", CPU, {}).refusal
    assert launch.refusal_in_words(refused) == launch.compiler_bugs.MISADDRESSED


def test_a_refusal_says_what_the_compiler_met() -> None:
    """Triton tells of each call that led there; the innermost one says what is wrong."""
    node = ast.parse("a = b").body[0]
    outer = CompilationError("consume()", node, None)
    outer.__cause__ = CompilationError("a = b", node, "NameError('b is not defined')")
    assert launch.refusal_in_words(outer) == "NameError('b is not defined')"
    assert launch.refusal_in_words(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Verdict(200), "a thread spills 200 registers at least"),
        (Verdict(65, LOST), "a thread spills 65 registers at least"),
        (
            RuntimeError("too wide\nmore"),
            "no shape of it compiles: 64x128 (1 consumer): too wide; 64x64 (1 consumer): too wide; "
            "128x128 (2 consumers): too wide; 128x64 (2 consumers): too wide",
        ),
    ],
    ids=["spills", "spills and is serialized", "fails"],
)
def test_a_ladder_at_its_end(fault: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, _ = made("forward")
    calls = []

    def compiled(*_: Any) -> Verdict:
        calls.append(0)
        if isinstance(fault, Exception):
            raise fault
        return Verdict(*fault)

    monkeypatch.setattr(launch, "verdict", compiled)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(launch.NoRung) as raised:
                launch.choose_tile(kernels, "forward", CPU, lambda shape: [{}])
            assert str(raised.value) == why
    assert len(calls) == len(kernels.ladder("forward"))
    wanted = f"the forward does not run on the template 'hopper', {why}"
    assert [str(warning.message) for warning in said] == [wanted] * isinstance(fault, Exception)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=repr,
)
def test_an_error_of_the_machine_is_not_remembered(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a launch nor by a build ahead of time, which would take a slower shape."""
    kernels, _ = made("forward")
    failing = mock.Mock(side_effect=error)
    monkeypatch.setattr(launch, "verdict", failing)
    monkeypatch.setattr(ahead, "compiled", failing)
    with pytest.raises(type(error)):
        launch.choose_tile(kernels, "forward", CPU, lambda shape: [{}])
    assert not kernels.tiles
    with pytest.raises(type(error)):
        ahead.first_tile(VariantCall(variant(head_dim=64, block_size=128)), kernels, "forward", "sm_90")
    monkeypatch.setattr(launch, "verdict", lambda *_: Verdict(0))
    assert launch.choose_tile(kernels, "forward", CPU, lambda shape: [{}]) == kernels.ladder("forward")[0]


# Launches


@pytest.fixture(autouse=True)
def _a_small_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "processors", lambda device: 20)
    monkeypatch.setattr(launch, "TensorDescriptor", lambda base, *_: base)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)])
def test_every_argument_is_there(
    way: Any, mask: bool, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, call = made(
        way, mask, head_dim=dims[0], value_dim=dims[1], batch=2, heads=4, kv_heads=2, kv_batch=1
    )
    launched: dict[str, Any] = {}

    def start(kernels: HopperKernels, name: str, device: Any, programs: Any, arguments: Any) -> None:
        launched[name] = programs
        wanted = set(getattr(kernels.module, name).arg_names)
        assert wanted == set(arguments) - {"num_warps", "maxnreg"}

    monkeypatch.setattr(launch, "start", start)
    shape = kernels.ladder(way)[-1]
    found = getattr(planned, way)(kernels, **call, shape=shape)
    if way == "forward":
        assert launched == {"forward_kernel": (20,)}
        assert found.out.shape == (2, 4, 300, dims[1]) and found.lse.shape == (2, 4, 300)
    else:
        assert launched == {
            "statistics_kernel": (2 * 4 * (384 // statistics_rows(kernels.spec)),),
            "backward_kernel": (1 * 2 * (5 if dims[0] == 256 else 3),),
            "round_kernel": (2 * 4 * 5,),
        }
        assert [found.query.shape, found.key.shape] == [call["q"].shape, call["k"].shape]


@pytest.mark.parametrize(("keys", "ordered"), [(128 * 40, True), (128 * 40 + 1, False)])
def test_the_long_ones_go_first_where_a_backward_has_few_programs(
    keys: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen on each processor, here: 8 heads of 40 tiles of keys. A forward has an order always."""
    chosen: list[Any] = []
    case = make_case(q_len=128, kv_len=keys, head_dim=64, dtype=HALF, heads=8, kv_heads=8)
    mask = create_block_mask(far, None, None, 128, keys, device="cpu").snapshot()
    spec = triton.kernel_spec(*case.inputs, Problem(None, None, mask, 1.0), backward=True)
    lowered = lower(mask.traced.graph, (1, 8, 128, keys), split=False)
    kernels = HopperKernels(kernels_for(spec, None, lowered))
    monkeypatch.setattr(hopper, "_order", lambda mask, axis, wanted=True: chosen.append((axis, wanted)) or {})
    monkeypatch.setattr(launch, "start", lambda *given: None)
    q, k, v = case.inputs
    call = {"q": q, "k": k, "v": v, "scale": 1.0, "mask": mask}
    planned.forward(kernels, **call, shape=kernels.ladder("forward")[-1])
    lse = torch.empty(q.shape[:3])
    out = {"out": case.grad_out, "lse": lse, "grad_out": case.grad_out, "kept": (lse, lse)}
    planned.backward(
        kernels, **call, **out, grad_lse=None, needs=(True,) * 3, shape=kernels.ladder("backward")[-1]
    )
    assert chosen == [("kv", True), ("q", ordered)]


def test_sums_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel sums by column and along diagonals; other kernels sum a bias of rows and of pairs."""
    _, call = made("backward", batch=2, heads=4, kv_heads=2, kv_batch=1)
    slopes, keys, rows, pairs, near = (torch.ones(s) for s in ((4,), (260,), (300,), (300, 260), (600,)))

    def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        score = score + slopes[h] * (kv_idx - q_idx) + near[q_idx - kv_idx + 260]
        return score + keys[kv_idx] + rows[q_idx] + pairs[q_idx, kv_idx]

    traced = trace(learned, "score", CPU)
    score = lower(traced.graph, (2, 4, 300, 260), split=False)
    mask = lower(call["mask"].traced.graph, (2, 4, 300, 260), split=False)
    problem = Problem(None, None, call["mask"], 1.0)
    spec = triton.kernel_spec(call["q"], call["k"], call["v"], problem, backward=True)
    kernels = HopperKernels(
        kernels_for(spec, score, mask, grad_captures=(0, 1, 2, 3, 4), reduce_in_backward=True)
    )
    launched = []

    def start(kernels: Any, name: str, device: Any, programs: Any, arguments: Any) -> None:
        names, given = set(getattr(kernels.module, name).arg_names), dict(arguments)
        for option in ("num_warps", "num_stages", "maxnreg"):
            given.pop(option, None)
        assert names <= set(given) if name in BESIDE else names == set(given)
        if name in BESIDE:
            assert given["ROW_MAX"].shape == given["REST"].shape == given["DELTA"].shape == (2, 4, 300)
        launched.append(name)

    monkeypatch.setattr(launch, "start", start)
    captured = planned.Mod(traced.tensors)
    call["kept"] = (call["lse"], call["lse"])
    found = planned.backward(kernels, **call, score_captured=captured, shape=kernels.ladder("backward")[-1])
    assert launched == ["statistics_kernel", "backward_kernel", "round_kernel", *BESIDE]
    assert [x.shape for x in found.sums["column"]] == [(2, 4, 260)] * 2
    assert [x.shape for x in found.sums["row"]] == [(2, 4, 300)]
    (along,) = found.sums["diagonal"]
    assert torch.equal(along, torch.zeros(2, 4, 300 + 260 - 1))


@pytest.mark.parametrize(
    ("way", "target", "options", "facts", "why"),
    [
        ("forward", "sm_90", {}, {}, None),
        (
            "backward",
            "sm_90",
            {"num_stages": 2},
            {},
            "kernel option num_stages speaks of the portable template",
        ),
        ("forward", "sm_80", {}, {}, "sm_80 is no Hopper chip (sm_90)"),
        ("forward", "gfx942", {}, {}, "gfx942 is no Hopper chip (sm_90)"),
        ("forward", "sm_90", {"BLOCK_M": 64}, {}, "kernel option BLOCK_M speaks of the portable template"),
        ("backward", "sm_90", {"BLOCK_M": 64}, {}, None),
        ("backward", "sm_90", {"fwd_num_warps": 4}, {}, None),
        ("forward", "sm_90", {"bwd_TEMPLATE": "portable"}, {}, None),
        ("forward", "sm_90", {"deterministic": True}, {"deterministic": True}, None),
        ("backward", "sm_90", {"deterministic": False}, {}, None),
        (
            "backward",
            "sm_90",
            {"deterministic": True},
            {},
            "a deterministic backward: Hopper's adds up dQ in any order",
        ),
        (
            "backward",
            "sm_90",
            {},
            {"deterministic": True},
            "a deterministic backward: Hopper's adds up dQ in any order",
        ),
    ],
)
def test_choice_of_the_template(way: Any, target: str, options: Any, facts: Any, why: str | None) -> None:
    made = replace(variant(head_dim=128), options=tuple(options.items()))
    assert hopper.obstacle(made, way, target, **facts) == why


def test_options_that_ask_for_another_template() -> None:
    made = replace(variant(head_dim=128), options=(("TEMPLATE", "portable"), ("BLOCK_M", 64)))
    own, portable = families()
    assert obstacle(own, made, "forward", "sm_90") == "kernel option TEMPLATE asks for another"
    assert obstacle(portable, made, "forward", "sm_90") is None
