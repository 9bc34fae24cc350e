"""The generated Hopper forward, run as plain Python beside dense attention: its pipeline, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plain_gluon
import pytest
import torch
from plain_gluon import Descriptor, Pointer

from flexmod import BlockMask, create_block_mask, masks, mods
from flexmod.backends import triton
from flexmod.codegen import hopper
from flexmod.codegen.spec import KernelSpec
from flexmod.compiler import kernels_for, lower
from flexmod.ir.evaluate import evaluate
from flexmod.ir.trace import trace

BF16 = torch.bfloat16
BATCH, HEADS = 2, 2


def holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 3 != 0) & ((q_idx < 130) | (q_idx >= 300)) & (kv_idx <= q_idx)


MASKS = {"": None, "causal": masks.causal(), "window": masks.sliding_window(130), "holes": holes,
         "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0}  # fmt: skip
SCORES = {"": None, "softcap": mods.softcap(20.0), "alibi": mods.alibi(2)}


@dataclass(frozen=True)
class Case:
    mask: str = ""
    score: str = ""
    dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (300, 500)
    block_n: int = 128
    stages: int = 2
    consumers: int = 2
    scale: float = 0.125
    form: str = "runs"
    programs: int = 3
    ordered: bool = False

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "") for x in self.__dict__.values())


CASES = [
    Case(),
    Case(dims=(128, 128), lengths=(1, 1)),
    Case(consumers=3, lengths=(500, 300)),
    Case("causal", lengths=(500, 500)),
    Case("causal", "alibi", lengths=(500, 500), form="lists"),
    Case("window", dims=(64, 64), lengths=(700, 700), block_n=64, stages=4, programs=4),
    Case("window", "softcap", (256, 256), (500, 500), block_n=64, scale=0.6),
    Case("holes", lengths=(500, 500)),
    Case("holes", "softcap", lengths=(500, 500), scale=-0.5),
    Case("holes", lengths=(700, 700), ordered=True),
    Case("window", "alibi", lengths=(700, 700), block_n=64, ordered=True, programs=5),
    Case("nothing", lengths=(500, 500)),
    Case(dims=(192, 128), block_n=64),
]


class Call:
    """Inputs of a case, and places for its results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        (self.rows, self.columns), (self.dim, self.value_dim) = case.lengths, case.dims
        numbers = np.random.default_rng(0)
        self.q = numbers.standard_normal((BATCH, HEADS, self.rows, self.dim))
        self.k = numbers.standard_normal((1, 1, self.columns, self.dim))
        self.v = numbers.standard_normal((1, 1, self.columns, self.value_dim))
        self.out = np.full((BATCH, HEADS, self.rows, self.value_dim), np.nan)
        self.lse = np.full(BATCH * HEADS * self.rows, np.nan)
        self.largest, self.counter = np.full_like(self.lse, np.nan), np.zeros(1, dtype=np.int64)
        mods = {"score": SCORES[case.score], "mask": MASKS[case.mask]}
        self.traced: dict[str, Any] = {kind: trace(mod, kind) for kind, mod in mods.items() if mod}
        extents = (BATCH, HEADS, self.rows, self.columns)
        self.lowered = {kind: lower(x.graph, extents, split=False) for kind, x in self.traced.items()}
        self.spec = KernelSpec(
            BF16, BF16, BF16, self.dim, self.value_dim, mask_block=(128, 128) if case.mask else None,
            mask_form=case.form, positive_scale=case.scale > 0,
        )  # fmt: skip
        self.kernels = kernels_for(self.spec, self.lowered.get("score"), self.lowered.get("mask"))

    def run(self) -> None:
        case, spec, kernels = self.case, self.spec, self.kernels
        arguments: dict[str, Any] = {
            "Q": Descriptor(self.q, 64, spec.head_tile),
            "K": Descriptor(self.k, case.block_n, spec.head_tile),
            "V": Descriptor(self.v, case.block_n, spec.value_tile),
            "OUT": Descriptor(self.out, 64, spec.value_tile),
            "LSE": Pointer(self.lse), "MAX_SCORES": Pointer(self.largest), "COUNTER": Pointer(self.counter),
            "scale": case.scale, "B": BATCH, "KV_B": 1, "HQ": HEADS, "HKV": 1,
            "M": self.rows, "N": self.columns, "CONSUMERS": case.consumers, "BLOCK_N": case.block_n,
            "STAGES": case.stages,
            "CONSUMER_REGISTERS": 0, "PRODUCER_REGISTERS": 0,
        }  # fmt: skip
        given = triton.mask_arguments(self.mask(), "kv") if case.mask else {}
        if "KV_ROWS" in given:
            tiles_of_row = given["KV_ROWS"][..., 0].sum(-1)
            given["KV_ORDER"] = tiles_of_row.argsort(dim=-1, descending=True) if case.ordered else None
        if kernels.exponent:
            captured = tuple(self.traced["score"].tensors)
            given |= {p.name: p.value(captured, ()) for p in kernels.exponent.parameters}
        for name, x in given.items():
            arguments[name] = Pointer(x.numpy().reshape(-1)) if isinstance(x, torch.Tensor) else x
        tiles = BATCH * HEADS * -(-self.rows // (64 * case.consumers))
        text = hopper.text(spec, kernels.exponent, kernels.mask)
        plain_gluon.run(text, arguments, min(case.programs, tiles))

    def mask(self) -> BlockMask:
        mask = create_block_mask(MASKS[self.case.mask], None, None, *self.case.lengths, "cpu")
        if self.case.form == "runs":
            return mask
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return BlockMask.from_kv_blocks(*lists, 128, seq_lengths=self.case.lengths)

    def scores(self) -> torch.Tensor:
        places: dict[str, Any] = {
            "b": torch.arange(BATCH)[:, None, None, None], "h": torch.arange(HEADS)[:, None, None],
            "q_idx": torch.arange(self.rows)[:, None], "kv_idx": torch.arange(self.columns),
        }  # fmt: skip
        scores = torch.from_numpy(self.q) @ torch.from_numpy(self.k).mT * self.case.scale
        for kind, own in (("score", {"score": scores}), ("mask", {})):
            if kind in self.traced:
                graph, tensors = self.lowered[kind].score, self.traced[kind].tensors
                (found,) = evaluate(graph, tensors, real=torch.float64, **places, **own)
                scores = found if kind == "score" else scores.masked_fill(~found, -torch.inf)
        return scores


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_ends_and_agrees_with_dense_attention(case: Case) -> None:
    call = Call(case)
    call.run()
    scores = call.scores()
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ torch.from_numpy(call.v)
    torch.testing.assert_close(torch.from_numpy(call.out), expected, rtol=1e-6, atol=1e-6)
    for found, truth in ((call.lse, scores.logsumexp(-1)), (call.largest, scores.amax(-1))):
        torch.testing.assert_close(torch.from_numpy(found).view(truth.shape), truth, rtol=1e-6, atol=1e-5)
    assert call.counter[0] == 0, "the next launch begins with a counter of zero"


def test_a_wait_that_nobody_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last values are waited for in vain."""
    expected = "        mbarrier.expect(full.index(slot), V.block_type.nbytes)\n"
    write = hopper.text

    def changed(*given: Any) -> str:
        text = write(*given)
        assert text.count(expected) == 1
        return text.replace(expected, expected.replace("V.block", "2 * V.block"))

    monkeypatch.setattr(plain_gluon, "SECONDS", 0.3)
    monkeypatch.setattr(hopper, "text", changed)
    with pytest.raises(plain_gluon.Stuck):
        Call(CASES[0]).run()
