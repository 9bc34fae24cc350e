"""Finds masks and score mods by name, for the command line and `compare`.

    causal                               parameters follow from the sizes
    sliding_window:1024                  parameters after a colon, with commas between
    "sliding_window(1024)"               or as in Python: numbers, tuples, and lists for tensors
    "causal & sliding_window(1024)"      masks, combined by &, | and ~
    my_mods.py:near                      a function of a file, which flexmod runs

Other texts may have only library names and literals. If a text names a library score mod where a mask is
expected, the causal mask comes with it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod import masks, mods
from flexmod.block_mask.build import noop_mask
from flexmod.block_mask.parts import device_of
from flexmod.errors import NoDeviceError, NotMadeError
from flexmod.errors.base import (
    ModExpressionError,
    ModFileError,
    ModParametersError,
    ModPlaceError,
    UnknownModName,
    did_you_mean,
)
from flexmod.ir.composed import and_masks
from flexmod.ir.graph import dtype_name
from flexmod.ir.source import mod_kind, mod_name

Mod = Callable[..., Any]

# The return annotations of the library's functions.
RESULTS = {"mask": ("MaskMod", "Mask"), "score": ("ScoreMod",)}
OF_A_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")
WITH_COLON = re.compile(r"(?P<name>\w+):(?P<parameters>[^:]+)")


@dataclass(frozen=True)
class Setting:
    """Self-attention on [batch, heads, seq, dim] tensors."""

    batch: int
    heads: int
    seq: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"B={self.batch} H={self.heads} S={self.seq} D={self.dim} {dtype} on {self.device.type}"

    def sized(self, **given: Any) -> Setting:
        """Returns a setting with the given sizes; None keeps this one's."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def side(self) -> int:
        """The side of the largest square image whose pixels fit in the sequence."""
        return math.isqrt(self.seq)


class Mods(NamedTuple):
    mask: Mod | None = None
    score: Mod | None = None


# Default sizes: large on a GPU; on the CPU a comparison takes seconds.
ON_CPU = Setting(batch=1, heads=4, seq=2048, dim=64, dtype=torch.float32, device=torch.device("cpu"))
ON_GPU = Setting(batch=4, heads=16, seq=8192, dim=128, dtype=torch.bfloat16, device=torch.device("cuda"))


def usual_setting(device: torch.device | str | None = None, **given: Any) -> Setting:
    """Returns the default sizes on a device, with the given ones in their place. Raises NoDeviceError."""
    place = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "meta":
        raise NoDeviceError(device=repr(device), problem="its tensors have no values to compare or to time")
    return (ON_CPU if place.type == "cpu" else ON_GPU).sized(device=place, **given)


