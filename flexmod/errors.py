"""Every mistake that flexmod refuses, one class each.

A class carries two sentences: `what` was wrong and what to write `instead`. Both are format strings; the
facts are given by keyword where the error is raised. A mistake inside a user's mod also carries `where`, the
file and line of the user's own code. All of it is the message: tests hold the messages word by word.

    raise HeadDimMismatch(query=64, key=128)
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        text = self.text
        return f"{self.file}:{self.line}" + (f": {text}" if text else "")

    @property
    def text(self) -> str:
        """The line as the user wrote it, cut where it is very long."""
        text = linecache.getline(self.file, self.line).strip()
        return text if len(text) <= 120 else text[:117] + "..."


class FlexmodError(Exception):
    """Base of all errors that flexmod raises on purpose."""

    what = "{what}"
    instead = "{instead}"

    def __init__(self, *, where: Where | None = None, **facts: object) -> None:
        self.where = where
        self.facts = facts
        lines = [self.what.format(**facts)]
        if where is not None:
            lines.append(f"  at {where}")
        lines.append(f"  Instead: {self.instead.format(**facts)}")
        self.message = "\n".join(lines)
        self.args = (self.message,)  # TorchDynamo follows this, and no super().__init__


# The call: shapes, devices, dtypes


class NotFourDimensional(FlexmodError, ValueError):
    what = "{name} has {rank} dimensions, shape {shape}; attention takes {layout}."
    instead = "add the missing dimensions, e.g. {name}.unsqueeze(0), or merge the extra ones."


class LayoutError(FlexmodError, ValueError):
    what = "layout is {layout!r}."
    instead = "give 'bhsd' for [batch, heads, length, head_dim], or 'bshd' for [batch, length, heads, head_dim]."


class NotATensor(FlexmodError, TypeError):
    what = "{name} is a {type}, not a torch.Tensor."
    instead = "pass a tensor of shape {layout}."


class EmptyHeadDim(FlexmodError, ValueError):
    what = "{name} has a head_dim of 0, shape {shape}."
    instead = "give it one element at least; batch, heads and lengths may be 0."


class ExtentError(FlexmodError, ValueError):
    what = "{name} is {value}; kernels count to {limit}."
    instead = "split the call along {along}."


class NotStrided(FlexmodError, TypeError):
    what = "{name} has layout {layout}; attention takes strided tensors."
    instead = "pass {name}.to_dense()."


class NestedTensorInput(FlexmodError, ValueError):
    what = "{name} is a nested tensor; flex_attention takes strided ones."
    instead = "call flexmod.nested_attention(query, key, value, mask_mod=...)."


class NestedLayoutError(FlexmodError, ValueError):
    what = "{name} {problem}; nested_attention takes [batch, heads, length, head_dim], with one length for each batch entry."
    instead = "{advice}."


class PackedShapeError(FlexmodError, ValueError):
    what = "{name} has shape {shape}; varlen_attention takes packed sequences, [total, heads, head_dim]."
    instead = "put them one after another, e.g. with torch.cat(sequences); nested tensors go to flexmod.nested_attention."


class MaskTwiceError(FlexmodError, ValueError):
    what = "both mask_mod and block_mask are given."
    instead = "give block_mask alone, built of masks.jagged(offsets, mask_mod)."


class DeviceMismatch(FlexmodError, ValueError):
    what = "{first} is on {first_device} but {second} is on {second_device}."
    instead = "move one of them, e.g. {name}.to({first_device!r})."


class UnsupportedDevice(FlexmodError, ValueError):
    what = "query is on {device}; flexmod runs on cuda and cpu."
    instead = "move query, key and value to one of them."


class UnsupportedDtype(FlexmodError, TypeError):
    what = "{name} has dtype {dtype}; the {backend} backend takes {accepted}."
    instead = "cast it, e.g. {name}.to({example})."


class MixedDtypes(FlexmodError, TypeError):
    what = "query is {query}, key is {key} and value is {value}; key and value must share one dtype, query's or a lower one."
    instead = "cast key and value to {query}."


class LowerPrecisionBackward(FlexmodError, NotImplementedError):
    what = "key and value are {key} but query is {query}, and a gradient is asked for; the backward takes one dtype."
    instead = "cast key and value to {query}, or call under torch.no_grad()."


class HeadDimMismatch(FlexmodError, ValueError):
    what = "query has head_dim {query} but key has {key}."
    instead = "give query and key the same last dimension (value's may differ)."


class LengthMismatch(FlexmodError, ValueError):
    what = "key has length {key} but value has {value}."
    instead = "give key and value the same number of positions (dimension {dimension})."


class BatchMismatch(FlexmodError, ValueError):
    what = "query has batch {query} but key has {key} and value has {value}."
    instead = "give key and value query's batch, or both a batch of 1 to share them."


class KeyValueHeadsMismatch(FlexmodError, ValueError):
    what = "key has {key} heads but value has {value}."
    instead = "give key and value the same number of heads (dimension {dimension})."


class HeadCountMismatch(FlexmodError, ValueError):
    what = "query has {query} heads but key and value have {key}."
    instead = "pass enable_gqa=True if groups of query heads share a key head."


class HeadRatioError(FlexmodError, ValueError):
    what = "query has {query} heads, which is no multiple of key's {key}."
    instead = "make query's head count a multiple of key's (any ratio will do)."


# The block mask


class NotABlockMask(FlexmodError, TypeError):
    what = "block_mask is a {type}, not a BlockMask."
    instead = "build one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."


class MaskBroadcastError(FlexmodError, ValueError):
    what = "block_mask has {axis} {mask} but query has {query}; it must be equal or 1."
    instead = "rebuild it with {axis}={query}, or with {axis}=None if the mask is the same for each."


class MaskLengthError(FlexmodError, ValueError):
    what = "block_mask was made for Q_LEN={mask_q} and KV_LEN={mask_kv}, but query has {query} positions and key {key}."
    instead = "{call}{layout}"


class MaskReadsBroadcastIndex(FlexmodError, ValueError):
    what = "mask_mod reads {index}, but the block mask was built with {axis}=1 and query has {axis}={query}: its tiles are those of {index}=0 alone."
    instead = "build it with {axis}={query}."


class BlockSizeError(FlexmodError, ValueError):
    what = "BLOCK_SIZE {block_size} {problem}."
    instead = "use {advice}."


class BlockMaskPartsError(FlexmodError, ValueError):
    what = "{problem}."
    instead = "{advice}."


class LengthError(FlexmodError, ValueError):
    what = "{name} is {value}; it must be a positive integer."
    instead = "give the number of positions, e.g. {name}=query.shape[2]."


class MaskExtentError(FlexmodError, ValueError):
    what = "{name} is {value!r}; it must be a positive integer or None."
    instead = "give {name}=query.shape[{axis}], or None if the mask is the same for each."


class BlockMaskIndexError(FlexmodError, IndexError):
    what = "a block mask of {shape} {axes} is indexed with {index}: {problem}."
    instead = "{advice}."


class BlockMaskCropError(FlexmodError, ValueError):
    what = "_adjust crops a block mask: this one of Q_LEN={mask_q} and KV_LEN={mask_kv} has no tiles for Q_LEN={query} and KV_LEN={key}."
    instead = "build it anew, create_block_mask(mask_mod, B, H, {query}, {key})."


class BlockMaskResizeError(FlexmodError, ValueError):
    what = "this block mask of Q_LEN={mask_q} and KV_LEN={mask_kv} was given as lists, which say nothing of Q_LEN={query} and KV_LEN={key}."
    instead = "build it of its mask_mod, create_block_mask(mask_mod, B, H, {query}, {key})."


class BlockMaskCombineError(FlexmodError, ValueError):
    what = "these block masks do not go together: {problem}."
    instead = "{advice}."


class SlicedTorchMaskError(FlexmodError, ValueError):
    what = "this torch BlockMask was sliced, and torch drops the mask_mod of a slice."
    instead = "slice after the conversion, from_torch(whole_mask)[...], or set the slice's mask_mod first."


class InGraphModError(FlexmodError, NotImplementedError):
    what = "TorchDynamo did something with a traced value that flexmod cannot see."
    instead = "write it as a torch function: torch.neg(x), torch.abs(x), torch.logical_not(x)."


class ForgottenGraphError(FlexmodError, RuntimeError):
    what = "a compiled model asks for a block mask that is gone, and thousands were made since."
    instead = "keep a reference to the mask until its backward has run."


class InGraphMaskError(FlexmodError, NotImplementedError):
    what = "{problem}, inside torch.compile or torch.export."
    instead = "{advice}."


class MissingMatplotlib(FlexmodError, RuntimeError):
    what = "BlockMask.plot draws with matplotlib, which is not installed."
    instead = "pip install matplotlib, or write mask.to_svg() to a file."


class GridSizeError(FlexmodError, ValueError):
    what = "grid_size is {grid_size!r}; it is the largest number of rows and columns to draw."
    instead = "give a positive integer, a pair (rows, columns) of them, or -1 to draw every tile."


# The mod


class ModArityError(FlexmodError, TypeError):
    what = "{mod} takes {count} positional arguments without defaults; a score_mod takes 5 (score, b, h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx)."
    instead = "write {expected}."


class NotCallable(FlexmodError, TypeError):
    what = "{mod} is a {type}, which cannot be called."
    instead = "pass a function of scalars, e.g. {expected}."


class MaskResultError(FlexmodError, TypeError):
    what = "mask_mod returned {dtype}; a mask says True or False."
    instead = "return a comparison, e.g. q_idx >= kv_idx, or pass the function as score_mod."


class ScoreResultError(FlexmodError, TypeError):
    what = "score_mod returned {dtype}; a score is a floating-point number."
    instead = "return the changed score, e.g. torch.where(condition, score, -float('inf'))."


class NotScalarError(FlexmodError, TypeError):
    what = "{what}, of shape {shape}, where a scalar is needed: a mod works on one (query, key) pair."
    instead = "index it down to one element, e.g. {example}."


class NoResultError(FlexmodError, TypeError):
    what = "{mod} returned {result}."
    instead = "return {expected}."


class ControlFlowError(FlexmodError, TypeError):
    what = "Python asked for the truth of a traced value (if, while, and, or, not, in): it has no value yet."
    instead = "use torch.where(condition, a, b), and & | ~ in place of and, or, not."


class ConcreteValueError(FlexmodError, TypeError):
    what = "{operation} needs the value of a traced scalar, which has none while the mod is compiled."
    instead = "keep it symbolic: use it in arithmetic, comparisons, torch.where, or as an index."


class ReductionError(FlexmodError, TypeError):
    what = "{operation} reduces over elements, but a mod sees one (query, key) pair."
    instead = "compute it before the call and capture the result, e.g. total = x.sum(-1), then total[q_idx]."


class RandomNumberError(FlexmodError, NotImplementedError):
    what = "{operation} draws random numbers inside a mod: they would change with the tiling."
    instead = "draw them before the call and capture the tensor, e.g. noise[q_idx, kv_idx], or make them of the positions and a captured seed, as docs/operations.md shows."


class MutationError(
    FlexmodError, RuntimeError
):  # a TypeError in `captured += 1` would mean: try `captured + 1`
    what = "{operation} writes in place inside a mod; a mod is a pure function."
    instead = "use the form that returns a new value, or do the write before the call."


class UnknownOperationError(FlexmodError, NotImplementedError):
    what = "{operation} is not an operation that flexmod can trace."
    instead = "{advice}"


class OperationArgumentError(FlexmodError, TypeError):
    what = "{operation} was called with {problem}."
    instead = "{advice}"


class IndexDtypeError(FlexmodError, TypeError):
    what = "{name} is indexed with a {dtype} value; an index is an integer."
    instead = "cast it, e.g. {name}[index.to(torch.int32)]."


class CaptureIndexError(FlexmodError, IndexError):
    what = "{name}, of shape {shape}, is indexed {problem}."
    instead = "{advice}"


class CaptureBoundsError(FlexmodError, IndexError):
    what = "{name}, of shape {shape}, captured by {mod}, is indexed with {index} in dimension {dim}, which has {size} elements."
    instead = "use an index from -{size} to {last}, e.g. index.clamp(0, {last}): what a mask rules out counts too."

    @classmethod
    def of(
        cls, name: str, mod: str, shape: Sequence[int], dim: int, index: int, where: Where | None
    ) -> CaptureBoundsError:
        """For an index into dimension `dim` of a tensor of this shape."""
        size = shape[dim]
        facts = {"name": name, "mod": mod, "shape": tuple(shape), "dim": dim, "index": index, "size": size}
        return cls(where=where, last=size - 1, **facts)


class ModDtypeError(FlexmodError, TypeError):
    what = "{name} has dtype {dtype}, which a mod cannot use; it takes {accepted}."
    instead = "convert it before the call."


class MaskCaptureGradientError(FlexmodError, TypeError):
    what = "{name}, captured by mask_mod, requires grad; a mask has no derivative."
    instead = "capture {name}.detach()."


class NoDerivativeError(FlexmodError, NotImplementedError):
    what = "{operation} has no derivative in flexmod, and a gradient through it is asked for."
    instead = "write it with differentiable operations, or detach what it reads."


class LibraryArgumentError(FlexmodError, ValueError):
    what = "{function}: {name} is {value}; it must be {rule}."
    instead = "{advice}."


# Options, environment, device


class ReturnArgumentsError(FlexmodError, ValueError):
    what = "both return_lse and return_aux are given."
    instead = "use return_aux=AuxRequest(lse=True) alone."


class UnknownOption(FlexmodError, ValueError):
    what = "kernel_options has no option {name!r}.{close}"
    instead = "use some of: {known}."


class OptionValueError(FlexmodError, ValueError):
    what = "kernel option {name} is {value!r}."
    instead = "give {accepted}."


class FlashBackendError(FlexmodError, NotImplementedError):
    what = 'BACKEND="FLASH" asks for torch\'s FlashAttention kernels, which flexmod does not contain.'
    instead = "leave BACKEND out: flexmod chooses its own fastest kernel."


class DecodeBackendError(FlexmodError, NotImplementedError):
    what = 'BACKEND="TRITON_DECODE" asks for a decoding kernel, which flexmod does not have yet.'
    instead = "leave BACKEND out: one query runs through the usual kernel."


class BackendDeviceError(FlexmodError, ValueError):
    what = 'BACKEND="{backend}" runs on {wanted} tensors, but query is on {device}.'
    instead = "move query, key and value to {wanted}, or leave BACKEND out."


class HopperTemplateError(FlexmodError, ValueError):
    what = "kernel option TEMPLATE is 'hopper', but the {way} cannot run on it: {why}."
    instead = "leave TEMPLATE out: flexmod takes the portable template then."


class NoTileFits(FlexmodError, RuntimeError):
    what = "no tile size fits the {limit} bytes of shared memory of {device}; tried {tried}."
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
    instead = "{advice}."


class NoStandaloneError(FlexmodError, NotImplementedError):
    what = "this handle cannot be saved as a file of its own: {why}."
    instead = "{advice}."


class FlexOnCpuError(FlexmodError, NotImplementedError):
    what = "compare(flex=True) times torch's compiled flex_attention, which has no backward on {device}."
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
    instead = "name a kind of chip, e.g. flexmod.runtime.target.named('sm_90')."


# Derivatives of the derivative, transforms of torch


class DoubleBackwardError(FlexmodError, NotImplementedError):
    what = "a second derivative of flex_attention is asked for; the {backend} backend has the first alone."
    instead = (
        'pass kernel_options={{"BACKEND": "REFERENCE"}} to the call: dense, and differentiable to any order.'
    )


class ForwardModeError(FlexmodError, NotImplementedError):
    what = "{name} carries a tangent of forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad); flex_attention has reverse mode alone."
    instead = 'use torch.func.vjp or torch.autograd.grad, or pass kernel_options={{"BACKEND": "REFERENCE"}}.'


class VmapError(FlexmodError, NotImplementedError):
    what = "torch.vmap maps over {name}; flex_attention has no batching rule. (jacrev and is_grads_batched are vmap too.)"
    instead = 'put the mapped dimension into the batch, dimension 0 of query, key and value, or pass kernel_options={{"BACKEND": "REFERENCE"}}.'


# Other libraries


class TransformersArgumentError(FlexmodError, NotImplementedError):
    what = 'attn_implementation="flexmod": {name} is {value}, which flexmod does not do.'
    instead = "{advice}."
