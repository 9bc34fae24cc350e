"""Writes one file with a variant's kernels, forward and backward, that needs torch and triton only.

    save("my_attention.py", score_mod, mask_mod, head_dim=128)
    python my_attention.py

The file has the portable kernels, a plain launcher, and a main() that checks them against dense attention.
"""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton

from flexmod.backends.of_variant import VariantCall
from flexmod.codegen.compiler import build, capture_grad, capture_terms
from flexmod.codegen.expressions import fresh
from flexmod.codegen.kernels import NO_CAPTURES, CaptureTexts, Kernels, ModText
from flexmod.codegen.render import head_lines, render
from flexmod.codegen.spec import FLOAT8, Direction, KernelName, KernelSpec, Tile
from flexmod.codegen.term_text import write_terms
from flexmod.codegen.variant import Variant, variant
from flexmod.errors import ArgumentTypeError, NoTileFits
from flexmod.ir.derivative import GradientTerm
from flexmod.ir.graph import UNIFORM, Graph, dtype_name, used_captures
from flexmod.ir.passes import Extents
from flexmod.runtime.compiler_bugs import wrong
from flexmod.runtime.plan import Size
from flexmod.runtime.target import OLDEST
from flexmod.tools import standalone_functions
from flexmod.tools.ahead import first_tile, portable_kernels
from flexmod.tools.needed_sizes import fit, least_shapes, positions_in
from flexmod.tools.standalone_text import PlanText, TorchText, example, quotes, write_torch

# A file's index arithmetic is wide enough for this many batch entries, heads, queries and keys.
EXTENTS: Extents = (1 << 20, 1 << 20, 1 << 20, 1 << 20)
# main()'s B, HQ, HKV, M and N on a GPU and in the interpreter; captured tensors may need smaller sizes.
ON_GPU = (2, 8, 4, 2000, 2100)
INTERPRETED = (2, 2, 1, 100, 130)
# The largest distance of a result from dense attention in float64, as a ratio of norms, by dtype.
LIMITS = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
NO_TILES: Mapping[KernelName, Tile] = {}
# A tile that the file chooses.
IN_THE_FILE: Any = Tile(Size("BLOCK_M"), Size("BLOCK_N"), 0, 0)  # type: ignore[arg-type]
# The file's names for the sizes of a call, in attention() and in build_mask().
CALL_SIZES = {"b": "B", "h": "HQ", "q_idx": "M", "kv_idx": "N"}
MASK_SIZES = {"b": "batch", "h": "heads", "q_idx": "queries", "kv_idx": "keys"}
# The file's names for a mask's lists.
PARTS = {
    "{}_num_blocks": "counts", "{}_indices": "indices",
    "full_{}_num_blocks": "full_counts", "full_{}_indices": "full_indices",
}  # fmt: skip
# The template's own names, which captured tensors must not have.
TAKEN = {
    "q", "k", "v", "scale", "mask", "ctx", "out", "lse", "rest", "row_max", "total", "row", "column",
    "length", "dtype", "limit", "batch", "heads", "shared_heads", "queries", "keys", "device", "b", "h",
    "q_idx", "kv_idx", "score", "keep", "kept", "start", "positions", "pairs", "full", "partial",
    "exact", "dense",
    "operands", "results", "truths", "names", "agrees", "error", "name", "result", "truth", "shapes", "sizes",
    "interpreted", "largest", "weight", "torch", "triton", "tl", "os", "sys", "warnings", "attention",
    "Tensor", "grad_out", "grad_q", "grad_k", "grad_v", "grad", "x", "size", "whole", "told_apart",
    "D", "DV", "D_TILE", "DV_TILE", "Q_BLOCK", "KV_BLOCK", "TILES", "LONGEST", "LOG2E", "B", "HQ", "M", "N",
    "KV_B", "HKV", "_", "MASK_B", "MASK_H", "Q_BLOCKS", "KV_BLOCKS", "delta", "lse2", "meta",
    "DTYPES", "gradients", "captured", "writes", "writes_to", "tensor", "tensors",
    "Attention", "build_mask", "dense_attention", "main", *vars(standalone_functions),
    "score_mod_in_torch", "mask_mod_in_torch", "forward_kernel", "statistics_kernel", "delta_kernel",
    "dq_kernel", "dkdv_kernel", "scatter_kernel", *dir(builtins),
}  # fmt: skip


class SumText(NamedTuple):
    """Sums of a gradient: the launch argument with the sums, and a function for each sum's place.

    `place` is None if the sums are in the gradient's order. `given`: the function's captured tensors.
    """

    buffer: str
    along: str
    place: TorchText | None = None
    given: tuple[str, ...] = ()


