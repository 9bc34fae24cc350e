"""The text of the modules: whole files held in tests/golden, and rules that every text keeps."""

from __future__ import annotations

import ast
import errno
import symtable
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from attention_cases import ALIBI, ALIBI_GRAD, CAUSAL, DOCUMENT, SOFTCAP, SOFTCAP_GRAD

from flexmod import explain
from flexmod.codegen import compiler
from flexmod.codegen.kernels import ModText, Parameter
from flexmod.codegen.render import _environment, parameters, render
from flexmod.codegen.spec import Decoding, KernelSpec

HALF = KernelSpec(torch.bfloat16, torch.bfloat16, torch.bfloat16, 64, 64, mask_block=(128, 128))
SINGLE = KernelSpec(torch.float32, torch.float32, torch.float32, 80, 64)


def test_golden_causal_forward(golden: Callable[[str, str], None]) -> None:
    golden(render(HALF, mask=CAUSAL), "causal_forward.txt")


def test_golden_alibi_documents(golden: Callable[[str, str], None]) -> None:
    spec = replace(HALF, head_dim=80, backward=True, shared_kv=True)
    golden(render(spec, ALIBI, DOCUMENT, ALIBI_GRAD), "alibi_document_backward.txt")


def test_golden_without_mods(golden: Callable[[str, str], None]) -> None:
    golden(render(replace(SINGLE, backward=True)), "plain_backward_float32.txt")


