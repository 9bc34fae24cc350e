"""The generated Hopper forward, run as plain Python beside dense attention: its pipeline, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import planned
import pytest
import torch
from plain_gluon import on_python
from tiers import long_but

from flexmod import BlockMask, create_block_mask, masks, mods
from flexmod.backends.arguments import Forward
from flexmod.codegen.compiler import kernels_for, lower
from flexmod.codegen.hopper import ForwardShape, HopperKernels
from flexmod.codegen.spec import KernelSpec
from flexmod.codegen.variant import pair_tile
from flexmod.ir.evaluate import evaluate
from flexmod.ir.offsets import Positions
from flexmod.ir.trace import trace

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
BATCH, HEADS = 2, 2


def holes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 3 != 0) & ((q_idx < 130) | (q_idx >= 300)) & (kv_idx <= q_idx)


def of_each(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Another mask for each batch entry and head."""
    return (q_idx - 130 * h >= kv_idx) & (q_idx - kv_idx < 500 - 190 * b)


AT = Positions(210, 9)
AT_TENSOR = Positions(torch.tensor([40, 210], dtype=torch.int32), torch.tensor([9]), q_bound=4096)
MASKS = {"": None, "causal": masks.causal(), "window": masks.sliding_window(130), "holes": holes,
         "causal at 210": AT.mask(masks.causal()), "window at 210": AT.mask(masks.sliding_window(130)),
         "of each": of_each, "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0}  # fmt: skip


def nothing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.full_like(score, -torch.inf)


def near_ones(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Asks what the mask of a window asks."""
    return torch.where((q_idx >= kv_idx) & (q_idx - kv_idx <= 130), score * 0.5, score + 2.0)


PAIRS = torch.randn(BATCH, HEADS, 600, 504, generator=torch.Generator().manual_seed(1)).bfloat16()
WIDE_PAIRS = torch.randn(700, 1028, generator=torch.Generator().manual_seed(2))[:, 4:]


def pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + PAIRS[b, h, q_idx, kv_idx]


def capped_pairs(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 5.0 * torch.tanh(score * WIDE_PAIRS[q_idx, kv_idx] / 5.0) + (kv_idx - q_idx) * 0.01


SCORES = {"": None, "pairs": pairs, "capped pairs": capped_pairs,
          "nothing": nothing, "softcap": mods.softcap(20.0), "alibi": mods.alibi(2),
          "near ones": near_ones, "alibi at 210": AT.score(mods.alibi(2)),
          "near ones at 210": AT.score(near_ones), "alibi at a tensor": AT_TENSOR.score(mods.alibi(2)),
          "near ones at a tensor": AT_TENSOR.score(near_ones)}  # fmt: skip


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
    ordered: bool = False
    block: int = 128
    float8: bool = False
    value_scale: tuple[float, ...] = ()  # one number, or one for each head

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "") for x in self.__dict__.values())


CASES = [
    Case(),
    Case(dims=(128, 128), lengths=(1, 1)),
    Case(consumers=3, lengths=(500, 300)),
    Case("causal", lengths=(500, 500)),
    Case("causal", "alibi", lengths=(500, 500), form="lists"),
    Case("window", dims=(64, 64), lengths=(700, 700), block_n=64, stages=4),
    Case("window", "softcap", (256, 256), (500, 500), block_n=64, scale=0.6),
    Case("holes", "near ones", lengths=(500, 500)),
    Case("holes", "softcap", lengths=(500, 500), scale=-0.5),
    Case("holes", lengths=(700, 700), ordered=True),
    Case("window", "alibi", lengths=(700, 700), block_n=64, ordered=True),
    Case("causal", lengths=(300, 300), ordered=True, block=256),
    Case("nothing", lengths=(500, 500)),
    Case("", "nothing", lengths=(130, 130)),
    Case(dims=(192, 128), block_n=64),
    Case("causal at 210", "alibi at 210"),
    Case("window at 210", "near ones at 210", lengths=(290, 500), block_n=64),
    Case("causal", "near ones at a tensor"),
    Case(float8=True, stages=3),
    Case("holes", "near ones", (128, 112), (500, 500), float8=True),
    Case("causal", "alibi", (64, 128), (500, 500), block_n=64, form="lists", float8=True),
    Case("holes", "softcap", lengths=(500, 500), scale=-0.5, ordered=True, float8=True),
    Case("window at 210", "near ones at 210", (128, 128), (290, 500), block_n=64, float8=True),
    Case("", "alibi at a tensor", lengths=(130, 300), block_n=256, float8=True),
    Case("nothing", lengths=(500, 500), float8=True),
    Case(dims=(128, 128), lengths=(450, 300), consumers=3, stages=2, float8=True),
    Case(dims=(256, 256), block_n=64, stages=3, float8=True),
    Case("causal", dims=(128, 128), lengths=(300, 300), float8=True, value_scale=(0.5,)),
    Case("", "alibi", lengths=(300, 300), float8=True, value_scale=(0.5, 3.0)),
    Case("window", lengths=(300, 300), value_scale=(0.5, 3.0)),
    Case("", "pairs"),
    Case("holes", "pairs", (128, 128), (304, 304), block_n=64, stages=3),
    Case("window", "capped pairs", (256, 128), (500, 500), block_n=64, form="lists"),
    Case("", "capped pairs", lengths=(700, 130), consumers=3),
    Case("of each", "pairs", lengths=(300, 500), ordered=True),
    Case("of each", lengths=(300, 500)),
    Case(consumers=1, lengths=(500, 300)),
    Case("of each", lengths=(300, 500), consumers=1, ordered=True),
    Case("causal", "alibi", lengths=(500, 500), consumers=1, form="lists"),
    Case("of each", "alibi", (128, 128), (300, 500), consumers=1, float8=True),
    Case("holes", lengths=(700, 500), consumers=1, form="lists", float8=True),
    Case("of each", "alibi", lengths=(500, 500), consumers=3, form="lists", float8=True),
    Case("causal", "alibi", (64, 128), (500, 500), consumers=3, block=256, float8=True),
]
# each differs from one above in a value that another of them has
MORE = [
    Case(score="alibi", consumers=3, lengths=(500, 300)),
    Case("window", "near ones", lengths=(500, 500), block_n=64),
    Case("holes", lengths=(500, 500)),
    Case("", "alibi at a tensor", lengths=(130, 300)),
    Case(dims=(128, 128), lengths=(1, 1), float8=True),
    Case("", "nothing", lengths=(130, 130), float8=True),
    Case("holes", "near ones", (64, 192), (500, 500), float8=True),
    Case("nothing", "pairs", lengths=(300, 300)),
    Case("", "pairs", consumers=1),
    Case("holes", "softcap", lengths=(700, 700), consumers=1, block=256),
    Case("holes", "near ones", (128, 128), (700, 500), consumers=3, float8=True),
    Case("of each", lengths=(300, 500), consumers=3, float8=True),
    Case("window", "softcap", lengths=(700, 700), consumers=3, form="lists", float8=True),
    Case("nothing", lengths=(500, 300), consumers=3, float8=True),
]


class Call:
    """Inputs of a case, float64 in place of a half type, and its results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        (rows, columns), (dim, value_dim) = case.lengths, case.dims
        generator = torch.Generator().manual_seed(0)
        sizes = (BATCH, HEADS, rows, dim), (1, 1, columns, dim), (1, 1, columns, value_dim)
        self.q, self.k, self.v = (torch.randn(size, generator=generator).double() for size in sizes)
        self.value_scale: torch.Tensor | None = None
        if case.value_scale:
            self.value_scale = torch.tensor(case.value_scale)
            self.k, self.v = (x.repeat(1, HEADS, 1, 1) for x in (self.k, self.v))
            shape = (1, HEADS) if len(case.value_scale) > 1 else ()
            self.value_scale = self.value_scale.reshape(shape)
        mods = {"score": SCORES[case.score], "mask": MASKS[case.mask]}
        self.traced: dict[str, Any] = {kind: trace(mod, kind) for kind, mod in mods.items() if mod}
        self.extents = (BATCH, HEADS, rows, columns)

    def run(self, changed: Callable[[str], str] = lambda text: text) -> Forward:
        case = self.case
        shape = ForwardShape(case.consumers, case.block_n, case.stages)
        dtypes = 3 * (FLOAT8 if case.float8 else BF16,)
        spec = KernelSpec(
            *dtypes, *case.dims, mask_block=(case.block,) * 2 if case.mask else None,
            mask_form=case.form, positive_scale=case.scale > 0,
            out_dtype=BF16 if case.float8 else None, value_scale=bool(case.value_scale),
        )  # fmt: skip
        if "score" in self.traced:
            score = self.traced["score"]
            spec = replace(spec, pair_tile=pair_tile(spec, score.graph, score.tensors))
        lowered = {kind: lower(x.graph, self.extents, split=False) for kind, x in self.traced.items()}
        kernels = HopperKernels(kernels_for(spec, lowered.get("score"), lowered.get("mask")))
        tensors = self.traced["score"].tensors if "score" in self.traced else ()
        mask = self.mask().snapshot() if case.mask else None
        with on_python(changed, ordered=case.ordered):
            return planned.forward(
                kernels, self.q, self.k, self.v, scale=case.scale, mask=mask, want_max=True, shape=shape,
                score_captured=planned.Mod(tensors), value_scale=self.value_scale,
            )  # fmt: skip

    def mask(self) -> BlockMask:
        sizes, block = self.case.lengths, self.case.block
        leading = (BATCH, HEADS) if self.case.mask == "of each" else (None, None)
        mask = create_block_mask(MASKS[self.case.mask], *leading, *sizes, "cpu", BLOCK_SIZE=block)
        if self.case.form == "runs":
            return mask
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return BlockMask.from_kv_blocks(*lists, block, seq_lengths=sizes)

    def scores(self) -> torch.Tensor:
        rows, columns = self.case.lengths
        places: dict[str, Any] = {
            "b": torch.arange(BATCH)[:, None, None, None], "h": torch.arange(HEADS)[:, None, None],
            "q_idx": torch.arange(rows)[:, None], "kv_idx": torch.arange(columns),
        }  # fmt: skip
        scores = self.q @ self.k.mT * self.case.scale
        for kind, own in (("score", {"score": scores}), ("mask", {})):
            if kind in self.traced:
                graph, tensors = self.traced[kind].graph, self.traced[kind].tensors
                (found,) = evaluate(graph, tensors, real=torch.float64, **places, **own)
                scores = torch.where(found, scores, -torch.inf) if kind == "mask" else found.expand_as(scores)
        return scores


def agrees(call: Call, found: Forward) -> bool:
    """With dense attention."""
    scores = call.scores()
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ call.v
    if call.value_scale is not None:
        expected *= call.value_scale[..., None, None]
    pairs = (found.out, expected), (found.lse, scores.logsumexp(-1)), (found.max_scores, scores.amax(-1))
    return all(torch.allclose(own.double(), truth, rtol=1e-6, atol=1e-5) for own, truth in pairs)


@pytest.mark.parametrize("case", long_but(CASES, [*CASES, *MORE]), ids=str)
def test_it_ends_and_agrees_with_dense_attention(case: Case) -> None:
    call = Call(case)
    assert agrees(call, call.run())


@pytest.mark.parametrize("score", ["", "softcap", "alibi"])
@pytest.mark.parametrize("mask", ["", "causal"])
def test_queries_of_nan(mask: str, score: str) -> None:
    """The chip's maximum ignores nan, and so does this one."""
    call = Call(Case(mask, score, lengths=(300, 300)))
    call.q[0, 1, 7, 3] = call.q[1, 0, 299, 0] = torch.nan
    found, scores = call.run(), call.scores()
    expected = torch.softmax(scores, -1) @ call.v
    pairs = (found.out, expected), (found.lse, scores.logsumexp(-1)), (found.max_scores, scores.amax(-1))
    for own, truth in pairs:
        torch.testing.assert_close(own.double(), truth, rtol=1e-6, atol=1e-5, equal_nan=True)
