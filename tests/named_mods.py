"""The names of mods that need no parameters, or have usual ones."""

from __future__ import annotations

import inspect

from flexmod.tools.mod_names import KNOWN, MASKS, NOTHING, SCORES, USUAL

NAMED = tuple(
    name
    for name in KNOWN
    if name == NOTHING or name in USUAL or not inspect.signature((MASKS | SCORES)[name]).parameters
)
