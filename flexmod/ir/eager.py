"""Notices torch's own work on tensors while a mod is traced.

Such work may read a captured tensor's values: `t.item()`, `if t > 3`, `t * 2`. Its result becomes part of the
graph, so the graph is right for these values only, and the next call must trace the mod again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flexmod.internals.torch import TorchDispatchMode, tree_leaves
from flexmod.ir.names import METADATA
from flexmod.ir.proxy import AbstractTracer, mentions_traced
from flexmod.ir.torch_calls import refuse_impure
from flexmod.tensor_kinds import check_storage, ends_the_process


class Watch(TorchFunctionMode):
    """Sees every torch function that a mod calls; those with a traced value go to the tracer."""

    def __init__(self, tracer: AbstractTracer) -> None:
        super().__init__()
        self.tracer = tracer
        self._operations = _Operations(tracer)

    def __enter__(self) -> Watch:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if mentions_traced(args) or (kwargs and mentions_traced(kwargs.values())):
            return self.tracer.call(func, args, kwargs)
        refuse_impure(getattr(func, "__name__", ""), kwargs)
        if func not in METADATA:
            self.tracer.eager = True
            self.tracer.read_values(args, kwargs)
        elif args and isinstance(args[0], torch.Tensor):
            self.tracer.described[id(args[0])] = args[0]
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees operations on tensors that reach torch without a torch function.

    They come from scripted functions, extensions, code under DisableTorchFunction, and the tracer itself.
    """

    def __init__(self, tracer: AbstractTracer) -> None:
        super().__init__()
        self.tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Stops torch from importing TorchDynamo and Triton at the first operation, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = self.tracer.read_values(args, kwargs)
        self.tracer.eager |= bool(tensors)
        for tensor in () if getattr(func, "is_view", False) else tensors:
            if ends_the_process(tensor):
                check_storage(self.tracer.name_of(tensor), tensor)
        result = func(*args, **(kwargs or {}))
        self.tracer.computed |= {id(leaf): leaf for leaf in tree_leaves(result)}
        return result
