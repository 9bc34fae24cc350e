"""Errors in a block mask: its construction, indexing, combination and pictures, and its fit to a call."""

from __future__ import annotations

from flexmod.errors.base import FlexmodError


class NotABlockMask(FlexmodError, TypeError):
    what = "block_mask is a {type}, not a BlockMask."

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
        return cls(type=type(value).__name__, advice=advice)


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


class BlockMaskPartsError(FlexmodError, ValueError, AssertionError, RuntimeError):
    """The lists of a block mask, or its other parts, make no mask."""


class LengthError(FlexmodError, ValueError):
    what = "{name} is {value}; it must be an integer from 1 to 1073741824."


class DenseMaskError(FlexmodError, ValueError):
    what = "a dense mask, of shape {shape}, {problem}."


class MaskExtentError(FlexmodError, ValueError):
    what = "{name} is {value!r}; it must be an integer from 1 to 1073741824 or None."
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
    instead = "slice after the conversion, from_torch(whole_mask)[...], or set the slice's mask_mod first."


class InGraphModError(FlexmodError, NotImplementedError):
    what = "TorchDynamo did something with a traced value that flexmod cannot see."
    instead = (
        "write it as a function of torch itself: torch.neg(x), torch.abs(x), torch.logical_not(x), "
        "torch.tanh(x) and torch.sigmoid(x) rather than those of torch.nn.functional."
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
