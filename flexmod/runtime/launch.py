"""Starts a kernel with the best tile that fits the device, and remembers which one that was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from flexmod.codegen.kernels import Kernels
from flexmod.codegen.spec import KernelName, Tile, ladder, option
from flexmod.errors import NoTileFits
from flexmod.runtime.interpreter import interpreted

# kernel_options that Triton takes as they are, on AMD alone
AMD_OPTIONS = ("kpack", "waves_per_eu", "matrix_instr_nonkdim")


def launch(
    kernels: Kernels,
    kernel: KernelName,
    device: torch.device,
    grid: Callable[[Tile], tuple[int]],
    arguments: Mapping[str, object],
) -> None:
    """Run `forward_kernel`, `dq_kernel` or `dkdv_kernel` of the module, on the device's current stream.

    `arguments` are all but the tile's. The rungs of the ladder are tried in order; one that does not fit is
    refused by Triton before anything runs.

    Raises:
        NoTileFits: the device has too little shared memory for the last rung.
    """
    rungs = ladder(kernels.spec, kernel, kernels.options)
    first = kernels.rungs.get((kernel, device), 0)
    refused = []
    for number, tile in enumerate(rungs[first:], first):
        chosen = _tile_arguments(kernels, kernel, tile)
        try:
            start(kernels, f"{kernel}_kernel", device, grid(tile), {**arguments, **chosen})
        except OutOfResources as e:
            refused.append((tile, e))
            continue
        kernels.rungs[kernel, device] = number
        return
    raise NoTileFits(
        limit=refused[-1][1].limit,
        device=device,
        tried=", ".join(f"{tile}: {e.required} bytes" for tile, e in refused),
    )


def start(
    kernels: Kernels, name: str, device: torch.device, grid: tuple[int], arguments: Mapping[str, Any]
) -> None:
    """One launch of a kernel of the module: on a GPU, or through the interpreter on CPU tensors."""
    if kernels.interpreted:
        getattr(interpreted(kernels.module), name)[grid](**arguments)
        return
    with torch.cuda.device(device):
        getattr(kernels.module, name)[grid](**arguments)


def _tile_arguments(kernels: Kernels, kernel: KernelName, tile: Tile) -> dict[str, Any]:
    names = AMD_OPTIONS if torch.version.hip else ()
    given = {name: option(kernels.options, kernel, name, None) for name in names}
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **{name: value for name, value in given.items() if value is not None},
    }
