"""Text of a user's never becomes code: names, file names, lines and functions that are meant to break out."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmod import create_block_mask, explain, flex_attention
from flexmod.codegen.spec import KernelName, Tile
from flexmod.ir.trace import trace
from flexmod.tools.standalone import standalone

KERNELS: tuple[KernelName, ...] = ("forward", "delta", "dq", "dkdv", "scatter")
SMALL = {name: Tile(32, 32, 4, 1) for name in KERNELS}
MARK = "broke_out = 1"
INTERPRET = {"BACKEND": "INTERPRET", "BLOCK_M": 16, "BLOCK_N": 16}

# what ends a line for some reader of text, and what hides one
ENDS = {
    "newline": "\n", "carriage return": "\r", "form feed": "\x0c", "vertical tab": "\x0b",
    "next line": "\x85", "line separator": "\u2028", "paragraph separator": "\u2029", "null": "\0",
    "group separator": "\x1d", "right to left": "\u202e", "surrogate": "\udcff",
}  # fmt: skip
LINES = {
    "quotes": f'"""{MARK}"""', "template": f"{{{{ 1 }}}} {{% raw %}} {MARK}", "backslash": f"{MARK} \\",
    "accents": f"größe ½ 长 {MARK}", "braces": f"{{}} {{0}} %s {MARK}",
}  # fmt: skip


@pytest.fixture
def made() -> Iterator[Callable[..., Any]]:
    """`made(text, file, names)`: the function `mod` of a text that linecache finds under a file's name."""
    files = []

    def make(text: str, file: str, names: dict[str, Any]) -> Any:
        files.append(file)
        linecache.cache[file] = (len(text), None, text.split("\n"), file)
        scope = {"torch": torch, **names}
        exec(compile("\n".join(line.partition("#")[0] for line in text.split("\n")), "plain", "exec"), scope)
        mod = scope["mod"]
        mod.__code__ = mod.__code__.replace(co_filename=file)
        return mod

    yield make
    for file in files:
        linecache.cache.pop(file, None)


def assert_harmless(text: str) -> None:
    """The text is Python in which the mark stands in comments alone, whoever splits its lines."""
    compile(text.encode(), "text", "exec")
    assert MARK in text
    for line in text.splitlines():
        assert MARK not in line or line.strip().startswith("#"), line
    assert all(character.isprintable() or character == "\n" for character in text)


HOSTILE = [
    *(pytest.param(f"mods{end}{MARK}{end}.py", "", id=f"a file name with a {name}")
      for name, end in ENDS.items()),
    *(pytest.param("mods.py", f"a{end}{MARK}", id=f"a line with a {name}")
      for name, end in ENDS.items() if end != "\n"),
    *(pytest.param(f"{line}.py", "", id=f"a file name with {name}") for name, line in LINES.items()),
    *(pytest.param("mods.py", line, id=f"a line with {name}") for name, line in LINES.items()),
]  # fmt: skip


def of_a_row(file: str, comment: str) -> tuple[str, str, dict[str, Any]]:
    """The text, the file and the names of a mask mod."""
    text = f"def mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx + shift[q_idx]  # {comment}\n"
    return text, file, {"shift": torch.zeros(64, dtype=torch.int32)}


@pytest.mark.parametrize(("file", "comment"), HOSTILE)
def test_lines_and_files_stay_in_comments(file: str, comment: str, made: Callable[..., Any]) -> None:
    """In a kernel's module."""
    assert_harmless(explain(None, made(*of_a_row(file, comment))).source)


@pytest.mark.parametrize(("file", "comment"), HOSTILE[::4])
def test_lines_and_files_stay_in_comments_of_a_standalone_file(
    file: str, comment: str, made: Callable[..., Any]
) -> None:
    """The writer of a kernel's comments writes these too."""
    assert_harmless(standalone(None, made(*of_a_row(file, comment)), tiles=SMALL))


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_names_of_functions_stay_in_comments(end: str, made: Callable[..., Any]) -> None:
    mod = made("def mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n", "<nowhere>", {})
    del linecache.cache["<nowhere>"]  # so that only its name can be quoted
    mod.__name__ = mod.__qualname__ = f'mod{end}{MARK}{end}"""'
    assert_harmless(standalone(None, mod, tiles=SMALL))
    assert MARK not in explain(None, mod).source


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_values_of_a_closure_stay_in_comments(end: str) -> None:
    """A text, and a number that prints as it likes."""

    class Loud(int):
        def __repr__(self) -> str:
            return f"1{end}{MARK}"

    name, size = f"{MARK}{end}", Loud(3)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx + size) if name else q_idx

    assert_harmless(standalone(None, mod, tiles=SMALL))
    assert MARK not in explain(None, mod).source


