"""Whether captured tensors are what they were: for whatever is made of their values and kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexmod.ir.fingerprint import tensor_key

UNCOUNTED = -1


def version_of(tensor: Tensor) -> int:
    """How often torch saw a write to the tensor; UNCOUNTED for one of inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


class Watched:
    """Tensors as they were when this was made.

    It sees writes that torch counts (`tensor.fill_()`, an optimizer's step) and another tensor in place of
    this one (`tensor.data = other`, `torch.utils.swap_tensors`, `module.to()`). It cannot see writes that
    torch does not count: through `tensor.data` or `tensor.detach().numpy()`, by a custom kernel, into a
    storage. Of a tensor of inference mode torch counts none. Such a tensor always counts as changed, or
    with `strict` False only where its kind or its memory is another.

    It keeps the memory of the tensors, so that no other tensor can get their addresses meanwhile.
    """

    __slots__ = ("_memory", "_states", "_strict", "tensors")

    def __init__(self, tensors: Sequence[Tensor], strict: bool = True) -> None:
        self.tensors = tuple(tensors)
        self._strict = strict
        self._states = [_state(tensor, strict) for tensor in tensors]
        known = (t for t, state in zip(self.tensors, self._states, strict=True) if state is not None)
        self._memory = [tensor.untyped_storage() for tensor in known]

    def unchanged(self) -> bool:
        """Do the tensors have the values, as far as torch knows, and the kinds that they had?"""
        for tensor, state in zip(self.tensors, self._states, strict=True):
            if state != _state(tensor, self._strict) or (state is None and self._strict):
                return False
        return True

    def same_kinds(self) -> bool:
        """Have they the shapes, strides, dtypes and devices that they had?"""
        pairs = zip(self.tensors, self._states, strict=True)
        return all(state is None or state[0] == tensor_key(tensor) for tensor, state in pairs)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy watches the copies of the tensors; what has changed already stays changed."""
        return _copied, (self.tensors, self._strict, self.unchanged())


def _copied(tensors: Sequence[Tensor], strict: bool, unchanged: bool) -> Watched:
    made = Watched(tensors, strict)
    if not unchanged:
        made._states = [(None,)] * len(made.tensors)
    return made


def _state(tensor: Tensor, strict: bool) -> tuple[object, ...] | None:
    """Kind, count of writes and address of a tensor; None where these do not tell that it is the same."""
    writes = version_of(tensor)
    kind = None if writes == UNCOUNTED and strict else tensor_key(tensor)
    return None if kind is None else (kind, writes, tensor.data_ptr())
