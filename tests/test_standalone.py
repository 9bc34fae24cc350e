"""The standalone file: it runs where flexmod is not, and checks its kernels against dense attention."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from flexmod import and_masks, errors, masks, mods
from flexmod.codegen.spec import KernelName, Tile
from flexmod.ir.graph import expect_size
from flexmod.runtime.offline import Report
from flexmod.runtime.target import named
from flexmod.tools.ahead import Built
from flexmod.tools.standalone import save, standalone
from flexmod.tools.standalone_text import example, quotes

EVERY = pytest.mark.every
KERNELS: tuple[KernelName, ...] = ("forward", "dq", "dkdv", "scatter")
SMALL = {name: Tile(64, 64, 4, 1) for name in KERNELS}

# Runs files as programs, with flexmod out of reach, until one fails.
ALONE = """
import runpy, sys
sys.modules["flexmod"] = None
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert [name for name in sys.modules if name.split(".")[0] == "flexmod"] == ["flexmod"]
        if end.code:
            raise
"""


def run(*paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.python(ALONE, *paths, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


slopes = torch.rand(2, requires_grad=True)
temperature = torch.tensor(0.5, requires_grad=True)
bias = torch.randn(2, 4, 260, requires_grad=True)
table = torch.randn(4, 16, 16, requires_grad=True)
ids = torch.arange(300, dtype=torch.int32) // 77


def by_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Sums by row, by column, and along diagonals, which a file adds up by element."""
    near = torch.clamp(q_idx - kv_idx + 100, 0, 250)
    return score * temperature + bias[b, h, near] + bias[b, h, kv_idx]


