"""Queries, keys and values in float8, against float64 of what they stand for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from float8_cases import CASES, E4M3, E5M2, Float8Case, check, eager, handle, made
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmod import Scales, flex_attention, mods, quantize
from flexmod.backends.options import parse
from flexmod.calls import checks, float8
from flexmod.calls.float8 import ScaledScore

WAYS: dict[str, Callable[..., Any]] = {
    "cpu": eager,
    "reference": lambda *x, **options: eager(*x, kernel_options={"BACKEND": "REFERENCE"}, **options),
    "interpret": lambda *x, **options: eager(*x, kernel_options={"BACKEND": "INTERPRET"}, **options),
    "handle": handle,
    "graph": lambda *x, **options: torch.compile(eager, backend="aot_eager", fullgraph=True)(*x, **options),
}
# all cases on the CPU; of the other ways few in the quick tests, and some in the long ones
SOME = ("no scales", "by tensor", "by block", "mixed scales", "float16 out", "one query, by block", "bshd")
SOME += ("keys and values", "keys and values by block", "values")
QUICK = {
    "cpu": CASES, "reference": SOME, "handle": SOME, "interpret": ("mixed scales", "keys and values"),
    "graph": ("mixed scales", "bshd"),
}  # fmt: skip
LONG = {
    "interpret": ("no scales", "by block", "the other format", "wide values", "one query, by block", "bshd"),
    "graph": ("by block", "float16 out", "one query, by block", "keys and values"),
}


def tier(way: str, name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK[way]:
        return []
    return [pytest.mark.long if name in LONG.get(way, ()) else pytest.mark.every]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=tier(way, name))
        for way in WAYS
        for name in CASES
    ],
)
def test_attention(way: str, name: str) -> None:
    torch._dynamo.reset()
    check(CASES[name], WAYS[way])


def test_scales_are_read_at_each_call() -> None:
    call = made(Float8Case(score=mods.softcap(3.0)))
    scales = call.options["scales"]
    before = flex_attention(*call.tensors, **call.options)
    for scale in scales:
        scale.mul_(2.0)
    after = flex_attention(*call.tensors, **call.options)
    doubled = flex_attention(*call.tensors, **{**call.options, "scales": Scales(*map(torch.clone, scales))})
    assert torch.equal(after, doubled) and not torch.allclose(before, after)


def test_a_user_mod_sees_natural_scores() -> None:
    """A threshold between the products with scales and those without."""
    ones = torch.ones(1, 1, 4, 16).to(E4M3)
    scales = Scales(query=torch.tensor(0.5), key=torch.full((1, 1), 0.25))
    seen = flex_attention(
        ones, ones, ones, lambda score, b, h, q_idx, kv_idx: torch.where(score < 3.0, score, -torch.inf),
        scales=scales, scale=1.0, return_lse=True,
    )[1]  # fmt: skip
    torch.testing.assert_close(seen, torch.full((1, 1, 4), 2.0 + torch.tensor(4.0).log().item()))


def test_no_queries_and_no_keys() -> None:
    for length, keys in ((0, 5), (5, 0)):
        query, key = torch.zeros(1, 2, length, 16).to(E5M2), torch.zeros(1, 2, keys, 16).to(E5M2)
        out, lse = flex_attention(query, key, key, return_lse=True, scales=Scales(torch.ones(())))
        assert out.dtype is torch.bfloat16 and out.shape == (1, 2, length, 16) and not out.any()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("heads", [(4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("blocks", [(), (1,)], ids=["by head", "by block"])
def test_heads_of_key_and_value_differ(heads: tuple[int, int], blocks: tuple[int, ...]) -> None:
    """In a graph two of the cases: more heads of keys, by head; more heads of values, by block."""
    query, key, value = (torch.randn(1, of_one, 40, 16).to(E4M3) for of_one in (4, *heads))
    scales = Scales(key=torch.rand(1, heads[0], *blocks) + 0.5, value=torch.rand(1, heads[1], *blocks) + 0.5)
    found = flex_attention(query, key, value, enable_gqa=True, scales=scales)
    key4, value4, *of_both = (x.repeat_interleave(4 // x.shape[1], 1) for x in (key, value, *scales[1:]))
    expected = flex_attention(query, key4, value4, scales=Scales(None, *of_both))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    if (heads, blocks) not in (((4, 2), ()), ((2, 4), (1,))):
        return
    torch._dynamo.reset()
    in_graph = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    compiled = in_graph(query, key, value, enable_gqa=True, scales=scales)
    torch.testing.assert_close(compiled, expected, atol=0, rtol=0)


def test_autocast_keeps_float8() -> None:
    call = made(CASES["keys and values"])
    expected = flex_attention(*call.tensors, **call.options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flex_attention(*call.tensors, **call.options), expected)


def test_requests_for_gradients_elsewhere_do_not_matter() -> None:
    call = made(CASES["plain"])
    learned = [x.float().requires_grad_() for x in call.tensors]
    with torch.no_grad():
        assert not flex_attention(*[x.to(E4M3) for x in learned], enable_gqa=True).requires_grad


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, E4M3),
        ({"deterministic": True}, E4M3),
        ({"TEMPLATE": "auto"}, E4M3),
        ({"TEMPLATE": "hopper"}, torch.bfloat16),
        ({"fwd_tuned": True}, torch.bfloat16),
        ({"FORCE_USE_FLEX_ATTENTION": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_only_kernels_for_few_queries_get_keys_in_float8(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a half-type query, on a chip that multiplies float8."""
    monkeypatch.setattr(float8, "_multiplies", lambda device: True)
    with FakeTensorMode():
        query = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(1, 2, 900, 64, dtype=E4M3, device="cuda")
        call = float8.lowered(query, key, key, None, None, None, True, parse(options))
    assert call.key.dtype == call.value.dtype == dtype


