"""tanh_approximate: an instruction of NVIDIA's chips in kernels for these, and tanh everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_case import make_case
from torch import Tensor

import flexmod
from flexmod import create_block_mask, flex_attention, masks, mods, tanh_approximate
from flexmod.codegen.variant import variant
from flexmod.ir.fingerprint import fingerprint
from flexmod.runtime.target import family_of
from flexmod.tools.ahead import jobs

INTERPRET = {"BACKEND": "INTERPRET"}
REFERENCE = {"BACKEND": "REFERENCE"}


def inputs() -> list[Tensor]:
    return [x.requires_grad_() for x in make_case(q_len=24, heads=2, head_dim=16).inputs]


def test_outside_of_kernels_it_is_tanh() -> None:
    x = torch.linspace(-9, 9, 99, dtype=torch.float64, requires_grad=True)
    assert torch.equal(tanh_approximate(x), torch.tanh(x))
    (grad,) = torch.autograd.grad(tanh_approximate(x).sum(), x)
    (wanted,) = torch.autograd.grad(torch.tanh(x).sum(), x)
    assert torch.equal(grad, wanted)
    (vmapped,) = torch.autograd.grad(torch.vmap(tanh_approximate)(x).sum(), x)
    assert torch.equal(vmapped, wanted)


@pytest.mark.parametrize("options", [None, INTERPRET, REFERENCE], ids=["cpu", "interpret", "reference"])
def test_results_are_those_of_softcap_where_there_is_no_instruction(options: Any) -> None:
    found = []
    for approximate in (True, False):
        tensors = inputs()
        torch.manual_seed(0)
        out = flex_attention(*tensors, mods.softcap(2.0, approximate), kernel_options=options)
        found.append((out, *torch.autograd.grad(out, tensors, torch.randn_like(out))))
    assert all(map(torch.equal, *found))


def test_it_is_a_mod_like_any() -> None:
    """It has a fingerprint, combines with others, and runs in a compiled graph."""
    score_mod = mods.softcap(2.0, approximate=True)
    one, other = fingerprint(score_mod), fingerprint(mods.softcap(2.0, approximate=True))
    assert one is not None and other is not None and one.key == other.key
    plain, three = fingerprint(mods.softcap(2.0)), fingerprint(mods.softcap(3.0, approximate=True))
    assert plain is not None and three is not None and one.key not in (plain.key, three.key)
    q, k, v = inputs()
    mask = create_block_mask(masks.causal(), None, None, 24, 24, device="cpu")
    chained = mods.chain(mods.alibi(2), score_mod)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, chained, mask)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attend(q, k, v))


@pytest.mark.parametrize(
    ("target", "template"),
    [
        ("sm_80", "portable"),
        pytest.param("sm_90", "hopper", marks=pytest.mark.long),
        ("gfx942", "portable"),
    ],
)
def test_the_instruction_is_in_the_kernel(target: str, template: str) -> None:
    """Once for each element of a tile, in the loops of full and of partial tiles."""
    made = variant(mods.softcap(20.0, approximate=True), masks.causal(), head_dim=64)
    built = next(iter(jobs(made, target))).compile()
    assert (built.kernel, built.template, built.problem) == ("forward", template, "")
    assert built.report is not None
    assert ("tanh.approx.f32" in built.report.asm.get("ptx", "")) == (target != "gfx942")
    if built.report.sass:
        text = built.report.sass
        assert text.count("MUFU.TANH") > 0
        assert text.count("MUFU.RCP") < text.count("MUFU.TANH") / 4  # the rows' sums, and nothing else


def test_families_of_chips() -> None:
    families = {
        "nvidia": ("sm_75", "sm_89"),
        "nvidia_early": ("sm_90", "sm_120"),
        "": ("sm_70", "gfx942", "cpu"),
    }
    for family, names in families.items():
        assert {family_of(name) for name in names} == {family}


def test_modules_of_a_handle_follow_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = flexmod.compile(mods.softcap(20.0, approximate=True))
    attend(*inputs())
    assert "tanh.approx" not in str(attend.source)
    for chip, there in (("sm_86", True), ("gfx942", False)):
        monkeypatch.setattr(type(attend), "_chip", lambda _, chip=chip: chip)
        assert all(("tanh.approx" in text) == there for text in attend.source.values())
