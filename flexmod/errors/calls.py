"""Errors in a call, and in the block mask that it is given.

First come shapes, devices and dtypes of its tensors, its return values, and torch's transforms; then a mask's
construction, indexing, combination and pictures, and its fit to a call.
"""

from __future__ import annotations

from os import PathLike

from flexmod.errors.base import FlexmodError, a_type, counted, is_flag, shown


class NotFourDimensional(FlexmodError, ValueError, NotImplementedError):
    what = "{name} has {rank}, shape {shape}; attention takes {layout}."
    instead = "add the missing dimensions, e.g. {name}.unsqueeze(0), or merge the extra ones."


class LayoutError(FlexmodError, ValueError):
    what = "layout is {layout!r}."
    instead = (
        "give 'bhsd' for [batch, heads, length, head_dim], or 'bshd' for [batch, length, heads, head_dim]."
    )


class NotATensor(FlexmodError, TypeError):
    what = "{name} is {type}, not a torch.Tensor."
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


class TensorKindError(FlexmodError, TypeError, NotImplementedError):
    what = "{name} is {kind}; no kernel can read it."
    instead = "pass {advice}."


class FakeTensorError(FlexmodError, TypeError):
    """A call mixes fake tensors of two modes, or fake tensors and real ones."""


class FreedStorageError(FlexmodError, RuntimeError):
    what = "{name} needs {bytes}, but its storage has {present}: it was freed or shrunk, as FSDP does with a module's parameters after its forward."
    instead = "allocate it again before the call, e.g. module.unshard(), or {name}.untyped_storage().resize_({needed}) and write to it."


class OperationTensorError(FlexmodError, ValueError):
    what = "torch.ops.flexmod.{operation} was given {name} as {found}; this call has {expected} there."
    instead = "let a __torch_dispatch__ hand on all tensors as they were given, or none."


class ScaleError(FlexmodError, TypeError):
    what = "scale is {type}; it is a number, fixed at the call, without a gradient."


class ScaleValueError(FlexmodError, ValueError):
    what = "scale is {value}; it must be a finite number that float32 holds."
    instead = "give such a number, or None for 1/sqrt(head_dim)."


class NestedTensorInput(FlexmodError, ValueError, NotImplementedError):
    what = "{name} is a nested tensor; flex_attention takes strided ones."
    instead = "call flexmod.nested_attention(query, key, value, mask_mod=...)."


class NestedLayoutError(FlexmodError, ValueError):
    what = "{name} {problem}; nested_attention takes [batch, heads, length, head_dim], with one length for each batch entry."


class PackedShapeError(FlexmodError, ValueError):
    what = "{name} has shape {shape}; varlen_attention takes packed sequences, [total, heads, head_dim]."
    instead = "put them one after another, e.g. with torch.cat(sequences); nested tensors go to flexmod.nested_attention."


class MaskTwiceError(FlexmodError, ValueError):
    what = "both mask_mod and block_mask are given."
    instead = "give block_mask alone, built of masks.jagged(offsets, mask_mod)."


class DeviceMismatch(FlexmodError, ValueError, RuntimeError):
    what = "{first} is on {first_device} but {second} is on {second_device}."

    @classmethod
    def of(cls, first: str, device: object, second: str, other: object) -> DeviceMismatch:
        """Builds the error. The first word of `second`, up to a comma, is an expression."""
        name = second.split(",")[0]
        advice = f"move one of them, e.g. {name}.to({str(device)!r})"
        if str(other) == "meta":
            advice = f"make {name} on {device}; on meta it has no elements"
        return cls(
            first=first, first_device=str(device), second=second, second_device=str(other), advice=advice
        )


class NoDeviceError(FlexmodError, TypeError, RuntimeError, AssertionError):
    what = "device is {device}: {problem}."
    instead = "name a device that is here, e.g. cpu, or give query.device."


class UnsupportedDevice(FlexmodError, ValueError):
    what = "query is on {device}; flexmod runs on cuda and cpu."
    instead = "move query, key and value to one of them."


class UnsupportedDtype(FlexmodError, TypeError):
    what = "{name} has dtype {dtype}; the {backend} backend takes {accepted}."
    instead = "cast it, e.g. {name}.{advice}."


class MixedDtypes(FlexmodError, TypeError):
    what = "query is {query}, key is {key} and value is {value}; key and value must share one dtype, query's or a lower one."
    instead = "cast key and value to {query}."


class LowerPrecisionBackward(FlexmodError, NotImplementedError):
    what = "key and value are {key} but query is {query}, and a gradient is asked for; the backward takes one dtype."
    instead = "cast key and value to {query}, or call under torch.no_grad()."


