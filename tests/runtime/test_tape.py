"""Recording what a function of tensors did, and playing it on others; what makes that impossible."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexmod.runtime import tape
from flexmod.runtime.tape import Repeated, record


class Scaled:
    """A kernel in the interpreter's way: OUT = X * scale + (bias or 0)."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(X: Tensor, OUT: Tensor, scale: float, BIAS: Tensor | None = None) -> None:
            self.launches += 1
            OUT.copy_(X * scale if BIAS is None else X * scale + BIAS)

        return run


KERNEL = Scaled()


def launched(x: Tensor, **others: Any) -> Tensor:
    out = torch.empty_like(x)
    tape.start(KERNEL, (1,), None, {"X": x, "OUT": out, "scale": 3.0, **others})
    return out


def played(run: Callable[..., Any], *given: Any, beside: Any = ()) -> tuple[Any, tape.Tape | None]:
    return record(run, given, beside)


def twice(x: Tensor) -> tuple[Tensor, ...]:
    zeros = x.new_zeros((2, *x.shape))
    zeros[0].add_(launched(x))
    return zeros.sum(0), torch.arange(3) + torch.tensor(2)


def test_a_tape_does_what_the_function_does() -> None:
    first, made = played(twice, torch.ones(4))
    assert made is not None and first[0].tolist() == [3.0] * 4
    before = KERNEL.launches
    for _ in range(2):
        again = made.play((torch.full((4,), 2.0),))
        assert again[0].tolist() == [6.0] * 4 and again[1].tolist() == [2, 3, 4]
    assert KERNEL.launches == before + 2
    assert first[0].tolist() == [3.0] * 4  # what was handed out is the caller's


def test_one_tensor_given_twice_is_two() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x - y,)

    one = torch.ones(2)
    _, made = played(run, one, one)
    assert made is not None and made.play((one * 5, one))[0].tolist() == [4.0, 4.0]  # type: ignore[union-attr]


def test_absent_tensors_and_tensors_beside() -> None:
    bias = torch.ones(2)

    def run(x: Tensor, y: Tensor | None) -> tuple[Tensor | None, ...]:
        return launched(x, BIAS=bias), None

    _, made = played(run, torch.zeros(2), None, beside=[bias])
    assert made is not None
    out, nothing = made.play((torch.ones(2), None, torch.full((2,), 4.0)))
    assert out is not None and out.tolist() == [7.0, 7.0] and nothing is None


@pytest.mark.parametrize("quick", [True, False])
def test_memory_that_nothing_reads_is_not_allocated_again(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[Any] = []
    home, name = (tape.guards, "_empty_strided_cpu") if quick else (torch, "empty_strided")
    allocate = getattr(home, name)

    def counted(*arguments: Any, **options: Any) -> Tensor:
        allocated.append(arguments[0])
        return allocate(*arguments, **options)

    monkeypatch.setattr(home, name, counted)
    if not quick:
        monkeypatch.delattr(tape.guards, "_empty_strided_cpu")

    def run(x: Tensor) -> tuple[Tensor, ...]:
        torch.empty(1 << 10)
        return (launched(x),)

    _, made = played(run, torch.ones(2))
    allocated.clear()
    assert made is not None
    assert made.play((torch.full((2,), 2.0),))[0].tolist() == [6.0, 6.0]  # type: ignore[union-attr]
    assert allocated == [(2,)]


OUTSIDE = torch.ones(2)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x * float(x[0]),),
        lambda x: (x if x.sum() > 0 else -x,),
        lambda x: (x[x > 0],),
        lambda x: (x.nonzero(),),
        lambda x: (x + OUTSIDE,),
        lambda x: (launched(x, BIAS=OUTSIDE),),
        lambda x: (OUTSIDE,),
    ],
    ids=["number", "branch", "selection", "places", "operand", "argument", "result"],
)
def test_what_cannot_be_repeated(run: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    wanted = run(torch.ones(2))
    result, made = played(run, torch.ones(2))
    assert made is None and torch.equal(result[0], wanted[0])


def test_two_slots_for_one_tensor_beside() -> None:
    one = torch.ones(2)
    assert played(lambda: (one + one,), beside=[one, one])[1] is None


# Repeated


def test_runs_then_records_then_plays() -> None:
    ran = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(x)
        return (x + 1,)

    repeated = Repeated()
    for number in range(5):
        (out,) = repeated(run, (torch.tensor([number]),))
        assert out is not None and out.tolist() == [number + 1]
    assert len(ran) == 2


def test_what_cannot_be_repeated_runs() -> None:
    repeated = Repeated()
    for number in (3, 1, 4, 1, 5):
        (out,) = repeated(lambda x: (x * int(x),), (torch.tensor(number),))
        assert out is not None and int(out) == number**2


@pytest.mark.parametrize("watched", ["operations", "launches"])
def test_somebody_who_watches_sees_all(watched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(x)
        return (x + 1,)

    repeated = Repeated()
    for _ in range(3):
        repeated(run, (torch.ones(1),))
    if watched == "launches":
        hooks = SimpleNamespace(launch_enter_hook=lambda _: None, launch_exit_hook=None)
        monkeypatch.setattr("flexmod.runtime.direct.knobs", SimpleNamespace(runtime=hooks))
        repeated(run, (torch.ones(1),))
    else:

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        with Watch():
            repeated(run, (torch.ones(1),))
    assert len(ran) == 3
