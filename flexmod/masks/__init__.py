"""A library of masks. Each function returns an ordinary mask_mod(b, h, q_idx, kv_idx) -> bool.

The operators `&`, `|` and `~` combine them with one another and with your own functions:

    mask_mod = masks.causal() & masks.sliding_window(1024) | masks.prefix_lm(256)
    block_mask = flexmod.create_block_mask(mask_mod, None, None, 8192, 8192)
    out = flexmod.flex_attention(query, key, value, block_mask=block_mask)

An invalid argument raises LibraryArgumentError when you make the mask. An argument that is no mask_mod raises
NotCallable, NotMadeError or ModArityError, a device that is not there NoDeviceError. A mask with an entry for
each head, batch entry or position raises CallSizeError in a call with another number of them.
"""

from flexmod.ir.composed import Mask as Mask
from flexmod.masks import images, packed, sequences
from flexmod.masks.checks import MaskMod as MaskMod
from flexmod.masks.images import *
from flexmod.masks.packed import *
from flexmod.masks.sequences import *

_names = [*images.__all__, *packed.__all__, *sequences.__all__]
globals()["__all__"] = sorted(["Mask", "MaskMod", *_names])  # type checkers take the names of the imports
