"""Renders the text of one module from a KernelSpec and mods. The only user of Jinja."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flexmod.codegen import device_functions
from flexmod.codegen.builder_text import BoundsText, BuilderTerm
from flexmod.codegen.device_functions import called
from flexmod.codegen.expressions import TRITON_DTYPES, filled
from flexmod.codegen.kernels import NO_CAPTURES, ByDistance, CaptureTexts, ModText, Parameter
from flexmod.codegen.spec import LARGEST_EXACT, KernelSpec, min_fixed_max
from flexmod.runtime.locks import lazy_imports

if TYPE_CHECKING:
    import jinja2

# stands for a line of a template that renders to nothing
NO_LINE = "\0"
# A function with its parameters on lines of their own. A mark, `!`, follows each number that Triton must not
# specialize a kernel for.
SIGNATURE = re.compile(r"^(@\w+\.jit)\ndef (\w+)\(\n((?: .*\n)+?)\):", re.MULTILINE)
# stands for the device functions of some files that the module calls, and for the names that it calls of some
FUNCTIONS, NAMES = re.compile("\1(.*)\1"), re.compile("\2(.*)\2")
# the head of a kernel, up to its first statement
HEAD = re.compile(r'^def \w+_kernel\(\n(?: .*\n)+?\):\n(?:    """(?:.|\n)*?"""\n)?', re.MULTILINE)
COMMENT = re.compile("#.*")
MARKED = re.compile(r"(\w+)!(?=,)")


def render(
    spec: KernelSpec,
    score: ModText | None = None,
    mask: ModText | None = None,
    grad: ModText | None = None,
    captures: CaptureTexts = NO_CAPTURES,
    distances: ByDistance | None = None,
    template: str = "module.jinja",
    target: str = "",
    **facts: object,
) -> str:
    """Renders one complete module: `forward_kernel`, and if spec.backward also the backward's three kernels
    (`statistics_kernel` or, for an exact spec, `delta_kernel`; `dq_kernel`, `dkdv_kernel`).

    A backward with a score_mod needs `grad`, its derivative. `captures` are derivatives that also compute
    gradients of captured tensors; they may add a `diagonal_kernel` and a `scatter_kernel`. `distances` adds
    a `distance_kernel`. The module contains the device functions that the mods call, see
    `device_functions.used_by`. `facts` are further variables of a template.
    """
    if not spec.backward:
        grad, captures = None, NO_CAPTURES
    elif (score is None) != (grad is None):
        raise ValueError("a backward takes a score_mod's text and its derivative's, or neither")
    grads = captures.by_kernel(grad)
    terms = {kernel: text.terms if text else () for kernel, text in grads.items()}
    ahead = distances.text if distances else None
    texts = (ahead, score, score.as_written if score else None, *dict.fromkeys(grads.values()), mask)
    mods = [mod.text for mod in texts if mod]
    return _rendered(
        template,
        early=target in device_functions.EARLY,
        spec=spec,
        score=score,
        mask=mask,
        grads=grads,
        distances=distances,
        terms_of=lambda kernel: terms.get(kernel, ()),
        texts=_with_prelude(*mods, single=spec.exact, target=target),
        head=facts.pop("head", None) or head_lines(spec, score, mask),
        single=spec.q_dtype is torch.float32,
        precision=facts.pop("precision", None) or f'"{spec.precision}"',
        exact=spec.exact,
        compensates=spec.compensates,
        in_pairs=score is not None and device_functions.in_pairs(score.text, target),
        min_fixed_max=min_fixed_max(spec, score.bounds) if score else None,
        lowest_score=score.bounds[0] * math.log2(math.e) if score else None,
        small_scores=score is not None and score.small,
        largest_exact=LARGEST_EXACT,
        **facts,
    )


def render_builder(terms: tuple[BuilderTerm, ...], bounds: BoundsText, mask: ModText) -> str:
    """Renders the module that builds block masks: `terms_kernel` (if there are terms), `squares_kernel` and
    `elements_kernel`.
    """
    texts = [*(term.text.text for term in terms), bounds.text.text, mask.text]
    prelude = _with_prelude(*texts, single=True)
    return _rendered("block_mask_module.jinja", terms=terms, bounds=bounds, mask=mask, texts=prelude)


def _with_prelude(*texts: str, single: bool, target: str = "") -> list[str]:
    """The texts of a module's mods, after the device functions that they call."""
    used = device_functions.used_by(*texts, single=single, target=target)
    return [used, *texts] if used else [*texts]


