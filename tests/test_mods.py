"""The library of score mods: each against its formula, written out once more in plain Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from learned_mods import random
from tiers import long_but
from torch.nn.attention import flex_attention as torch_flex

from flexmod import create_block_mask, errors, flex_attention, masks, mods
from flexmod.ir.evaluate import evaluate
from flexmod.ir.fingerprint import fingerprint
from flexmod.ir.trace import trace

INTERPRET, REFERENCE = {"BACKEND": "INTERPRET"}, {"BACKEND": "REFERENCE"}
B, H, M, N = 2, 3, 7, 9
LONG = max(M, N)
OFFSETS, KV_OFFSETS = [0, 3, 3, 7], [0, 2, 6, 9]
SEQUENCE, KV_SEQUENCE = [0, 0, 0, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2]


def integers(high, *shape, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))


SLOPES, LOGITS, TEMPERATURES = random(H), random(H, seed=5), random(H, seed=6).exp()
TABLE, SHORT_TABLE, BUCKETS = random(H, 7), random(5), random(6, H)
DISTANCES, LENGTHS = integers(5, B, M, N), random(5, H)
EDGES, TYPES = integers(3, B, M, N, 4, low=-1), random(4, 3, H)
QUERY_ROPE, KEY_ROPE = random(B, H, M, 4), random(B, N, 4, seed=8)


def clamped(x, reach):
    return min(max(x, -reach), reach)


def t5_bucket(distance, buckets, max_distance):
    """As in the paper's code, for the distances to keys before the query."""
    exact = buckets // 2
    if distance < exact:
        return max(distance, 0)
    grown = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return min(exact + int(grown), buckets - 1)


def t5_both(distance, buckets, max_distance):
    half = buckets // 2
    return (half if distance < 0 else 0) + t5_bucket(abs(distance), half, max_distance)


def sandwich(h, distance, dim=6, heads=3):
    products = sum(math.cos(distance / 10000 ** (2 * i / dim)) for i in range(dim // 2))
    return products / ((h + 1) * 8 / heads)


def edge_bias(b, h, q, k):
    path = [(n, int(edge)) for n, edge in enumerate(EDGES[b, q, k]) if edge >= 0]
    return sum(TYPES[n, edge, h].item() for n, edge in path) / max(1, len(path))


# name -> (what makes the mod of what it captures, what it captures, the same of (s, b, h, q, k))
CASES: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "alibi": (lambda: mods.alibi(3), (), lambda s, b, h, q, k: s + 2.0 ** (-8 / 3 * (h + 1)) * (k - q)),
    "alibi table": (mods.alibi, (SLOPES,), lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "softcap": (lambda: mods.softcap(2.5), (), lambda s, b, h, q, k: 2.5 * math.tanh(s / 2.5)),
    "relative position": (mods.relative_position, (), lambda s, b, h, q, k: s + q - k),
    "causal": (mods.causal_score, (), lambda s, b, h, q, k: s if q >= k else -math.inf),
    "temperature": (lambda: mods.temperature(3), (), lambda s, b, h, q, k: s / 3),
    "one temperature": (
        mods.temperature, (TEMPERATURES[0].clone(),), lambda s, b, h, q, k: s / TEMPERATURES[0]
    ),
    "temperatures": (mods.temperature, (TEMPERATURES,), lambda s, b, h, q, k: s / TEMPERATURES[h]),
    "sink": (lambda t: mods.sink(t, 2), (LOGITS,), lambda s, b, h, q, k: LOGITS[h] if k == 2 else s),
    "relative bias": (
        mods.relative_bias, (TABLE,), lambda s, b, h, q, k: s + TABLE[h, clamped(k - q, 3) + 3]
    ),
    "relative bias of all heads": (
        mods.relative_bias, (SHORT_TABLE,), lambda s, b, h, q, k: s + SHORT_TABLE[clamped(k - q, 2) + 2]
    ),
    "t5": (
        lambda t: mods.t5_bias(t, max_distance=5), (BUCKETS,),
        lambda s, b, h, q, k: s + BUCKETS[t5_bucket(q - k, 6, 5), h],
    ),
    "t5, both sides": (
        lambda t: mods.t5_bias(t, bidirectional=True, max_distance=4), (BUCKETS,),
        lambda s, b, h, q, k: s + BUCKETS[t5_both(q - k, 6, 4), h],
    ),
    "sandwich": (
        lambda: mods.sandwich(3, LONG, dim=6), (), lambda s, b, h, q, k: s + sandwich(h, q - k)
    ),
    "graphormer, spatial": (
        lambda t: mods.graphormer_spatial(t, DISTANCES), (LENGTHS,),
        lambda s, b, h, q, k: s + LENGTHS[DISTANCES[b, q, k], h],
    ),
    "graphormer, one graph": (
        lambda t: mods.graphormer_spatial(t, DISTANCES[0]), (LENGTHS,),
        lambda s, b, h, q, k: s + LENGTHS[DISTANCES[0, q, k], h],
    ),
    "graphormer, edges": (
        lambda t: mods.graphormer_edge(t, EDGES), (TYPES,), lambda s, b, h, q, k: s + edge_bias(b, h, q, k)
    ),
    "mla": (
        lambda t, u: mods.mla_rope(t, u, 0.3), (QUERY_ROPE, KEY_ROPE),
        lambda s, b, h, q, k: s + 0.3 * QUERY_ROPE[b, h, q] @ KEY_ROPE[b, k],
    ),
    "jagged": (
        lambda t: mods.jagged(
            torch.tensor(OFFSETS), lambda s, b, h, q, k: s * (b + 1) + t[h] * (q - k),
            kv_offsets=torch.tensor(KV_OFFSETS),
        ),
        (SLOPES,),
        lambda s, b, h, q, k: s * (SEQUENCE[q] + 1)
        + SLOPES[h] * (q - OFFSETS[SEQUENCE[q]] - k + KV_OFFSETS[KV_SEQUENCE[k]]),
    ),
    "chain": (
        lambda t: mods.chain(mods.temperature(2.0), mods.alibi(t), mods.softcap(1.5)), (SLOPES,),
        lambda s, b, h, q, k: 1.5 * math.tanh((s / 2 + SLOPES[h] * (k - q)) / 1.5),
    ),
    "an empty chain": (mods.chain, (), lambda s, b, h, q, k: s),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_score_mods_do_what_their_formula_says(name):
    make, captured, reference = CASES[name]
    traced = trace(make(*captured), "score")
    score = torch.linspace(-4, 4, B * H * M * N, dtype=torch.float64).view(B, H, M, N)
    places = {
        name: torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, size) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), score.shape, strict=True))
    }
    (got,) = evaluate(traced.graph, traced.tensors, **places, score=score, real=torch.float64)
    for b, h, q, k in itertools.product(*map(range, score.shape)):
        expected = float(reference(score[b, h, q, k].item(), b, h, q, k))
        assert got[b, h, q, k].item() == pytest.approx(expected, rel=1e-6, abs=1e-6), (b, h, q, k)


