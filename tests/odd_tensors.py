"""Tensors of every kind that is not plain, made of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only


class Renamed(Tensor):
    """Storage of its own; torch's default __torch_function__ makes results of the class."""


class Seeing(Tensor):
    """Writes down which functions it sees."""

    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Weight(torch.nn.Parameter):
    """As inference engines have it: a Parameter with attributes."""


class Wrapper(Tensor):
    """Holds another tensor, has no storage, and writes down which operations it sees."""

    seen: list[Any] = []
    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Wrapper], inner: Tensor, **said: Any) -> Wrapper:
        facts: dict[str, Any] = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        shape = said.pop("shape", inner.shape)
        self = Tensor._make_wrapper_subclass(cls, shape, requires_grad=inner.requires_grad, **facts | said)
        self.inner = inner.detach()
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        args, kwargs = tree_map(unwrapped, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


class Stored(Tensor):
    """The same with storage of its own, which holds other values: nobody shall read it."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Stored], inner: Tensor) -> Stored:
        self = Tensor._make_subclass(cls, torch.full_like(inner.detach(), 3), inner.requires_grad)
        self.inner = inner.detach()
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(unwrapped, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


def unwrapped(value: Any) -> Any:
    return value.inner if isinstance(value, (Wrapper, Stored)) else value


def plain(tensor: Tensor) -> Tensor:
    """The values of a result of any of these kinds."""
    if isinstance(tensor, (Wrapper, Stored)):
        return tensor.inner
    if hasattr(tensor, "wait"):
        return tensor.wait()  # type: ignore[no-any-return]
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)
    return tensor.as_subclass(Tensor)


def asynchronous(tensor: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(tensor)


def parameter(tensor: Tensor) -> Tensor:
    return Weight(tensor.detach(), requires_grad=tensor.requires_grad)


def negative(tensor: Tensor) -> Tensor:
    """The same values; the memory holds their negatives."""
    return torch._neg_view(-tensor)


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_below(tensor: Tensor) -> Tensor:
    """A view of freed storage that does not begin where the storage does."""
    view = torch.stack([tensor, tensor])[1]
    view.untyped_storage().resize_(0)
    return view


def shrunk(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


def nested(tensor: Tensor, **layout: Any) -> Tensor:
    rows = tensor if tensor.dim() > 1 else tensor[:, None]
    return torch.nested.nested_tensor(list(rows), **layout)


# dispatched, or read as they are: equal results
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda x: torch.nn.Parameter(x.detach(), requires_grad=x.requires_grad),
    "subclass of Parameter": parameter,
    "subclass": lambda x: x.as_subclass(Renamed),
    "wrapper": Wrapper,
    "subclass with __torch_dispatch__": Stored,
    "asynchronous": asynchronous,
    "negative": negative,
    "functional": torch._to_functional_tensor,
}
DISPATCHED = ("wrapper", "subclass with __torch_dispatch__", "asynchronous", "functional")
# what the elements are is not in a storage that a kernel could read
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": nested,
    "jagged": lambda x: nested(x, layout=torch.jagged),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.flatten(0, -2).to_sparse_csr() if x.dim() > 1 else x.to_sparse(),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "complex": lambda x: torch.complex(x.float(), x.float()),
    "conjugate": lambda x: torch.complex(x.float(), x.float()).conj(),
    "freed": freed,
    "view of freed storage": freed_below,
    "shrunk": shrunk,
    "meta": lambda x: x.to("meta"),
}
