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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch
import triton

from flexmod.codegen.by_distance import table_names
from flexmod.codegen.compiler import build, capture_grad, capture_terms, with_distances
from flexmod.codegen.expressions import fresh
from flexmod.codegen.kernels import NO_CAPTURES, CaptureTexts, Kernels, ModText
from flexmod.codegen.render import head_lines, render
from flexmod.codegen.spec import FLOAT8, Direction, KernelName, KernelSpec, Tile
from flexmod.codegen.term_text import write_terms
from flexmod.codegen.variant import Variant, check_dtype, variant
from flexmod.errors import ArgumentTypeError
from flexmod.ir.derivative import GradientTerm
from flexmod.ir.graph import UNIFORM, ExpectedSize, Graph, dtype_name, used_captures
from flexmod.ir.passes import Extents
from flexmod.runtime.compiler_bugs import wrong
from flexmod.runtime.launch import no_tile_fits
from flexmod.runtime.plan import Size
from flexmod.runtime.target import OLDEST, family_of
from flexmod.tools import standalone_functions
from flexmod.tools.ahead import VariantCall, first_tile
from flexmod.tools.standalone_text import (
    PlanText,
    TorchText,
    example,
    fit,
    least_shapes,
    positions_in,
    quotes,
    write_torch,
)

# A file's index arithmetic is wide enough for this many batch entries, heads, queries and keys.
EXTENTS: Extents = (1 << 20, 1 << 20, 1 << 20, 1 << 20)
# main()'s B, HQ, HKV, M and N on a GPU and in the interpreter; captured tensors may need smaller sizes.
ON_GPU = (2, 8, 4, 2000, 2100)
INTERPRETED = (2, 2, 1, 100, 130)
# The largest distance of a result from dense attention in float64, as a ratio of norms, by dtype.
LIMITS = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
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
    "dq_kernel", "dkdv_kernel", "scatter_kernel", "distance_kernel", *dir(builtins),
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
    ArgumentTypeError.check_path("path", path)  # before kernels compile, for seconds
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
    check_dtype(dtype, dtype not in FLOAT8)
    made = variant(
        score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype, block_size=block_size,
        extents=EXTENTS, mask_form="lists", shared_kv=True,
    )  # fmt: skip
    quoted = quotes([mod for mod in (score_mod, mask_mod) if mod is not None])
    return File(made, quoted, target, tiles=dict(tiles or {})).text()


