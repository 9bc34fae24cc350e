"""Errors of the command line and of mods named by text, in the form of the errors in `errors/`."""

from __future__ import annotations

from flexmod.errors.base import FlexmodError


class UnknownModName(FlexmodError, ValueError):
    what = "there is no mask or score mod named {name!r}.{close}"
    instead = "use one of: {known}; or file.py:function for one of your own."


class ModExpressionError(FlexmodError, ValueError):
    what = "{text!r} names no mask or score mod: {problem}."
    instead = (
        "write a name, a name with parameters (sliding_window:1024 or 'sliding_window(1024)'), masks joined "
        "by & and |, ~ of one, or file.py:function."
    )


class ModParametersError(FlexmodError, TypeError):
    what = "{name}{signature} does not take the parameters {given}: {problem}."
    instead = "give numbers, tuples, and lists for tensors, as in {name}(...)."


class ModFileError(FlexmodError, ValueError):
    what = "{text!r}: {problem}.{close}"
    instead = "write path/to/file.py:function, with a function of the file's own."


class ModPlaceError(FlexmodError, TypeError):
    what = "{text!r} is a {kind}_mod, and a {wanted}_mod is wanted here."


class MissingPlots(FlexmodError, RuntimeError):
    what = "--plot draws with matplotlib, which is not installed."
    instead = "pip install matplotlib, or take the numbers from --json."


class TuneDeviceError(FlexmodError, ValueError):
    what = "tune times kernels on a GPU, and {device} is none."
    instead = "run it on a machine with CUDA; flexmod build compiles for chips that are not here."


class WarmFolderError(FlexmodError, OSError):
    what = "compiled kernels cannot be kept in {folder}: {problem}."


class NoSourceError(FlexmodError, ValueError):
    what = "there is no {template} for this variant: {why}."
    instead = "ask for the portable template, which every chip runs."