@pytest.mark.parametrize("places", [(0, 1, 2), (1, 2), (2,)])
def test_a_gpu_takes_float8_beside_few_queries(
    places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all tensors, in keys and values, in values alone."""
    monkeypatch.setattr(float8, "_multiplies", lambda device: True)
    with FakeTensorMode():
        tensors = [torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (2, 900, 900)]
        for place in places:
            tensors[place] = tensors[place].to(E4M3)
        call = float8.lowered(*tensors, None, None, None, False, parse({}))
        checks.check_dtypes(call.query, call.key, call.value, "triton", wants_grad=False)
    assert call.value.dtype == E4M3


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_of_few_queries_serves_other_lengths(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_multiplies", lambda device: True)
    queries, keys = (torch.export.Dim(name, min=2, max=4000) for name in ("queries", "keys"))
    case = torch.randn(1, 4, 3, 64).half(), *(torch.randn(1, 2, 300, 64).to(E4M3) for _ in range(2))

    class Attention(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return flex_attention(*tensors, enable_gqa=True)

    shapes = (({2: queries}, {2: keys}, {2: keys}),)
    exported = torch.export.export(Attention(), case, strict=strict, dynamic_shapes=shapes).module()
    for length, count in ((3, 300), (100, 20)):
        query, key = torch.randn(1, 4, length, 64).half(), torch.randn(1, 2, count, 64).to(E4M3)
        expected = flex_attention(query, key, key, enable_gqa=True)
        torch.testing.assert_close(exported(query, key, key), expected, atol=0, rtol=0)


def test_a_graph_whose_scales_by_block_become_one() -> None:
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, backend="eager", fullgraph=True)
    for length in (300, 65):
        query = torch.randn(1, 4, 3, 64).half()
        key, scale = quantize(torch.randn(1, 2, length, 64), by="block")
        given: dict[str, Any] = {"enable_gqa": True, "scales": Scales(key=scale)}
        expected = flex_attention(query, key, key, **given)
        torch.testing.assert_close(attend(query, key, key, **given), expected, atol=0, rtol=0)


def test_other_calls_stay_as_they_are() -> None:
    query = torch.randn(1, 2, 40, 16, requires_grad=True)
    out = flex_attention(query, query, query, scales=Scales(), out_dtype=torch.float32)
    expected = flex_attention(query, query, query)
    assert torch.equal(out, expected) and out.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Any) -> None:
    scales = Scales(torch.tensor(2.0), torch.rand(1, 2))
    assert all(torch.equal(one, other) for one, other in zip(copied(scales)[:2], scales[:2], strict=True))
    mod = ScaledScore(mods.softcap(2.0), scales.query, scales.key, 2, False)
    q = torch.randn(1, 4, 33, 16)
    expected, found = (flex_attention(q, q, q, score_mod) for score_mod in (mod, copied(mod)))
    assert torch.equal(found, expected)


def test_masks_of_minus_infinity_stay_masks() -> None:
    """A score_mod that excludes elements leaves rows with nothing to attend to."""
    x = torch.randn(1, 2, 50, 16).to(E4M3)
    given = Scales(query=torch.rand(1, 2))

    def strictly(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx > kv_idx, score, -torch.inf)

    out, lse = flex_attention(x, x, x, strictly, scales=given, return_lse=True)
    assert not out[:, :, 0].any() and (lse[:, :, 0] == -torch.inf).all() and lse[:, :, 1:].isfinite().all()
    masked = flex_attention(x, x, x, block_mask=None, scales=given)
    assert not torch.equal(out, masked)
