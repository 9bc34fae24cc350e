"""Plans bound to tensors: what is allocated, called, kept with a mask and launched, and who sees it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexmod.runtime import bound, interpreter, launch
from flexmod.runtime.bound import Bound
from flexmod.runtime.plan import Keep, Place, PlanWriter, Size, named

CPU = torch.device("cpu")


class Scaled:
    """A kernel in the interpreter's way: OUT = X * scale + (BIAS or 0)."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(X: Tensor, OUT: Tensor, scale: float, BIAS: Tensor | None = None) -> None:
            self.launches.append({"grid": grid, "scale": scale})
            OUT.copy_(X * scale if BIAS is None else X * scale + BIAS)

        return run


KERNEL = Scaled()
SOURCE: Any = SimpleNamespace(module=SimpleNamespace(scaled_kernel=KERNEL), interpreted=True)


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "interpreted", lambda module: module)
    KERNEL.launches.clear()


def doubled(x: Tensor, numbers: dict[str, list[Any]]) -> tuple[Tensor, None]:
    return x * numbers["by"][0], None


def bound_of(x: Tensor) -> Bound:
    """x * 3 in a grid of its length, doubled, beside a part of zeros."""
    writer, place = PlanWriter(), named("x", x)
    zeros = writer.empty("zeros", (Size("x_size0") * 2,), zeros=True)
    view = writer.view("half", zeros, (Size("x_size0"),), offset=Size("x_size0"))
    writer.launch(SOURCE, "scaled", Size("x_size0"), {"X": place, "OUT": view, "scale": 3.0, "BIAS": None})
    twice = Place("twice", place.shape, (1,), torch.float32)
    writer.call(doubled, (view, {"by": [2]}), (twice, None))
    return Bound(writer.plan((place,), (twice, zeros, None)), (x,), CPU)


def test_a_run() -> None:
    made = bound_of(torch.ones(3))
    first = made.run((torch.ones(3),))
    again = made.run((torch.full((3,), 2.0),))
    assert first[0] is not None and first[1] is not None and again[0] is not None
    assert first[0].tolist() == [6.0] * 3 and first[1].tolist() == [0.0] * 3 + [3.0] * 3
    assert again[0].tolist() == [12.0] * 3 and again[2] is None
    assert KERNEL.launches == [{"grid": (3,), "scale": 3.0}] * 2


def test_other_tensors_are_refused() -> None:
    plan = bound_of(torch.ones(3)).plan
    Bound(plan, (torch.ones(5),), CPU)
    with pytest.raises(ValueError, match="is what the plan takes"):
        Bound(plan, (torch.ones(5, 1),), CPU)


def test_two_places_of_one_name_are_a_mistake() -> None:
    writer = PlanWriter()
    writer.empty("x", (1,))
    writer.empty("x", (2,))
    with pytest.raises(AssertionError, match="two places of one name"):
        Bound(writer.plan((), ()), (), CPU)


@pytest.mark.parametrize("quick", [True, False])
def test_memory_is_torchs(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not quick:
        monkeypatch.setattr(bound, "quick_empty_strided", lambda kind: None)
    writer = PlanWriter()
    place = writer.empty("x", (2, 3), torch.int64, (1, 2), zeros=True)
    (made,) = Bound(writer.plan((), (place,)), (), CPU).run(())
    assert made is not None and made.stride() == (1, 2) and made.dtype == torch.int64
    assert not made.any()


# What a mask keeps

calls: list[int] = []


def counted(x: Tensor, number: int) -> tuple[Tensor]:
    calls.append(number)
    return (x + number,)


def snapshot() -> Any:
    """What a run reads of a MaskSnapshot."""
    return SimpleNamespace(derived={}, storage=SimpleNamespace(wait=lambda: None))


def kept_by(number: int) -> Bound:
    writer, x = PlanWriter(), named("x", torch.ones(2))
    made = Place("made", x.shape, (1,), torch.float32)
    writer.call(counted, (x, number), (made,), Keep)
    return Bound(writer.plan((x,), (made,)), (torch.ones(2),), CPU)


def test_what_stays_is_made_again_after_a_write() -> None:
    calls.clear()
    one, two, x, mask = kept_by(1), kept_by(2), torch.ones(2), snapshot()
    for _ in range(3):
        assert one.run((x,), mask)[0].tolist() == [2.0, 2.0]  # type: ignore[union-attr]
        assert two.run((x,), mask)[0].tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    assert calls == [1, 2]
    x.add_(1)
    assert one.run((x,), mask)[0].tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    assert calls == [1, 2, 1]


def test_nothing_stays_where_nobody_remembers_or_writes_are_not_seen() -> None:
    calls.clear()
    made = kept_by(1)
    for _ in range(2):
        made.run((torch.ones(2),))
    with torch.inference_mode():
        x = torch.ones(2)
    mask = snapshot()
    for number in (1.0, 5.0):
        with torch.inference_mode():
            x.fill_(number)
        assert made.run((x,), mask)[0].tolist() == [number + 1] * 2  # type: ignore[union-attr]
    assert len(calls) == 4 and not mask.derived


def test_what_stays_is_bounded() -> None:
    made, x, mask = kept_by(1), torch.ones(2), snapshot()
    for _ in range(3 * bound.KEPT):
        x.add_(1)
        made.run((x,), mask)
    assert len(mask.derived) <= bound.KEPT


# Who watches


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_what_is_allocated() -> None:
    made = bound_of(torch.ones(3))
    x = torch.ones(3)
    made.run((x,))
    with Watch() as watch:
        made.run((x,))
    assert watch.seen[:2] == ["empty_strided", "zero_"]


def test_hooked_launches_go_by_tritons_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A direct launch is made of the first one, and does all that follow but where somebody watches."""
    direct: list[Any] = []
    monkeypatch.setattr(launch, "Direct", lambda *_: direct.append)
    monkeypatch.setattr(launch, "start", lambda *given: started.append(given[1]) or SimpleNamespace())
    KERNEL.arg_names = ["X", "OUT", "scale", "BIAS"]  # type: ignore[attr-defined]
    started: list[str] = []
    made = bound_of(torch.ones(3))
    for _ in range(3):
        made.run((torch.ones(3),))
    assert started == ["scaled_kernel"] and len(direct) == 2
    hooks = SimpleNamespace(launch_enter_hook=lambda _: None, launch_exit_hook=None)
    monkeypatch.setattr("flexmod.runtime.direct.knobs", SimpleNamespace(runtime=hooks))
    made.run((torch.ones(3),))
    assert len(started) == 2 and len(direct) == 2