def device_name(device: torch.device) -> str:
    """Returns what a report calls a device: the name of a GPU, or the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# Default parameters by name; they follow from the sizes.
USUAL: Mapping[str, Callable[[Setting], tuple[Any, ...]]] = {
    "sliding_window": lambda s: (max(1, s.seq // 8),),
    "dilated_window": lambda s: (max(1, s.seq // 32), 4),
    "global_window": lambda s: (max(1, s.seq // 8), 4),
    "prefix_lm": lambda s: (s.seq // 4,),
    "document": lambda s: (torch.arange(s.seq, device=s.device) * 8 // s.seq, True),  # eight of them
    "block_diffusion": lambda s: (max(1, s.seq // 2), max(1, s.seq // 32)),
    "standalone_window": lambda s: (s.side, s.side, 8),
    "natten": lambda s: ((s.side, s.side), min(7, s.side - 1 + s.side % 2)),
    "alibi": lambda s: (s.heads,),
    "sandwich": lambda s: (s.heads, s.seq, 128, s.device),
    "softcap": lambda s: (30.0,),
    "temperature": lambda s: (2.0,),
}
# The largest length up to `seq` of names without parameters that do not take every length: square images, and
# two copies of a sequence.
LENGTHS: Mapping[str, Callable[[Setting], int]] = {
    "standalone_window": lambda s: s.side**2,
    "natten": lambda s: s.side**2,
    "block_diffusion": lambda s: max(2, s.seq - s.seq % 2),
}
# A score mod that hides scores by itself.
WITHOUT_MASK = ("causal_score",)
NOTHING = "noop"

files_run: set[str] = set()  # of users, by absolute path


def _library(module: ModuleType, kind: str) -> dict[str, Mod]:
    """Returns the functions of a module that return a mod of this kind."""
    functions = inspect.getmembers(module, inspect.isfunction)
    wanted = RESULTS[kind]
    return {
        name: function
        for name, function in functions
        if not name.startswith("_") and function.__annotations__.get("return") in wanted
    }


MASKS = _library(masks, "mask")
SCORES = {name: mod for name, mod in _library(mods, "score").items() if name not in MASKS}
KNOWN = (NOTHING, *MASKS, *SCORES)


def choose(mod: str | Mod, setting: Setting, score: str | Mod | None = None) -> Mods:
    """Returns the mods for a text or a function, sized for the setting; adds the score mod `score` to a mask.

    Raises UnknownModName, ModExpressionError, ModParametersError, ModFileError, ModPlaceError, and the errors
    of library functions or the user's file.
    """
    if mod == NOTHING:
        chosen = Mods()
    else:
        found, kind = _mod_of(mod, setting)
        chosen = Mods(mask=found)
        if kind == "score":
            of_library = isinstance(mod, str) and not OF_A_FILE.fullmatch(mod)
            masked = of_library and name_of(mod).partition("(")[0].partition(":")[0] not in WITHOUT_MASK
            chosen = Mods(masks.causal() if masked else None, found)
    if score is None:
        return chosen
    if chosen.score is not None:
        advice = "name a mask first, and one score mod by --score or score_mod"
        raise ModPlaceError(text=name_of(mod), kind="score", wanted="mask", advice=advice)
    found, kind = _mod_of(score, setting)
    if kind == "mask":
        advice = "name it in the place of the mask"
        raise ModPlaceError(text=name_of(score), kind="mask", wanted="score", advice=advice)
    return chosen._replace(score=found)


def name_of(mod: str | Mod) -> str:
    return mod if isinstance(mod, str) else mod_name(mod)


def _mod_of(mod: str | Mod, setting: Setting) -> tuple[Mod, str]:
    """Returns a mod and its kind."""
    return _Reader(mod, setting).mod() if isinstance(mod, str) else (mod, mod_kind(mod))


def choose_mask(text: str, setting: Setting) -> Mod:
    """Returns the mask_mod that a text names. Raises the errors of `choose`."""
    if text == NOTHING:
        return noop_mask
    mod, kind = _Reader(text, setting).mod()
    if kind == "score":
        raise ModPlaceError(text=text, kind="score", wanted="mask", advice="name a mask, such as causal")
    return mod


def fitting(mod: str | Mod, setting: Setting) -> Setting:
    """Returns the setting with `seq`, or the largest length below it that a named mask takes."""
    length = LENGTHS.get(mod) if isinstance(mod, str) else None
    return setting if length is None else replace(setting, seq=length(setting))


class _Reader:
    """Parses one text."""

    def __init__(self, text: str, setting: Setting) -> None:
        self.text = text
        self.setting = setting

    def mod(self) -> tuple[Mod, str]:
        """Returns the mod and its kind."""
        of_file = OF_A_FILE.fullmatch(self.text)
        if of_file:
            function = _of_file(self.text, Path(of_file["path"]), of_file["name"])
            try:
                return function, mod_kind(function)
            except NotMadeError as error:  # its line is none of the file's
                facts: dict[str, Any] = error.facts
                raise NotMadeError(**facts) from None
        if self.text.endswith(".py"):
            raise self._error("it names no function of the file")
        if ".py" in self.text:
            raise self._error("file.py:function stands alone; combine the functions of a file in the file")
        colon = WITH_COLON.fullmatch(self.text)
        source = f"{colon['name']}({colon['parameters']})" if colon else self.text
        try:
            node = ast.parse(source.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:  # ValueError: bytes that are no character
            raise self._error(f"it cannot be read, {getattr(error, 'msg', error)}") from None
        return self._expression(node)

    def _expression(self, node: ast.expr) -> tuple[Any, str]:
        """Evaluates an expression to a library mask or score mod, and its kind."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            sides = [self._expression(side) for side in (node.left, node.right)]
            if any(kind == "score" for _, kind in sides):
                raise self._error("& and | combine masks alone")
            (first, _), (second, _) = sides
            return (first & second if isinstance(node.op, ast.BitAnd) else first | second), "mask"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            inverted, kind = self._expression(node.operand)
            if kind == "score":
                raise self._error("~ is of masks alone")
            return ~inverted, kind
        if isinstance(node, ast.Name):
            return self._made(node.id, None, {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _check_known(node.func.id)  # before its parameters, which may be names too
            named = {word.arg: self._parameter(word.value) for word in node.keywords if word.arg}
            if len(named) < len(node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                raise self._error("* and ** are not taken")
            return self._made(node.func.id, [self._parameter(a) for a in node.args], named)
        raise self._error(f"{ast.unparse(node)} is neither a name nor a name with parameters")

    def _parameter(self, node: ast.expr) -> Any:
        """Evaluates a parameter: a literal, a tensor from a list of numbers, or a mod."""
        if isinstance(node, (ast.Name, ast.Call)):
            return self._expression(node)[0]
        try:
            value = ast.literal_eval(node)
            return torch.tensor(value, device=self.setting.device) if isinstance(value, list) else value
        except (TypeError, ValueError):
            raise self._error(f"{ast.unparse(node)} is no number, tuple or list of numbers") from None

    def _made(self, name: str, given: list[Any] | None, named: dict[str, Any]) -> tuple[Mod, str]:
        if name == NOTHING and (given or named):
            raise self._error(f"{NOTHING} takes no parameters")
        if name == NOTHING:
            return and_masks(), "mask"
        kind = "mask" if name in MASKS else "score"
        _check_known(name)
        function = MASKS.get(name) or SCORES[name]
        if not given and not named and name in USUAL:
            given = list(USUAL[name](self.setting))
        signature = inspect.signature(function)
        try:
            signature.bind(*(given or ()), **named)
        except TypeError as error:
            shown = [*map(_shown, given or ()), *(f"{key}={_shown(value)}" for key, value in named.items())]
            names = ", ".join(str(p).split(":")[0].strip() for p in signature.parameters.values())
            raise ModParametersError(
                name=name, signature=f"({names})", given=f"({', '.join(shown)})", problem=error
            ) from None
        return function(*(given or ()), **named), kind

    def _error(self, problem: str) -> ModExpressionError:
        return ModExpressionError(text=self.text, problem=problem)


def _check_known(name: str) -> None:
    if name not in KNOWN:
        raise UnknownModName(name=name, close=did_you_mean(name, KNOWN), known=", ".join(KNOWN))


def _shown(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def _of_file(text: str, path: Path, name: str) -> Mod:
    """Runs the user's file, as an import from its folder would, and returns its function."""
    if not path.is_file():
        raise ModFileError(text=text, problem=f"there is no file {path}", close="")
    try:
        module = _imported(path)
    except SystemExit as error:
        raise ModFileError(
            text=text, problem=f"{path} ends the process, with the exit status {error.code}",
            close=' Let it do so below if __name__ == "__main__" alone.',
        ) from None  # fmt: skip
    if not callable(getattr(module, name, None)):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        problem = f"{path} has no function {name}"
        raise ModFileError(text=text, problem=problem, close=did_you_mean(name, own))
    return getattr(module, name)


def _imported(path: Path) -> ModuleType:
    """Runs a file as a new module, which finds its neighbours and itself (dataclasses look it up)."""
    other = sys.modules.get(path.stem)
    known = other is None or getattr(other, "__file__", None) == str(path.absolute())
    spec = importlib.util.spec_from_file_location(path.stem if known else str(path), path.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    files_run.add(str(path.absolute()))
    sys.path.insert(0, str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.path.remove(str(path.absolute().parent))
    return module
