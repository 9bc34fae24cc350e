"""Device functions: their text, and what they compute."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from mod_kernel import run, source
from torch import Tensor

from flexmod.codegen import cache, device_functions
from flexmod.codegen.kernels import ModText
from flexmod.codegen.triton_text import reserved, write
from flexmod.ir.derivative import differentiate
from flexmod.ir.evaluate import evaluate
from flexmod.ir.graph import POSITIONS, Graph
from flexmod.ir.passes import optimize, promote_constants, widen
from flexmod.ir.trace import Traced, trace
from flexmod.runtime import offline

from .text_mods import TEXT_MODS

EXTENTS = (2, 4, 64, 64)
ALL = [pytest.param(mod, kind, id=mod.__name__) for kind, mods in TEXT_MODS.items() for mod in mods]


def positions(extents: Sequence[int] = EXTENTS) -> dict[str, Tensor]:
    return {
        name: torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, n) in enumerate(zip(POSITIONS, extents, strict=True))
    }


def traced(mod: Callable[..., Any], kind: str) -> Traced:
    found = trace(mod, kind)
    return replace(found, graph=optimize(found.graph))


def text_of(mod: Callable[..., Any], kind: str = "mask") -> ModText:
    return write(traced(mod, kind).graph)


def described(name: str, mod: ModText) -> str:
    statements = [
        f"{home}: {getattr(mod, home)}" for home in ("program", "row", "column", "call") if getattr(mod, home)
    ]
    parameters = [
        f"parameter: {p.name} = {p.kind} {p.index}.{p.dim}  {p.comment}".rstrip() for p in mod.parameters
    ]
    return "\n".join([f"=== {name}", "", mod.text, *statements, *parameters, ""])


def test_golden(golden: Callable[[str, str], None]) -> None:
    parts = []
    for kind, mods in TEXT_MODS.items():
        for mod in mods:
            graph = traced(mod, kind).graph
            parts.append(described(mod.__name__, write(graph)))
            if mod.__name__ == "soft_cap":
                parts.append(described("soft_cap, its derivative", write(optimize(differentiate(graph)))))
            if mod.__name__ == "window":
                parts.append(
                    described("window, promoted", write(promote_constants(graph, frozenset({0, 1}))))
                )
                parts.append(described("window, widened", write(widen(graph))))
    golden("\n".join(parts), "mod_texts.txt")


def holds(
    found: Traced, device: torch.device, extents: tuple[int, int, int, int] = EXTENTS, **rest: Any
) -> Tensor:
    """The kernel's values, after they have been held to the evaluator's."""
    score = torch.linspace(-3, 3, torch.Size(extents).numel()).view(extents)
    tensors = [t.detach().to(device) for t in found.tensors]
    values = run(found.graph, tensors, extents, score=score.to(device), device=device, **rest).cpu()
    (expected,) = evaluate(found.graph, found.tensors, **positions(extents), score=score)
    torch.testing.assert_close(
        values, expected.detach().expand(extents), rtol=2e-5, atol=1e-5, equal_nan=True
    )
    return values


@pytest.mark.parametrize(("mod", "kind"), ALL)
def test_values(mod: Callable[..., Any], kind: str, device: torch.device) -> None:
    holds(traced(mod, kind), device)


@pytest.mark.parametrize("mod", TEXT_MODS["score"], ids=lambda m: m.__name__)
def test_values_of_derivatives(mod: Callable[..., Any], device: torch.device) -> None:
    found = traced(mod, "score")
    graph = optimize(differentiate(found.graph))
    score = torch.linspace(-3, 3, 2 * 4 * 64 * 64).view(EXTENTS)
    grad = torch.linspace(1, 2, 2 * 4 * 64 * 64).view(EXTENTS)
    values = run(graph, [t.detach().to(device) for t in found.tensors], EXTENTS, score=score.to(device),
                 grad=grad.to(device), device=device).cpu()  # fmt: skip
    (expected,) = evaluate(graph, found.tensors, **positions(), score=score, grad=grad)
    torch.testing.assert_close(values, expected.detach().expand(EXTENTS), rtol=2e-5, atol=1e-5)


# where things are computed


docs = torch.arange(64) // 5
heads = torch.linspace(0, 1, 5)
flags = torch.arange(64) % 3 == 0


def lines(text: str, function: str) -> str:
    """The body of one device function, without comments."""
    (node,) = [f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == function]
    return "; ".join(ast.unparse(statement) for statement in node.body)


def test_loads_of_a_row_and_a_column_are_hoisted() -> None:
    mod = text_of(lambda b, h, q, k: docs[q] == docs[k])
    load = "return tl.load(docs + {0} * docs_stride0, mask={0} < docs_size0, other=0)"
    assert lines(mod.text, "mask_mod_row") == load.format("q_idx")
    assert lines(mod.text, "mask_mod_column") == load.format("kv_idx")
    assert lines(mod.text, "mask_mod") == "return docs_q == docs_kv"
    assert mod.row.startswith("docs_q_of_mask = mask_mod_row(b, h, q_idx, ")
    assert mod.program == ""


def test_what_b_and_h_decide_is_computed_once_a_program() -> None:
    mod = text_of(lambda s, b, h, q, k: s * torch.exp(heads[h]), "score")
    assert mod.program.startswith("exp_bh_of_score = score_mod_program(b, h, heads_of_score, ")
    assert (mod.row, mod.column) == ("", "")


def test_a_row_may_need_what_the_program_computed() -> None:
    mod = text_of(lambda b, h, q, k: (docs[q + docs[b]] > 2) & (k > docs[b]))
    assert "docs_bh_of_mask" in mod.row
    holds(
        traced(lambda b, h, q, k: (docs[q + docs[b]] > 2) & (k > docs[b]), "mask"),
        torch.device("cpu"),
        (2, 1, 32, 32),
    )


def test_hoisted_values_may_need_one_another(device: torch.device) -> None:
    """A value that the elements need, and another that is made of it in the same function."""
    holds(traced(lambda b, h, q, k: (docs[q] == docs[k]) & (k <= docs[q] * 5 + 7), "mask"), device)


@pytest.mark.parametrize(
    "mod",
    [lambda b, h, q, k: True, lambda b, h, q, k: False, lambda b, h, q, k: b == 1,
     lambda b, h, q, k: flags[h],
     lambda b, h, q, k: q > 5, lambda b, h, q, k: flags[k], lambda b, h, q, k: flags[3 * b] & flags[k]],
)  # fmt: skip
def test_masks_that_do_not_fill_the_tile(mod: Callable[..., Any], device: torch.device) -> None:
    holds(traced(mod, "mask"), device)


@pytest.mark.parametrize(
    "mod",
    [lambda s, b, h, q, k: 2, lambda s, b, h, q, k: b, lambda s, b, h, q, k: q * 0.5,
     lambda s, b, h, q, k: k + h,
     lambda s, b, h, q, k: q - k, lambda s, b, h, q, k: heads[h], lambda s, b, h, q, k: s],
)  # fmt: skip
def test_scores_fill_the_tile(mod: Callable[..., Any], device: torch.device) -> None:
    holds(traced(mod, "score"), device)


# loads


def test_a_tile_transposed_gives_the_same() -> None:
    """The text does not know which way q_idx and kv_idx lie."""
    mod = text_of(lambda b, h, q, k: (docs[q] == docs[k]) & (q - k > 2))
    assert not re.search(r"\[:, None\]|\[None, :\]|tl\.arange|tl\.full", mod.text)


def test_indices_never_reach_outside(device: torch.device) -> None:
    """Poison lies on both sides of what is captured; a padded tile, or an index too large, reads 0."""
    storage = torch.full((3, 70), torch.nan, device=device)
    window = storage[1, 10:50]
    window[:] = torch.arange(40.0)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0 + window[q * 2] + window[q - 45 + k] + window[q * k * q] + window[k << 28]

    found = run(optimize(trace(mod, "score").graph), (window,), (1, 1, 33, 33), device=device)
    assert found.isfinite().all()
    q, k = torch.arange(33)[:, None], torch.arange(33)
    wrapped = torch.where(q - 45 + k < 0, q - 45 + k + 40, q - 45 + k)
    shifted = torch.tensor([n << 28 & 0xFFFFFFFF for n in range(33)])
    shifted = torch.where(shifted >= 2**31, shifted - 2**32, shifted)
    expected = sum(torch.where((i >= 0) & (i < 40), i, 0) for i in (q * 2, wrapped, q * k * q, shifted))
    torch.testing.assert_close(found[0, 0].cpu(), expected.float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_at_the_ends_of_their_dtype(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.arange(1.0, 41.0, device=device)
    ends = torch.iinfo(dtype)
    places = [ends.min, ends.min + 1, -(2**31), -41, -40, -1, 0, 39, 40, 2**31 - 1, ends.max - 39, ends.max]
    index = torch.tensor(places, dtype=dtype, device=device)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * 0 + values[index[k]]

    graph = trace(mod, "score").graph
    tensors = tuple({"values": values, "index": index}[c.name] for c in graph.captures)
    found = run(optimize(graph), tensors, (1, 1, 4, len(places)), device=device)
    expected = [values[i].item() if -40 <= i < 40 else 0.0 for i in places]
    assert found[0, 0, 0].tolist() == expected


def test_a_constant_index_that_a_pass_has_made_is_guarded(device: torch.device) -> None:
    small = torch.arange(4.0)
    graph = optimize(
        trace(
            lambda s, b, h, q, k: s * 0 + small[torch.where(torch.ones_like(q > k), q.new_full((), 99), q)],
            "score",
        ).graph
    )
    assert run(graph, (small.to(device),), (1, 1, 16, 16), device=device).eq(0).all()


NEGATIVE = {
    "a number": (lambda b, h, q, k: docs[-3] == q, None),
    "surely": (lambda b, h, q, k: docs[-1 - q] == k, None),
    "perhaps": (lambda b, h, q, k: docs[q - 5] == k, "wrap(q_idx - 5, docs_size0)"),
    "never": (lambda b, h, q, k: docs[q // 2 + k % 8] == k, None),
    "of a load": (lambda b, h, q, k: docs[docs[q]] == k, "wrap(tl.load(docs + q_idx"),
    "at the most": (lambda b, h, q, k: docs[torch.minimum(q, k)] == k, None),
    "clamped": (lambda b, h, q, k: docs[(q - k).clamp(min=0)] == k, None),
    "or not": (lambda b, h, q, k: docs[torch.where(flags[q], q, -1)] == k, "wrap("),
    "of a small integer": (lambda b, h, q, k: docs[q.to(torch.int8)] == k, "wrap("),
}


@pytest.mark.parametrize(("mod", "wrapped"), NEGATIVE.values(), ids=NEGATIVE)
def test_negative_indices(mod: Callable[..., Any], wrapped: str | None, device: torch.device) -> None:
    found = traced(mod, "mask")
    text = write(found.graph).text
    assert wrapped in text if wrapped else "wrap(" not in text
    holds(found, device, (1, 1, 40, 40))


def test_halves_are_loaded_as_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        half = heads.to(dtype)
        text = text_of(lambda s, b, h, q, k: s + half[h], "score").text  # noqa: B023
        assert text.count(".to(tl.float32)") == 1


def test_halves_round_after_each_operation(device: torch.device) -> None:
    half = heads.bfloat16()
    found = traced(lambda s, b, h, q, k: (s.bfloat16() * 1.01 + half[h]) / 3 - s.half() * half[h], "score")
    holds(found, device)


def test_a_wide_capture_is_addressed_with_64_bits(device: torch.device) -> None:
    found = traced(lambda s, b, h, q, k: s + table[q, 3] + table[-1, k], "score")
    captures = tuple(replace(c, wide=True) for c in found.graph.captures)
    wide = replace(found, graph=Graph("score", found.graph.results, captures))
    text = write(wide.graph).text
    assert "tl.cast(q_idx, tl.int64) * table_stride0 + tl.cast(3, tl.int64) * table_stride1" in text
    holds(wide, device)


table = torch.randn(64, 64)


def test_tensors_beyond_2_to_the_31_are_wide() -> None:
    huge = torch.empty(1).expand(2**31, 2)
    assert not trace(lambda s, b, h, q, k: s + huge[q, 0], "score").graph.captures[0].wide
    wide = torch.empty((2**16, 2**16), device="meta")
    assert trace(lambda s, b, h, q, k: s + wide[q, k], "score").graph.captures[0].wide


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float64]
)
def test_captures_of_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    values = (torch.arange(64) % 5).to(dtype)
    holds(traced(lambda s, b, h, q, k: s + values[q] * 2 + values[-k - 1], "score"), device)
    if not dtype.is_floating_point and dtype != torch.bool:
        holds(
            traced(lambda s, b, h, q, k: s + heads[values[q] % 4] + heads[values[k].int() - 5], "score"),
            device,
        )


# names


def names_in(mod: ModText) -> list[str]:
    return [p.name for p in mod.parameters]


def test_names_of_the_writers_own_are_not_taken(device: torch.device) -> None:
    for name in (
        "q_idx",
        "score",
        "tl",
        "wrap",
        "tanh",
        "mask_mod",
        "score_mod",
        "b",
        "add_0",
        "number0",
        "docs_q",
    ):
        tensor = torch.arange(64)
        scope: dict[str, Any] = {}
        exec(f"def make({name}):\n    return lambda a, bb, c, d, e: a + {name}[d - 3] + {name}[e] * 2", scope)
        found = traced(scope["make"](tensor), "score")
        assert names_in(write(found.graph))[0] == (f"{name}_1" if name in reserved() else name) + "_of_score"
        holds(found, device, (1, 1, 16, 16))


def test_a_capture_named_like_a_parameter(device: torch.device) -> None:
    """t_size0 is a tensor here, and the size of t."""
    t, t_size0, t_stride0, t_q = (torch.arange(n) * n for n in (16, 17, 18, 19))
    found = traced(lambda s, b, h, q, k: s + t[q - k] + t_size0[q] * t_stride0[k] + t_q[q - 3], "score")
    names = names_in(write(found.graph))
    assert len(names) == len(set(names)) == 12
    holds(found, device, (1, 1, 16, 16))


def test_all_names_end_in_the_mods_kind() -> None:
    for kind in ("mask", "score"):
        for mod in TEXT_MODS[kind]:
            assert all(n.endswith(f"_of_{kind}") for n in names_in(text_of(mod, kind)))


# a user's strings are no code


def mod_at(file: str, source_line: str, line: int = 1) -> Callable[..., Any]:
    """A mask_mod that seems to stand in a file of this name, whose line reads so."""
    scope: dict[str, Any] = {"docs": docs}
    code = compile("\n" * (line - 1) + "mod = lambda b, h, q, k: docs[q] == docs[k]", file, "exec")
    exec(code, scope)
    linecache.cache[file] = (1, None, [source_line] * line, file)
    return scope["mod"]


STRANGE = {
    "a quote": ('mod = """ + \'\'\' + "', "file.py"),
    "line ends": (
        "x\rimport os\x0bimport os\x0cimport os\x1cimport os\u2028import os\x85import os",
        "file.py",
    ),
    "controls": ("mod \x00 = \x1b[31m q", "file.py"),
    "templates": ("{{ config }} {% raw %} {# x #} {0} {mod}", "file.py"),
    "letters": ("größer = ψ ≥ 3  # 你好 🙂", "file.py"),
    "backslash": ("mod = \\", "file.py"),
    "a file's name": ("mod = q", "a\nimport os  # b.py"),
    "a file's name with a return": ("mod = q", "a\rimport os\u2029b.py"),
    "no source": ("", "<string>"),
    "long": ("x = " + "1 + " * 100, "file.py"),
}


