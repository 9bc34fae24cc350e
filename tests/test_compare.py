"""compare and the command line: what they report, and what they refuse."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch
from named_mods import NAMED

from flexmod import errors, masks, mods
from flexmod.errors.base import ModPlaceError, UnknownModName
from flexmod.ir.graph import expect_size
from flexmod.tools.comparison import Timing, compare
from flexmod.tools.mod_names import ON_GPU, usual_setting

SMALL = {"batch": 1, "heads": 2, "seq": 256, "dim": 16, "device": "cpu", "show": False}


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", NAMED)
def test_every_name_agrees_with_its_reference(name: str) -> None:
    comparison = compare(name, **SMALL)
    assert comparison.agrees, str(comparison)
    results = [agreement.result for agreement in comparison.agreements]
    assert results == ["out", "grad of q", "grad of k", "grad of v"]
    assert all(timing.forward_ms > 0 and timing.backward_ms > 0 for timing in comparison.timings)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare("causal", **{**SMALL, "show": True})
    printed = capsys.readouterr().out
    assert printed == f"{comparison}\n"
    assert printed.startswith("causal, B=1 H=2 S=256 D=16 float32 on cpu\n(on the CPU: a size that takes")
    parts = (
        "flexmod against SDPA + mask",
        "flexmod is",
        "first forward and backward",
        "(0, 0)\n",
        "█ all pairs",
    )
    assert sorted(parts, key=printed.index) == list(parts)
    assert [timing.attention for timing in comparison.timings] == ["SDPA causal", "SDPA + mask", "flexmod"]
    assert repr(comparison) == "<Comparison causal, B=1 H=2 S=256 D=16 float32 on cpu: agrees>"


def test_a_row_says_how_many_times_faster_flexmod_is() -> None:
    comparison = compare("causal", **SMALL)
    sdpa = Timing("SDPA causal", 3.0, 1.0, 1.0, 1.0)
    changed = replace(comparison, timings=(sdpa, Timing("flexmod", 1.5, 1.0, 2.0, 1.0)))
    rows = [
        line.split() for line in str(changed).splitlines() if line.startswith(("SDPA causal", "flexmod  "))
    ]
    assert rows == [
        ["SDPA", "causal", "3.000", "1", "2.00x", "1.000", "1", "0.50x"],
        ["flexmod", "1.500", "1", "2.000", "1"],
    ]


def test_rates_count_the_tiles_that_are_kept() -> None:
    comparison = compare("causal", **SMALL)
    density = 1 - comparison.block_mask.sparsity() / 100
    assert density == 0.75
    causal, masked, ours = comparison.timings
    pairs = 2 * 256 * 256 * 16
    for timing, share in ((causal, 0.5), (masked, density), (ours, density)):
        assert timing.forward_tflops * timing.forward_ms == pytest.approx(4e-9 * share * pairs)
        assert timing.backward_tflops * timing.backward_ms == pytest.approx(10e-9 * share * pairs)


@pytest.mark.usefixtures("timed_once")
def test_a_function_of_the_caller() -> None:
    def every_second(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 2 == h

    comparison = compare(every_second, **SMALL)
    assert comparison.name == "every_second"
    assert comparison.block_mask.shape == (1, 2, 256, 256)
    assert comparison.agrees, str(comparison)


@pytest.mark.usefixtures("timed_once")
def test_a_mask_and_a_score_mod_together() -> None:
    comparison = compare(
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        score_mod=lambda score, b, h, q_idx, kv_idx: score + h,
        **SMALL,
    )
    assert comparison.reference == "the dense reference"
    assert comparison.agrees, str(comparison)


def test_two_mods_of_a_kind_are_refused() -> None:
    def shifted(score, b, h, q_idx, kv_idx):
        return score + h

    for mod in ("alibi", mods.softcap(3.0)):
        with pytest.raises(ModPlaceError, match="is a score_mod, and a mask_mod is wanted here"):
            compare(mod, score_mod=shifted, **SMALL)
    with pytest.raises(ModPlaceError, match="is a mask_mod, and a score_mod is wanted here"):
        compare("causal", score_mod=masks.causal(), **SMALL)


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("name", ["alibi", "sandwich", "by_entry"])
def test_a_reference_of_few_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence leaves memory for some heads of one batch entry, and mods may be made for all."""
    monkeypatch.setattr(sys.modules["flexmod.tools.comparison"], "REFERENCE_BYTES", 1)
    bias = torch.randn(3, 2)

    def by_entry(score, b, h, q_idx, kv_idx):
        return score + bias[expect_size(b, 3, "mods.by_entry", "bias"), h] * (q_idx - kv_idx)

    comparison = compare(by_entry if name == "by_entry" else name, **{**SMALL, "batch": 3})
    assert comparison.agrees, str(comparison)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("heads", -1), ("seq", 8.5), ("dim", "64"), ("dtype", "bf16"), ("dtype", torch.int8)],
)
def test_sizes_that_are_none(name: str, value: object) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=f"^{name} is {re.escape(repr(value))}"):
        compare("causal", **{**SMALL, name: value})


@pytest.mark.usefixtures("timed_once")
def test_rows_with_nothing_to_attend_to() -> None:
    comparison = compare(lambda b, h, q_idx, kv_idx: (q_idx > 40) & (q_idx >= kv_idx), **SMALL)
    assert comparison.agrees, str(comparison)


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["flexmod.tools.comparison"]
    attend = module.flex_attention

    def wrong(q, k, v, *rest, **options):
        return attend(q, k, 1.01 * v, *rest, **options)

    monkeypatch.setattr(module, "flex_attention", wrong)
    comparison = compare("causal", **SMALL)
    assert not comparison.agrees
    assert "DIFFERS" in str(comparison)


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    comparison = compare("sliding_window", dtype=dtype, **SMALL)
    assert comparison.agrees, str(comparison)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_on_the_gpu_with_flex(name: str) -> None:
    comparison = compare(name, batch=2, heads=4, seq=1024, dim=64, flex=True, show=False)
    assert comparison.agrees, str(comparison)
    assert [timing.attention for timing in comparison.timings] == [
        "SDPA causal (flash)",
        "SDPA + mask",
        "flex_attention (torch)",
        "flexmod",
    ]


def test_an_image_is_square() -> None:
    assert compare("natten", **{**SMALL, "seq": 150}).setting.seq == 144


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownModName):
        compare("causual")


@pytest.mark.usefixtures("timed_once")
def test_names_with_parameters() -> None:
    comparison = compare("causal & sliding_window(40)", score_mod="softcap:15", **SMALL)
    assert comparison.name == "causal & sliding_window(40) with softcap:15"
    assert comparison.reference == "the dense reference"
    assert comparison.agrees, str(comparison)
    beside = compare(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, score_mod="alibi", **SMALL)
    assert beside.name == "<lambda> with alibi"
    assert beside.agrees, str(beside)


def test_flex_wants_cuda() -> None:
    with pytest.raises(errors.FlexOnCpuError) as raised:
        compare("causal", device="cpu", flex=True)
    assert str(raised.value) == (
        "flex=True, or --flex, times torch's compiled flex_attention, which has no backward on cpu.\n"
        "  Instead: run it on a CUDA device, or leave flex out."
    )


def test_the_usual_size_fits_the_device() -> None:
    assert str(usual_setting("cpu")) == "B=1 H=4 S=2048 D=64 float32 on cpu"
    assert str(ON_GPU) == "B=4 H=16 S=8192 D=128 bfloat16 on cuda"