class Float8MixedError(FlexmodError, TypeError):
    what = "query is {query}, key is {key} and value is {value}; float8 is for all three, for key and value, or for value alone, in one format."
    instead = (
        "quantize the others too, e.g. flexmod.quantize(key, {format}), or convert all to torch.bfloat16."
    )


class Float8HeadDimError(FlexmodError, ValueError):
    what = "{name} is float8 with a head_dim of {dim}; float8 tensors take multiples of 16."
    instead = "pad it with zeros before quantize, torch.nn.functional.pad({name}, (0, {more}))."


class Float8GradientError(FlexmodError, NotImplementedError):
    what = "{name} requires a gradient; attention on float8 has no backward."
    instead = "call under torch.no_grad(), or give float16 or bfloat16 tensors."


class OutDtypeError(FlexmodError, TypeError):
    what = "out_dtype is {given}; {rule}."
    instead = "leave out_dtype out, or cast the output, out.to(dtype)."


class ScalesTypeError(FlexmodError, TypeError):
    what = "{name} is {given}; scales are flexmod.Scales of float32 tensors."
    instead = "give scales=flexmod.Scales(query=..., key=..., value=...), of what flexmod.quantize returned."


class ScalesUnusedError(FlexmodError, ValueError):
    what = "scales.{name} is given, but {name} is {dtype}; scales are for float8 tensors."
    instead = "leave it out, or quantize {name} with flexmod.quantize."


class ScalesShapeError(FlexmodError, ValueError):
    what = "scales.{name} has shape {shape}; {name} takes (), {head} by head, or {block} by block of {rows} positions."
    instead = "give what flexmod.quantize({name}, dtype, by) returned for this tensor."


class ScalesValueError(FlexmodError, ValueError):
    what = "scales.{name} contains {value}; scales are positive finite numbers."
    instead = "let flexmod.quantize make them, or clamp them, scale.clamp(min=1e-12)."


class QuantizeGradientError(FlexmodError, NotImplementedError):
    what = "x requires a gradient, and rounding to float8 has none."
    instead = "write flexmod.quantize(x.detach()), or call under torch.no_grad()."


class HeadDimMismatch(FlexmodError, ValueError):
    what = "query has head_dim {query} but key has {key}."
    instead = "give query and key the same last dimension (value's may differ)."


class LengthMismatch(FlexmodError, ValueError, RuntimeError):
    what = "key has length {key} but value has {value}."
    instead = "give key and value the same number of positions (dimension {dimension})."


class BatchMismatch(FlexmodError, ValueError):
    what = "query has batch {query} but key has {key} and value has {value}."
    instead = "give key and value query's batch, or both a batch of 1 to share them."


class KeyValueHeadsMismatch(FlexmodError, ValueError):
    what = "key has {key} but value has {value}."

    @classmethod
    def of(cls, query: int, key: int, value: int, heads: int, named: str) -> KeyValueHeadsMismatch:
        """Builds the error. `heads` is the dimension of heads in the layout, `named` the layout's name."""
        advice = f"give key and value the same number of heads (dimension {heads}{named})"
        if key and value and query % key == query % value == 0:
            advice = "pass enable_gqa=True: each head of key and of value then serves a group of query heads"
        elif key and value > key and value % key == 0:
            split = f"value.unflatten({heads}, ({key}, {value // key}))"
            moved = split if heads == 2 else f"{split}.transpose(2, 3)"
            advice = (
                f"put the {value // key} value heads of each key head side by side, {moved}.flatten(3): the "
                "output has theirs side by side too"
            )
        return cls(key=counted(key, "head"), value=value, advice=advice)


class HeadCountMismatch(FlexmodError, ValueError):
    what = "query has {query} but key and value have {key}."
    instead = "pass enable_gqa=True if groups of query heads share a key head{layout}."


class HeadRatioError(FlexmodError, ValueError):
    what = "query has {query}, which is no multiple of key's {key}."
    instead = "make query's head count a multiple of key's (any ratio will do){layout}."


class OffsetTypeError(FlexmodError, TypeError):
    what = "{name} is {value}; it must be an integer, or an int32 or int64 tensor with one element for each batch entry."
    instead = "give a number, e.g. {name}=1024, or a tensor, e.g. {name}=lengths.to(torch.int32)."


class OffsetValueError(FlexmodError, ValueError):
    what = "{name} is {value}; it must be from 0 to {bound}."

    @classmethod
    def of(cls, name: str, value: int, bound: int, largest: int) -> OffsetValueError:
        """Builds the error; `largest` is the largest valid bound."""
        advice = f"count positions from the first key that was ever there, so that {name} is at most {largest}"
        if value < 0:
            advice = "count positions from 0, e.g. add the same number to q_offset and kv_offset"
        elif bound < largest:
            advice = f"declare what the tensor may hold, flexmod.Offset({name}, bound={min(value, largest)})"
        return cls(name=name, value=value, bound=bound, advice=advice)


