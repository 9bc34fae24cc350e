"""Threads and processes on one GPU, streams, CUDA graphs, damaged caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from concurrent_calls import SCRIPT, WORKERS, of_threads, results, squares
from torch import Tensor

import flexmod
from flexmod import masks, mods
from flexmod.codegen import cache
from flexmod.codegen.compiler import kernels_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
LENGTH, HEAD_DIM = 777, 64
ROOT = Path(__file__).parents[2]
TEMPLATES = ["auto", "portable"]


@pytest.fixture(scope="module")
def alone() -> list[list[Tensor]]:
    return [results(number, DEVICE, "TRITON", LENGTH, HEAD_DIM) for number in range(8)]


def held_to(alone: list[list[Tensor]], number: int, found: list[Tensor]) -> None:
    """Near, not equal: a number is in the text of the first kernel, and an argument of the next one's."""
    for ours, expected in zip(found, alone[number % 8], strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3, msg=lambda m: f"{number}: {m}")


# Threads and processes


def test_threads(alone: list[list[Tensor]]) -> None:
    """Each on a stream of its own; the kernels are compiled once more, all at once."""
    kernels_for.cache_clear()
    cache._modules.clear()

    def work(number: int) -> list[list[Tensor]]:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            found = [results(number, DEVICE, "TRITON", LENGTH, HEAD_DIM) for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return found

    for number, calls in of_threads(work).items():
        for call in calls:
            held_to(alone, number, call)


@pytest.mark.parametrize("way", ["handle", "score_mod", "written", "lists"])
@torch.no_grad()
def test_tiles_that_another_stream_finds(way: str) -> None:
    """A call finds the tiles on its stream, behind other work; the next one is on a stream that knows
    nothing of it.
    """
    width = torch.tensor(40, device=DEVICE)
    q, k, v = (torch.randn(1, 4, 1000, HEAD_DIM, device=DEVICE, dtype=torch.float16) for _ in range(3))

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() <= width

    def near_alone(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where((q_idx - kv_idx).abs() <= 200, s, -torch.inf)

    handle = flexmod.compile(mask_mod=masks.sliding_window(201, causal=False))
    length = 1000
    if way in ("written", "lists"):
        mask = flexmod.create_block_mask(near, None, None, length, length, device=DEVICE)

    def attend(number: int) -> Tensor:
        x = [t[:, :, :number] for t in (q, k, v)]
        if way == "score_mod":
            return flexmod.flex_attention(*x, near_alone)
        return handle(*x) if way == "handle" else flexmod.flex_attention(*x, block_mask=mask)

    for number in (700, 800) if way in ("handle", "score_mod") else ():
        attend(number)  # torch finds the tiles of a first mask, and waits for the device
    if way in ("written", "lists"):
        for value in (60, 80):
            width.fill_(value)
            attend(length)
    width.fill_(200)
    torch.cuda.synchronize()
    one, other = (torch.cuda.Stream(DEVICE) for _ in range(2))
    with torch.cuda.stream(one):
        for size in (1 << n for n in range(4, 16)):
            torch.zeros(size, dtype=torch.int32, device=DEVICE)  # what memory has without the tiles
        torch.cuda._sleep(200_000_000)
        if way == "lists":
            mask.refresh()
        else:
            attend(length)
    with torch.cuda.stream(other):
        found = mask.kv_num_blocks.clone() if way == "lists" else attend(length)
    torch.cuda.synchronize()
    if way == "lists":
        wide = flexmod.create_block_mask(near, None, None, length, length, device=DEVICE)
        assert torch.equal(found, wide.kv_num_blocks)
    else:
        i = torch.arange(length, device=DEVICE)
        kept = (i[:, None] - i).abs() <= 200
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, kept)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def process(folder: Path, number: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLEXMOD_CACHE_DIR": str(folder / "flexmod"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = [str(number), DEVICE, "TRITON", str(LENGTH), str(HEAD_DIM)]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def printed(started: list[subprocess.Popen[str]]) -> list[Any]:
    """What each prints, all let go together; the last line of what one that failed said instead."""
    for each in started:
        assert each.stdout and each.stdout.readline() == "ready\n", each.communicate()
    for each in started:
        assert each.stdin
        each.stdin.write("go\n")
        each.stdin.flush()
    answers = []
    for each in started:
        output, said = each.communicate(timeout=200)
        answers.append(json.loads(output) if each.returncode == 0 else said.strip().splitlines()[-1:])
    return answers


def test_processes(alone: list[list[Tensor]], tmp_path: Path) -> None:
    answers = printed([process(tmp_path, number) for number in range(WORKERS)])
    for number, found in enumerate(answers):
        assert found == pytest.approx(squares(alone[number % 8]), rel=1e-3), (number, found)


def test_damaged_caches(alone: list[list[Tensor]], tmp_path: Path) -> None:
    """A module of flexmod that was cut is written again; one of Triton: an error, or the right answer."""
    expected = pytest.approx(squares(alone[0]), rel=1e-3)
    assert printed([process(tmp_path, 0)]) == [expected]
    for path in (tmp_path / "flexmod").glob("*.py"):
        path.write_bytes(path.read_bytes()[:200])
    assert printed([process(tmp_path, 0)]) == [expected]
    compiled = [path for path in (tmp_path / "triton").rglob("*") if path.suffix in (".cubin", ".json")]
    assert compiled
    for path in compiled:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (answer,) = printed([process(tmp_path, 0)])
    assert isinstance(answer[0], str) or answer == expected


# Streams and graphs


def variants() -> Iterator[tuple[str, Any, Any]]:
    ids = torch.arange(LENGTH, device=DEVICE) // 100
    yield "causal", None, masks.causal()
    yield "documents", mods.softcap(20.0), masks.document(ids)
    yield "plain", None, None


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def attend(inputs: list[Tensor], grad_out: Tensor, score_mod: Any, mask: Any, template: str) -> list[Tensor]:
    options = {"TEMPLATE": template} if template == "auto" else {"TEMPLATE": template, "deterministic": True}
    out = flexmod.flex_attention(*inputs, score_mod, mask, kernel_options=options)
    return [out, *torch.autograd.grad(out, inputs, grad_out)]


def same(found: list[Tensor], expected: list[Tensor], template: str) -> None:
    for number, (ours, other) in enumerate(zip(found, expected, strict=True)):
        if number == 1 and template == "auto":  # Hopper adds dQ up in any order
            torch.testing.assert_close(ours, other, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(ours, other)


def mask_of(mask_mod: Any) -> Any:
    return mask_mod and flexmod.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=DEVICE)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_side_stream(template: str) -> None:
    """The mask, the forward and the backward run behind what the stream has still to write."""
    for _, score_mod, mask_mod in variants():
        inputs = [random(1, 4, LENGTH, 64).requires_grad_() for _ in range(3)]
        grad_out = random(1, 4, LENGTH, 64)
        expected = attend(inputs, grad_out, score_mod, mask_of(mask_mod), template)
        stream = torch.cuda.Stream(DEVICE)
        for _ in range(4):  # from the third on, calls are played
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                late = [torch.zeros_like(x) for x in inputs]
                torch.cuda._sleep(20_000_000)
                for x, value in zip(late, inputs, strict=True):
                    x.copy_(value.detach())
                leaves = [x.requires_grad_() for x in late]
                found = attend(leaves, grad_out, score_mod, mask_of(mask_mod), template)
            stream.synchronize()
            same(found, expected, template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_cuda_graph(template: str) -> None:
    """Captured once, with its mask and its backward; replayed on other values."""
    for _, score_mod, mask_mod in variants():
        inputs = [random(1, 4, LENGTH, 64).requires_grad_() for _ in range(3)]
        grad_out = random(1, 4, LENGTH, 64)
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                attend(inputs, grad_out, score_mod, mask_of(mask_mod), template)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend(inputs, grad_out, score_mod, mask_of(mask_mod), template)
        for _ in range(3):
            with torch.no_grad():
                for x in (*inputs, grad_out):
                    x.copy_(random(*x.shape))
            for x in found:
                x.detach().fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            replayed = [x.detach().clone() for x in found]
            same(replayed, attend(inputs, grad_out, score_mod, mask_of(mask_mod), template), template)
