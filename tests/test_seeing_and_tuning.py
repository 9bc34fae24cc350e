"""explain, FLEXMOD_DEBUG and kernel_options: what a user sees of the kernels, and sets of them."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from reference_case import make_case

from flexmod import create_block_mask, errors, explain, flex_attention
from flexmod.backends import options
from flexmod.codegen.variant import variant
from flexmod.runtime import config, launch

ROOT = Path(__file__).parents[1]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 19.0 * torch.tanh(score / 19.0)


def kernels(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def test_explain_shows_graphs_with_the_users_lines_and_the_whole_module() -> None:
    explanation = explain(score_mod=soft_cap, mask_mod=causal)
    line = soft_cap.__code__.co_firstlineno + 1
    text = str(explanation)
    assert [graph.kind for graph in explanation.graphs] == ["mask", "score", "grad"]
    assert "mask():" in text
    assert "ge(q_idx, kv_idx)" in text
    assert f"{__file__}:{line}: return 19.0 * torch.tanh(score / 19.0)" in text
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel", "score_mod", "mask_mod"} <= kernels(
        explanation.source
    )


def moved(lines: int, file: str) -> Any:
    """A mod that stands `lines` further down in a file of this name."""
    text = "def cube(score, b, h, q_idx, kv_idx):\n    return score * score * score * 0.375\n"
    scope: dict[str, Any] = {}
    exec(compile("\n" * lines + text, file, "exec"), scope)
    linecache.cache[file] = (1, None, [*["\n"] * lines, *text.splitlines(True)], file)
    return scope["cube"]


def test_an_equal_mod_before_it_does_not_lend_its_lines() -> None:
    first, second = explain(moved(0, "first.py")), explain(moved(7, "second.py"))
    assert "# first.py:2: return score * score" in str(first)
    assert "# second.py:9: return score * score" in str(second)
    assert "# second.py:9\n@triton.jit\ndef score_mod(" in second.source


def test_a_mod_that_moves_is_not_compiled_again() -> None:
    """What Triton's cache asks of a kernel is what it was."""
    keys = []
    for lines, file in ((0, "first.py"), (7, "second.py")):
        made = variant(moved(lines, file), causal)
        text = made.kernels("backward").module
        names = ("forward_kernel", "dkdv_kernel", "score_mod")
        keys.append([getattr(text, name).cache_key for name in names])
    assert keys[0] == keys[1]


def test_explain_splits_off_infinite_branches() -> None:
    explanation = explain(
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))
    )
    assert [graph.kind for graph in explanation.graphs] == ["mask"]
    assert "mask_mod" in kernels(explanation.source)
    assert "score_mod" not in kernels(explanation.source)


def test_explain_of_nothing() -> None:
    explanation = explain()
    assert str(explanation) == (
        "no mod: plain attention\n"
        "\n"
        "forward template: hopper on sm_90, 192x128 (3 consumers) first; portable elsewhere\n"
        "backward template: hopper on sm_90, 128x128 (ahead, own operand) first; portable elsewhere"
    )
    assert "forward_kernel" in kernels(explanation.source)


def test_explain_takes_shapes_and_dtypes() -> None:
    changes: list[dict[str, Any]] = [{}, {"head_dim": 80}, {"value_dim": 32}, {"dtype": torch.float32}]
    assert len({explain(soft_cap, causal, **change).source for change in changes}) == 4


def test_explain_says_on_which_template_the_kernels_stand() -> None:
    both = explain(soft_cap, causal, head_dim=128)
    assert {key: kernels(source) & {"forward_kernel", "backward_kernel", "score_grad"}
            for key, source in both.sources.items()} == {
        "hopper forward": {"forward_kernel"}, "hopper backward": {"backward_kernel", "score_grad"},
    }  # fmt: skip
    wide = explain(soft_cap, causal, head_dim=256)
    assert str(wide).splitlines()[-2:] == [
        "forward template: hopper on sm_90, 128x64 (2 consumers) first; portable elsewhere",
        "backward template: hopper on sm_90, 64x64 (ahead) first; portable elsewhere",
    ]
    wider = explain(soft_cap, causal, head_dim=264)
    assert str(wider).splitlines()[-2:] == [
        "forward template: portable everywhere: a head dimension of 264, above 256",
        "backward template: portable everywhere: a head dimension of 264, above 256",
    ]
    assert wider.sources == {}
    single = explain(soft_cap, causal, dtype=torch.float32)
    assert str(single).splitlines()[-2:] == [
        "forward template: portable everywhere: float32 operands",
        "backward template: portable everywhere: float32 operands",
    ]
    assert single.sources == {}


DEBUG_LINES = {
    0: [],
    1: ["flexmod: optimize", "flexmod: derive", "flexmod: write", "flexmod: render", "flexmod: load"],
    2: ["flexmod: traced\nscore():", "flexmod: optimized\nscore():", "flexmod: render"],
    3: ["flexmod: source ", "flexmod: traced\nscore():", "flexmod: render"],
}