@dataclass
class File:
    """A file for a variant of EXTENTS, with lists of blocks and shared keys.

    `quoted` has the user's functions. `scale` is the file's default, None for 1/sqrt(D).
    """

    variant: Variant
    quoted: list[list[str]]
    target: str
    scale: float | None = None
    tiles: dict[KernelName, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.variant = v = replace(self.variant, spec=self.variant.spec.on(family_of(self.target)))
        score, mask = v.score, v.mask
        graph = score.graph if score else None
        derived, distances = score, None
        if score:
            score, derived, distances = with_distances(score, v.learned, v.spec.backward)
        self.terms: list[GradientTerm] = []
        self.captures = NO_CAPTURES
        if v.learned and graph:
            # sums along diagonals need a kernel and lists of their own: sum by element instead
            assert derived is not None and derived.graph is not None
            self.terms = [
                replace(term, along="element") if term.along == "diagonal" else term
                for term in capture_terms(derived.graph, v.learned)
            ]
            if self.terms:
                self.captures = write_terms(capture_grad(derived.graph, v.learned), self.terms)
        texts = [text for _, text in _by_along(self.captures) if text]
        taken = TAKEN | {term.sums.lower() for text in texts for term in text.terms}
        taken |= {name for made in table_names(distances) for name in made}
        known: dict[object, str] = {}  # the names of tensors that both mods may capture
        of_score = names_of(graph, v.score_tensors, taken, known)
        self.score = FileMod(graph, v.score_tensors, of_score, v.score_sizes, CALL_SIZES)
        of_mask = mask.graph if mask else None
        names = names_of(of_mask, v.mask_tensors, taken, known)
        self.mask = FileMod(of_mask, v.mask_tensors, names, v.mask_sizes, MASK_SIZES)
        self.kernels = Kernels(
            v.spec, self.build, score.text if score else None, mask.text if mask else None,
            derived.grad_text if derived else None, dict(v.options), captures=self.captures,
            by_distance=distances,
        )  # fmt: skip

    def build(self, spec: KernelSpec) -> ModuleType:
        kernels = self.kernels
        return build(
            spec, kernels.score, kernels.mask, kernels.grad, kernels.captures, distances=kernels.by_distance
        )

    def text(self) -> str:
        """Raises UnknownTarget, NoTileFits, RoundedProductsError, MisaddressedProductsError."""
        kernels, spec, score, mask = self.kernels, self.variant.spec, self.score, self.mask
        score_names, mask_names = [*score.used()], [*mask.used()]
        learned = self.learned()
        places = {tensor.name: f"exact[{3 + place}]" for place, tensor in enumerate(learned)}
        mask_only = [name for name in mask_names if name not in score_names]
        results = ["grad_q", "grad_k", "grad_v", "None", *(["None"] if mask.graph else [])]
        results += [f"grad_{n}.to({n}.dtype)" if n in places else "None" for n in score_names]
        return render(
            spec, kernels.score, kernels.mask, kernels.grad, self.captures, kernels.by_distance,
            "standalone.jinja",
            head=self.head(),
            precision="PRECISION" if spec.precision == "bf16x6" else None,
            shared=_shared,
            quotes=self.quoted,
            usual_scale=self.scale,
            of_score=score.graph and write_torch(score.graph, "score_mod_in_torch", score.names),
            of_mask=mask.graph and write_torch(mask.graph, "mask_mod_in_torch", mask.names),
            score_names=score_names,
            mask_names=mask_names,
            mask_only=mask_only,
            mask_reads=mask.graph.reads if mask.graph else (),
            learned=learned,
            forward=self.statements("forward"),
            backward=self.statements("backward"),
            adds=any(term.place for tensor in learned for term in tensor.terms),
            captured_shapes=[
                (name, f"{dtype_name(tensor.dtype)} {list(tensor.shape)} where it was captured")
                for name, tensor in score.used().items()
            ],
            tiles=self.chosen_tiles(),
            score_checks=score.checks(),
            mask_checks=mask.checks(),
            fixed=[name for name in score_names if name not in places],
            examples=[(name, example(tensor)) for name, tensor in (score.used() | mask.used()).items()],
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
        launches = self.call.plan(self.kernels.spec.direction, self.kernels).launches()
        for name in dict.fromkeys(["forward", *(step.kernel for step in launches if step.rung)]):
            if name == "delta":
                continue
            tile = self.tiles.get(name)  # type: ignore[call-overload]
            if tile is None:
                built = first_tile(self.call, self.kernels, name, self.target)
                assert isinstance(built.tile, Tile) and built.report is not None
                tile, report = built.tile, built.report
                if report.too_large is not None:
                    raise no_tile_fits({f"{tile} last": report.too_large}, self.target)
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
        names |= {f"score_capture{number}": name for number, name in enumerate(self.score.names)}
        names |= {f"mask_capture{number}": name for number, name in enumerate(self.mask.names)}
        for axis, blocks in (("kv", "by_row"), ("q", "by_column")):
            for part, name in PARTS.items():
                names[part.format(axis)] = f"mask.{blocks}.{name}"
        rungs = dict.fromkeys(get_args(KernelName), IN_THE_FILE)
        plan = self.call.plan(direction, self.kernels, rungs, captured=False)
        return PlanText(names).statements(plan, indent=12)

    @cached_property
    def call(self) -> VariantCall:
        small = self.kernels.small_scores and not self.kernels.spec.exact
        return VariantCall(self.variant, keep=not small)

    def learned(self) -> list[Learned]:
        """Returns the tensors with gradients, and the sums of each gradient."""
        of_score = self.score.names
        names = {along: iter(text.terms) for along, text in _by_along(self.captures) if text}
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
                assert self.score.graph is not None
                graph = self.score.graph.of(term.indices, "mask")
                name = f"place_in_{of_score[term.capture]}" + (f"_{len(sums) + 1}" if sums else "")
                place = write_torch(graph, name, of_score)
                given = tuple(of_score[n] for n in place.captures)
                sums.append(SumText(text.sums, term.along, place, given))
        return [Learned(of_score[n], tuple(sums)) for n, sums in sorted(found.items())]

    def sizes(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Returns main()'s B, HQ, HKV, M and N, as captured tensors and the library's mods need them."""
        mods = self.score, self.mask
        expected = [size for mod in mods for size in mod.expected]
        limits: dict[str, int] = {}
        for mod in mods:
            for name, size in positions_in(mod.graph, mod.tensors, EXTENTS).items():
                limits[name] = min(size, limits.get(name, size))
        for axis, size, _, _, start in expected:
            limits[axis] = min(size - start, limits.get(axis, size))
        batch, heads, shared, queries, keys = wanted
        exact = {axis: size for axis, size, *_ in expected if axis in UNIFORM}
        heads = exact.get("h", min(heads, limits.get("h", heads)))
        batch = exact.get("b", min(batch, limits.get("b", batch)))
        queries = min(queries, limits.get("q_idx", queries))
        keys = min(keys, limits.get("kv_idx", keys))
        while max(queries, keys) > 1 and not all(
            fit(mod.graph, mod.tensors, (batch, heads, queries, keys)) for mod in mods
        ):
            queries, keys = max(1, queries // 2), max(1, keys // 2)
        return batch, heads, math.gcd(heads, shared), queries, keys


class FileMod(NamedTuple):
    """A mod of the file.

    `names`: of its captured tensors. `expected`: the sizes that it was made for. `sizes`: the names of a
    call's sizes where the file checks the mod's.
    """

    graph: Graph | None
    tensors: Sequence[torch.Tensor]
    names: tuple[str, ...]
    expected: Sequence[ExpectedSize]
    sizes: Mapping[str, str]

    def used(self) -> dict[str, torch.Tensor]:
        """Returns the captured tensors that the graph loads from, by name."""
        numbers = used_captures(self.graph.nodes) if self.graph else ()
        return {self.names[number]: self.tensors[number] for number in numbers}

    def checks(self) -> list[str]:
        """Returns statements that refuse captured tensors and sizes for which the mod was not traced."""
        found = []
        for axis, size, owner, _, start in self.expected:
            exact = ", exact=True" if axis in UNIFORM else ""
            arguments = f"{owner!r}, {CALL_SIZES[axis]!r}, {self.sizes[axis]}, {size}, {start}{exact}"
            found.append(f"check_size({arguments})")
        for number, least in least_shapes(self.graph, self.tensors, EXTENTS, self.sizes).items():
            name, dtype = self.names[number], self.tensors[number].dtype
            found.append(f"check_captured({', '.join([repr(name), name, str(dtype), *least])})")
        return found


def _shared(*names: str) -> str:
    """Returns the texts of functions and classes of `standalone_functions`."""
    return "\n\n".join(inspect.getsource(vars(standalone_functions)[name]) for name in names)


def names_of(
    graph: Graph | None, tensors: Sequence[torch.Tensor], taken: set[str], known: dict[object, str]
) -> tuple[str, ...]:
    """Names captured tensors in the file: the user's names, one for each tensor, none of `taken`."""
    names = []
    # a score_mod of -inf branches alone has no graph: the mask has its tensors
    for capture, tensor in zip(graph.captures, tensors, strict=True) if graph else ():
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        names.append(known.setdefault(key, fresh(capture.name, taken)))
    return tuple(names)


def _by_along(texts: CaptureTexts) -> tuple[tuple[str, ModText | None], ...]:
    return (("row", texts.row), ("column", texts.column), ("element", texts.element))
