"""What a copy, a deep copy and a pickle of a block mask hold."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from flexmod.block_mask.rebase import Derived
from flexmod.errors import FakeTensorError
from flexmod.ir.composed import Mask
from flexmod.ir.copies import deep_copied_traces
from flexmod.ir.replay import leaves, replay
from flexmod.ir.source import mod_name

if TYPE_CHECKING:
    from flexmod.block_mask.format import BlockMask


class Copied:
    """A mask that is copied by what it means: tiles, lengths, a mask_mod and its captures."""

    def __copy__(self: Any) -> BlockMask:
        """The same tensors; what is assigned to one mask is not assigned to the other."""
        new = object.__new__(type(self))
        new.__setstate__({**self._state(), "_held": copy.copy(self.held)})
        return new

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> BlockMask:
        """Tensors of its own; those that a mask_mod captures are shared where it is a function, as Python
        copies no functions.
        """
        new = memo[id(self)] = object.__new__(type(self))
        state = self._state()
        mask_mod, traced = state.pop("_mask_mod"), state.pop("_traced")
        mask_mod, (traced,) = deep_copied_traces(mask_mod, [traced], memo)
        state = {name: copy.deepcopy(value, memo) for name, value in state.items()}
        new.__setstate__({**state, "_mask_mod": mask_mod, "_traced": traced})
        return new

    def __getstate__(self: Any) -> dict[str, Any]:
        """What is pickled: in place of a function its graph, as it was traced, and what it captures."""
        traced, mask_mod = leaves(self._traced), self._mask_mod
        if not isinstance(mask_mod, Derived):
            replayed = replay(traced, mod_name(mask_mod))
            mask_mod = Mask(replayed) if isinstance(mask_mod, Mask) else replayed
        return {**self._state(), "_traced": traced, "_mask_mod": mask_mod}

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._know(self._traced)
        self._seen = self._lists_now() if state["_seen"] else None

    def _state(self: Any) -> dict[str, Any]:
        """Its attributes without what goes by identity; in place of the lists that it has checked, whether
        these are all.
        """
        self.refresh()
        if any(getattr(tensor, "fake_mode", None) for tensor in self.held.tensors()):
            raise FakeTensorError(
                problem="block_mask has fake tensors, shapes without values, and is copied or pickled",
                advice="build it again, outside of the FakeTensorMode",
            )
        seen = self._lists_now() == self._seen
        own = {"_seen": seen, "_snapshot": None, "_watched": None, "_described": (), "_in_graphs": ()}
        return {**self.__dict__, **own}  # after a look at the lists: those that were written replace the runs
