"""The generated Hopper kernels, broken on purpose: without one of their waits, arrivals and fences, or with
one of their phases turned, at a time.

That shows what running them as plain Python finds, and that they wait for nothing in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from plain_gluon import Race, Stuck
from tiers import long_but

from flexmod.codegen.hopper import BackwardShape

from . import test_hopper_in_python as forwards
from .hopper_backward_calls import CHUNKS, DELAYED, Call, Case, faults

Run = Callable[[Callable[[str], str]], bool]
"""Runs a call with its text changed: did it end with the right results?"""

STATEMENT = re.compile(r" *(mbarrier\.(wait|arrive|expect)|fence_async_shared|stores_read)\(")
PHASE = re.compile(r"(mbarrier\.wait\(.+?), (\w*phase|turn|0|1)([,)])")
PRODUCTS = re.compile(r"warpgroup_mma_wait\((.+?), deps")


def broken(text: str) -> Iterator[tuple[str, str]]:
    """What is done to a line, and the text of it: without the line, or with a wait for something else."""
    # in the kernel the barriers are made, which is no matter of this test
    end = text.index("_kernel(", text.index("@gluon.jit\ndef produce"))
    for line in re.finditer(r".*\n", text[:end]):
        before, now, after = text[: line.start()], line[0], text[line.end() :]
        if STATEMENT.match(now):
            indent = now[: len(now) - len(now.lstrip())]
            yield f"without {now.strip()}", f"{before}{indent}pass\n{after}"
        if PHASE.search(now):
            yield f"other phase: {now.strip()}", before + PHASE.sub(r"\1, \2 ^ 1\3", now) + after
        if PRODUCTS.search(now):
            fewer = PRODUCTS.sub(r"warpgroup_mma_wait(1 + (\1), deps", now)
            yield f"one product less: {now.strip()}", before + fewer + after


def endured(*runs: Run) -> list[str]:
    """What all of these calls of one text do without."""
    texts: list[str] = []

    def kept(text: str) -> str:
        texts.append(text)
        return text

    assert all(run(kept) for run in runs)
    assert len(set(texts)) == 1
    ways = list(broken(texts[0]))
    assert len(ways) > 25
    return [way for way, text in ways if all(run(lambda _, text=text: text) for run in runs)]


def backward(shape: BackwardShape, dims: tuple[int, int], keys: int, copied_heads: bool = False) -> Run:
    call = Call(Case("", "", shape, dims, (190, keys), heads=(2, 1)))
    out, lse, exact = call.truth()

    def run(changed: Callable[[str], str]) -> bool:
        try:
            found = call.run(out, lse, changed, copied_heads=copied_heads)
            if copied_heads:
                found[1:3] = (x.unflatten(1, (-1, 2)).sum(2) for x in found[1:3])
            return not faults(found, exact, call.case.dtype)
        except (Race, Stuck):
            return False

    return run


def forward(case: forwards.Case) -> Run:
    call = forwards.Call(case)

    def run(changed: Callable[[str], str]) -> bool:
        try:
            return forwards.agrees(call, call.run(changed))
        except (Race, Stuck):
            return False

    return run


@pytest.mark.parametrize(
    ("dim", "needless"),
    [
        # keeps the assembler's order
        (64, "one product less: score = warpgroup_mma_wait(1, deps=(score,))"),
        # behind a wait for all products: this one hands out a result
        pytest.param(
            128, "one product less: score = warpgroup_mma_wait(0, deps=(product,))", marks=pytest.mark.long
        ),
    ],
)
def test_backward_whose_consumers_have_keys_of_their_own(dim: int, needless: str) -> None:
    ways = BackwardShape(64, True, True, late=False), BackwardShape(64, False, False, late=True)
    assert endured(*(backward(way, (dim, 64), 129) for way in ways)) == [needless]


@pytest.mark.long
@pytest.mark.parametrize("dims", [(192, 136), pytest.param((256, 64), marks=pytest.mark.every)])
def test_backward_whose_consumers_share_keys(dims: tuple[int, int]) -> None:
    products = 1 + (dims[1] > 128)  # of dp
    ways = (BackwardShape(64, ahead, None, late=not ahead, block_n=64) for ahead in (True, False))
    assert endured(*(backward(way, dims, 65, copied_heads=way.late) for way in ways)) == [
        # of its last step a consumer reads only those keys whose place it takes itself
        "without mbarrier.wait(done, 0)",
        # keeps the assembler's order
        f"one product less: score = warpgroup_mma_wait({products}, deps=(score,))",
    ]


@pytest.mark.long
def test_backward_whose_consumers_take_grad_q_a_step_late() -> None:
    few, many = (backward(shape, (192, 64), rows) for shape, rows in ((CHUNKS, 65), (DELAYED, 129)))
    assert endured(many, few) == []


@pytest.mark.parametrize("case", long_but({(64, "")}, [(64, ""), (256, ""), (64, "pairs")]), ids=str)
def test_forward(case: tuple[int, str]) -> None:
    """Of few steps and many: a ring of many slots, or of few, hides what the other shows."""
    dim, score = case
    few = forwards.Case("", score, (dim, dim), lengths=(600, 64), block_n=64, stages=4)
    many = forwards.Case("", score, (dim, dim), lengths=(300, 190), block_n=64)
    assert endured(forward(many), forward(few)) == []