class Learned(NamedTuple):
    """A tensor of the score_mod that gets a gradient."""

    name: str
    terms: tuple[SumText, ...]


def save(path: str | Path, *arguments: Any, **options: Any) -> Path:
    """Writes `standalone(*arguments, **options)` to a file; returns its path."""
    return written(path, standalone(*arguments, **options))


def written(path: str | Path, text: str) -> Path:
    """Writes the text in UTF-8, which Python reads under any locale; returns the path."""
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


def standalone(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | tuple[int, int] = 128,
    target: str = OLDEST,
    tiles: Mapping[KernelName, Tile] | None = None,
) -> str:
    """Returns the text of a file with attention for these mods, on the portable kernels. It needs no GPU.

        head_dim    of query and key
        value_dim   of value; head_dim if None
        dtype       the file takes float16 and bfloat16; with float32 here it takes float32
        block_size  of the mask, one number or (queries, keys)
        target      the chip to choose tiles for, by compiling them
        tiles       tiles by kernel, instead of chosen ones

    The mods' captured tensors become arguments; the score_mod's captures that require grad get gradients.
    The file refuses other dtypes, captured tensors and sizes that its kernels would read wrongly, a mask
    whose tensors were written to, and second derivatives.

    main() has the values of small tensors, and random values for others. Raises what tracing raises, and
    ArgumentTypeError, UnknownTarget, NoTileFits, RoundedProductsError, MisaddressedProductsError.
    """
    if dtype in FLOAT8:
        raise ArgumentTypeError(
            name="dtype", given=str(dtype), advice="give torch.float16, torch.bfloat16 or torch.float32"
        )
    made = variant(
        score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype, block_size=block_size,
        extents=EXTENTS, mask_form="lists", shared_kv=True,
    )  # fmt: skip
    return file_of(made, quotes([mod for mod in (score_mod, mask_mod) if mod]), target, tiles or {})


def file_of(
    made: Variant,
    quoted: list[list[str]],
    target: str,
    tiles: Mapping[KernelName, Tile] = NO_TILES,
    scale: float | None = None,
) -> str:
    """Returns the text of a file for a variant of EXTENTS, with lists of blocks and shared keys.

    `quoted` has the user's functions. `scale` is the file's default, None for 1/sqrt(D). Raises
    UnknownTarget, NoTileFits, RoundedProductsError, MisaddressedProductsError.
    """
    return _File(made, quoted, target, dict(tiles), scale).text()