def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A term of each kind: by row, by column, along diagonals, by element."""
    table = relative[h, q_idx - kv_idx + 63]
    return score * rate + slopes[h] * table + keys[kv_idx] * pairs[q_idx, kv_idx]


slopes, rate, keys = (torch.zeros(size, requires_grad=True) for size in ((4,), (), (64,)))
relative, pairs = (torch.zeros(4, 127, requires_grad=True), torch.zeros(64, 64, requires_grad=True))


def test_golden_learned(golden: Callable[[str, str], None]) -> None:
    """The dQ kernel with a term, and the kernel that walks the diagonals.

    A mask of its own: equal graphs quote the first one's lines.
    """

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * rate + relative[h, q_idx - kv_idx + 63]

    golden(explain(score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx - h).source, "learned.txt")


BOUNDED = replace(SOFTCAP, bounds=(-20.0, 20.0))


def test_golden_bounded_forward(golden: Callable[[str, str], None]) -> None:
    golden(render(HALF, BOUNDED, CAUSAL), "bounded_forward.txt")


def test_golden_decoding(golden: Callable[[str, str], None]) -> None:
    """Programs share the keys of a tile, by runs of blocks."""
    golden(render(replace(HALF, decoding=Decoding(16, 4, True)), ALIBI, CAUSAL), "decoding_forward.txt")


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_careful_text_of_what_is_learned(dtype: torch.dtype, block: int | None) -> None:
    mask = None if block is None else lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    text = explain(learned, mask, dtype=dtype, head_dim=80).source
    assert_careful(text, longest=400)  # a mod that captures so much has long calls
    kernels = ("dq_kernel", "dkdv_kernel", "diagonal_kernel", "scatter_kernel")
    assert all(f"def {kernel}(" in text for kernel in kernels)
    sums = ("RATE_BY_ROW", "SLOPES_BY_ROW", "KEYS_BY_COLUMN", "RELATIVE_BY_DIAGONAL", "PAIRS_BY_ELEMENT")
    assert all(f"\n    {name}," in text for name in sums)


def test_only_the_kernels_that_are_needed() -> None:
    text = explain(lambda s, b, h, q_idx, kv_idx: s + keys[kv_idx]).source
    assert "KEYS_BY_COLUMN" in text and "diagonal" not in text and "scatter" not in text
    assert "GRAD_K is not None" in text and "GRAD_Q is not None" not in text
    fixed = explain(lambda s, b, h, q_idx, kv_idx: s + keys.detach()[kv_idx]).source
    assert "is not None:" in fixed and "GRAD_K is not None" not in fixed


def test_names_that_differ_in_case_alone() -> None:
    t, T = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    text = explain(lambda s, b, h, q_idx, kv_idx: s + t[h] * T[b] + t[b]).source
    assert all(f"    {name}_BY_ROW," in text for name in ("T", "T_1", "T_2"))
    assert_careful(text, longest=200)


@pytest.mark.parametrize(
    ("score_mod", "dtype", "fixed"),
    [
        (lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0), torch.bfloat16, True),
        (lambda s, b, h, q_idx, kv_idx: s.sigmoid() * 3.0, torch.bfloat16, True),
        (lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0), torch.float16, False),
        (lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0), torch.float32, False),
        (lambda s, b, h, q_idx, kv_idx: 60.0 * torch.tanh(s / 60.0), torch.bfloat16, False),
        (lambda s, b, h, q_idx, kv_idx: s.sigmoid() * 3.0 + slopes[h], torch.bfloat16, False),
    ],
)
def test_bounded_scores_have_a_fixed_peak(
    score_mod: Any, dtype: torch.dtype, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "CONSTANTS", compiler.Constants())  # so that the caps are constants
    text = explain(score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, dtype=dtype).source
    assert ("if met == 0:" in text, "new_row_max" in text) == (fixed, not fixed)


BLOCKS: dict[str, dict[str, Any]] = {
    "none": {"mask_block": None},
    "runs": {"mask_block": (64, 128), "mask_form": "runs"},
    "lists": {"mask_block": (64, 128), "mask_form": "lists"},
}
MODS = {
    "plain": (None, None, None),
    "document": (None, DOCUMENT, None),
    "softcap": (SOFTCAP, None, SOFTCAP_GRAD),
    "bounded": (BOUNDED, CAUSAL, SOFTCAP_GRAD),
    "alibi": (ALIBI, CAUSAL, ALIBI_GRAD),
}


@pytest.mark.covering(3, long=3)
@pytest.mark.parametrize("spec", [HALF, SINGLE], ids=["half", "single"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mods", MODS)
def test_a_careful_text(spec: KernelSpec, blocks: str, positive: bool, shared: bool, mods: str) -> None:
    spec = replace(spec, **BLOCKS[blocks], positive_scale=positive, shared_kv=shared, backward=True)
    assert_careful(render(spec, *MODS[mods]))


def assert_careful(text: str, longest: int = 110) -> None:
    lines = text.split("\n")
    assert max(map(len, lines)) <= longest
    assert all(line == line.rstrip() for line in lines)
    assert "\n\n\n\n" not in text and text.endswith("\n") and not text.endswith("\n\n")
    for before, line in zip(lines, lines[1:], strict=False):
        assert line or not before.endswith((":", "(")), f"a blank line opens a block after: {before}"
    compile(text, "module", "exec")
    assert unused_names(text) == []


def unused_names(text: str) -> list[str]:
    """Local names and parameters of functions that nothing reads; do_not_specialize must name parameters."""
    found = []
    functions = [
        f for f in symtable.symtable(text, "module", "exec").get_children() if f.get_type() == "function"
    ]
    for f in functions:
        found += [
            f"{f.get_name()}: {s.get_name()}"
            for s in f.get_symbols()
            if s.is_local() and not s.is_referenced()
        ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and isinstance(node.decorator_list[0], ast.Call):
            listed = ast.literal_eval(node.decorator_list[0].keywords[0].value)
            found += [name for name in listed if name not in {a.arg for a in node.args.args}]
    # a mod's main function takes all positions, whatever it reads
    free = {"b", "h", "q_idx", "kv_idx", "score"}
    return [name for name in found if name.rpartition(" ")[2] not in free]


def test_parameters_of_equal_names() -> None:
    assert [p.name for p in parameters(SOFTCAP, SOFTCAP_GRAD)] == ["cap"]
    other = ModText("", "", parameters=(Parameter("cap", "pointer", 0),))
    with pytest.raises(ValueError, match="two mods use the parameter name cap for different things"):
        parameters(SOFTCAP, other)


def test_a_backward_needs_the_derivative() -> None:
    with pytest.raises(ValueError, match="a score_mod's text and its derivative's, or neither"):
        render(replace(HALF, backward=True), SOFTCAP)


def test_what_the_mods_call_of_the_prelude_is_there() -> None:
    mod = ModText(
        "@triton.jit\ndef mask_mod(b, h, q_idx, kv_idx):\n    return remainder(q_idx, 3) == 0", CAUSAL.call
    )
    text = render(HALF, mask=mod)
    assert text.count("def remainder(a, b):") == 1 and "def floor_divide(" not in text


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], tuple[str, int]]]:
    """Renders as a new process, with bytecode in `tmp_path`: the text, and how many templates it compiled."""
    compiled: list[str] = []
    generate = jinja2.Environment._generate

    def counted(self: jinja2.Environment, source: Any, name: Any, *rest: Any, **options: Any) -> str:
        compiled.append(name)
        return generate(self, source, name, *rest, **options)

    monkeypatch.setattr(jinja2.Environment, "_generate", counted)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def rendered() -> tuple[str, int]:
        compiled.clear()
        _environment.cache_clear()
        return render(HALF, mask=CAUSAL), len(compiled)

    yield rendered
    _environment.cache_clear()


def test_templates_are_compiled_once(afresh: Callable[[], tuple[str, int]], tmp_path: Path) -> None:
    """And once more where the bytecode is damaged."""
    text, count = afresh()
    files = [path for path in (tmp_path / "bytecode").rglob("*") if path.is_file()]
    assert count == len(files) > 1
    assert afresh() == (text, 0)
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-50])
    assert afresh() == (text, 2)
    assert afresh() == (text, 0)


@pytest.mark.parametrize("fault", ["a file is there", "the disk is full", "Python keeps none"])
def test_templates_without_bytecode(
    fault: str, afresh: Callable[[], tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    if fault == "a file is there":
        (tmp_path / "bytecode").write_text("")
    elif fault == "the disk is full":
        monkeypatch.setattr(jinja2.FileSystemBytecodeCache, "dump_bytecode", full)
    else:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text, count = afresh()
    assert afresh() == (text, count)
    assert count > 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "bytecode"]
