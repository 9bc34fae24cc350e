"""What kernels compute once for each distance: which functions these are, and calls beside float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_case import make_case

from flexmod import create_block_mask, flex_attention, masks
from flexmod.backends import families
from flexmod.codegen.by_distance import PAD, split
from flexmod.codegen.compiler import LARGEST, lower
from flexmod.codegen.spec import Decoding
from flexmod.codegen.variant import variant
from flexmod.ir.derivative import LARGEST_ON_LINE
from flexmod.ir.graph import Graph
from flexmod.ir.trace import trace
from flexmod.runtime import config
from flexmod.tools.ahead import VariantCall

LENGTH = 1 << 15
INTERPRET = {"BACKEND": "INTERPRET"}
slopes = torch.tensor([0.3, 0.6, 0.1, 0.9])
table = torch.linspace(-1, 1, 128).view(4, 32)
numbers = torch.arange(64, dtype=torch.int32) % 32


def lowered(score_mod: Callable[..., Any], length: int = LENGTH) -> Graph:
    graph = lower(trace(score_mod, "score").graph, (2, 4, length, length), split=False).graph
    assert graph is not None
    return graph


def said(graph: Graph | None) -> str:
    """The operations of each function, in order."""
    if graph is None:
        return "none"
    return " | ".join(" ".join(n.op for n in graph.of([one]).nodes if n.args) for one in graph.results)


def distance(q: Any, k: Any) -> Any:
    return (q - k).abs().float()


# a mod, and the functions that a forward and a backward compute for each distance
SPLITS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a logarithm": (lambda s, b, h, q, k: s + (distance(q, k) + 1).log(), *["cast cast sub abs add log"] * 2),
    "with what it multiplies": (
        lambda s, b, h, q, k: s - slopes[h] * (distance(q, k) + 1).log(),
        *["load cast cast sub abs add log mul"] * 2,
    ),
    "up to what reads the score": (
        lambda s, b, h, q, k: torch.tanh(s + distance(q, k).sqrt()), "cast cast sub abs sqrt", "none"
    ),
    "an index": (
        lambda s, b, h, q, k: s + table[h, numbers[(q - k).clamp(0, 63)]],
        *["sub maximum minimum load load"] * 2,
    ),
    "a condition": (
        lambda s, b, h, q, k: torch.where(torch.cos(q - k) > 0, s, 1.0), *["cast cast sub cos gt"] * 2
    ),
    "two functions": (
        lambda s, b, h, q, k: (s + distance(q, k).log()) * (distance(q, k) + h).sqrt(),
        "cast cast sub abs log | cast cast sub abs add sqrt", "none",
    ),
    "what a derivative reads, too": (
        lambda s, b, h, q, k: s * distance(q, k).sqrt(), "cast cast sub abs sqrt", "none"
    ),
    "what costs more than two loads": (
        lambda s, b, h, q, k: s * torch.cos((q - k) * 0.1), *["cast cast sub mul cos"] * 2
    ),
    "one load": (lambda s, b, h, q, k: s + table[h, (q - k).clamp(0, 31)], *["none"] * 2),
    "few instructions": (lambda s, b, h, q, k: s + slopes[h] * (k - q), *["none"] * 2),
    "an exponential": (lambda s, b, h, q, k: s + torch.exp(-distance(q, k)), *["none"] * 2),
    "a power of a number": (lambda s, b, h, q, k: s * 0.9 ** distance(q, k), *["none"] * 2),
    "not of the distance": (lambda s, b, h, q, k: s + torch.sin(q * 2 - k), *["none"] * 2),
    "of a row": (lambda s, b, h, q, k: s + torch.sin(q), *["none"] * 2),
    "of rounded positions": (lambda s, b, h, q, k: s + torch.log(distance(q * 0.1, k * 0.1)), *["none"] * 2),
    "of the score": (lambda s, b, h, q, k: s + torch.sin(s + (q - k)), *["none"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", SPLITS)
def test_functions(name: str, backward: bool) -> None:
    score_mod, *wanted = SPLITS[name]
    graph = lowered(score_mod)
    found = split(graph, LARGEST_ON_LINE, backward=backward)
    assert said(found.functions) == wanted[backward]
    added = found.graph.captures[len(graph.captures) :]
    assert len(added) == (0 if found.functions is None else len(found.functions.results))
    assert found.derived in (graph, found.graph)


def test_a_sum_of_learned_values_is_loaded_and_not_differentiated() -> None:
    graph = lowered(lambda s, b, h, q, k: s + table[h, torch.log2(distance(q, k) + 1).int()])
    found = split(graph, LARGEST_ON_LINE, [0], backward=True)
    assert said(found.functions) == "sub abs cast add log2 cast load"
    assert found.derived is graph


def test_a_derivative_that_needs_the_values_keeps_learned_loads() -> None:
    """The gradient of the slope is a logarithm, and it needs one for each pair in any case."""
    graph = lowered(lambda s, b, h, q, k: s - slopes[h] * (distance(q, k) + 1).log())
    assert split(graph, LARGEST_ON_LINE, [0], backward=True).functions is None
    graph = lowered(lambda s, b, h, q, k: s - slopes[h] * torch.cos((q - k) * 0.1))
    found = split(graph, LARGEST_ON_LINE, [0], backward=True)
    assert said(found.functions) == "cast cast sub mul cos" and found.derived is found.graph


def test_indices_of_learned_loads_decide_the_sums_of_their_gradients() -> None:
    """A table by distance would be summed along diagonals, a distance of floats by element."""
    learned = torch.linspace(-1, 1, 80).view(4, 20).requires_grad_()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.tanh(learned[h, (torch.sin(q.float() - k.float()) * 8 + 10).int()])

    found = split(lowered(mod), LARGEST_ON_LINE, [0], backward=True)
    assert said(found.functions) == "cast cast sub sin mul add cast" and found.derived is not found.graph
    case, gradients = make_case(heads=4, q_len=40), []
    for dtype, options in ((torch.float32, INTERPRET), (torch.float64, {"BACKEND": "REFERENCE"})):
        q, k, v, grad_out = (x.to(dtype) for x in (*case.inputs, case.grad_out))
        out = flex_attention(q, k, v, mod, kernel_options=options)
        gradients.append(torch.autograd.grad(out, learned, grad_out)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_float32_rounds_large_positions() -> None:
    graph = lowered(lambda s, b, h, q, k: s + torch.sin(q.float() - k.float()))
    assert split(graph, LARGEST_ON_LINE).functions is not None
    assert split(graph, LARGEST).functions is None


def buckets(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """T5's, as users write them."""
    far = 8 + (torch.log((q - k).abs() / 8) / math.log(16) * 8).to(torch.int32)
    near = (q - k).abs()
    return s + table[h, torch.where(k > q, 16, 0) + torch.where(near < 8, near, far.clamp(max=15))]