@dataclass
class _File:
    variant: Variant
    quoted: list[list[str]]
    target: str
    tiles: dict[KernelName, Tile]
    scale: float | None

    def __post_init__(self) -> None:
        v = self.variant
        self.score = v.score.score if v.score else None
        self.mask = v.mask.score if v.mask else None
        self.terms: list[GradientTerm] = []
        if v.learned and self.score:
            # sums along diagonals need a kernel and lists of their own: sum by element instead
            self.terms = [
                replace(term, along="element") if term.along == "diagonal" else term
                for term in capture_terms(self.score, v.learned)
            ]
        self.captures = NO_CAPTURES
        if self.terms and self.score:
            self.captures = write_terms(capture_grad(self.score, v.learned), self.terms)
        texts = [text for _, text in _by_along(self.captures) if text]
        names = FileNames([term.sums.lower() for text in texts for term in text.terms])
        self.score_names = names.of(self.score, v.score_tensors)
        self.mask_names = names.of(self.mask, v.mask_tensors)
        score, mask = v.score, v.mask
        self.kernels = Kernels(
            v.spec, self.build, score.text if score else None, mask.text if mask else None,
            score.grad_text if score else None, dict(v.options), captures=self.captures,
        )  # fmt: skip

    def build(self, spec: KernelSpec) -> ModuleType:
        kernels = self.kernels
        return build(spec, kernels.score, kernels.mask, kernels.grad, kernels.captures)

    def text(self) -> str:
        kernels, spec = self.kernels, self.variant.spec
        score_names = used_names(self.score, self.score_names)
        mask_names = used_names(self.mask, self.mask_names)
        learned = self.learned()
        places = {tensor.name: f"exact[{3 + place}]" for place, tensor in enumerate(learned)}
        mask_only = [name for name in mask_names if name not in score_names]
        results = ["grad_q", "grad_k", "grad_v", "None", *(["None"] if self.mask else [])]
        results += [f"grad_{n}.to({n}.dtype)" if n in places else "None" for n in score_names]
        return render(
            spec, kernels.score, kernels.mask, kernels.grad, self.captures, "standalone.jinja",
            head=self.head(),
            shared=lambda name: inspect.getsource(getattr(standalone_functions, name)),
            quotes=self.quoted,
            usual_scale=self.scale,
            of_score=self.score and write_torch(self.score, "score_mod_in_torch", self.score_names),
            of_mask=self.mask and write_torch(self.mask, "mask_mod_in_torch", self.mask_names),
            score_names=score_names,
            mask_names=mask_names,
            mask_only=mask_only,
            mask_reads=self.mask.reads if self.mask else (),
            learned=learned,
            forward=self.statements("forward"),
            backward=self.statements("backward"),
            adds=any(term.place for tensor in learned for term in tensor.terms),
            captured_shapes=shapes(self.score, self.variant.score_tensors, self.score_names),
            tiles=self.chosen_tiles(),
            score_checks=self.checks("score"),
            mask_checks=self.checks("mask"),
            fixed=[name for name in score_names if name not in places],
            examples=self.examples(),
            sizes={"gpu": self.sizes(ON_GPU), "interpreted": self.sizes(INTERPRETED)},
            dtype=spec.q_dtype,
            limit=LIMITS[spec.q_dtype],
            dense_arguments=", ".join(["*exact[:3]", *(places.get(n, n) for n in score_names), *mask_only]),
            results=", ".join(results),
            longest=EXTENTS[2],
        )  # fmt: skip

    def head(self) -> list[str]:
        first, *facts = head_lines(self.variant.spec, self.kernels.score, self.kernels.mask)
        return [
            first,
            "",
            "One file that needs torch and triton alone. It checks itself against dense attention, on a GPU",
            "or, with TRITON_INTERPRET=1, on the CPU:",
            "",
            "    python THIS_FILE",
            "",
            *facts[1:-1],
            "of the mask. BLOCK_M queries and BLOCK_N keys make a tile; TILES has them, chosen for",
            f"{self.target}.",
        ]

    def chosen_tiles(self) -> list[tuple[str, Tile]]:
        """Returns tiles by kernel; delta_kernel must add in the order of dq_kernel."""
        chosen: dict[str, Tile] = {}
        for name in ("forward", *portable_kernels(self.kernels, self.variant)):
            if name == "delta":
                continue
            tile = self.tiles.get(name)
            if tile is None:
                built = first_tile(self.kernels, name, self.target, self.variant)
                assert isinstance(built.tile, Tile) and built.report is not None
                tile, report = built.tile, built.report
                if not report.fits:
                    raise NoTileFits(
                        limit=report.target.shared_limit, device=self.target,
                        tried=f"{tile} last: {report.shared} bytes",
                    )  # fmt: skip
                error = wrong(self.kernels, report.asm)
                if error is not None:
                    raise error(triton=triton.__version__, device=self.target, tried=f"{tile} last")
            chosen[name] = tile
        if self.variant.spec.exact:
            chosen["delta"] = chosen["dq"]
        return list(chosen.items())

    def statements(self, direction: Direction) -> str:
        """Writes the allocations and launches of one direction, with the tiles in TILES."""
        names = {"query": "q", "key": "k", "value": "v", "scale": "scale"}
        names |= {f"grad_{name}": f"grad_{names[name]}" for name in ("query", "key", "value")}
        names |= {f"kept{number}": name.lower() for number, name in enumerate(self.kernels.kept)}
        names |= {f"score_capture{number}": name for number, name in enumerate(self.score_names)}
        names |= {f"mask_capture{number}": name for number, name in enumerate(self.mask_names)}
        for axis, blocks in (("kv", "by_row"), ("q", "by_column")):
            for part, name in PARTS.items():
                names[part.format(axis)] = f"mask.{blocks}.{name}"
        small = self.kernels.small_scores and not self.kernels.spec.exact
        rungs = dict.fromkeys(get_args(KernelName), IN_THE_FILE)
        plan = self.call.plan(direction, self.kernels, rungs, keep=not small, captured=False)
        return PlanText(names).statements(plan, indent=12)

    @cached_property
    def call(self) -> VariantCall:
        return VariantCall(self.variant)

    def learned(self) -> list[Learned]:
        """Returns the tensors with gradients, and the sums of each gradient."""
        texts = self.captures
        names = {along: iter(text.terms) for along, text in _by_along(texts) if text}
        found: dict[int, list[SumText]] = {}
        for term in self.terms:
            text = next(names[term.along])
            sums = found.setdefault(term.capture, [])
            if term.along == "element":
                if text.sums not in [s.buffer for s in sums]:
                    sums.append(SumText(text.sums, term.along))
            elif not term.indices:
                sums.append(SumText(text.sums, term.along))
            else:
                assert self.score is not None
                graph = self.score.of(term.indices, "mask")
                name = f"place_in_{self.score_names[term.capture]}" + (f"_{len(sums) + 1}" if sums else "")
                place = write_torch(graph, name, self.score_names)
                given = tuple(self.score_names[n] for n in place.captures)
                sums.append(SumText(text.sums, term.along, place, given))
        return [Learned(self.score_names[n], tuple(sums)) for n, sums in sorted(found.items())]

    def checks(self, kind: Literal["score", "mask"]) -> list[str]:
        """Returns statements that refuse captured tensors and sizes for which the mod was not traced."""
        v = self.variant
        graph, tensors, names, expected = {
            "score": (self.score, v.score_tensors, self.score_names, v.score_sizes),
            "mask": (self.mask, v.mask_tensors, self.mask_names, v.mask_sizes),
        }[kind]
        known = CALL_SIZES if kind == "score" else MASK_SIZES
        found = []
        for axis, size, owner, _, start in expected:
            exact = ", exact=True" if axis in UNIFORM else ""
            arguments = f"{owner!r}, {CALL_SIZES[axis]!r}, {known[axis]}, {size}, {start}{exact}"
            found.append(f"check_size({arguments})")
        for number, least in least_shapes(graph, tensors, EXTENTS, known).items():
            name, dtype = names[number], tensors[number].dtype
            found.append(f"check_captured({', '.join([repr(name), name, str(dtype), *least])})")
        return found

    def sizes(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Returns main()'s B, HQ, HKV, M and N, as captured tensors and the library's mods need them."""
        v = self.variant
        expected = (*v.score_sizes, *v.mask_sizes)
        loads = (self.score, v.score_tensors), (self.mask, v.mask_tensors)
        limits: dict[str, int] = {}
        for graph, tensors in loads:
            for name, size in positions_in(graph, tensors, EXTENTS).items():
                limits[name] = min(size, limits.get(name, size))
        for axis, size, _, _, start in expected:
            limits[axis] = min(size - start, limits.get(axis, size))
        batch, heads, shared, queries, keys = wanted
        exact = {axis: size for axis, size, *_ in expected if axis in UNIFORM}
        heads = exact.get("h", min(heads, limits.get("h", heads)))
        batch = exact.get("b", min(batch, limits.get("b", batch)))
        queries = min(queries, limits.get("q_idx", queries))
        keys = min(keys, limits.get("kv_idx", keys))
        while max(queries, keys) > 1 and not all(fit(*load, (batch, heads, queries, keys)) for load in loads):
            queries, keys = max(1, queries // 2), max(1, keys // 2)
        return batch, heads, math.gcd(heads, shared), queries, keys

    def examples(self) -> list[tuple[str, str]]:
        """Returns Python for an example of each captured tensor, by name."""
        v = self.variant
        values = [*zip(self.score_names, v.score_tensors, strict=True)]
        values += zip(self.mask_names, v.mask_tensors, strict=True)
        wanted = {*used_names(self.score, self.score_names), *used_names(self.mask, self.mask_names)}
        return [(name, example(tensor)) for name, tensor in dict(values).items() if name in wanted]


class FileNames:
    """Names captured tensors in the file: the user's names, one for each tensor, none of `sums`."""

    def __init__(self, sums: Sequence[str]) -> None:
        self._taken = {*TAKEN, *sums}
        self._known: dict[object, str] = {}

    def of(self, graph: Graph | None, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        names = [capture.name for capture in graph.captures] if graph else []
        return tuple(
            self._known.setdefault(
                (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), fresh(name, self._taken)
            )
            for name, tensor in zip(names, tensors, strict=True)
        )


def used_names(graph: Graph | None, names: Sequence[str]) -> list[str]:
    return [names[number] for number in used_captures(graph.nodes)] if graph else []


def shapes(
    graph: Graph | None, tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> list[tuple[str, str]]:
    """Describes each captured tensor that a graph loads from, by name."""
    return [
        (names[n], f"{dtype_name(tensors[n].dtype)} {list(tensors[n].shape)} where it was captured")
        for n in (used_captures(graph.nodes) if graph else ())
    ]


def _by_along(texts: CaptureTexts) -> tuple[tuple[str, ModText | None], ...]:
    return (("row", texts.row), ("column", texts.column), ("element", texts.element))