def by_element(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[h, q_idx % 16, kv_idx % 16]


def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Some queries have nothing to attend to; the mask is another for each head."""
    return (q_idx >= kv_idx) & (q_idx > 30 * h)


def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[h, torch.log2(torch.abs(q_idx - kv_idx) + 1).to(torch.int32), 3]


CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "distances": (by_distance, masks.causal(), ["table"]),
    "plain": (None, None, []),
    "softcap": (mods.softcap(15.0), None, []),
    "split": (mods.causal_score(), None, []),
    "alibi": (mods.alibi(slopes), masks.document(ids, causal=True), ["table"]),
    "places": (by_place, of_heads, ["temperature", "bias"]),
    "elements": (by_element, masks.sliding_window(40), ["table"]),
}

QUICK = [("places", torch.bfloat16), ("distances", torch.bfloat16)]
LONG = [*((name, torch.bfloat16) for name in CASES), ("split", torch.float32), ("places", torch.float32)]
LONG = [case for case in LONG if case not in QUICK]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="two"),
        pytest.param(LONG, id="the others", marks=pytest.mark.long),
    ],
)
def test_it_runs_without_flexmod(cases: list[tuple[str, torch.dtype]], tmp_path: Path) -> None:
    paths = []
    for name, dtype in cases:
        score_mod, mask_mod, _ = CASES[name]
        paths.append(
            save(
                tmp_path / f"{name}_{len(paths)}.py", score_mod, mask_mod,
                head_dim=24, value_dim=16, dtype=dtype, block_size=64, tiles=SMALL,
            )
        )  # fmt: skip
    done = run(*paths, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.split(" relative error ")[0].strip() for line in done.stdout.splitlines()]
    expected = []
    for name, _ in cases:
        expected += ["B=2 HQ=2 HKV=1 M=100 N=130, torch.float32 on cpu", "out"]
        expected += [f"grad of {x}" for x in ("q", "k", "v", *CASES[name][2])]
    assert shown == expected
    assert done.stderr == ""


def test_it_refuses_empty_tensors(tmp_path: Path) -> None:
    """A launch without keys would crash."""
    path = save(tmp_path / "mine.py", None, masks.causal(), head_dim=16, tiles=SMALL)
    calls = """
import runpy, sys, torch
mine = runpy.run_path(sys.argv[1])
mask = mine["build_mask"](1, 2, 5, 7, device="cpu")
for batch, heads, queries, keys in ((0, 2, 5, 7), (1, 0, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0)):
    q, k = torch.zeros(batch, heads, queries, 16), torch.zeros(batch, heads, keys, 16)
    for call in (
        lambda: mine["build_mask"](batch, heads, queries, keys, device="cpu"),
        lambda: mine["attention"](q, k, k, mask),
    ):
        try:
            call()
        except ValueError as error:
            print(error)
"""
    done = forked.python(calls, path, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout.splitlines() == [
        "B, HQ, M and N are 1 or more", "B, HQ, HKV, M and N are 1 or more"
    ] * 4, done.stderr  # fmt: skip


REFUSED = """
import runpy, sys, torch
attention, build_mask = (runpy.run_path(sys.argv[1])[name] for name in ("attention", "build_mask"))


def refused(call):
    try:
        call()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(str(error).split(': [')[0])
    else:
        print("no error")


def tensors(heads=2, length=70, **kind):
    return [torch.randn(1, heads, length, 16, **kind) for _ in range(3)]


ids, bias = torch.arange(70) // 40, torch.randn(2, 70)
mask = build_mask(1, 2, 70, 70, ids, device="cpu")
q, k, v = tensors()
attention(q, k, v, mask, bias)
refused(lambda: attention(*tensors(dtype=torch.float64), mask, bias))
refused(lambda: attention(q, k, v, mask, bias.double()))
refused(lambda: attention(q, k, v, mask, bias[0]))
refused(lambda: attention(q, k, v, mask, bias[:, :69]))
refused(lambda: attention(q, k, v, mask, bias[:1]))
refused(lambda: attention(q, k, v, mask, bias.clone().requires_grad_()))
refused(lambda: attention(q, k, v, mask, bias.to("meta")))
refused(lambda: attention(q, k, v, mask, bias, scale=float("nan")))
refused(lambda: build_mask(1, 2, 71, 70, ids, device="cpu"))
refused(lambda: build_mask(1, 2, 70, 71, ids, device="cpu"))
refused(lambda: build_mask(1, 2, 70, 70, ids.int(), device="cpu"))
refused(lambda: attention(*tensors(heads=4), mask, torch.randn(4, 70)))

q.requires_grad_()
(grad,) = torch.autograd.grad(attention(q, k, v, mask, bias).square().sum(), q, create_graph=True)
refused(lambda: torch.autograd.grad(grad.square().sum() + q.sum(), q))
out = attention(q, k, v, mask, bias)
ids.zero_()
refused(lambda: torch.autograd.grad(out.sum(), q))
refused(lambda: attention(q, k, v, mask, bias))
"""


def test_it_refuses_what_it_was_not_written_for(tmp_path: Path) -> None:
    """Kernels read 0 past the end of a tensor, and know nothing of autograd's second derivatives."""
    ids, bias = torch.arange(70) // 40, torch.randn(2, 70)

    def by_key(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[expect_size(h, 2, "mods.by_key", "bias"), kv_idx]

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    path = save(tmp_path / "mine.py", by_key, same, head_dim=16, block_size=64, tiles=SMALL)
    done = forked.python(REFUSED, path, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout.splitlines() == [
        "q is torch.float64; this file is for torch.float16 and torch.bfloat16 and torch.float32",
        "bias is torch.float64 of rank 2; the kernels read torch.float32 of rank 2",
        "bias is torch.float32 of rank 1; the kernels read torch.float32 of rank 2",
        "bias has the shape [2, 69], but the kernels read [2, 70]",
        "bias has the shape [1, 70], but the kernels read [2, 70]",
        "bias gets no gradient here: save the file with one that requires grad",
        "q is on cpu, and another tensor is not",
        "a batch of keys is q's or 1, scale is positive, sizes are up to 1048576",
        "ids has the shape [70], but the kernels read [71]",
        "ids has the shape [70], but the kernels read [71]",
        "ids is torch.int32 of rank 1; the kernels read torch.int64 of rank 1",
        "mods.by_key is made for HQ=2, but the call has 4",
        "this file has no second derivatives; dense_attention has them",
        "one of the variables needed for gradient computation has been modified by an inplace operation",
        "a tensor that the mask captures was written to: build the mask again",
    ], done.stderr


@pytest.mark.parametrize(
    ("size", "index", "least", "interpreted"),
    [
        (60, lambda b, h, i, j: i + 5, "M + 5", (2, 2, 1, 55, 130)),
        (279, lambda b, h, i, j: i - j + 139, "max(M + 139, N - 140)", (2, 2, 1, 100, 130)),
        (279, lambda b, h, i, j: 2 * i + j, "2 * M + N - 2", (2, 2, 1, 50, 65)),
        (60, lambda b, h, i, j: -1 - j, "N", (2, 2, 1, 25, 32)),
        (60, lambda b, h, i, j: i // 4, "((M - 1) // 4) + 1", (2, 2, 1, 100, 130)),
        (60, lambda b, h, i, j: (i - j).clamp(-4, 4) + 4, "9", (2, 2, 1, 100, 130)),
        (60, lambda b, h, i, j: (i * j) % 7, "7", (2, 2, 1, 100, 130)),
        (60, lambda b, h, i, j: i * j, "0", (2, 2, 1, 6, 8)),
    ],
)  # fmt: skip
def test_sizes_that_a_call_needs(size: int, index: Any, least: str, interpreted: Any) -> None:
    bias = torch.randn(size)
    text = standalone(lambda s, b, h, i, j: s + bias[index(b, h, i, j)], head_dim=16, tiles=SMALL)
    found = re.findall(r"^    check_captured\('bias', bias, torch.float32, (.*)\)$", text, re.MULTILINE)
    assert found == [least]
    assert f"keys = {interpreted} if interpreted else (" in text


def test_its_check_has_the_sizes_that_mods_expect_and_sees_a_wrong_kernel(tmp_path: Path) -> None:
    """One process runs both files; the second one fails."""
    sizes = save(tmp_path / "sizes.py", mods.alibi(5), masks.block_diffusion(30, 6), head_dim=16, tiles=SMALL)
    text = standalone(None, masks.causal(), head_dim=16, block_size=64, tiles=SMALL)
    wrong, count = re.subn(r"(\ndef mask_mod\(.*?\n    return q_idx) >=", r"\1 >", text, flags=re.DOTALL)
    assert count == 1
    path = tmp_path / "wrong.py"
    path.write_text(wrong)
    done = run(sizes, path, TRITON_INTERPRET="1")
    assert done.returncode == 1
    of_sizes, of_wrong = done.stdout.split("\nB=2 HQ=2 ")
    assert of_sizes.startswith("B=2 HQ=5 HKV=1 M=60 N=60, ") and "DIFFERS" not in of_sizes
    assert "DIFFERS" in of_wrong
    assert "attention differs from dense attention" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = run(save(tmp_path / "mine.py", head_dim=16, tiles=SMALL), TRITON_INTERPRET="0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no GPU here; TRITON_INTERPRET=1 runs the kernels on the CPU\n"


@pytest.mark.parametrize(
    "target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.long), pytest.param("gfx942", marks=EVERY)]
)
def test_tiles_are_chosen_for_a_chip(target: str) -> None:
    """Each kernel of the file compiles for it, and fits."""
    text = standalone(None, masks.causal(), head_dim=16, target=target)
    assert f"TILES has them, chosen for\n{target}.\n" in text
    tiles: dict[str, Any] = {}
    start = text.index("TILES = {")
    exec(text[start : text.index("}", start) + 1], tiles)
    assert set(tiles["TILES"]) == {"forward", "dq", "dkdv"}


@pytest.mark.parametrize(("target", "precision"), [("sm_80", "PRECISION"), ("gfx942", '"ieee"')])
def test_products_of_float32_follow_the_chip(
    target: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["flexmod.tools.standalone"]
    monkeypatch.setattr(module, "first_tile", lambda _, kernels, name, target: chosen(name, target))
    text = standalone(head_dim=16, dtype=torch.float32, target=target)
    assert set(re.findall(r"input_precision=([^)]*)", text)) == {precision}
    assert ('else "bf16x6")' in text) == ("grad_q_lost" not in text) == (precision == "PRECISION")


def chosen(name: KernelName, target: str) -> Built:
    return Built(name, "portable", SMALL[name], Report(named(target), 0, 0, 0, 0))


def test_an_unknown_chip() -> None:
    with pytest.raises(errors.UnknownTarget):
        standalone(None, masks.causal(), target="sm_9000")


def test_float8_has_no_file() -> None:
    with pytest.raises(errors.ArgumentTypeError, match=r"^dtype is torch.float8_e5m2"):
        standalone(dtype=torch.float8_e5m2)


def test_a_chip_that_no_tile_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(named("sm_86"), 200_000, 255, 0, 0)
    module = sys.modules["flexmod.tools.standalone"]
    monkeypatch.setattr(module, "first_tile", lambda *_: Built("dq", "portable", SMALL["dq"], report))
    with pytest.raises(errors.NoTileFits) as raised:
        standalone(head_dim=16, target="sm_86")
    assert str(raised.value).startswith(
        "no tile size fits the 101376 bytes of shared memory of sm_86; tried 64x64 (4 warps, 1 stage) last: "
        "200000 bytes."
    )


def test_the_users_functions_are_quoted() -> None:
    window = 40

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= window

    text = standalone(mods.softcap(15.0), near, tiles=SMALL)
    assert "#     def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:\n" in text
    assert "#         return q_idx - kv_idx <= window\n#     where window = 40\n" in text
    assert "#         return cap * torch.tanh(score / cap)\n#     where cap = 15.0\n" in text


def test_functions_that_a_mask_is_combined_of_are_quoted() -> None:
    class TileStorage:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return self.function(b, h, q_idx, kv_idx)

    both = and_masks(TileStorage(masks.causal()), masks.sliding_window(9))
    lines = [line.strip() for quote in quotes([both]) for line in quote]
    assert any(line.startswith("def _all_of(mask_mods: Sequence[MaskMod], ") for line in lines)
    assert "return q_idx >= kv_idx" in lines
    assert "where window = 9" in lines
    namespace: dict[str, Any] = {}
    exec(compile("def made(b, h, q_idx, kv_idx): return q_idx > 0", "<nowhere>", "exec"), namespace)
    assert quotes([namespace["made"]]) == [["made: its source is not at hand"]]


def test_functions_and_numbers_of_a_partial_are_quoted() -> None:
    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: int) -> Any:
        return q_idx - kv_idx < window

    found = quotes([partial(near, window=40)])
    assert found[0] == ["near with window = 40"]
    assert found[1][1] == "    return q_idx - kv_idx < window"


def test_views_of_one_memory_are_several_arguments() -> None:
    both = torch.randn(70, 70)
    views = {"flipped": both.T, "half": both[:35, :35]}

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        flipped, half = views["flipped"], views["half"]
        return score + flipped[q_idx, kv_idx] * half[q_idx // 2, kv_idx // 2]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (both[q_idx, kv_idx] > 0) & (views["half"][q_idx // 2, kv_idx // 2] > 0)

    text = standalone(score_mod, mask_mod, tiles=SMALL)
    found = re.findall(r"^def (?:attention|build_mask)\((.*)\):$", text, re.MULTILINE)
    assert found == [
        'batch, heads, queries, keys, both, half, device="cuda"', "q, k, v, mask, flipped, half, scale=None"
    ]  # fmt: skip


def test_a_score_mod_of_infinities_alone_leaves_its_tensors_to_the_mask() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(ids[q_idx] == ids[kv_idx], score, -torch.inf)

    text = standalone(score_mod, tiles=SMALL)
    found = re.findall(r"^def (?:attention|build_mask)\((.*)\):$", text, re.MULTILINE)
    assert found == ['batch, heads, queries, keys, ids, device="cuda"', "q, k, v, mask, scale=None"]


def test_values_of_captured_tensors() -> None:
    assert example(torch.tensor([0.1, 0.2])) == "torch.tensor([0.1, 0.2], dtype=torch.float32, device=device)"
    runs = torch.arange(300) // 100
    scope: dict[str, Any] = {"torch": torch, "device": "cpu"}
    assert torch.equal(eval(example(runs), scope), runs)
    mixed = torch.randint(3, 9, (300, 2), dtype=torch.int32)
    drawn = eval(example(mixed), scope)
    assert (drawn.shape, drawn.dtype) == (mixed.shape, mixed.dtype)
    assert mixed.min() <= drawn.min() and drawn.max() <= mixed.max()
    assert eval(example(torch.randn(100, dtype=torch.float64)), scope).dtype == torch.float64
