"""Shows what flexmod makes of mods: `explain` for mods, `Inspection` for a flexmod.compile handle.

Both show graphs and modules of kernels. A handle also shows PTX, and saves itself as a standalone file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from flexmod import errors
from flexmod.backends.options import USUAL, KernelOptions, Layout
from flexmod.codegen.compiler import capture_grad
from flexmod.codegen.render import render
from flexmod.codegen.spec import FLOAT8, KERNEL_DTYPES, KernelSpec
from flexmod.codegen.variant import EXTENTS, Variant, check_dim, check_dtype, of_traces, spec_for, variant
from flexmod.ir.graph import Graph, dtype_name
from flexmod.ir.passes import Extents
from flexmod.ir.trace import Traced, trace
from flexmod.runtime.locks import lazy_imports
from flexmod.runtime.plan import Plan
from flexmod.runtime.target import MEASURED, OLDEST, target_of
from flexmod.tools.standalone_text import quotes

T = TypeVar("T")


class Named(dict[str, T]):
    """Graphs or texts by name; `str` joins them all. Raises NoKernelsError for a name without an entry."""

    advice = "take one of these names, or print all"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.values()))

    def __missing__(self, key: str) -> T:
        known = ", ".join(map(repr, self)) or "none"
        raise errors.NoKernelsError(name=key, known=known, advice=self.advice)


class ByFamily(Named[T]):
    """Texts by family and direction, such as "hopper forward"; a family that cannot run has no entry."""

    advice = (
        "print(flexmod.explain(...)), which says why a family cannot serve; "
        "its `source` has the portable kernels"
    )


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str` shows the graphs and the kernels' templates.

        graphs     the graphs of the mask, of the score and of its derivative, "mask", "score" and "grad"
        source     the portable module, forward and backward
        sources    the modules of other kernel families, by family and direction ("hopper forward")
        templates  for each direction, which family runs on which chip, and why
        plan       the allocations and launches of a call, by family and direction ("portable forward"), with
                   the first tile of each ladder

    The last three print as a whole. The dicts `sources` and `plan` raise NoKernelsError for a missing key.
    """

    graphs: tuple[Graph, ...]
    source: str
    sources: ByFamily[str]
    templates: tuple[str, ...]
    plan: ByFamily[Plan]

    def __str__(self) -> str:
        graphs = "\n\n".join(map(str, self.graphs)) or "no mod: plain attention"
        return "\n".join([graphs, "", *self.templates])


def graphs_of(made: Variant) -> Named[Graph]:
    """Returns a variant's optimized graphs: "mask", "score", and "grad", the score's derivative.

    "grad" also has derivatives by captured elements that require them. A mod without effect has no entry.
    """
    score, mask = made.score, made.mask
    found = {"mask": mask.graph if mask else None}
    if score and score.graph:
        found |= {"score": score.graph, "grad": score.grad}
        if made.learned:
            found["grad"] = capture_grad(score.graph, made.learned).graph
    return Named({name: graph for name, graph in found.items() if graph})


def explain(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | tuple[int, int] = 128,
) -> Explanation:
    """Shows what flexmod compiles for these mods. It needs no GPU and launches nothing.

        head_dim    of query and key
        value_dim   of value; head_dim if None
        dtype       of all three
        block_size  of the mask's tiles, in positions: one number or (queries, keys)

    The backward includes gradients of captured tensors that require them. The result prints the graphs; its
    `source` is the portable module of kernels, its `sources` are modules of other families. Raises
    ArgumentTypeError for an invalid dtype, dimension or block_size, and what tracing raises.

    Example:

        explanation = explain(mods.softcap(50.0), masks.causal(), head_dim=128)
        print(explanation)
        print(explanation.source)
    """
    made = variant(
        score_mod, mask_mod, head_dim=head_dim, value_dim=value_dim, dtype=dtype, block_size=block_size
    )
    kernels = made.kernels(made.spec.directions[-1])
    texts = kernels.score, kernels.mask, kernels.grad, kernels.captures, kernels.by_distance
    source = render(kernels.spec, *texts)
    graphs = tuple(graphs_of(made).values())
    with lazy_imports():
        from flexmod.tools.ahead import by_family
    plans, sources, templates = by_family(made)
    return Explanation(graphs, source, ByFamily(sources), templates, ByFamily(plans))


# kernel_options that a standalone file, with portable kernels and a plain launcher, does not support; False
# and 0 ask for nothing
NOT_IN_A_FILE = ("tuned", "deterministic", "kpack", "waves_per_eu", "matrix_instr_nonkdim")
CALL = "head_dim=64, dtype=torch.bfloat16"


