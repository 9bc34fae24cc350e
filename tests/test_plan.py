"""Plans as data: sizes that a call fills in, what a plan refuses, and that one plan serves every length."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexmod import create_block_mask, explain, flex_attention, masks, mods
from flexmod.backends import arguments, families, triton
from flexmod.backends.arguments import Problem, operands
from flexmod.backends.families import FirstRungs
from flexmod.codegen.compiler import kernels_for, lower
from flexmod.codegen.variant import variant
from flexmod.ir.trace import trace
from flexmod.runtime.launch import rung_arguments
from flexmod.runtime.plan import (
    Launch,
    Place,
    Plan,
    PlanWriter,
    Size,
    bits,
    cdiv,
    contiguous,
    extents_of,
    fixed,
    if_several,
    least,
    named,
    value_of,
)
from flexmod.tools.ahead import by_family

NAMES = ("B", "M", "N")
NUMBERS = st.integers(1, 50)


def both() -> st.SearchStrategy[Any]:
    """An expression over names, as the function of three numbers that it shall be."""
    leaves = st.one_of(
        st.sampled_from(range(3)).map(lambda n: lambda of: of[n]), NUMBERS.map(lambda x: lambda of: x)
    )

    def grown(part: Any) -> Any:
        pairs = st.tuples(part, part)
        return st.one_of(
            pairs.map(lambda p: lambda of: p[0](of) + p[1](of)),
            pairs.map(lambda p: lambda of: p[0](of) * p[1](of)),
            pairs.map(lambda p: lambda of: p[0](of) - p[1](of)),
            st.tuples(part, NUMBERS).map(lambda p: lambda of: p[0](of) // p[1]),
            st.tuples(part, NUMBERS).map(lambda p: lambda of: cdiv(p[0](of), p[1])),
            pairs.map(lambda p: lambda of: least(p[0](of), p[1](of))),
            st.tuples(part, part, part).map(lambda p: lambda of: if_several(p[0](of), p[1](of), p[2](of))),
        )

    return st.recursive(leaves, grown, max_leaves=8)


@settings(max_examples=50)
@given(both(), st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_an_expression_is_what_python_makes_of_it(make: Any, numbers: tuple[int, ...]) -> None:
    expression = make(tuple(map(Size, NAMES)))
    assert value_of(expression, dict(zip(NAMES, numbers, strict=True))) == make(numbers)


def test_sizes_as_they_are_read() -> None:
    batch, length = Size("B"), Size("M")
    assert str(batch * 8 * cdiv(length, 128)) == "B * 8 * cdiv(M, 128)"
    assert str((length + 1) * batch) == "(M + 1) * B"
    assert str(62 - bits(batch * length)) == "62 - bits(B * M)"
    assert (batch * 1, 1 * batch, batch * 0, batch + 0) == (batch, batch, 0, batch)


# Inputs


def of_kind(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


Q = named("q", of_kind((2, 3, 5, 8)), (Size("B"), Size("H"), Size("M"), 8))
LSE = Place("lse", Q.shape[:3], contiguous(Q.shape[:3]), torch.float32)


def test_tensors_fill_in_the_names() -> None:
    found = extents_of((Q, LSE), (of_kind((4, 1, 7, 8)), of_kind((4, 1, 7))))
    assert {name: found[name] for name in ("B", "H", "M", "q_stride2")} == {
        "B": 4, "H": 1, "M": 7, "q_stride2": 8
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ((of_kind((4, 1, 7, 16)), of_kind((4, 1, 7))), "8 is 8, not 16"),
        ((of_kind((4, 1, 7, 8)), of_kind((4, 2, 7))), "H is 1, not 2"),
        ((of_kind((4, 2, 7, 8)), of_kind((4, 7, 2)).mT), "not 1"),
        ((of_kind((4, 1, 7, 8)), None), "is what the plan takes, not None"),
        ((of_kind((4, 1, 7, 8)), of_kind((4, 1, 7), torch.float64)), "not .* of torch.float64"),
        ((of_kind((4, 1, 7, 8)), of_kind((4, 7))), r"not \[4, 7\]"),
    ],
    ids=["number", "name", "strides", "absent", "dtype", "rank"],
)
def test_other_tensors_are_refused(tensors: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        extents_of((Q, LSE), tensors)


def test_one_that_is_not_expected_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is what the plan takes"):
        extents_of((None,), (of_kind((1,)),))


def test_exactly_this_kind() -> None:
    place = fixed("x", of_kind((2, 3)))
    assert extents_of((place,), (of_kind((2, 3)),)) == {}
    with pytest.raises(ValueError, match="3 is 3, not 1"):
        extents_of((place,), (of_kind((3, 2)).mT,))


# Plans of attention


def plans(batch: int, length: int, keys: int, dim: int = 64) -> dict[str, Plan]:
    """Forward and backward of ALiBi with a causal mask, on both families' kernels, by name."""
    heads, slopes = 4, torch.rand(4)
    q = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16)
    k = v = torch.empty(batch, heads, keys, dim, dtype=torch.bfloat16)
    score = trace(mods.alibi(slopes), "score", torch.device("cpu"))
    mask = create_block_mask(masks.causal(), None, None, length, keys, device="cpu").snapshot()
    problem = Problem(score, None, mask, 0.125)
    found = {}
    for backward in (False, True):
        spec = triton.kernel_spec(q, k, v, problem, backward=backward)
        sizes = (batch, heads, length, keys)
        texts = [lower(x.graph, sizes, split=False) for x in (score, mask.traced)]
        kernels = kernels_for(spec, *texts)
        call = operands(q, k, v, problem, (), ())
        for family in families.families():
            made: Any = family.kernels(kernels)
            writer, rungs = PlanWriter(), FirstRungs(made)
            results: Any
            if backward:
                lse = torch.empty(q.shape[:3])
                incoming = arguments.incoming(call, (q, None, q, k, v, q, lse), kept=2)
                needs, inputs = (True, True, True), (*incoming.in_order(), *call.of_mask)
                results = family.backward(writer, made, call, incoming, needs, rungs, k, q)[:3]
            else:
                inputs = call.inputs
                results = family.forward(writer, made, call, rungs, want_max=False, keep=True)
            found[f"{family.name} {'backward' if backward else 'forward'}"] = writer.plan(inputs, results)
    return found


