"""A library of score mods. Each function returns an ordinary score_mod(score, b, h, q_idx, kv_idx) -> score.

    score_mod = mods.chain(mods.alibi(16), mods.softcap(50.0))
    out = flexmod.flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

Each result is a ScoreMod, which you call like a function and can pickle; `mods.ScoreMod` wraps your own
function. A floating-point tensor that you pass gets a gradient if it requires one.

An invalid argument raises LibraryArgumentError when you make the mod. An argument that is no score_mod raises
NotCallable, NotMadeError or ModArityError, a device that is not there NoDeviceError. A mod with an entry for
each head, batch entry or position raises CallSizeError in a call with another number of them.
"""

from flexmod.ir.composed import ScoreMod as ScoreMod
from flexmod.mods import positions, scores
from flexmod.mods.positions import *
from flexmod.mods.scores import *

_names = ["ScoreMod", *positions.__all__, *scores.__all__]
globals()["__all__"] = sorted(_names)  # type checkers take the names of the imports
