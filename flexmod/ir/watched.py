"""Whether captured tensors are what they were: for whatever is made of their values and kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexmod.ir.fingerprint import tensor_key


class Watched:
    """Tensors as they were when this was made.

    It sees writes that torch counts (`tensor.fill_()`, an optimizer's step) and another tensor in place of
    this one (`tensor.data = other`, `torch.utils.swap_tensors`, `module.to()`). It cannot see writes that
    torch does not count: through `tensor.data` or `tensor.detach().numpy()`, by a custom kernel, into a
    storage. A tensor of inference mode has no count of writes and always counts as changed.

    It keeps the memory of the tensors, so that no other tensor can get their addresses meanwhile.
    """

    __slots__ = ("_memory", "_states", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._states = [_state(tensor) for tensor in tensors]
        known = (t for t, state in zip(self.tensors, self._states, strict=True) if state is not None)
        self._memory = [tensor.untyped_storage() for tensor in known]

    def unchanged(self) -> bool:
        """Do the tensors have the values, as far as torch knows, and the kinds that they had?"""
        for tensor, state in zip(self.tensors, self._states, strict=True):
            if state is None or state != _state(tensor):
                return False
        return True


def _state(tensor: Tensor) -> tuple[object, ...] | None:
    """Kind, count of writes and address of a tensor; None where these do not tell that it is the same."""
    kind = None if tensor.is_inference() else tensor_key(tensor)
    return None if kind is None else (kind, tensor._version, tensor.data_ptr())