@pytest.mark.parametrize(("line", "file"), STRANGE.values(), ids=STRANGE)
def test_source_lines_stay_comments(line: str, file: str) -> None:
    plain = text_of(mod_at("plain.py", "mod"))
    mod = text_of(mod_at(file, line))
    assert ast.dump(ast.parse(mod.text)) == ast.dump(ast.parse(plain.text)), "the same code"
    comments = [text for text in mod.text.splitlines() if "#" in text]
    assert len(comments) == (6 if line else 3), "each function's line, and where it stands"
    assert all(text.strip().startswith("# ") and text.isprintable() and len(text) <= 110 for text in comments)
    assert (mod.row, mod.call) == (plain.row, plain.call)


def test_strange_names_stay_names() -> None:
    tensors = {
        "x\nimport os": docs,
        "print(1)": docs + 1,
        "tl.load": docs + 2,
        "": docs + 3,
        "__": docs + 4,
        "ünï": docs + 5,
    }
    scope = {"tensors": tensors}

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q >= k
        for tensor in scope["tensors"].values():
            result = result & (tensor[q] == tensor[k])
        return result

    for name in names_in(text_of(mod)):
        assert name.isidentifier()
        assert name.isascii()


# the compiler takes it too


@pytest.mark.parametrize(("mod", "kind"), ALL)
def test_the_compiler_takes_the_text(mod: Callable[..., Any], kind: str) -> None:
    """For a chip, without one: what the interpreter takes, the compiler may not."""
    found = traced(mod, kind)
    mod = write(found.graph)
    module = cache.load(source(mod), "mod_kernel")
    types = {torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
             torch.int64: "i64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
             torch.float64: "fp64"}  # fmt: skip
    signature = {"OUT": "*i1" if found.graph.kind == "mask" else "*fp32", "SCORE": "*fp32", "GRAD": "*fp32"}
    for p in mod.parameters:
        signature[p.name] = f"*{types[found.tensors[p.index].dtype]}" if p.kind == "pointer" else "i32"
    signature |= dict.fromkeys(("H", "M", "N"), "i32")
    assert offline.compile(module.run, signature, {"BLOCK_M": 32, "BLOCK_N": 32}).registers > 0


