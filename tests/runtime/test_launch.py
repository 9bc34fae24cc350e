"""Walking the ladder on a device that has less shared memory than the first rungs ask for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from triton.compiler import compiler
from triton.runtime.errors import OutOfResources

from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelSpec, Tile
from flexmod.errors import MisaddressedProductsError, NoTileFits, RoundedProductsError
from flexmod.runtime import compiler_bugs
from flexmod.runtime.launch import choose_tile, judged, rung_arguments, start
from flexmod.runtime.plan import Launch

DEVICE = torch.device("cuda", 0)


class Compiled:
    """What Triton gives of a launch, or before one. It asks for `required` bytes where it is loaded."""

    def __init__(self, n_spills: int, ptx: str, cubin: bytes, required: int, limit: int) -> None:
        self.n_spills = n_spills
        self.asm = {"ptx": ptx, "cubin": cubin}
        self._required, self._limit = required, limit

    def __getitem__(self, grid: tuple[int]) -> None:
        if self._required > self._limit:
            raise OutOfResources(self._required, self._limit, "shared memory")


class Device:
    """Stands in for a kernel on a device: a launch asks for `block_m * block_n` bytes, `limit` are there.

    `tried` is what was compiled, `ran` what ran. `spills` has the registers that a tile of a `block_m`
    spills; others spill none. `rounded` has the tiles whose products are in TF32, `misaddressed` those whose
    machine code is b"wrong".
    """

    def __init__(
        self,
        limit: int,
        spills: dict[int, int] | None = None,
        rounded: tuple[int, ...] = (),
        misaddressed: tuple[int, ...] = (),
    ) -> None:
        self.rounded = rounded
        self.misaddressed = misaddressed
        self.limit = limit
        self.spills = spills or {}
        self.tried: list[dict[str, Any]] = []
        self.ran: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> None:
            assert arguments.pop("enable_fp_fusion")
            self.ran.append({"grid": grid, **arguments})

        return run

    def warmup(self, grid: tuple[int, ...], **arguments: Any) -> Compiled:
        assert arguments["enable_fp_fusion"]
        self.tried.append(arguments)
        block_m = arguments["BLOCK_M"]
        ptx = "tcgen05.mma.cta_group::1.kind::tf32 [%r1]" if block_m in self.rounded else "fma.rn.f32"
        cubin = b"wrong" if block_m in self.misaddressed else b"right"
        required = block_m * arguments["BLOCK_N"]
        return Compiled(self.spills.get(block_m, 0), ptx, cubin, required, self.limit)


@pytest.fixture(autouse=True)
def no_device_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def kernels(
    kernel: Device,
    dtype: torch.dtype = torch.float16,
    precision: Literal["ieee", "tf32"] = "ieee",
    **options: Any,
) -> Kernels:
    spec = KernelSpec(dtype, dtype, dtype, 64, 64, precision=precision)
    return Kernels(spec, lambda _: SimpleNamespace(forward_kernel=kernel), options=options)  # type: ignore[arg-type]


def run(compiled: Kernels) -> None:
    def step(tile: Tile) -> Launch:
        return Launch(compiled, "forward", 1000 // tile.block_m, {"M": 1000}, tile)

    def arguments(tile: Tile) -> list[dict[str, Any]]:
        return [{**step(tile).arguments, **rung_arguments(step(tile))}]

    tile = choose_tile(compiled, "forward", DEVICE, arguments)
    start(compiled, "forward_kernel", DEVICE, (1000 // tile.block_m,), *arguments(tile))


def test_the_first_rung_that_fits_is_remembered() -> None:
    device = Device(limit=64 * 64)
    compiled = kernels(device)
    run(compiled)
    assert len(device.tried) > 1
    assert device.ran == [
        {"grid": (15,), "M": 1000, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    ]
    device.tried.clear()
    run(compiled)
    assert len(device.tried) == 1 and len(device.ran) == 2


def test_a_remembered_rung_that_fits_no_more_is_left() -> None:
    device = Device(limit=128 * 128)
    compiled = kernels(device)
    run(compiled)
    device.limit = 64 * 64
    run(compiled)
    assert [r["BLOCK_M"] for r in device.ran] == [128, 64]


@pytest.mark.parametrize(
    ("spills", "tried", "kept"),
    [
        ({}, [128], 128),
        ({128: 60}, [128], 128),
        ({128: 500}, [128, 64], 64),
        ({128: 80, 64: 90}, [128, 64, 64, 64], 128),
    ],
)
def test_a_tile_that_spills_gives_way(spills: dict[int, int], tried: list[int], kept: int) -> None:
    """Before anything runs: two calls run the same."""
    device = Device(1 << 20, spills)
    compiled = kernels(device)
    run(compiled)
    assert [r["BLOCK_M"] for r in device.tried] == tried
    run(compiled)
    assert [r["BLOCK_M"] for r in device.ran] == [kept, kept]


def test_a_tile_that_rounds_float32_gives_way() -> None:
    exact, device = torch.float32, Device(1 << 20, rounded=(64,))
    run(kernels(device, exact))
    assert [r["BLOCK_M"] for r in device.ran] == [32]
    for dtype, precision in ((exact, "tf32"), (torch.float16, "ieee")):  # these may, or say nothing of it
        device = Device(1 << 20, rounded=(64, 128))
        run(kernels(device, dtype, precision))
        assert len(device.ran) == 1
    with pytest.raises(RoundedProductsError):
        run(kernels(Device(1 << 20, rounded=(64, 32, 16)), exact))


def test_a_tile_that_is_misaddressed_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered one neither: other strides make another variant of the kernel."""
    monkeypatch.setattr(compiler_bugs, "misaddressed", lambda cubin: cubin == b"wrong")
    device = Device(1 << 20, misaddressed=(128,))
    compiled = kernels(device)
    for _ in range(2):
        run(compiled)
    assert [r["BLOCK_M"] for r in device.ran] == [64, 64]
    device.misaddressed = (64,)
    run(compiled)
    assert [r["BLOCK_M"] for r in device.ran[2:]] == [128]
    device.misaddressed = (64, 128)
    with pytest.raises(MisaddressedProductsError):
        run(compiled)


def test_arguments_made_for_each_tile() -> None:
    device = Device(128 * 128, {128: 500})
    compiled = kernels(device)

    def arguments(tile: Tile) -> list[dict[str, Any]]:
        sides = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        return [{"SUMS": [tile.block_m], **sides}, {"SUMS": [1], **sides}]

    for _ in range(2):
        assert choose_tile(compiled, "forward", DEVICE, arguments).block_m == 64
    assert [r["SUMS"] for r in device.tried] == [[128], [1], [64], [1], [64], [1]]


def test_nothing_fits() -> None:
    with pytest.raises(NoTileFits) as caught:
        run(kernels(Device(limit=100), BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=2))
    message = (
        "no tile size fits the 100 bytes of shared memory of cuda:0; tried 16x16 (4 warps, 2 stages): 256"
    )
    assert str(caught.value).startswith(message)


def test_what_triton_could_not_load_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels that have a text in common. Triton's own class remembers a launcher, loaded or not."""
    active = SimpleNamespace(get_current_device=lambda: 0, launcher_cls=lambda *_: "launcher")
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 100)
    compiled = compiler.CompiledKernel.__new__(compiler.CompiledKernel)
    compiled.module = compiled._run = compiled.src = None
    compiled.metadata = SimpleNamespace(shared=200)
    for one in range(3):
        refusal = judged(kernels(Device(100)), compiled, DEVICE).refusal
        assert isinstance(refusal, OutOfResources), one