def parameters(*mods: ModText | None) -> tuple[Parameter, ...]:
    """The kernel parameters of several mods, in order, each name once."""
    merged: dict[str, Parameter] = {}
    for mod in mods:
        for p in mod.parameters if mod else ():
            if merged.setdefault(p.name, p) != p:
                raise ValueError(f"two mods use the parameter name {p.name} for different things")
    return tuple(merged.values())


def parameter_names(*mods: ModText | None) -> list[str]:
    """The names of `parameters`, without tiles, which a kernel loads by itself."""
    return [p.name for p in parameters(*mods) if p.kind != "tile"]


@cache
def _environment() -> jinja2.Environment:
    with lazy_imports():
        import jinja2
    package = Path(__file__).resolve().parents[1]
    # a wheel has the templates inside the package, a checkout next to it
    folders = [package / "templates", package.parent / "templates"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_bytecode(folders[0] if folders[0].is_dir() else folders[1]),
    )
    environment.filters["block"] = _block
    environment.filters["far_keys"] = lambda line: re.sub(r"\bkv_idx\b", "far_kv_idx", line)
    environment.globals.update(
        triton_dtype=TRITON_DTYPES.__getitem__,
        hoisted=_hoisted,
        shared_out=_shared_out,
        in_parts=_in_parts,
        captured=_captured,
        parameter_names=parameter_names,
        device_functions=lambda *files: f"\1{' '.join(files)}\1",  # see `_rendered`
        kernel=lambda file, name: device_functions.functions(file)[name],
        called=lambda *names: f"\2{' '.join(names)}\2",
        as_tuple=_as_tuple,
    )
    return environment


def _bytecode(templates: Path) -> jinja2.BytecodeCache | None:
    """The templates' bytecode, where Python keeps that of modules; None where Python keeps none.

    Jinja compares the text of a template with that of which the bytecode was made. It takes a tenth of a
    second to compile the templates of a kernel.
    """
    with lazy_imports():
        import jinja2

    class Bytecode(jinja2.FileSystemBytecodeCache):
        def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            try:
                super().load_bytecode(bucket)
            except Exception:  # the file is damaged
                bucket.reset()

        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            with suppress(OSError):  # the disk is full
                super().dump_bytecode(bucket)

    if sys.dont_write_bytecode:
        return None
    folder = Path(importlib.util.cache_from_source(str(templates / "template.py"))).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the package's folder is read-only
        return None
    return Bytecode(str(folder), f"%s.{sys.implementation.cache_tag}")


def _block(text: str, width: int = 0) -> str:
    """Indents lines by `width`, without blank lines at either end. An empty text leaves no line."""
    text = text or NO_LINE
    blank = " " * width
    return "\n".join(blank + line if line else line for line in text.strip("\n").split("\n"))


def _hoisted(home: str, *mods: ModText | None) -> str:
    """The mods' statements for one home: "program", "row" or "column"."""
    return "\n".join(line for mod in mods if mod for line in getattr(mod, home).splitlines())


def _captured(*mods: ModText | None) -> str:
    """The mods' parameters, as lines of a kernel's signature."""
    lines = []
    for p in parameters(*mods):
        mark = "!" if p.kind in ("size", "number", "double") and not p.row_length else ""
        lines.append(f"    {p.name}{mark},{'  # ' + p.comment if p.comment else ''}\n")
    return "".join(lines)


def _shared_out(home: str, layout: str, own: Mapping[str, str], mod: ModText) -> str:
    """The statement of a home for a thread's `own` positions, with its results converted to a layout."""
    names, call = getattr(mod, home).split(" = ", 1)
    for position, place in own.items():
        call = re.sub(rf"\b{position}\b", place, call)
    brought = [f"{name} = gl.convert_layout({name}, {layout})" for name in names.split(", ")]
    return "\n".join([f"{names} = {call}", *brought])