CALLS: dict[str, Callable[..., Any]] = {
    "buckets": buckets,
    "of batch entries": lambda s, b, h, q, k: s - torch.sqrt((q - k) ** 2 + b) * slopes[h],
    "integers": lambda s, b, h, q, k: s + numbers[torch.sqrt((q - k).abs().float()).int()] * 0.1,
    "truth values": lambda s, b, h, q, k: torch.where(torch.sin(q - k) > 0, s * 2, s),
    "halves": lambda s, b, h, q, k: s + torch.log1p((q - k).abs().half() / 7),
    "int64": lambda s, b, h, q, k: s + (torch.log1p((q - k).abs().float()).long() << 33 >> 33),
    "two": lambda s, b, h, q, k: (s + torch.cos(k - q)) * torch.sin(q - k) + slopes[h],
}


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("lengths", [(70, 70), (1, 70), (70, 1), (33, 75)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_bits(name: str, lengths: tuple[int, int], switch: Any) -> None:
    """A call that computes each pair has the same bits. Kernels that check indices compute each pair."""
    case = make_case(batch=2, kv_heads=1, q_len=lengths[0], kv_len=lengths[1])
    mask = create_block_mask(masks.prefix_lm(40), None, None, *lengths, device="cpu", BLOCK_SIZE=32)
    found = []
    for check in (0, 1):
        switch(config.CHECK_BOUNDS, check)
        q, k, v = (x.detach().requires_grad_() for x in case.inputs)
        out = flex_attention(q, k, v, CALLS[name], mask, enable_gqa=True, kernel_options=INTERPRET)
        found.append((out, *torch.autograd.grad(out, (q, k, v), case.grad_out)))
    assert all(map(torch.equal, *found))


def test_a_number_that_changes_is_an_argument() -> None:
    """Three calls with other numbers, of which the third compiles nothing."""
    q = make_case(q_len=70).q
    for tau in (3.0, 5.0, 7.0):

        def decay(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, tau: float = tau) -> Any:
            return s - torch.log1p((q_idx - kv_idx).abs() / tau)

        out, exact = (
            flex_attention(x, x, x, decay, kernel_options=options)
            for x, options in ((q, INTERPRET), (q.double(), {"BACKEND": "REFERENCE"}))
        )
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_table_has_room_for_the_padding_of_every_tile_and_block() -> None:
    made = variant(buckets, head_dim=64)
    for direction in ("forward", "backward"):
        for family in families.families():
            kernels = families.kernels_of(family, made, direction, "hopper")
            for name in ("forward", "dq", "dkdv"):
                for rung in kernels.ladder(name):
                    assert max(rung.block_m, rung.block_n) <= PAD
    wide = replace(variant(buckets, head_dim=16), options=(("BLOCK_N", 2 * PAD),))
    for other in (wide, variant(buckets, masks.causal(), block_size=(128, 2 * PAD))):
        (launch,) = VariantCall(other).plan("forward", other.kernels("forward")).launches("distance")
        assert str(launch.arguments["middle"]).endswith(str(2 * PAD))


def test_calls_that_have_few_pairs_compute_them() -> None:
    """Short calls, and calls of few queries, which read each key once."""
    for facts in ({"short": 64}, {"decoding": Decoding(1, 16, False)}):
        assert variant(buckets, **facts).kernels("forward").by_distance is None
    assert variant(buckets).kernels("forward").by_distance is not None