def attend(name, dtype, options):
    """Out, and the gradients of query, key, value and of what the mod captures."""
    make, captured, _ = CASES[name]
    captured = [x.to(dtype).requires_grad_() for x in captured]
    leaves = [random(B, H, n, 8, seed=n).to(dtype).requires_grad_() for n in (M, N, N)]
    out = flex_attention(*leaves, score_mod=make(*captured), kernel_options=options)
    return out, *torch.autograd.grad(out.square().sum(), [*leaves, *captured])


@pytest.mark.parametrize("name", CASES)
def test_mods_are_known_again(name):
    """What a mod can see is told, so that a second call need not trace it."""
    make, captured, _ = CASES[name]
    assert fingerprint(make(*captured)) is not None


@pytest.mark.parametrize("name", CASES)
def test_a_mod_sees_writes_to_what_it_captures(name):
    """As an optimizer writes to a learned table."""
    make, captured, _ = CASES[name]
    written = [x.clone() for x in captured]
    score_mod = make(*written)
    for x in written:
        x.mul_(1.5)
    query, key, value = (random(B, H, n, 8, seed=n) for n in (M, N, N))
    found, wanted = (flex_attention(query, key, value, mod) for mod in (score_mod, make(*written)))
    assert torch.equal(found, wanted)
    if captured:
        assert not torch.equal(found, flex_attention(query, key, value, make(*captured)))


def close(found, exact, tolerance):
    for got, expected in zip(found, exact, strict=True):
        atol = tolerance * (1 + expected.abs().max().item())
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_attention_on_the_cpu(name):
    close(attend(name, torch.float64, None), attend(name, torch.float64, REFERENCE), 1e-13)


# Each operation of the others is in one of these.
KERNEL = {
    "alibi table", "softcap", "causal", "temperatures", "sink", "relative bias", "t5, both sides", "sandwich",
    "graphormer, spatial", "graphormer, edges", "mla", "jagged", "chain",
}  # fmt: skip


