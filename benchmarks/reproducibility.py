"""Do reruns agree bit for bit? Over every mask of the library, and over score mods that learn a tensor.

    python -m benchmarks.reproducibility                    100 runs each, on a GPU
    python -m benchmarks.reproducibility --runs 1000 --masks causal natten
    python -m benchmarks.reproducibility --cpu-smoke        2 runs, in Triton's interpreter

Each run makes new tensors at other addresses, while other work keeps the device busy. The columns answer:

- Does the forward agree (out and lse)? Does the backward with {"deterministic": True}?
- How much do gradients differ without it? The largest difference over the largest gradient; 0 if all agree.
- "neighbours": does a batch entry have the same results alone as in a batch?

All results go to OUT/reproducibility.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import flexmod
from benchmarks import workers
from flexmod import masks, mods

BATCH, HEADS = 2, 2
# on a GPU, and in the interpreter: the length, with the sides of an image
SIZES = {"cuda": (1024, (32, 32)), "cpu": (64, (8, 8))}


def ids_of(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device) * 5 // length


# By the name of the library's mask: it, for a length, the sides of an image that long, and a device.
Made = Callable[[int, tuple[int, int], torch.device], Any]
MASKS: dict[str, Made] = {
    "causal": lambda n, image, device: masks.causal(),
    "sliding_window": lambda n, image, device: masks.sliding_window(n // 5),
    "dilated_window": lambda n, image, device: masks.dilated_window(n // 16, dilation=3),
    "global_window": lambda n, image, device: masks.global_window(n // 8, 5),
    "prefix_lm": lambda n, image, device: masks.prefix_lm(n // 3),
    "padding": lambda n, image, device: masks.padding(torch.tensor([n, n // 3], device=device)),
    "document": lambda n, image, device: masks.document(ids_of(n, device), causal=True),
    "segments": lambda n, image, device: masks.segments(ids_of(n, device), ids_of(n, device).flip(0)),
    "jagged": lambda n, image, device: masks.jagged(
        torch.tensor([0, n // 7, n // 2, n], device=device), masks.causal()
    ),
    "shared_prefix": lambda n, image, device: masks.shared_prefix(n // 8, ids_of(n, device)),
    "block_diffusion": lambda n, image, device: masks.block_diffusion(n // 2, 8),
    "tree": lambda n, image, device: masks.tree((torch.arange(n, device=device) - 1) // 2),
    "by_head": lambda n, image, device: masks.by_head(
        torch.arange(HEADS, device=device) % 2, masks.causal(), masks.sliding_window(n // 9)
    ),
    "standalone_window": lambda n, image, device: masks.standalone_window(*image, 3),
    "natten": lambda n, image, device: masks.natten(image, 7),
    "sliding_tiles": lambda n, image, device: masks.sliding_tiles(image, (4, 4), (1, 1)),
    "reordered": lambda n, image, device: masks.reordered(
        masks.natten(image, 5), masks.tile_order(image, (4, 4), device=device)
    ),
    "vision_cross": lambda n, image, device: masks.vision_cross(
        torch.tensor([[0, n // 2], [n // 4, n]], device=device, dtype=torch.int32),
        (torch.arange(n, device=device) * 2 // n).to(torch.int32),
    ),
}


def by_slope(learned: Tensor) -> Any:
    return lambda s, b, h, q_idx, kv_idx: s + learned[h] * (kv_idx - q_idx)


def by_distance(learned: Tensor) -> Any:
    return lambda s, b, h, q_idx, kv_idx: s + learned[(q_idx - kv_idx).clamp(-7, 7) + 7]


def by_pair(learned: Tensor) -> Any:
    return lambda s, b, h, q_idx, kv_idx: s + learned[(q_idx * kv_idx) % 16]


# By name: a score_mod of a tensor of 16 numbers that it learns, under a causal mask.
SCORES: dict[str, Callable[[Tensor], Any]] = {
    "softcap": lambda learned: mods.softcap(20.0),
    "learned slopes": by_slope,
    "learned distances": by_distance,
    "learned elements": by_pair,
}


@dataclass(frozen=True)
class Case:
    """`name` of a mask, or of a score mod; plain data, for a worker."""

    name: str
    dtype: str
    runs: int
    device: str

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}"


class Call:
    """A case's tensors, of `batch` entries, and what it does with them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.device = torch.device(case.device)
        length, image = SIZES[self.device.type]
        head_dim = 64 if self.device.type == "cuda" else 16
        dtype = getattr(torch, case.dtype)
        shape = (BATCH, HEADS, length, head_dim)
        self.tensors = [torch.randn(shape, device=self.device, dtype=dtype) for _ in range(4)]
        self.learned = torch.linspace(-0.1, 0.1, 16, device=self.device)
        self.score = SCORES.get(case.name)
        mask_mod = MASKS.get(case.name, MASKS["causal"])(length, image, self.device)
        block = 128 if self.device.type == "cuda" else 32
        sizes = (BATCH if case.name == "padding" else None, HEADS if case.name == "by_head" else None)
        self.mask = flexmod.create_block_mask(
            mask_mod, *sizes, length, length, device=self.device, BLOCK_SIZE=block
        )
        self.backend = "AUTO" if self.device.type == "cuda" else "INTERPRET"

    def run(self, deterministic: bool, entry: slice = slice(None)) -> dict[str, Tensor]:
        """out, lse and gradients, of copies of the tensors' entries."""
        *inputs, grad_out = (x[entry].clone() for x in self.tensors)
        leaves = [x.requires_grad_() for x in inputs]
        names = ["dq", "dk", "dv"]
        learned = self.learned.clone().requires_grad_()
        score_mod = self.score(learned) if self.score else None
        if self.score not in (None, SCORES["softcap"]):
            leaves.append(learned)
            names.append("learned")
        mask = self.mask if entry == slice(None) or self.mask.shape[0] == 1 else self.mask[entry]
        options = {"BACKEND": self.backend, "deterministic": deterministic}
        out, lse = flexmod.flex_attention(
            *leaves[:3], score_mod, mask, return_lse=True, kernel_options=options
        )
        found = dict(zip(names, torch.autograd.grad(out, leaves, grad_out), strict=True))
        return {"out": out.detach(), "lse": lse.detach(), **found}

    def disturb(self, number: int) -> list[Tensor]:
        """Changes the next run's addresses, and starts other work on the device."""
        held = [torch.empty(1000 * (number % 7) + 1, device=self.device)]
        if self.device.type == "cuda" and number % 3 == 0:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                noise = torch.ones(1024, 1024, device=self.device)
                held += [noise, noise @ noise]
        return held


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """0.0 and -0.0 differ, and nan is nan."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def measure(case: Case) -> dict[str, Any]:
    """What agrees, and how far apart the gradients are that may differ."""
    call = Call(case)
    result: dict[str, Any] = {}
    for deterministic in (True, False):
        first = call.run(deterministic)
        same = dict.fromkeys(first, True)
        apart = dict.fromkeys(first, 0.0)
        for number in range(1, case.runs):
            held = call.disturb(number)
            for name, x in call.run(deterministic).items():
                if not equal_bits(x, first[name]):
                    same[name] = False
                    difference = (x.double() - first[name].double()).abs().max()
                    apart[name] = max(apart[name], float(difference / first[name].double().abs().max()))
            del held
        result["deterministic" if deterministic else "free"] = {"same": same, "apart": apart}
    result["neighbours"] = neighbours(call)
    return result


def neighbours(call: Call) -> dict[str, bool]:
    """Has each batch entry the results that it has alone? What is summed over the batch is left out."""
    together = call.run(True)
    same = {name: True for name in together if name != "learned"}
    for entry in range(BATCH):
        alone = call.run(True, slice(entry, entry + 1))
        for name in same:
            same[name] &= equal_bits(alone[name][0], together[name][entry])
    return same


def cases(runs: int, device: str, names: list[str], dtypes: list[str]) -> list[list[Case]]:
    """Groups that share compiled kernels."""
    return [[Case(name, dtype, runs, device)] for dtype in dtypes for name in names]


def row(case: Case, found: dict[str, Any]) -> list[object]:
    fixed, free = found["deterministic"]["same"], found["free"]["same"]
    forward = all(same[name] for same in (fixed, free) for name in ("out", "lse"))
    apart = {name: x for name, x in found["free"]["apart"].items() if name not in ("out", "lse")}
    spread = ", ".join(f"{name} {x:.1e}" if x else f"{name} 0" for name, x in apart.items())
    together = all(found["neighbours"].values())
    return [
        case.name,
        case.dtype,
        *(("no", "yes")[ok] for ok in (forward, all(fixed.values()), together)),
        spread,
    ]


HEADER = [
    "mods",
    "dtype",
    "forward agrees",
    "deterministic backward agrees",
    "neighbours",
    "gradients apart without",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--masks", nargs="+", default=[*MASKS, *SCORES], help="names, of score mods too")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--total-seconds", type=float, default=540)
    parser.add_argument("--cpu-smoke", action="store_true", help="two runs in the interpreter")
    given = parser.parse_args()
    device, runs = ("cpu", 2) if given.cpu_smoke else ("cuda", given.runs)
    groups = cases(runs, device, given.masks, given.dtypes)
    found: dict[str, Any] = {}
    rows: list[list[object]] = []
    count = min(14, os.cpu_count() or 1)
    for outcome in workers.run(
        measure, groups, workers=count, case_seconds=240, total_seconds=given.total_seconds
    ):
        found[str(outcome.case)] = {**asdict(outcome), "case": asdict(outcome.case)}
        rows.append(
            [outcome.case.name, outcome.case.dtype, outcome.error.splitlines()[-1]]
            if outcome.error
            else row(outcome.case, outcome.value)
        )
    print(f"{runs} runs each")
    print(tabulate(sorted(rows, key=str), HEADER))
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "reproducibility.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
