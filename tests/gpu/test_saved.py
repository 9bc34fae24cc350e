"""Changes between forward and backward on a GPU, where the second backward on runs a plan again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import planned
import pytest
import torch
from reference_case import make_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmod import BlockMask, create_block_mask, errors, flex_attention, masks, mods
from flexmod.block_mask.tiles import LISTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
LENGTH, HEADS = 640, 4
TEMPLATES = ["portable", "auto"]
FORMS = ["lists", "runs"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that were run again."""
    return planned.reruns(monkeypatch)


class Case:
    """`learned`: a table of distances, whose sums walk tiles by diagonal where the kernels are portable."""

    def __init__(self, template: str, form: str, learned: bool = False) -> None:
        case = make_case(q_len=LENGTH, heads=HEADS, head_dim=64, dtype=torch.bfloat16, device=DEVICE, seed=0)
        self.tensors = [x.requires_grad_() for x in case.inputs]
        self.documents = torch.arange(LENGTH, device=DEVICE) // 200
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.learned = torch.randn(2 * LENGTH - 1 if learned else HEADS, device=DEVICE, generator=generator)
        self.learned.requires_grad_()
        self.grad_out = torch.randn(self.tensors[0].shape, device=DEVICE, generator=generator).bfloat16()
        self.score_mod = mods.relative_bias(self.learned) if learned else mods.alibi(self.learned)
        self.options = {"TEMPLATE": template}
        mask = create_block_mask(masks.document(self.documents), None, None, LENGTH, LENGTH, device=DEVICE)
        if form == "lists":
            parts = {name: getattr(mask, name).clone() for name in LISTS}
            mask = BlockMask(mask.seq_lengths, **parts, BLOCK_SIZE=128, mask_mod=mask.mask_mod)
        self.mask = mask

    def forward(self) -> Tensor:
        return flex_attention(*self.tensors, self.score_mod, self.mask, kernel_options=self.options)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (*self.tensors, self.learned), self.grad_out, retain_graph=True)

    def warm(self) -> tuple[Tensor, ...]:
        for _ in range(3):
            found = self.backward(self.forward())
        return found


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """dQ and sums along diagonals are added up in any order by the kernels made for Hopper."""
    for ours, right in zip(found, wanted, strict=True):
        assert (ours.double() - right.double()).norm() <= 0.01 * right.double().norm()


def shorter_lists(mask: BlockMask) -> None:
    """No full tiles, in tensors that have no room for more than there are; the old ones may be freed."""
    for name in LISTS:
        part, full = getattr(mask, name), name.startswith("full")
        if name.endswith("indices"):
            setattr(mask, name, part[..., : 1 if full else 4].contiguous())
        elif full:
            setattr(mask, name, torch.zeros_like(part))


def longer_lists(mask: BlockMask) -> None:
    """The same tiles, in lists with room for others."""
    for name in LISTS:
        if name.endswith("indices"):
            setattr(mask, name, torch.nn.functional.pad(getattr(mask, name), (0, 7)))


def every_tile(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


ASSIGNED: dict[str, Callable[[BlockMask], None]] = {
    "shorter lists": shorter_lists,
    "longer lists": longer_lists,
    "mask_mod": lambda mask: setattr(mask, "mask_mod", every_tile),
    "seq_lengths": lambda mask: setattr(mask, "seq_lengths", (LENGTH - 1, LENGTH - 1)),
}


@pytest.mark.parametrize("learned", [False, True], ids=["slopes", "table"])
@pytest.mark.parametrize("what", ASSIGNED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_assigned_does_not_reach_the_backward(
    template: str, form: str, what: str, learned: bool, played: list[Any]
) -> None:
    case = Case(template, form, learned)
    wanted = case.warm()
    out = case.forward()
    ASSIGNED[what](case.mask)
    torch.cuda.empty_cache()
    played.clear()
    for _ in range(2):
        same(case.backward(out), wanted)
    assert learned or len(played) == 2
    torch.cuda.synchronize()


def test_what_is_assigned_reaches_the_next_call(played: list[Any]) -> None:
    """Calls with both masks take turns, each with its own recordings."""
    case = Case("auto", "lists")
    first, wanted = case.mask, case.warm()
    shorter = Case("auto", "lists")
    shorter_lists(shorter.mask)
    others = shorter.warm()
    for _ in range(4):
        out = case.forward()
        case.mask = shorter.mask
        other = case.forward()
        same(case.backward(out), wanted)
        same(case.backward(other), others)
        case.mask = first
    assert played


@pytest.mark.parametrize("name", ["kv_indices", "q_num_blocks", "documents", "learned", "query"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written_is_named(template: str, name: str) -> None:
    case = Case(template, "lists")
    case.warm()
    out = case.forward()
    written = {
        "documents": case.documents, "learned": case.learned.detach(), "query": case.tensors[0].detach(),
    }.get(name)  # fmt: skip
    (getattr(case.mask, name) if written is None else written).zero_()
    with pytest.raises(errors.ModifiedBeforeBackwardError):
        case.backward(out)
    torch.cuda.synchronize()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_offload(template: str, form: str) -> None:
    """The lists and captures come back as copies, and are launched from."""
    case = Case(template, form)
    wanted = case.warm()
    for _ in range(4):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = case.forward()
        if form == "lists":
            shorter_lists(case.mask)
        same(case.backward(out), wanted)
        case.mask = Case(template, form).mask


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_checkpoint_takes_the_lists_of_its_second_forward(template: str) -> None:
    case = Case(template, "lists")
    case.warm()

    def attend(*tensors: Tensor) -> Tensor:
        return flex_attention(*tensors, case.score_mod, case.mask, kernel_options=case.options)

    out = checkpoint(attend, *case.tensors, use_reentrant=False)
    for name in ("full_kv_num_blocks", "full_q_num_blocks"):
        getattr(case.mask, name).zero_()
    found = torch.autograd.grad(out, case.tensors, case.grad_out)
    wanted = torch.autograd.grad(attend(*case.tensors), case.tensors, case.grad_out)
    same(found, wanted)


def test_diagonals_on_two_streams() -> None:
    """Lists that one stream makes of a mask are not read by another before they are written."""
    wanted = Case("portable", "runs", learned=True).warm()
    case = Case("portable", "runs", learned=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if number == 0:
                torch.cuda._sleep(200_000_000)
            found = case.backward(case.forward())
        if number == 1:
            stream.synchronize()
            same(found, wanted)
    torch.cuda.synchronize()