class OffsetShapeError(FlexmodError, ValueError):
    what = "{name} has shape {shape}, but {place} has batch {batch}."


class OffsetMismatchError(FlexmodError, ValueError):
    what = "{by} states {name}={given}, but its block mask has {mask}."
    instead = "leave {name} out, since a call has the offsets of its mask, or build the mask with create_block_mask(..., {name}={name})."


class ArgumentTypeError(FlexmodError, TypeError):
    what = "{name} is {given}."

    @classmethod
    def check(cls, right: bool, name: str, value: object, advice: str) -> None:
        """Raises the error for a value that is not right."""
        if not right:
            raise cls(name=name, given=shown(value), advice=advice)

    @classmethod
    def check_flags(cls, **flags: object) -> None:
        """Raises the error if a value is no flag, see `is_flag`: it was meant for another argument."""
        for name, value in flags.items():
            if not is_flag(value):
                raise cls(name=name, given=shown(value), advice=f"give {name}=True or {name}=False")

    @classmethod
    def check_path(cls, name: str, value: object) -> None:
        """Raises the error for a value that names no file."""
        cls.check(isinstance(value, (str, PathLike)), name, value, "give a text or a pathlib.Path")


class ReturnArgumentsError(FlexmodError, ValueError):
    what = "both return_lse and return_aux are given."
    instead = "use return_aux=AuxRequest(lse=True) alone."


class ModifiedBeforeBackwardError(FlexmodError, RuntimeError):
    what = "{name} has been modified by an inplace operation between forward and backward, which needs it as it was."
    instead = (
        "modify it after the backward (optimizer.step() too), or modify a new one: {bare} = {bare}.clone()."
    )


class RecomputedError(FlexmodError, RuntimeError):
    what = "a checkpoint computes attention again, and its {what} is not that of the first forward."
    instead = "assign it after the backward, or inside of the checkpointed function."


class SavedTensorError(FlexmodError, RuntimeError):
    what = "{name} was saved for the backward as {before} and comes back as {now}."
    instead = "return what was saved from the unpack hook (tensors of integers too), and assign to .data after the backward."


class DoubleBackwardError(FlexmodError, NotImplementedError):
    what = "a second derivative of flex_attention is asked for; the {backend} backend has the first alone."
    instead = (
        'pass kernel_options={{"BACKEND": "REFERENCE"}} to the call: dense, and differentiable to any order.'
    )


class ForwardModeError(FlexmodError, NotImplementedError):
    what = "{name} carries a tangent of forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad); flex_attention has reverse mode alone."
    instead = 'use torch.func.vjp or torch.autograd.grad, or pass kernel_options={{"BACKEND": "REFERENCE"}}.'


class JitTraceError(FlexmodError, NotImplementedError):
    what = "torch.jit.trace records a call of flexmod; it would keep the call's sizes and miss its kernels."
    instead = "use torch.compile(model) or torch.export.export(model, args)."


class VmapError(FlexmodError, NotImplementedError):
    what = "torch.vmap maps over {name}; flex_attention has no batching rule. (jacrev and is_grads_batched are vmap too.)"
    instead = 'put the mapped dimension into the batch, dimension 0 of query, key and value, or, unless a mask_mod captures it, pass kernel_options={{"BACKEND": "REFERENCE"}}.'


class TransformersArgumentError(FlexmodError, NotImplementedError):
    what = 'attn_implementation="flexmod": {name} is {value}, which flexmod does not do.'


class TransformersModelError(FlexmodError, NotImplementedError):
    what = '{model} computes attention in its own code, which attn_implementation="flexmod" does not reach.'
    instead = 'load the model with attn_implementation="eager".'


class NotABlockMask(FlexmodError, TypeError):
    what = "block_mask is {type}, not a BlockMask."

    @classmethod
    def of(cls, value: object) -> NotABlockMask:
        """For a value that was given in its place; a tensor can be read by a mask_mod."""
        rank, dtype = getattr(value, "ndim", 0), str(getattr(value, "dtype", ""))
        advice = "build one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        if rank in (2, 3, 4):
            positions = ", ".join(("b", "h", "q_idx", "kv_idx")[-rank:])
            tensor = "the tensor" if dtype.startswith("torch.") else "torch.from_numpy of the array"
            if dtype.endswith("bool"):
                advice = f"build one with create_block_mask(dense), where dense is {tensor}"
            elif "float" in dtype:
                mod = f"lambda score, b, h, q_idx, kv_idx: score + dense[{positions}]"
                advice = f"give scores that are added as score_mod={mod}, where dense is {tensor}"
        return cls(type=a_type(value), advice=advice)