def _in_parts(mod: ModText, own: str, rest: str) -> str:
    """Splits the statement of a linear column into a sum over two parts of the offset.

    The first part, a lane's `own`, is behind an optimization barrier.
    """
    name, call = mod.column.split(" = ", 1)
    of_own, of_rest = (re.sub(r"\boffset\b", part, call) for part in (own, rest))
    if len(of_rest) > 60:  # it stands deep in a loop
        of_own, of_rest = f"\n    {of_own}\n", f"(\n    {of_rest}\n)"
    return f"{name} = opaque({of_own})\n{name} += {of_rest}"


def _with_unspecialized(function: re.Match[str]) -> str:
    """Moves the marks of a kernel's parameters into its decorator, and drops another function's."""
    decorator, name, signature = function.groups()
    names = ", ".join(f'"{marked}"' for marked in MARKED.findall(signature))
    if len(names) >= 78:
        names = f"\n{filled(names, 104)}\n"
    if names and name.endswith("_kernel"):
        decorator += f"(do_not_specialize=[{names}])"
    signature = MARKED.sub(r"\1", signature)
    return f"{decorator}\ndef {name}(\n{signature}):"


def _as_tuple(names: Sequence[str]) -> str:
    """A tuple of names; in lines of its own if it is long."""
    inside = ", ".join(names) + ("," if len(names) == 1 else "")
    return f"({inside})" if len(inside) < 88 else f"(\n{filled(inside, 92)}\n)"


def head_lines(spec: KernelSpec, score: ModText | None, mask: ModText | None) -> list[str]:
    """The module's docstring: its purpose, and the facts that determine its text."""
    kernels = "forward and backward" if spec.backward else "forward"
    mods = " and ".join([*(["a score_mod"] if score else []), *(["a mask_mod"] if mask else [])])
    q, k, v = (str(d).removeprefix("torch.") for d in (spec.q_dtype, spec.k_dtype, spec.v_dtype))
    out = f"; out {str(spec.out_dtype).removeprefix('torch.')}" if spec.out_dtype else ""
    lines = [
        f"Flash attention, {kernels}, {'with ' + mods if mods else 'without mods'}. Written by flexmod.",
        "",
        f"    operands       q {q}, k {k}, v {v}; sums in float32{out}",
        f"    head dims      {spec.head_dim} (queries and keys), {spec.value_dim} (values)",
    ]
    if spec.mask_block:
        form, sides = spec.mask_form, spec.mask_block
        lines.append(f"    mask           {form} of blocks, {sides[0]} queries x {sides[1]} keys each")
    else:
        lines.append("    mask           none: every tile runs")
    if spec.q_dtype is torch.float32:
        made = ", each of six in bfloat16" if spec.precision == "bf16x6" else ""
        lines.append(f"    float32 dots   {spec.precision}{made}")
    lines += [
        "",
        "Shapes: B batch, HQ query heads, HKV heads of keys and values, M queries, N keys, Qb and KVb blocks",
        "of the mask. BLOCK_M queries and BLOCK_N keys make a tile; the launcher chooses them.",
    ]
    return lines


def _rendered(template: str, *, early: bool = False, **facts: object) -> str:
    """A module of a template with these variables, with the device functions that it calls, without marks.

    `early`: its kernels wait for earlier ones. No trailing blanks, no more than two blank lines
    together, one newline at the end.
    """
    text = _environment().get_template(template).render(early=early, **facts)
    code = COMMENT.sub("", text)
    text = FUNCTIONS.sub(lambda files: device_functions.called_by(code, *files[1].split()) or NO_LINE, text)
    text = NAMES.sub(lambda names: ", ".join(sorted(called(tuple(names[1].split()), text))), text)
    lines = [line.rstrip() for line in text.strip("\n").split("\n") if NO_LINE not in line]
    kept = [line for i, line in enumerate(lines) if line or any(lines[max(i - 2, 0) : i])]
    text = SIGNATURE.sub(_with_unspecialized, "\n".join(kept) + "\n")
    wait = f"    {device_functions.WAIT}  # for the kernels of earlier launches\n"
    return HEAD.sub(rf"\g<0>{wait}", text) if early else text