@pytest.mark.parametrize("name", long_but(KERNEL, CASES))
def test_attention_in_the_kernel(name):
    close(attend(name, torch.float32, INTERPRET), attend(name, torch.float64, REFERENCE), 1e-5)


def check_beside_torch(name):
    """Its eager form, which has no backward on the CPU."""
    make, captured, _ = CASES[name]
    query, key, value = (random(B, H, n, 8, seed=n).float() for n in (M, N, N))
    score_mod = make(*(x.float() for x in captured))
    found = torch_flex.flex_attention(query, key, value, score_mod)
    close((found,), attend(name, torch.float64, REFERENCE)[:1], 3e-6)


@pytest.mark.parametrize("name", CASES)
def test_attention_of_torch_takes_them(name):
    with torch.compiler.set_stance("force_eager"):
        check_beside_torch(name)


@pytest.mark.parametrize("name", long_but({"graphormer, edges"}, CASES))
def test_torch_dynamo_takes_them(name):
    """torch's attention compiles each mod."""
    torch.compiler.reset()  # it refuses many mods
    check_beside_torch(name)


def test_the_slopes_of_trained_models():
    """For powers of two the formula, and in between as transformers has them."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    for heads in (1, 2, 3, 8, 12, 20, 40):
        ours = mods.alibi_slopes(heads)
        theirs = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)
        torch.testing.assert_close(ours, theirs[:, 0, 1])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (12, 100), (64, 513)])
def test_the_buckets_of_t5(buckets, max_distance, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    table = torch.arange(float(buckets))[:, None]
    traced = trace(mods.t5_bias(table, bidirectional, max_distance), "score")
    q_idx, kv_idx = torch.arange(400).view(1, 1, -1, 1), torch.arange(400).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    score = torch.zeros(1, 1, 400, 400)
    (found,) = evaluate(traced.graph, traced.tensors, b=zero, h=zero, q_idx=q_idx, kv_idx=kv_idx, score=score)
    theirs = t5.T5Attention._relative_position_bucket(kv_idx - q_idx, bidirectional, buckets, max_distance)
    assert torch.equal(found.long(), theirs)


def test_mla_is_the_attention_of_both_parts_side_by_side():
    query, key, value = (random(B, H, n, 8, seed=n) for n in (M, N, N))
    found = flex_attention(query, key, value, mods.mla_rope(QUERY_ROPE, KEY_ROPE, 0.2), scale=0.2)
    together = torch.cat((query, QUERY_ROPE), -1), torch.cat((key, KEY_ROPE[:, None].expand(B, H, N, 4)), -1)
    torch.testing.assert_close(found, flex_attention(*together, value, scale=0.2))


def test_a_sink_beside_a_mask():
    """A position of zeros in front of key and value; a row that sees nothing else gives 0."""
    query, key, value = (random(B, H, n, 8, seed=n) for n in (M, M, M))
    padded = [F.pad(x, (0, 0, 1, 0)) for x in (key, value)]
    mask_mod = masks.Mask(lambda b, h, q, k: (k == 0) | ((q > 2) & (k - 1 <= q)))
    block_mask = create_block_mask(mask_mod, None, None, M, M + 1, "cpu")
    found = flex_attention(query, *padded, mods.sink(LOGITS), block_mask)
    scores = query @ key.mT / 8**0.5
    kept = torch.ones(M, M, dtype=torch.bool).tril() & (torch.arange(M) > 2)[:, None]
    scores = scores.masked_fill(~kept, -math.inf)
    weights = torch.cat((LOGITS.view(1, H, 1, 1).expand(B, H, M, 1), scores), -1).softmax(-1)[..., 1:]
    torch.testing.assert_close(found, weights @ value)
    assert found[:, :, :3].eq(0).all()


MADE_OF_NUMBERS = {
    "alibi": lambda n: mods.alibi(n(2)),
    "alibi_slopes": lambda n: mods.alibi(mods.alibi_slopes(n(2))),
    "softcap": lambda n: mods.softcap(n(3)),
    "temperature": lambda n: mods.temperature(n(3)),
    "sink": lambda n: mods.sink(torch.zeros(2), n(3)),
    "t5_bias": lambda n: mods.t5_bias(torch.arange(16.0).view(8, 2), max_distance=n(12)),
    "sandwich": lambda n: mods.sandwich(n(2), n(16), n(8)),
    "jagged": lambda n: mods.jagged(torch.tensor([0, 5, 9]), mods.relative_position(), total=n(16)),
}


@pytest.mark.parametrize("name", MADE_OF_NUMBERS)
@pytest.mark.parametrize("number", [np.int64, np.uint8, np.float32])
def test_numbers_of_numpy_count_as_numbers(name, number):
    if number is np.float32 and name not in ("softcap", "temperature"):
        pytest.skip("counts are integers")
    query = torch.randn(1, 2, 16, 8)
    results = [
        flex_attention(query, query, query, MADE_OF_NUMBERS[name](kind)) for kind in (int, number)
    ]
    assert torch.equal(*results)


ALIBI_RULE = "the number of heads, or a floating-point tensor of shape [H]"
EVEN_RULE = "an even integer from 2 to 1073741824"
REAL = "a floating-point tensor of shape "
EVEN, ROPE = torch.zeros(2, 4), torch.zeros(1, 1, 5, 2)


@pytest.mark.parametrize(
    ("call", "facts", "rule"),
    [
        (lambda: mods.softcap(math.inf), "softcap: cap is inf", "a positive finite number"),
        (lambda: mods.softcap(0), "softcap: cap is 0", "a positive finite number"),
        (lambda: mods.softcap(True), "softcap: cap is True", "a positive finite number"),
        (lambda: mods.alibi(0), "alibi: slopes is 0", ALIBI_RULE),
        (lambda: mods.alibi(torch.tensor([1, 2])), "alibi: slopes is torch.int64 [2]", ALIBI_RULE),
        (lambda: mods.alibi_slopes(0), "alibi_slopes: heads is 0", "an integer of 1 or more"),
        (lambda: mods.temperature(-1), "temperature: value is -1", "a positive finite number"),
        (lambda: mods.temperature(EVEN), "temperature: value is torch.float32 [2, 4]", REAL + "[] or [H]"),
        (lambda: mods.sink(1.0), "sink: logits is a float", REAL + "[H]"),
        (lambda: mods.sink(SLOPES, -1), "sink: position is -1", "an integer of 0 or more"),
        (
            lambda: mods.relative_bias(EVEN),
            "relative_bias: table is of shape [2, 4]",
            "of an odd last dimension, 2 * reach + 1",
        ),
        (
            lambda: mods.relative_bias([1.0]),
            "relative_bias: table is a list",
            REAL + "[H, 2 * reach + 1] or [2 * reach + 1]",
        ),
        (lambda: mods.t5_bias(SLOPES), "t5_bias: table is torch.float64 [3]", REAL + "[buckets, H]"),
        (
            lambda: mods.t5_bias(torch.zeros(7, 2), bidirectional=True),
            "t5_bias: table is of shape [7, 2], with max_distance=128",
            "of 2 buckets or more for each direction, half of them fewer than max_distance",
        ),
        (
            lambda: mods.t5_bias(torch.zeros(32, 2), max_distance=16),
            "t5_bias: table is of shape [32, 2], with max_distance=16",
            "of 2 buckets or more for each direction, half of them fewer than max_distance",
        ),
        (lambda: mods.sandwich(8, 0), "sandwich: length is 0", "an integer of 1 or more"),
        (lambda: mods.sandwich(8, 4, 7), "sandwich: dim is 7", EVEN_RULE),
        (lambda: mods.sandwich(8, 4, "16"), "sandwich: dim is '16'", EVEN_RULE),
        (
            lambda: mods.graphormer_spatial(LENGTHS, LENGTHS),
            "graphormer_spatial: distances is torch.float64 [5, 3]",
            "an integer tensor of shape [N, N] or [B, N, N]",
        ),
        (
            lambda: mods.graphormer_edge(LENGTHS, EDGES),
            "graphormer_edge: table is torch.float64 [5, 3]",
            REAL + "[longest, types, H]",
        ),
        (
            lambda: mods.mla_rope(ROPE, torch.zeros(1, 5, 3), 1.0),
            "mla_rope: key_rope is of width 3",
            "of query_rope's, 2",
        ),
        (
            lambda: mods.chain(mods.alibi(2), 3),
            "chain: a mod is an int",
            "a function (score, b, h, q_idx, kv_idx) -> score",
        ),
        (
            lambda: mods.jagged(SLOPES, mods.alibi(2)),
            "jagged: offsets is torch.float64 [3]",
            "an integer tensor of shape [n + 1]",
        ),
    ],
)
def test_refusals(call, facts, rule):
    with pytest.raises(errors.LibraryArgumentError) as caught:
        call()
    assert str(caught.value).startswith(f"{facts}; it must be {rule}.\n  Instead: ")