NAMES = [
    f"x\n{MARK}\n", f'x"""\n{MARK}', "class", "lambda", "None", "1st", "", "__", "größe", "a b", "x,y", "tl",
    "{{ x }}",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_captures_of_any_name(name: str) -> None:
    """Keys of dictionaries and arguments of a partial are names too. They become identifiers."""
    held = {name: torch.arange(20) // 7}

    def of_dictionary(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return held[name][q_idx] == held[name][kv_idx]

    def of_partial(b: Any, h: Any, q_idx: Any, kv_idx: Any, **named: Any) -> Any:
        return named[name][q_idx] == named[name][kv_idx]

    for mod in (of_dictionary, partial(of_partial, **held)):
        (capture,) = trace(mod, "mask").graph.captures
        assert re.fullmatch(r"[A-Za-z]\w*", capture.name, re.ASCII)
        mask = create_block_mask(mod, None, None, 20, 20, device="cpu", BLOCK_SIZE=16)
        q = torch.ones(1, 1, 20, 16)
        v = torch.arange(20.0).view(1, 1, 20, 1).expand(1, 1, 20, 16).contiguous()
        out = flex_attention(q, q, v, block_mask=mask, kernel_options=INTERPRET)
        expected = flex_attention(q, q, v, block_mask=mask, kernel_options={"BACKEND": "REFERENCE"})
        torch.testing.assert_close(out, expected)


# Names of Python, of Triton, of the templates and of what the writer makes.
WORDS = """
    abs any bool dict eval exec float int isinstance len max min print range staticmethod super tuple zip
    tl triton torch os sys constexpr arange static_range tanh remainder wrap
    mask_mod score_mod mask_mod_row score_mod_in_torch mask_mod_in_torch forward_kernel dq_kernel
    Attention Blocks Mask NamedTuple Tensor attention build_mask launch main times add_at listed blocks
    TILES LONGEST LOG2E D DV Q_BLOCK KV_BLOCK BLOCK_M BLOCK_N M N Q K V OUT HQ HKV
    q k v out lse scale row_max total mask acc x x_of_mask x_of_score x_size0 x_stride0 self cls ctx device _
"""
TAKEN = WORDS.split()


def called_like_what_is_there(made: Callable[..., Any]) -> tuple[Any, Any]:
    """A score mod and a mask mod whose captures have all names that a generated module uses."""
    tensors = {name: torch.full((64,), 1e-4 * i) for i, name in enumerate(TAKEN)}
    loads = " + ".join(f"{name}[kv_idx]" for name in TAKEN)
    scope = {name: value.requires_grad_(i % 30 == 0) for i, (name, value) in enumerate(tensors.items())}
    biased = made(f"def mod(score, b, h, q_idx, kv_idx):\n    return score * ({loads})\n", "names.py", scope)
    some = {name: torch.arange(64) // 5 for name in TAKEN[::8]}
    same = " & ".join(f"({name}[q_idx] >= {name}[kv_idx])" for name in some)
    return biased, made(f"def mod(b, h, q_idx, kv_idx):\n    return {same}\n", "masks.py", some)


def test_captures_that_are_called_like_what_is_there(made: Callable[..., Any]) -> None:
    """All at once, in a call's kernels."""
    biased, kept = called_like_what_is_there(made)
    q = torch.randn(1, 2, 40, 16)
    mask = create_block_mask(kept, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    out = flex_attention(q, q, q, biased, block_mask=mask, kernel_options=INTERPRET)
    expected = flex_attention(q, q, q, biased, block_mask=mask, kernel_options={"BACKEND": "REFERENCE"})
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("index", ["q_idx", "kv_idx", "q_idx - kv_idx + 40", "(q_idx * kv_idx) % 80"])
@pytest.mark.parametrize("name", ["score_grad", "Score_Grad", "GRAD", "a" * 300])
def test_gradients_of_captures_that_are_called_like_what_is_there(
    name: str, index: str, made: Callable[..., Any]
) -> None:
    """By row, by column, along diagonals and by element; with a name that fits no line."""
    torch.manual_seed(0)
    table = torch.randn(80, requires_grad=True)
    text = f"def mod(score, b, h, q_idx, kv_idx):\n    return score * {name}[{index}]\n"
    mod = made(text, "names.py", {name: table})
    q, grads = torch.randn(1, 1, 20, 16), []
    for options in (INTERPRET, {"BACKEND": "REFERENCE"}):
        out = flex_attention(q, q, q, mod, kernel_options=options)
        grads += torch.autograd.grad(out.square().sum(), table)
    found, true = grads
    assert (found - true).norm() <= 1e-5 * true.norm()
    compile(standalone(mod, tiles=SMALL), "text", "exec")


@pytest.mark.long
def test_a_file_of_captures_that_are_called_like_what_is_there(
    made: Callable[..., Any], tmp_path: Path
) -> None:
    """It checks itself."""
    biased, kept = called_like_what_is_there(made)
    file = tmp_path / "attention.py"
    large = dict.fromkeys(KERNELS, Tile(128, 128, 4, 1))  # few of them, for the interpreter
    file.write_text(standalone(biased, kept, tiles=large, head_dim=16, dtype=torch.float32))
    switches = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(file)]
    ran = subprocess.run(command, env=switches, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
