"""What a backward needs is fixed at its forward: later changes do not reach it, or an error names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import planned
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexmod
from flexmod import BlockMask, create_block_mask, errors, flex_attention
from flexmod.block_mask.tiles import LISTS

LENGTH, BLOCK, HEADS, DIM = 24, 16, 1, 16
BACKENDS: dict[str, Any] = {
    "cpu": None,
    "interpret": {"BACKEND": "INTERPRET"},
    "reference": {"BACKEND": "REFERENCE"},
}
MODES = ["eager", "handle", "compiled"]
INPLACE = "modified by an inplace operation"


class Case:
    """A mask that captures a tensor, a score mod that captures one and a Parameter, and calls with them."""

    def __init__(self, mode: str, backend: str, form: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        shape = (1, HEADS, LENGTH, DIM)
        self.tensors = [random(*shape).requires_grad_() for _ in range(3)]
        self.grad_out = random(*shape)
        self.window = torch.full((LENGTH,), 20)
        self.bias = random(LENGTH)
        self.slopes = torch.nn.Parameter(random(HEADS))
        self.mode, self.options = mode, BACKENDS[backend]
        window, bias, slopes = self.window, self.bias, self.slopes

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx >= kv_idx) & (q_idx - kv_idx < window[q_idx])

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * bias[kv_idx] + slopes[h] * (q_idx - kv_idx)

        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK)
        if form == "lists":
            parts = {name: getattr(mask, name).clone() for name in LISTS}
            mask = BlockMask(mask.seq_lengths, **parts, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)
        self.mask = mask
        self._handle = flexmod.compile(score_mod, kernel_options=self.options)
        self._score_mod = score_mod

        def run(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
            return flex_attention(q, k, v, score_mod, block_mask, kernel_options=self.options)

        self._compiled = torch.compile(run, backend="aot_eager") if mode == "compiled" else run

    def forward(self) -> Tensor:
        attend = self._handle if self.mode == "handle" else self._compiled
        return attend(*self.tensors, self.mask)

    def backward(self, out: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (*self.tensors, self.slopes), self.grad_out, **options)

    def warm(self) -> tuple[Tensor, ...]:
        """The gradients of calls that nothing disturbs; afterwards both directions are known and recorded."""
        for _ in range(3):
            found = self.backward(self.forward())
        return found


def same(found: Any, wanted: Any) -> None:
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


def other(mask: BlockMask, name: str) -> Tensor:
    """Another list that fits, of other tiles."""
    part = getattr(mask, name)
    return part.flip(-1).contiguous() if name.endswith("indices") else torch.zeros_like(part)


# Compiling takes its time: some lists stand for all.
LISTED = [
    (name, mode)
    for name in LISTS
    for mode in MODES
    if mode != "compiled" or name in ("kv_num_blocks", "full_q_indices")
]
ON_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)
IN_MODES = pytest.mark.parametrize("mode", MODES)
IN_FORMS = pytest.mark.parametrize("form", ["lists", "runs"])


@pytest.mark.covering(1, long=1, costly=("compiled",))
@ON_BACKENDS
@IN_FORMS
@pytest.mark.parametrize(("name", "mode"), LISTED)
def test_a_list_that_is_assigned(name: str, mode: str, form: str, backend: str) -> None:
    case = Case(mode, backend, form)
    wanted = case.warm()
    out = case.forward()
    setattr(case.mask, name, other(case.mask, name))
    if mode != "compiled":  # there a graph is used once
        same(case.backward(out, retain_graph=True), wanted)
    same(case.backward(out), wanted)


@pytest.mark.covering(1, long=1, costly=("compiled",))
@ON_BACKENDS
@IN_FORMS
@pytest.mark.parametrize(("name", "mode"), LISTED)
def test_a_list_that_is_written(name: str, mode: str, form: str, backend: str) -> None:
    """The reference has read it in the forward, and a mask of runs is launched from these."""
    case = Case(mode, backend, form)
    wanted = case.warm()
    part = getattr(case.mask, name)
    out = case.forward()
    part.copy_(other(case.mask, name))
    if backend == "reference" or (form == "runs" and mode != "compiled"):
        same(case.backward(out), wanted)
        return
    with pytest.raises(RuntimeError, match=INPLACE) as raised:
        case.backward(out)
    if mode != "compiled":  # there torch raises its own
        assert type(raised.value) is errors.ModifiedBeforeBackwardError
        assert str(raised.value).startswith(f"block_mask.{name} has been")


@pytest.mark.covering(1, costly=("compiled",))
@ON_BACKENDS
@IN_MODES
def test_calls_after_a_write_see_it(mode: str, backend: str) -> None:
    case = Case(mode, backend, "runs")
    case.warm()
    for name in LISTS:
        if name.endswith("num_blocks"):
            getattr(case.mask, name).zero_()
    out = case.forward()
    assert not out.any() and not any(x.any() for x in case.backward(out))


def none_kept(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


ASSIGNED: dict[str, Callable[[BlockMask], None]] = {
    "mask_mod": lambda mask: setattr(mask, "mask_mod", none_kept),
    "seq_lengths": lambda mask: setattr(mask, "seq_lengths", (20, 20)),
    "BLOCK_SIZE": lambda mask: setattr(mask, "BLOCK_SIZE", (14, 14)),
    "all lists": lambda mask: [setattr(mask, n, other(mask, n)) for n in LISTS] and None,
}


@pytest.mark.covering(1, long=1, costly=("compiled",))
@ON_BACKENDS
@IN_MODES
@IN_FORMS
@pytest.mark.parametrize("what", ASSIGNED)
def test_another_part_that_is_assigned(what: str, form: str, mode: str, backend: str) -> None:
    case = Case(mode, backend, form)
    wanted = case.warm()
    out = case.forward()
    ASSIGNED[what](case.mask)
    same(case.backward(out), wanted)


def step(case: Case) -> None:
    case.slopes.grad = torch.ones_like(case.slopes)
    torch.optim.SGD([case.slopes], 0.5).step()


WRITTEN: dict[str, Callable[[Case], Any]] = {
    "window, captured by mask_mod,": lambda case: case.window.sub_(9),
    "bias, captured by score_mod,": lambda case: case.bias.mul_(2),
    "slopes, captured by score_mod,": step,
    "query": lambda case: case.tensors[0].detach().zero_(),
    "key": lambda case: case.tensors[1].detach().mul_(2),
    "value": lambda case: case.tensors[2].detach().mul_(2),
}


@pytest.mark.covering(1, costly=("compiled",))
@ON_BACKENDS
@IN_MODES
@IN_FORMS
@pytest.mark.parametrize("name", WRITTEN)
def test_a_tensor_that_is_written(name: str, form: str, mode: str, backend: str) -> None:
    case = Case(mode, backend, form)
    wanted = case.warm()
    out = case.forward()
    WRITTEN[name](case)
    if backend == "reference":  # differentiable torch: what no derivative reads may change
        try:
            same(case.backward(out), wanted)
        except RuntimeError as error:
            assert INPLACE in str(error)
        return
    with pytest.raises(RuntimeError, match=INPLACE) as raised:
        case.backward(out)
    if mode != "compiled":  # there torch raises its own
        assert type(raised.value) is errors.ModifiedBeforeBackwardError
        assert str(raised.value).startswith(f"{name} has been")
    case.backward(case.forward())


def test_a_tensor_without_a_name_that_is_written() -> None:
    """An operation of a graph does not know the names of captured tensors."""
    bias, (q, k, v) = torch.zeros(LENGTH), Case("eager", "cpu", "runs").tensors

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    torch._dynamo.reset()
    out = torch.compile(flex_attention, backend="eager")(q, k, v, biased)
    bias.fill_(1.0)
    with pytest.raises(errors.ModifiedBeforeBackwardError, match=r"a new one: tensor = tensor\.clone\(\)"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_a_handle_that_builds_its_mask_again(backend: str) -> None:
    window = torch.full((LENGTH,), 20)
    q, k, v = Case("eager", backend, "runs").tensors
    attend = flexmod.compile(
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window[q_idx], kernel_options=BACKENDS[backend]
    )
    wanted = [torch.autograd.grad(attend(q, k, v).sum(), q)[0] for _ in range(3)][-1]
    out = attend(q, k, v)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], wanted)
    window.fill_(3)
    attend(q, k, v)
    with pytest.raises(errors.ModifiedBeforeBackwardError, match=r"^window, captured by mask_mod, has been"):
        out.sum().backward()


def test_tensors_of_inference_mode_are_copied() -> None:
    """They know nothing of writes."""
    q, k, v = Case("eager", "cpu", "runs").tensors
    with torch.inference_mode():
        window, scale = torch.full((LENGTH,), 20), torch.full((LENGTH,), 2.0)
        sizes = (None, None, LENGTH, LENGTH, "cpu", BLOCK)
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window[q_idx], *sizes)
        mask.kv_num_blocks = mask.kv_num_blocks.clone()
    assert mask.storage.form == "lists"

    def attend() -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s * scale[q_idx], mask)

    wanted = torch.autograd.grad(attend().sum(), (q, k, v))
    out = attend()
    with torch.inference_mode():
        window.fill_(3)
        scale.fill_(7.0)
        mask.kv_num_blocks.zero_()
    same(torch.autograd.grad(out.sum(), (q, k, v)), wanted)


# Hooks and checkpoints

KERNELS = pytest.mark.parametrize("backend", ["cpu", "interpret"])


@pytest.mark.covering(2, long=2)
@KERNELS
@IN_FORMS
@pytest.mark.parametrize("change", ["nothing", "assigned", "written"])
def test_an_offload_keeps_what_was_saved(change: str, form: str, backend: str) -> None:
    case = Case("eager", backend, form)
    wanted = case.warm()
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            out = case.forward()
        if change == "written":
            for name in LISTS:
                getattr(case.mask, name).zero_()
            case.window.zero_()
        elif change == "assigned":
            case.mask.mask_mod = none_kept
            case.mask.kv_num_blocks = torch.zeros_like(case.mask.kv_num_blocks)
        same(case.backward(out), wanted)
        if change != "nothing":
            break


@KERNELS
@IN_FORMS
def test_hooks_that_return_what_they_get(form: str, backend: str) -> None:
    """torch compares no version behind hooks; of a mask it is compared all the same."""
    case = Case("eager", backend, form)
    wanted = case.warm()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        first, second = case.forward(), case.forward()
    same(case.backward(first), wanted)
    case.window.zero_()
    with pytest.raises(errors.ModifiedBeforeBackwardError, match=r"^window, captured by mask_mod, has been"):
        case.backward(second)


@KERNELS
@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_hooks_that_return_other_tensors(what: str, backend: str) -> None:
    case = Case("eager", backend, "runs")
    changed: Callable[[Tensor], Tensor] = {
        "dtype": lambda x: x.double(), "shape": lambda x: x[..., :-1]
    }[what]  # fmt: skip
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: changed(x) if x.is_floating_point() else x
        ):
            out = case.forward()
        with pytest.raises(errors.SavedTensorError, match=r"^query was saved for the backward as \(1, 1, 24"):
            case.backward(out)


@pytest.mark.covering(1, costly=("compiled",))
@KERNELS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("change", ["nothing", "written", "assigned", "mask_mod"])
def test_a_checkpoint_sees_the_mask_of_its_second_forward(change: str, reentrant: bool, backend: str) -> None:
    case = Case("eager", backend, "lists")
    case.warm()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, case._score_mod, case.mask, kernel_options=case.options)

    out = checkpoint(attend, *case.tensors, use_reentrant=reentrant)
    if change == "written":
        case.mask.kv_num_blocks.zero_()
        case.mask.q_num_blocks.zero_()
        case.window.fill_(3)
    elif change == "assigned":
        case.mask.kv_num_blocks = torch.zeros_like(case.mask.kv_num_blocks)
        case.mask.q_num_blocks = torch.zeros_like(case.mask.q_num_blocks)
    elif change == "mask_mod":
        window = case.window
        case.mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window[q_idx]

    def gradients(result: Tensor) -> list[Tensor]:
        for x in case.tensors:
            x.grad = None
        result.backward(case.grad_out)
        return [x.grad for x in case.tensors]  # type: ignore[misc]

    if change == "mask_mod" and not reentrant:
        with pytest.raises(errors.RecomputedError):
            gradients(out)
        return
    found = gradients(out)
    same(found, gradients(attend(*case.tensors)))


def test_a_checkpoint_that_builds_its_mask() -> None:
    """Each forward has a mask of its own, and both are one."""
    case = Case("eager", "cpu", "runs")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(case.mask.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK)
        return flex_attention(q, k, v, case._score_mod, mask)

    wanted = torch.autograd.grad(attend(*case.tensors), case.tensors, case.grad_out)
    again = checkpoint(attend, *case.tensors, use_reentrant=False)
    same(torch.autograd.grad(again, case.tensors, case.grad_out), wanted)


# What a mask is assigned


@pytest.mark.parametrize(
    ("name", "part"), [("kv_indices", None), ("kv_num_blocks", [[[1]]]), ("q_indices", 3)]
)
def test_a_list_that_is_no_tensor_is_refused_at_once(name: str, part: Any) -> None:
    mask = Case("eager", "cpu", "runs").mask
    with pytest.raises(errors.BlockMaskPartsError, match=f"block_mask.{name} is assigned a"):
        setattr(mask, name, part)


@pytest.mark.covering(1, long=1, costly=("compiled",))
@ON_BACKENDS
@IN_MODES
def test_lists_that_do_not_fit_are_refused_by_the_call(mode: str, backend: str) -> None:
    """Also where the new list lies at the place of an old one that is gone."""
    case = Case(mode, backend, "lists")
    case.warm()
    right = case.mask.kv_indices.clone()
    for wrong in (99, None, -1, 1):
        if wrong is None:
            case.mask.kv_indices = right.clone()
            case.forward()
            continue
        case.mask.kv_indices = torch.full_like(right, wrong)
        with pytest.raises(errors.BlockMaskPartsError):
            case.forward()
    with pytest.raises(errors.BlockMaskPartsError):
        case.mask.BLOCK_SIZE = 8


@KERNELS
def test_lists_of_64_bits_become_those_of_32(backend: str) -> None:
    case = Case("eager", backend, "runs")
    wanted = case.warm()
    for name in LISTS:
        setattr(case.mask, name, getattr(case.mask, name).long())
    assert case.mask.kv_indices.dtype == torch.int32 and case.mask.storage.form == "lists"
    same(case.warm(), wanted)


@pytest.mark.covering(1, long=1)
@pytest.mark.parametrize("batch", [None, 2])
@IN_FORMS
def test_plans_are_run_again_for_the_kinds_that_they_were_bound_to(
    form: str, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("eager", "interpret", form)
    if batch:
        case.tensors = [x.detach().repeat(batch, 1, 1, 1).requires_grad_() for x in case.tensors]
        case.grad_out = case.grad_out.repeat(batch, 1, 1, 1)
    played = planned.reruns(monkeypatch)
    case.warm()
    assert len(played) == 4
    for name in LISTS:
        part = getattr(case.mask, name)
        setattr(case.mask, name, torch.nn.functional.pad(part, (0, 3)) if "indices" in name else part.clone())
    case.backward(case.forward())
    assert len(played) == 4


def test_a_snapshot_is_made_once() -> None:
    mask = Case("eager", "cpu", "runs").mask
    first = mask.snapshot()
    assert mask.snapshot() is first
    assert mask.kv_indices is not None and mask.snapshot() is first
    mask.kv_indices.copy_(mask.kv_indices.clone())
    second = mask.snapshot()
    assert second is not first and mask.snapshot() is second and first.storage.form == "runs"
    mask.kv_indices.data = mask.kv_indices.clone()
    assert mask.snapshot() is not second