def sines(count: int) -> Any:
    """A mod of its own for each count, so that nothing of it is known yet."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for _ in range(count):
            score = torch.sin(score)
        return score

    return score_mod


@pytest.mark.parametrize("level", DEBUG_LINES)
def test_debug_levels(
    level: int, switch: Callable[[str, object], None], capfd: pytest.CaptureFixture[str]
) -> None:
    switch(config.DEBUG, level)
    q, k, v = (x.requires_grad_() for x in make_case(q_len=16).inputs)
    out = flex_attention(q, k, v, sines(3 + level), kernel_options={"BACKEND": "INTERPRET"})
    out.sum().backward()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert [line for line in DEBUG_LINES[level] if line not in printed.err] == []
    assert ("source" in printed.err, "traced" in printed.err, bool(printed.err)) == (
        level == 3,
        level >= 2,
        level >= 1,
    )


def test_debug_prints_a_path_that_can_be_opened(tmp_path: Path) -> None:
    script = (
        "import torch, flexmod\n"
        "q = torch.ones(1, 1, 16, 16)\n"
        "flexmod.flex_attention(q, q, q, kernel_options={'BACKEND': 'INTERPRET'})\n"
    )
    switches = {"FLEXMOD_DEBUG": "3", "FLEXMOD_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = forked.python(script, env={**os.environ, **switches})
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("flexmod: source "))
    path = Path(line.removeprefix("flexmod: source "))
    assert path.is_relative_to(tmp_path)
    assert "forward_kernel" in kernels(path.read_text())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) by kernel, as they were launched."""
    seen: dict[str, tuple[Any, ...]] = {}
    start = launch.start

    def spy(kernels: Any, name: str, device: Any, grid: Any, arguments: Any) -> int:
        seen[name] = tuple(arguments[a] for a in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
        return start(kernels, name, device, grid, arguments)

    monkeypatch.setattr(launch, "start", spy)
    return seen


def attend(options: dict[str, Any], mask: Any = None) -> list[torch.Tensor]:
    inputs = [x.requires_grad_() for x in make_case(q_len=70).inputs]
    out = flex_attention(*inputs, block_mask=mask, kernel_options={"BACKEND": "INTERPRET", **options})
    return [out, *torch.autograd.grad(out.sum(), inputs)]


USUAL = {
    "BLOCK_M": 32,
    "BLOCK_N": 16,
    "BLOCK_M1": 16,
    "BLOCK_N1": 32,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
    "num_stages": 1,
}
TILES = [
    ({**USUAL, "num_warps": 2}, {"forward": (32, 16, 2, 1), "dq": (64, 32, 2, 1), "dkdv": (16, 32, 2, 1)}),
    (
        {**USUAL, "num_warps": 2, "fwd_num_warps": 8, "bwd_num_warps": 4},
        {"forward": (32, 16, 8, 1), "dq": (64, 32, 4, 1), "dkdv": (16, 32, 4, 1)},
    ),
    (
        {
            **USUAL,
            "num_warps": 2,
            "fwd_BLOCK_M": 64,
            "bwd_BLOCK_M1": 64,
            "bwd_num_stages": 3,
            "bwd_BLOCK_M": 128,
        },
        {"forward": (64, 16, 2, 1), "dq": (64, 32, 2, 3), "dkdv": (64, 32, 2, 3)},
    ),
]


@pytest.mark.parametrize(("options", "tiles"), TILES, ids=["bare", "prefixed", "mixed"])
def test_tile_options_reach_the_kernels(options: Any, tiles: Any, launched: dict[str, Any]) -> None:
    results = attend(options)
    assert launched == {f"{name}_kernel": tile for name, tile in {**tiles, "delta": tiles["dq"]}.items()}
    for ours, plain in zip(results, attend({}), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-6)


IGNORED = (
    "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION",
    "USE_TMA", "deterministic",
)  # fmt: skip


def test_options_that_are_accepted_and_change_nothing(launched: dict[str, Any]) -> None:
    plain = attend({})
    tiles = dict(launched)
    for prefix in ("", "fwd_", "bwd_"):
        options = {f"{prefix}{name}": True for name in IGNORED}
        assert all(map(torch.equal, attend(options), plain))
    assert launched == tiles


def test_a_tile_must_divide_the_blocks_of_the_mask() -> None:
    mask = create_block_mask(causal, None, None, 70, 70, device="cpu", BLOCK_SIZE=(32, 64))
    with pytest.raises(errors.OptionValueError) as raised:
        attend({"BLOCK_M": 64}, mask)
    assert str(raised.value) == (
        "kernel option BLOCK_M is 64.\n  Instead: give a divisor of the mask's block, 32."
    )


def test_the_cpu_path_and_the_reference_take_the_options_too() -> None:
    q, k, v = make_case(q_len=16).inputs
    plain = flex_attention(q, k, v)
    assert torch.equal(flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "num_warps": 4}), plain)
    reference = flex_attention(q, k, v, kernel_options={"BACKEND": "REFERENCE", "fwd_num_stages": 2})
    torch.testing.assert_close(reference, plain)


def test_templates_that_may_be_chosen_anywhere() -> None:
    assert all(map(torch.equal, attend({"TEMPLATE": "portable"}), attend({"TEMPLATE": "auto"})))


def test_debug_says_why_the_portable_template_runs(
    switch: Callable[[str, object], None], capfd: pytest.CaptureFixture[str]
) -> None:
    switch(config.DEBUG, 1)
    attend({})
    said = [line for line in capfd.readouterr().err.splitlines() if "template" in line]
    assert said == [
        f"flexmod: {way} not on the template 'hopper': Triton's interpreter is no Hopper chip (sm_90)"
        for way in ("forward", "backward")
    ]


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "kernel_options.md").read_text()
    assert [name for name in options.OPTIONS if f"`{name}`" not in page] == []