class MaskBroadcastError(FlexmodError, ValueError):
    what = "block_mask has {axis} {mask} but query has {query}; it must be equal or 1."
    instead = "rebuild it with {axis}={query}, or with {axis}=None if the mask is the same for each."


class MaskLengthError(FlexmodError, ValueError):
    what = "block_mask was made for Q_LEN={mask_q} and KV_LEN={mask_kv}, but query has {query} and key {key}."
    instead = "{call}{layout}"


class MaskReadsBroadcastIndex(FlexmodError, ValueError):
    what = "mask_mod reads {index}, but the block mask was built with {axis}=1 and query has {axis}={query}: its tiles are those of {index}=0 alone."
    instead = "build it with {axis}={query}."


class BlockSizeError(FlexmodError, ValueError):
    what = "BLOCK_SIZE {block_size} {problem}."
    instead = "use {advice}."


class BlockMaskPartsError(FlexmodError, ValueError, AssertionError, RuntimeError):
    """The lists of a block mask, or its other parts, make no mask."""


class LengthError(FlexmodError, ValueError):
    what = "{name} is {value}; it must be an integer from 1 to 1073741824."


class DenseMaskError(FlexmodError, ValueError):
    what = "a dense mask, of shape {shape}, {problem}."


class MaskExtentError(FlexmodError, ValueError):
    what = "{name} is {value}; it must be an integer from 1 to 1073741824 or None."
    instead = "give {name}=query.shape[{axis}], or None if the mask is the same for each."


class BlockMaskIndexError(FlexmodError, IndexError):
    what = "a block mask of {shape} {axes} is indexed with {index}: {problem}."


class BlockMaskCropError(FlexmodError, ValueError):
    what = "_adjust crops a block mask: this one of Q_LEN={mask_q} and KV_LEN={mask_kv} has no tiles for Q_LEN={query} and KV_LEN={key}."
    instead = "build it anew, create_block_mask(mask_mod, B, H, {query}, {key})."


class BlockMaskResizeError(FlexmodError, ValueError):
    what = "this block mask of Q_LEN={mask_q} and KV_LEN={mask_kv} was given as lists, which say nothing of Q_LEN={query} and KV_LEN={key}."
    instead = "build it of its mask_mod, create_block_mask(mask_mod, B, H, {query}, {key})."


class BlockMaskCombineError(FlexmodError, ValueError):
    what = "these block masks do not go together: {problem}."


class MaskModChangedError(FlexmodError, RuntimeError):
    what = "mask_mod {name} would decide otherwise now than when the block mask was built with {positions}."
    instead = "build the mask again, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, q_offset=...)."


class SlicedTorchMaskError(FlexmodError, ValueError):
    what = "this torch BlockMask was sliced, and torch drops the mask_mod of a slice."
    instead = (
        "slice a mask of flexmod.create_block_mask, which keeps its mask_mod, or set the slice's mask_mod "
        "first."
    )


class InGraphModError(FlexmodError, NotImplementedError):
    what = "TorchDynamo did something with a traced value that flexmod cannot see."
    instead = (
        "write it as a function of torch itself: torch.neg(x), torch.abs(x), torch.logical_not(x), "
        "torch.tanh(x) and torch.sigmoid(x) rather than those of torch.nn.functional; and index a row of a "
        "table, row[0], rather than unpack it."
    )


class ConstantError(FlexmodError, TypeError):
    what = "{problem} is no constant of a mod in torch.compile or torch.export."
    instead = "give torch's functions numbers, strings, dtypes, devices and tensors."


class ForgottenGraphError(FlexmodError, RuntimeError):
    what = "a compiled model asks for a block mask that is gone, and thousands were made since."
    instead = "keep a reference to the mask until its backward has run."


class GraphNumberError(FlexmodError, RuntimeError):
    what = "the graphs of two block masks have one number, {number}, by which a compiled model knows them."
    instead = "change a constant of one mask_mod: the number is a digest of 62 bits, and almost never equal."


class InGraphMaskError(FlexmodError, NotImplementedError):
    what = "{problem}, inside torch.compile or torch.export."


class MissingMatplotlib(FlexmodError, RuntimeError):
    what = "BlockMask.plot draws with matplotlib, which is not installed."
    instead = "pip install matplotlib, or write mask.to_svg() to a file."


class GridSizeError(FlexmodError, ValueError):
    what = "grid_size is {grid_size!r}; it is the largest number of rows and columns to draw."
    instead = "give a positive integer, a pair (rows, columns) of them, or -1 to draw every tile."
