"""The steps of a plan are statements of a file; a graph's torch function computes what the evaluator does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexmod import errors, masks, mods
from flexmod.codegen.compiler import lower
from flexmod.codegen.spec import Tile
from flexmod.ir.evaluate import evaluate
from flexmod.ir.ops import OPS, Op
from flexmod.ir.trace import trace
from flexmod.runtime.plan import Place, PlanWriter, Size, bits, cdiv, if_several
from flexmod.tools.standalone_text import PlanText, write_torch

SOURCE: Any = SimpleNamespace(module=None, interpreted=False)
STRIDES = tuple(Size(f"query_stride{dim}") for dim in range(3))
QUERY = Place("query", (Size("B"), Size("M"), 16), STRIDES, torch.half)
TABLE = Place("score_capture0", (Size("score_capture0_size0"),), (1,), torch.float32)
NAMES = {"query": "q", "score_capture0": "slopes", "scale": "scale"}


def test_what_is_allocated() -> None:
    writer = PlanWriter()
    writer.empty("out", QUERY.shape, QUERY.dtype)
    writer.empty("sums", (TABLE.numel() + 1,), zeros=True)
    assert PlanText(NAMES).statements(writer.plan((QUERY, TABLE), ())) == (
        "out = torch.empty((B, M, 16), dtype=q.dtype, device=q.device)\n"
        "sums = torch.zeros((slopes.shape[0] + 1,), dtype=torch.float32, device=q.device)"
    )


def test_what_is_launched() -> None:
    batch, length = QUERY.shape[:2]
    writer, side = PlanWriter(), Size("BLOCK_M")
    arguments = {
        "Q": QUERY, "stride_qb": if_several(batch, QUERY.stride(0)), "LSE": None, "scale": 0.25,
        "room": 62 - bits(batch * length),
    }  # fmt: skip
    tile: Any = Tile(side, side, 4, 1)  # type: ignore[arg-type]
    writer.launch(SOURCE, "forward", batch * cdiv(length, side), arguments, tile)  # type: ignore[arg-type]
    writer.launch(SOURCE, "round", batch * cdiv(length, 64), {"M": length})
    assert PlanText(NAMES).statements(writer.plan((QUERY,), ()), indent=4) == (
        '    forward_kernel[lambda meta: (B * triton.cdiv(M, meta["BLOCK_M"]),)](\n'
        "        Q=q, stride_qb=(q.stride(0) if B > 1 else 0), LSE=None, scale=scale, "
        "room=62 - int.bit_length(B * M),\n"
        '        **TILES["forward"],\n'
        "    )\n"
        "    round_kernel[(B * triton.cdiv(M, 64),)](\n"
        "        M=M,\n"
        "        enable_fp_fusion=True,\n"
        "    )"
    )


def test_a_step_that_a_file_has_no_words_for() -> None:
    writer = PlanWriter()
    writer.call(print, (QUERY,))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="no statement for call   print"):
        PlanText(NAMES).statements(writer.plan((QUERY,), ()))


EXTENTS = (2, 3, 40, 50)
slopes = torch.randn(3)
half = torch.randn(3, dtype=torch.bfloat16)
ids = torch.arange(50) // 7
scalar = torch.tensor(0.3, dtype=torch.float64)
short = torch.tensor(3, dtype=torch.int8)


def positions() -> tuple[torch.Tensor, ...]:
    b, h, q_idx, kv_idx = (torch.arange(size, dtype=torch.int32) for size in EXTENTS)
    return b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx


MASKS = {
    "causal": masks.causal(),
    "document": masks.document(ids, causal=True),
    "natten": masks.natten((7, 7), 3),
    "diffusion": masks.block_diffusion(20, 4),
    "constant": lambda b, h, q_idx, kv_idx: torch.tensor(True),
    "logic": lambda b, h, q_idx, kv_idx: torch.logical_xor(q_idx % 3, ~(kv_idx > h)) | torch.logical_not(b),
    "bits": lambda b, h, q_idx, kv_idx: ((q_idx & 6) ^ (kv_idx >> 1) | (h << 2)) != 3,
    "scalar": lambda b, h, q_idx, kv_idx: q_idx * scalar > kv_idx // short,
    "where": lambda b, h, q_idx, kv_idx: torch.where(q_idx > 4, kv_idx, 2) < torch.minimum(q_idx, kv_idx + 1),
}
SCORES = {
    "alibi": mods.alibi(slopes),
    "formula": mods.alibi(3),
    "softcap": mods.softcap(5.0),
    "half": lambda s, b, h, q_idx, kv_idx: s * half[h] + (q_idx * half[-1]),
    "scalar": lambda s, b, h, q_idx, kv_idx: s * scalar + short * q_idx,
    "clamped": lambda s, b, h, q_idx, kv_idx: s.clamp(-1, 1) - torch.clamp(kv_idx - q_idx, min=-4).float(),
    "wide": lambda s, b, h, q_idx, kv_idx: s + (q_idx.long() * 2**33 % 7) / 3,
    "functions": lambda s, b, h, q_idx, kv_idx: torch.sigmoid(s) + torch.exp2(-q_idx) ** 0.5 + torch.erf(s),
    "rounded": lambda s, b, h, q_idx, kv_idx: torch.trunc(s) + torch.div(q_idx, 3, rounding_mode="trunc"),
    "constant": lambda s, b, h, q_idx, kv_idx: s * 0 + 1.5,
}


def check(mod: Any, kind: str, inputs: tuple[torch.Tensor, ...]) -> None:
    traced = trace(mod, kind)
    graph = lower(traced.graph, EXTENTS, split=False).graph
    assert graph is not None
    names = tuple(capture.name for capture in graph.captures)
    written = write_torch(graph, "function", names)
    scope: dict[str, Any] = {"torch": torch}
    exec(written.text, scope)
    found = scope["function"](*inputs, *(traced.tensors[n] for n in written.captures))
    *score, b, h, q_idx, kv_idx = inputs
    (expected,) = evaluate(
        graph, traced.tensors, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=score[0] if score else None
    )
    assert found.dtype == expected.dtype, written.text
    torch.testing.assert_close(
        found.expand(EXTENTS), expected.expand(EXTENTS), equal_nan=True, msg=written.text
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    check(MASKS[name], "mask", positions())


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(SCORES[name], "score", (torch.randn(EXTENTS), *positions()))


@pytest.mark.parametrize("row", [row for row in OPS.values() if row.torch_names], ids=lambda row: row.name)
def test_every_operation(row: Op) -> None:
    """Of the score, of positions, of truth values, and of a number on either side."""
    choices: list[Callable[[Any, Any], Sequence[Any]]] = [
        lambda s, kv_idx: (s, kv_idx + 1), lambda s, kv_idx: (kv_idx, kv_idx + 2),
        lambda s, kv_idx: (s > 0, kv_idx > 2), lambda s, kv_idx: (s > 0, True),
    ]  # fmt: skip
    if row.arity > 1:
        choices += [lambda s, kv_idx: (kv_idx, 3), lambda s, kv_idx: (3, kv_idx + 1),
                    lambda s, kv_idx: (s, 2.5), lambda s, kv_idx: (2.5, s)]  # fmt: skip
    met = 0
    for choose in choices:
        with contextlib.suppress(errors.OperationArgumentError):  # as torch has it
            check(mod_of(row, choose), "score", (torch.randn(EXTENTS), *positions()))
            met += 1
    assert met


def mod_of(row: Op, choose: Callable[[Any, Any], Sequence[Any]]) -> Any:
    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        condition = [q_idx > 4] if row.name == "where" else []
        found = s._tracer.apply(row.torch_names[0], [*condition, *choose(s, kv_idx)][: row.arity])
        return torch.where(found, s * 2, 0.5) if found.dtype == torch.bool else s * 0 + found

    return mod


def test_the_text() -> None:
    graph = lower(trace(mods.alibi(slopes), "score").graph, EXTENTS, split=False).graph
    assert graph is not None
    written = write_torch(graph, "score_mod_in_torch", ("slopes",))
    place, head, *comments, result = written.text.splitlines()
    assert place.startswith("# positions.py:")
    assert head == "def score_mod_in_torch(score, b, h, q_idx, kv_idx, slopes):"
    assert comments[-1].startswith("    # return score + ")
    assert result == "    return score + slopes[h] * (kv_idx.float() - q_idx.float())"
