"""The steps of a plan as the statements of a file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexmod.codegen.spec import Tile
from flexmod.runtime.plan import Place, PlanWriter, Size, bits, cdiv, if_several
from flexmod.tools.plan_text import PlanText

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
