"""Checks the `kernel_options` of flex_attention against one table, before any other work.

The names are torch's, except BLOCK_M3, BLOCK_N3, TEMPLATE, tuned and deterministic. Each name may have the
prefix `fwd_` or `bwd_`, which overrides the bare name for that direction's kernels.

`families.py` has the families of kernels; its `insert` adds a name here. A Layout is an order of the
dimensions that query, key, value and output may have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, get_type_hints

from torch import Tensor

from flexmod import errors
from flexmod.errors.base import did_you_mean, is_flag, is_size, shown
from flexmod.ir.graph import as_bool, as_int
from flexmod.runtime.private_torch import assume_constant

PORTABLE = "portable"  # the last family, whose kernels run on every chip
DECODE = "TRITON_DECODE"  # the value of BACKEND that asks for kernels for few queries
_version = object()


def family_names() -> tuple[str, ...]:
    """Returns the families of kernels, in the order in which flexmod tries them."""
    return OPTIONS["TEMPLATE"].names[1:]


def set_family_names(known: Sequence[str]) -> None:
    global _version
    OPTIONS["TEMPLATE"], _version = _one_of("auto", *known), object()


def families_version() -> object:
    """Returns an object that is another one after a family was inserted or removed."""
    return _version


@dataclass(frozen=True)
class Option:
    """A kernel option. `names` has its values if these are names."""

    accepted: str
    check: Callable[[Any], bool]
    names: tuple[str, ...] = ()


def _power_of_two(value: Any) -> bool:
    return is_size(value) and value >= 16 and value & (value - 1) == 0


def _among(*numbers: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value in numbers


def _one_of(*names: str) -> Option:
    accepted = "one of " + ", ".join(map(repr, names))
    return Option(accepted, lambda value: isinstance(value, str) and value in names, names)


class FlexKernelOptions(TypedDict, total=False):
    """The names of `kernel_options` and the types of their values, for type checkers.

    docs/kernel_options.md explains each. Names with the prefixes `fwd_` and `bwd_` are not among them, as in
    torch.
    """

    BACKEND: str
    TEMPLATE: str
    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    BLOCK_M3: int
    BLOCK_N3: int
    tuned: bool
    deterministic: bool
    # accepted, no effect
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    # for AMD; passed to Triton
    kpack: int
    waves_per_eu: int
    matrix_instr_nonkdim: int


_FLAG = Option("True or False", is_flag)
_BLOCK = Option("a power of two, 16 or more", _power_of_two)

# In the order of FlexKernelOptions: numbers without a row below are sides of tiles.
OPTIONS: dict[str, Option] = {
    **{name: _FLAG if kind is bool else _BLOCK for name, kind in get_type_hints(FlexKernelOptions).items()},
    "BACKEND": _one_of("AUTO", "TRITON", DECODE, "INTERPRET", "REFERENCE"),
    "TEMPLATE": _one_of("auto", "hopper", PORTABLE),
    "num_warps": Option("1, 2, 4, 8, 16 or 32", _among(1, 2, 4, 8, 16, 32)),
    "num_stages": Option("a positive integer", is_size),
    "kpack": Option("1 or 2", _among(1, 2)),
    "waves_per_eu": Option("0 or a positive integer", lambda v: _among(0)(v) or is_size(v)),
    "matrix_instr_nonkdim": Option("0, 4, 16 or 32", _among(0, 4, 16, 32)),
}
PREFIXES = ("fwd_", "bwd_")


@dataclass(frozen=True)
class KernelOptions:
    """Checked options. `tiles` has the options of launches, with prefixes, sorted by name."""

    backend: str = "AUTO"
    tiles: tuple[tuple[str, Any], ...] = ()


NONE = KernelOptions()


def parse(options: Mapping[str, Any] | None) -> KernelOptions:
    """Checks names and values, and returns the options.

    Raises UnknownOption, OptionValueError, FlashBackendError.
    """
    if options is None:
        return NONE
    right = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    advice = "give a dict of names and values, e.g. {'BACKEND': 'REFERENCE'}"
    errors.ArgumentTypeError.check(right, "kernel_options", options, advice)
    values = {name: _plain(value) for name, value in options.items()}
    for name, value in values.items():
        bare = name[4:] if name.startswith(PREFIXES) else name
        option = OPTIONS.get(bare)
        if option is None or (bare == "BACKEND" and bare != name):
            raise errors.UnknownOption(name=name, close=_close_to(bare), known=", ".join(OPTIONS))
        if not option.check(value):
            if bare == "BACKEND" and isinstance(value, str) and value == "FLASH":
                raise errors.FlashBackendError()
            raise errors.OptionValueError(name=name, value=shown(value), accepted=option.accepted)
        if option is _FLAG:
            values[name] = as_bool(value)
        if option.names:  # a member of an Enum is a string, but no constant of a compiled graph
            values[name] = option.names[option.names.index(value)]
    backend = values.get("BACKEND", "AUTO")
    if backend != DECODE:  # which the choice of a kernel reads
        values.pop("BACKEND", None)
    return KernelOptions(backend, tuple([(k, values[k]) for k in sorted(values)]))


@assume_constant
def _close_to(name: str) -> str:
    """Asks for the option that a name is close to, if there is one. TorchDynamo cannot run difflib."""
    return did_you_mean(name, OPTIONS)


def _plain(value: Any) -> Any:
    """Python's own int or bool for one of another library or a symbol of torch.compile.

    A kernel is compiled for it. A tensor is no number, since its value may change.
    """
    if isinstance(value, bool):
        return as_bool(value)
    number = None if isinstance(value, Tensor) else as_int(value)
    return value if number is None else operator.index(number)


LayoutName = Literal["bhsd", "bshd"]


class Layout(NamedTuple):
    """An order of dimensions: `heads` and `length` are dimension numbers; errors use `shape` and `named`."""

    heads: int
    length: int
    shape: str
    named: str = ""


LAYOUTS: Mapping[str, Layout] = {
    "bhsd": Layout(1, 2, "[batch, heads, length, head_dim]"),
    "bshd": Layout(2, 1, "[batch, length, heads, head_dim] in layout 'bshd'", " of layout 'bshd'"),
}
USUAL = LAYOUTS["bhsd"]


def layout_of(name: Any) -> Layout:
    """Returns the layout with this name. Raises LayoutError."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise errors.LayoutError(layout=name)
    return LAYOUTS[name]
