"""Facts about chips."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from flexmod.errors import NotAGpuError, UnknownTarget
from flexmod.runtime import target


@pytest.fixture(autouse=True)
def fresh_devices() -> Iterator[None]:
    target._read.cache_clear()
    yield
    target._read.cache_clear()


@pytest.mark.parametrize(
    ("name", "kilobytes"), [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227)]
)
def test_nvidia(name: str, kilobytes: int) -> None:
    chip = target.named(name)
    assert chip.shared_limit == kilobytes * 1024
    assert (chip.triton.backend, chip.triton.arch) == ("cuda", int(name[3:]))
    assert chip.triton.warp_size == chip.warp_size == 32
    assert chip.processors is None


def test_amd() -> None:
    chip = target.named("gfx942")
    assert chip.shared_limit == 65536
    assert (chip.triton.backend, chip.triton.arch, chip.triton.warp_size) == ("hip", "gfx942", 64)


def test_unknown_name() -> None:
    with pytest.raises(UnknownTarget) as raised:
        target.named("sm_1")
    assert str(raised.value) == (
        "'sm_1' is not a chip that flexmod knows.\n  Instead: use one of: " + ", ".join(target.NAMES) + "."
    )


def test_cpu_is_no_target() -> None:
    with pytest.raises(NotAGpuError, match="cpu is not a GPU"):
        target.target_of("cpu")


def device_facts(monkeypatch: pytest.MonkeyPatch, **facts: object) -> list[int]:
    """Stands in for a driver; gives the list of the devices that were asked about."""
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(**facts)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return asked


def test_device_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    asked = device_facts(
        monkeypatch, major=9, minor=0, multi_processor_count=132, warp_size=32, shared_memory_per_block=49152
    )
    chip = target.target_of(torch.device("cuda", 1))
    assert (chip.name, chip.shared_limit, chip.processors) == ("sm_90", 232448, 132)
    assert target.target_of("cuda") is chip
    assert asked == [1]


def test_the_driver_knows_better_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    device_facts(
        monkeypatch,
        major=7,
        minor=5,
        multi_processor_count=40,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=65536,
    )
    chip = target.target_of("cuda:0")
    assert (chip.name, chip.shared_limit, chip.float8) == ("sm_75", 65536, False)


def test_device_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    device_facts(monkeypatch, gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, warp_size=64)
    chip = target.target_of("cuda:0")
    assert (chip.name, chip.backend, chip.processors, chip.warp_size) == ("gfx942", "hip", 304, 64)
    assert chip.triton.arch == "gfx942"


@pytest.mark.gpu
def test_the_device_here_agrees_with_the_table(device: torch.device) -> None:
    chip = target.target_of(device)
    assert chip.processors
    if chip.name in target.NAMES:
        assert chip.shared_limit == target.named(chip.name).shared_limit