def test_the_prelude_brings_what_its_functions_call() -> None:
    text = device_functions.used_by("return floor_divide_float(a, b)")
    assert [f.name for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)] == [
        "fmod",
        "power_of_two",
        "fmod_of_doubles",
        "floor_divide_float",
    ]
    assert device_functions.used_by("return tl.floor(x) + x.wrap(3) + unwrap(2)") == ""


def test_a_load_whose_place_the_score_decides() -> None:
    table = torch.zeros(8)
    assert text_of(lambda s, b, h, q, k: s * table[s.clamp(0, 7).int()], "score").waits_for_score
    assert not text_of(lambda s, b, h, q, k: s * table[q % 8], "score").waits_for_score


@pytest.mark.parametrize(
    ("mod", "wanted"),
    [
        (lambda b, h, q, k: q // 7 >= k % 5, ["q_idx // 7", "kv_idx % 5"]),
        (lambda b, h, q, k: (q - k) // 7 >= (k - q) % -5, ["floor_divide(", "remainder("]),
        (lambda b, h, q, k: (q - k) // DIVISORS[h] >= 0, ["safe_floor_divide("]),
        (lambda b, h, q, k: (q - k) % (DIVISORS[h] & 3) >= 0, ["safe_remainder("]),
        (lambda b, h, q, k: (q - k) % ((DIVISORS[h] & 3) + 1) >= 0, [" remainder("]),
        (lambda b, h, q, k: torch.fmod(q - k, DIVISORS[h]) >= 0, ["safe_fmod("]),
        (lambda b, h, q, k: torch.div(q - k, q - 5, rounding_mode="trunc") >= 0, ["safe_trunc_divide("]),
        (lambda b, h, q, k: q * 1.0 % 0.25 + k * 1.0 % FACTORS[h] > 0, ["FACTORS"]),
        (lambda b, h, q, k: torch.fmod(q.float(), 0.25) > 0, ["fmod(q_idx.to(tl.float32), ", ", 2)"]),
        (lambda b, h, q, k: torch.fmod(q.float(), FACTORS[h]) > 0, ["FACTORS_bh)"]),
    ],
)
def test_divisions_are_as_plain_as_bounds_allow(mod: Callable[..., Any], wanted: list[str]) -> None:
    text = text_of(mod).text
    assert all(part in text for part in wanted), text


DIVISORS, FACTORS = torch.tensor([0, 3, -1, 7]), torch.tensor([0.0, 0.1, 1e-30, 49.0])


@pytest.mark.parametrize("number", [-0.0, 1e-39, -1e-45, 5e-324])
def test_numbers_keep_their_sign_and_their_dtype(number: float, device: torch.device) -> None:
    """Triton takes -0.0 for 0.0, and a denormal number for a float64."""
    found = traced(lambda s, b, h, q, k: s * 0 + torch.where(q > k, q * number, number).reciprocal(), "score")
    values = holds(found, device)
    assert values.signbit().any() == (number < 0 or str(number) == "-0.0")