class Latest(NamedTuple):
    """Everything that a call's kernels depend on, except the mods. `spec` has the mask's block size."""

    device: torch.device
    spec: KernelSpec
    extents: Extents


class Inspection:
    """The readable side of a handle:

        graph      the optimized graphs: "mask", "score" and "grad", the score's derivative
        source     the modules of kernels of the latest call, "forward" and "backward"
        ptx        their PTX by kernel, compiled for the chip of the latest call
        ptx_for()  the same for a named chip
        save()     writes a file that depends on torch and triton only

    The first four are dicts, and print as a whole. They show the mods as flexmod.compile traced them. Before
    the first call, the dtype and head dimensions from flexmod.compile describe the latest call.
    """

    _mods: dict[str, Callable[..., Any]]
    _scale: float | None
    _options: KernelOptions
    _layout: Layout
    _latest: Latest | None = None

    @property
    def _positive_scale(self) -> bool:
        return self._scale is None or self._scale > 0

    def _traced(self) -> Mapping[str, Traced]:
        """Returns the traces of the mods by "score" and "mask"; a missing mod has no entry."""
        raise NotImplementedError

    @property
    def graph(self) -> Named[Graph]:
        """The optimized graphs, with index arithmetic as wide as the latest call needs it."""
        # a graph does not depend on dtypes and head dimensions
        spec = self._latest.spec if self._latest else spec_for(torch.float32, 64)
        return graphs_of(self._made(spec))

    @property
    def source(self) -> Named[str]:
        """The modules of kernels of the latest call, for its chip.

        It has both directions, even if the call had no backward. On the CPU only the interpreter runs these
        kernels. The text shows numbers of the mods as constants, also where a call passes them as arguments.

        Raises:
            NotCalledError: there was no call, and flexmod.compile got no dtype and head_dim.
            UnsupportedDtype: there are no kernels for float64.
        """
        with lazy_imports():
            from flexmod.tools import ahead
        spec = self._spec("source", f"flexmod.explain(score_mod, mask_mod, {CALL}).source")
        made, target = self._made(spec), self._chip() or "cpu"
        modules = {
            direction: ahead.kernels_on(made, direction, target).module for direction in spec.directions
        }
        return Named({direction: inspect.getsource(module) for direction, module in modules.items()})

    @property
    def ptx(self) -> Named[str]:
        """The PTX of the latest call's kernels by name, for its chip; compiling them takes seconds.

        It leaves out kernels without a choice of tiles (statistics, rounding).

        Raises:
            NotCalledError, UnsupportedDtype: as `source`.
            NoPtxError: the call ran on the CPU, or on a chip without PTX; see `ptx_for`.
        """
        return self._ptx(self._spec("PTX", f"attend.ptx_for({MEASURED!r}, {CALL})"), self._chip())

    def ptx_for(
        self,
        target: str,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Named[str]:
        """Returns the PTX of the kernels by name, for a chip that need not be here, e.g. "sm_90".

            head_dim   of query and key; by default as in the latest call
            value_dim  of value; by default head_dim if you give it, else as in the latest call
            dtype      of all three; by default as in the latest call

        Raises UnknownTarget, ArgumentTypeError, and the errors of `ptx`.
        """
        advice = f"attend.ptx_for({target!r}, {CALL})"
        return self._ptx(self._spec("PTX", advice, head_dim, value_dim, dtype), target)

    def save(
        self,
        path: str | Path,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        target: str | None = None,
    ) -> Path:
        """Writes a file with this attention, forward and backward, that depends on torch and triton only.

        The file has the portable kernels, a plain launcher, and a main() that checks them against dense
        attention; see `flexmod.standalone`. Returns its path.

            head_dim, value_dim, dtype
                    as in `ptx_for`
            target  the chip to choose tiles for; by default the latest call's, or the oldest supported chip
                    if that call ran on no GPU

        Raises:
            NotCalledError, UnsupportedDtype: as `source`.
            NoStandaloneError: the handle uses an option that a file does not support.
            UnknownTarget, NoTileFits: see `standalone`.
            ArgumentTypeError: an invalid dtype or dimension.
        """
        with lazy_imports():
            from flexmod.tools import standalone
        errors.ArgumentTypeError.check_path("path", path)  # before kernels compile, for seconds
        advice = f"attend.save({str(path)!r}, {CALL})"
        spec = self._spec("file", advice, head_dim, value_dim, dtype)
        self._check_savable(spec)
        of_file = replace(spec, mask_form="lists", shared_kv=True)
        traced = self._traced()
        # do not quote numbers that changed since the trace
        unchanged = all(
            trace(mod, kind).graph.key == traced[kind].graph.key for kind, mod in self._mods.items()
        )
        file = standalone.File(
            self._made(of_file, standalone.EXTENTS), quotes([*self._mods.values()], unchanged),
            target or self._chip() or OLDEST, self._scale,
        )  # fmt: skip
        return standalone.written(path, file.text())

    def _ptx(self, spec: KernelSpec, target: str | None) -> Named[str]:
        if any(asked and name.endswith("tuned") for name, asked in self._options.tiles):
            raise errors.NoPtxError(
                of="this handle", why="its kernel option tuned asks for tiles that were found on a device",
                advice="compile a handle without the option",
            )  # fmt: skip
        with lazy_imports():
            from flexmod.tools import ahead
        if target is None:
            raise errors.NoPtxError(
                of="this handle", why="what it shows is for the CPU", advice=ahead.NAME_A_CHIP
            )
        return Named(ahead.ptx(self._made(spec), target))

    def _chip(self) -> str | None:
        """Returns the chip of the latest call, or None."""
        device = self._latest.device if self._latest else torch.device("cpu")
        # the latest call of an unpickled handle may have run on a machine with more GPUs
        here = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        return target_of(device).name if here else None

    def _made(self, spec: KernelSpec, extents: Extents | None = None) -> Variant:
        traced = self._traced()
        known = self._latest.extents if self._latest else EXTENTS
        return of_traces(traced.get("score"), traced.get("mask"), spec, extents or known, self._options.tiles)

    def _spec(
        self,
        what: str,
        advice: str,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> KernelSpec:
        """Returns the latest call's spec, with the given arguments in place of its own."""
        for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
            if dim is not None:
                check_dim(name, dim)
        check_dtype(dtype, dtype is None or isinstance(dtype, torch.dtype))
        latest = self._latest
        if latest is not None:
            spec = latest.spec
        elif head_dim is None or dtype is None:
            raise errors.NotCalledError(what=what, advice=advice)
        else:
            spec = spec_for(dtype, head_dim, positive_scale=self._positive_scale)
        if head_dim is not None:
            spec = replace(spec, head_dim=head_dim, value_dim=head_dim)
        if value_dim is not None:
            spec = replace(spec, value_dim=value_dim)
        if dtype is not None:
            spec = spec.of_dtype(dtype)
        if spec.q_dtype not in (*KERNEL_DTYPES, *FLOAT8):
            raise errors.UnsupportedDtype(
                name="query", dtype=dtype_name(spec.q_dtype), backend="TRITON",
                advice=f"to({torch.bfloat16})", accepted=", ".join(map(dtype_name, KERNEL_DTYPES)),
            )  # fmt: skip
        return spec

    def _check_savable(self, spec: KernelSpec) -> None:
        why, advice = "", "compile a handle without the option, and save that"
        tiles = [(name.removeprefix("fwd_").removeprefix("bwd_"), x) for name, x in self._options.tiles]
        options, unheeded = dict(tiles), [name for name, x in tiles if x and name in NOT_IN_A_FILE]
        if unheeded:
            why = f"a file does not heed its kernel option {unheeded[0]}"
        elif options.get("TEMPLATE", "auto") not in ("auto", "portable"):
            asked = options["TEMPLATE"]
            why = f"its kernel option TEMPLATE is {asked!r}, and a file has the portable kernels"
        elif self._scale is not None and self._scale <= 0:
            why, advice = (
                f"its scale is {self._scale}, and a file takes a positive one", "scale query instead"
            )
        elif self._layout != USUAL:
            why = "its layout is 'bshd', and a file takes [batch, heads, length, head_dim]"
            advice = "save a handle without layout, and give the file's attention views, x.transpose(1, 2)"
        elif spec.directions == ("forward",):
            why = "it was called on float8 tensors"
            advice = "name another dtype, attend.save(path, dtype=torch.bfloat16)"
        elif not spec.q_dtype == spec.k_dtype == spec.v_dtype:
            why = f"query was {dtype_name(spec.q_dtype)} and key {dtype_name(spec.k_dtype)}, a file has one"
            advice = "name the dtype, e.g. attend.save(path, dtype=torch.bfloat16)"
        if why:
            raise errors.NoStandaloneError(why=why, advice=advice)
