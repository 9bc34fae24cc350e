"""Errors in a call: shapes, devices and dtypes of its tensors, its return values, torch's transforms."""

from __future__ import annotations

from flexmod.errors.base import FlexmodError


class NotFourDimensional(FlexmodError, ValueError, NotImplementedError):
    what = "{name} has {rank} dimensions, shape {shape}; attention takes {layout}."
    instead = "add the missing dimensions, e.g. {name}.unsqueeze(0), or merge the extra ones."


class LayoutError(FlexmodError, ValueError):
    what = "layout is {layout!r}."
    instead = (
        "give 'bhsd' for [batch, heads, length, head_dim], or 'bshd' for [batch, length, heads, head_dim]."
    )


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


class TensorKindError(FlexmodError, TypeError, NotImplementedError):
    what = "{name} is {kind}; no kernel can read it."
    instead = "pass {advice}."


class FakeTensorError(FlexmodError, TypeError):
    """A call mixes fake tensors of two modes, or fake tensors and real ones."""


class FreedStorageError(FlexmodError, RuntimeError):
    what = "{name} needs {needed} bytes, but its storage has {present}: it was freed or shrunk, as FSDP does with a module's parameters after its forward."
    instead = "allocate it again before the call, e.g. module.unshard(), or {name}.untyped_storage().resize_({needed}) and write to it."


class OperationTensorError(FlexmodError, ValueError):
    what = "torch.ops.flexmod.{operation} was given {name} as {found}; this call has {expected} there."
    instead = "let a __torch_dispatch__ hand on all tensors as they were given, or none."


class ScaleError(FlexmodError, TypeError):
    what = "scale is a {type}; it is a number, fixed at the call, without a gradient."


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
    instead = "move one of them, e.g. {name}.to({first_device!r})."

    @classmethod
    def of(cls, first: str, device: object, second: str, other: object) -> DeviceMismatch:
        """Builds the error. The first word of `second`, up to a comma, is an expression."""
        name = second.split(",")[0]
        return cls(first=first, first_device=str(device), second=second, second_device=str(other), name=name)


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
    what = "key has {key} heads but value has {value}."

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
        return cls(key=key, value=value, advice=advice)


class HeadCountMismatch(FlexmodError, ValueError):
    what = "query has {query} heads but key and value have {key}."
    instead = "pass enable_gqa=True if groups of query heads share a key head{layout}."


class HeadRatioError(FlexmodError, ValueError):
    what = "query has {query} heads, which is no multiple of key's {key}."
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