def test_one_plan_serves_all_lengths() -> None:
    assert plans(1, 1100, 300) == plans(3, 1024, 4096)
    assert plans(1, 300, 300) == plans(3, 1024, 1024)  # where rows end soon


def test_a_plan_as_it_is_read(golden: Any) -> None:
    found = plans(2, 300, 300)
    order = sorted(found, key=lambda name: (name.endswith("backward"), name.startswith("hopper")))
    texts = [f"{name}\n\n{found[name]}" for name in order]
    golden("\n\n\n".join(texts) + "\n", "plans.txt")


def test_launches_by_name() -> None:
    found = plans(2, 300, 300)
    assert [step.name for step in found["portable backward"].launches()] == [
        "statistics_kernel", "dq_kernel", "dkdv_kernel",
    ]  # fmt: skip
    (step,) = found["hopper backward"].launches("backward")
    assert isinstance(step, Launch) and step.rung is not None
    assert {"query", "grad_out", "lse2"} <= {place.name for place in step.places()}


def test_a_source_of_kernels_is_no_part_of_what_plans_are_compared_by() -> None:
    one, other = (SimpleNamespace(module=None, interpreted=x) for x in (False, True))
    assert Launch(one, "forward", 1, {"M": 3}) == Launch(other, "forward", 1, {"M": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("length", [200, 130])
def test_what_explain_shows_is_what_a_call_does(
    length: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes = torch.rand(2, requires_grad=learned)
    shown = explain(mods.alibi(slopes), masks.causal(), head_dim=16).plan
    assert set(shown) == {"portable forward", "portable backward"}  # a head dimension that Hopper's lack
    bound: list[Plan] = []
    made = families.Bound
    monkeypatch.setattr(families, "Bound", lambda plan, *rest: bound.append(plan) or made(plan, *rest))
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(masks.causal(), None, None, length, length, device="cpu")
    out = flex_attention(q, k, v, mods.alibi(slopes), mask, kernel_options={"BACKEND": "INTERPRET"})
    torch.autograd.grad(out.sum(), (q, k, v, *([slopes] if learned else [])))
    assert bound == [shown["portable forward"], shown["portable backward"]]


def test_plans_of_plain_attention() -> None:
    shown = explain().plan
    ways = ("forward", "backward")
    assert set(shown) == {f"{family} {way}" for family in ("portable", "hopper") for way in ways}
    assert "mask" not in str(shown) and "grad_query" in str(shown["hopper backward"])


# A kernel's signature declares its parameters. The plan of a call has an argument for each.

TABLE, BIAS = torch.randn(4, 100, requires_grad=True), torch.randn(4, 8, 8, requires_grad=True)
VARIANTS: Mapping[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (None, None, {}),
    "causal": (None, masks.causal(), {}),
    "lists": (mods.softcap(30.0), masks.causal(), {"mask_form": "lists", "shared_kv": True}),
    "document": (mods.alibi(torch.rand(4)), masks.document(torch.arange(512) // 100), {}),
    "float32": (mods.softcap(30.0), masks.causal(), {"dtype": torch.float32}),
    "wide": (None, masks.causal(), {"head_dim": 256}),
    "large scores": (lambda score, b, h, q_idx, kv_idx: score * 1e9, None, {}),
    "by row": (lambda score, b, h, q_idx, kv_idx: score + TABLE[h, q_idx % 100], masks.causal(), {}),
    "by column": (lambda score, b, h, q_idx, kv_idx: score + TABLE[h, kv_idx % 100], masks.causal(), {}),
    "by diagonal": (mods.relative_bias(torch.randn(4, 63, requires_grad=True)), masks.causal(), {}),
    "by element": (lambda score, b, h, q_idx, kv_idx: score + BIAS[h, q_idx % 8, kv_idx % 8], None, {}),
    "float8": (None, masks.causal(), {"dtype": torch.float8_e4m3fn, "value_scale": True}),
}
OPTIONS = {"num_warps", "num_stages", "maxnreg"}
DTYPE = re.compile(r"\b(float32|int32|int64|uint8)\b")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_plan_gives_what_kernels_declare(name: str) -> None:
    score, mask, facts = VARIANTS[name]
    shown, *_ = by_family(variant(score, mask, **facts))
    assert any(family.startswith("hopper") for family in shown) != (name == "float32")
    for launch in [launch for plan in shown.values() for launch in plan.launches()]:
        kernel = getattr(launch.source.module, launch.name)
        given = {**launch.arguments, **rung_arguments(launch)}
        assert set(given) - OPTIONS == set(kernel.arg_names), launch.name
        # A kernel is compiled for the kind of a stride or of a row's length: a multiple of 16, or 1. It
        # serves any number of queries, keys and heads.
        numbers = {name for name, value in given.items() if isinstance(value, Size)}
        strides = {name for name in numbers if "stride" in name} - {"stride_mask_b", "stride_mask_h"}
        row_lengths = {name for name in numbers if re.match("(TABLE|table)_size1|BIAS_size2", name)}
        assert numbers - strides - row_lengths <= set(kernel.do_not_specialize), launch.name
        for parameter, dtype in declared_dtypes(launch).items():
            if isinstance(given[parameter], Place):
                assert given[parameter].dtype == dtype, f"{launch.name}: {parameter}"


def declared_dtypes(launch: Launch) -> dict[str, torch.dtype]:
    """The dtypes that comments in a kernel's signature name, by parameter."""
    source = inspect.getsource(launch.source.module)
    found = re.search(rf"^def {launch.name}\(\n(.*?)^\):", source, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [line.partition("#") for line in found[1].splitlines()]
    return {
        name: getattr(torch, dtype[1])
        for parameters, _, comment in lines
        if (dtype := DTYPE.search(comment))
        for name in re.findall(r"\b[A-Z]\w*", parameters)
    }
