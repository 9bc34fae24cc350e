"""Errors about kernels: options, the environment, devices, and inspection of a compiled handle."""

from __future__ import annotations

from flexmod.errors.base import FlexmodError


class UnknownOption(FlexmodError, ValueError):
    what = "kernel_options has no option {name!r}.{close}"
    instead = "use some of: {known}."


class OptionValueError(FlexmodError, ValueError):
    what = "kernel option {name} is {value}."
    instead = "give {accepted}."


class FlashBackendError(FlexmodError, NotImplementedError):
    what = 'BACKEND="FLASH" asks for torch\'s FlashAttention kernels, which flexmod does not contain.'
    instead = "leave BACKEND out: flexmod chooses its own fastest kernel."


class DecodeBackendError(FlexmodError, NotImplementedError):
    what = 'BACKEND="TRITON_DECODE" cannot run this call: {why}.'
    instead = (
        "leave BACKEND out: without gradients, flexmod takes this kernel for few queries on more than 64 keys, "
        "in float32 with heads of up to 128 columns, unless others take less time."
    )


class BackendDeviceError(FlexmodError, ValueError):
    what = 'BACKEND="{backend}" runs on {wanted} tensors, but query is on {device}.'
    instead = "move query, key and value to {wanted}, or leave BACKEND out."


class TemplateError(FlexmodError, ValueError):
    what = "kernel option TEMPLATE is {template!r}, but the {direction} cannot run on it: {why}."
    instead = "leave TEMPLATE out: flexmod takes the portable template then."


class NoKernelsError(FlexmodError, KeyError):
    what = "there is no {name!r} for this variant; there is: {known}."

    def __str__(self) -> str:
        return self.message  # KeyError's own method would add quotes


class NotTunedError(FlexmodError, ValueError):
    what = (
        "kernel option tuned is True, but nothing was tuned for the {direction} of this variant on {device}."
    )
    instead = (
        "run flexmod tune with the same mods, dtype and head dimension (what it finds is in {folder}), or "
        "leave the option out."
    )


class NoTileFits(FlexmodError, RuntimeError):
    what = "no tile size fits the {limit} of {device}; tried {tried}."
    instead = (
        "use a smaller head_dim, a half-precision dtype, or kernel_options with smaller BLOCK_M and BLOCK_N."
    )


class RoundedProductsError(FlexmodError, RuntimeError):
    what = (
        "Triton {triton} multiplies float32 in TF32 on {device}, though it is told not to, with each tile size "
        "that was tried: {tried}."
    )
    instead = (
        "install a newer Triton, leave BLOCK_M to flexmod if kernel_options have it, or allow TF32 with "
        "torch.set_float32_matmul_precision('high')."
    )


class MisaddressedProductsError(FlexmodError, RuntimeError):
    what = (
        "the ptxas of Triton {triton} has a matrix product on {device} read at a wrong address, with each tile size "
        "that was tried: {tried}."
    )
    instead = (
        "install a newer Triton, set TRITON_PTXAS_PATH to a ptxas of CUDA 12.9 or later, or leave BLOCK_M to "
        "flexmod if kernel_options have it."
    )


class NotCalledError(FlexmodError, RuntimeError):
    what = "this handle was not called yet, and its {what} depends on the dtype and the head dimensions of a call."
    instead = "call it once, give flexmod.compile a dtype and a head_dim, or write {advice}."


class NoPtxError(FlexmodError, ValueError):
    what = "there is no PTX of {of}: {why}."


class NoStandaloneError(FlexmodError, NotImplementedError):
    what = "this handle cannot be saved as a file of its own: {why}."


class FlexOnCpuError(FlexmodError, NotImplementedError):
    what = "flex=True, or --flex, times torch's compiled flex_attention, which has no backward on {device}."
    instead = "run it on a CUDA device, or leave flex out."


class EnvironmentSwitchError(FlexmodError, ValueError):
    what = "environment variable {name} is {value!r}."
    instead = "set it to {accepted}."


class InterpreterOperationError(FlexmodError, NotImplementedError):
    what = "{operation} does not work in Triton's interpreter."
    instead = 'run the kernel on a GPU, or use BACKEND="REFERENCE".'


class UnknownTarget(FlexmodError, ValueError):
    what = "{name!r} is not a chip that flexmod knows."
    instead = "use one of: {known}."


class NotAGpuError(FlexmodError, ValueError):
    what = "{device} is not a GPU: kernels are compiled for cuda devices."
    instead = "name a kind of chip, e.g. flexmod.runtime.target.named({example!r})."


class MissingPackage(FlexmodError, ImportError):
    what = "this needs the package {package}, which cannot be imported: {problem}."
