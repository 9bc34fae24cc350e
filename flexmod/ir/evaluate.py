"""Runs a graph in torch: for the reference, `create_mask`, the block mask builder and the CPU path.

torch takes a 0-d CPU tensor in operations on any device, and so does a mod. Each call reads the number and
copies it to the call's device, where a kernel reads it like any captured tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmod.errors import CaptureBoundsError
from flexmod.ir.graph import DType, Graph
from flexmod.ir.ops import CAST, HALF, OPS, Op, number, strong
from flexmod.ir.trace import Traced
from flexmod.runtime.private_torch import in_forward_ad, in_transform
from flexmod.runtime.tensor_kinds import as_plain_class

# Functions that write into a given tensor, and from how many elements on that saves time.
INTO_MEMORY = {torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.abs, torch.tanh, torch.sigmoid,
               torch.exp, torch.exp2, torch.log, torch.sqrt, torch.minimum, torch.maximum}  # fmt: skip
LARGE = 1 << 12


def is_host_number(tensor: Tensor, device: torch.device) -> bool:
    """Is it a 0-d CPU tensor in a call on another device?"""
    return device.type != "cpu" and tensor.dim() == 0 and tensor.device.type == "cpu"


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or a host number's present value as a new tensor on the device.

    Differentiable, and does not synchronize with the device. A captured CUDA graph keeps the value, unless
    the number requires a gradient.
    """
    if not is_host_number(tensor, device):
        return tensor
    if torch.compiler.is_compiling() or _is_differentiated(tensor):
        return tensor.to(device, non_blocking=True)
    # a launch with the value as its argument: a copy of pageable memory cannot be part of a CUDA graph
    return torch.full((), tensor.item(), dtype=tensor.dtype, device=device)


def all_on_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple([on_device(tensor, device) for tensor in tensors])


def captures_on_device(traced: Traced, device: torch.device) -> Traced:
    """The graph with its host numbers on the device."""
    if not any(is_host_number(tensor, device) for tensor in traced.tensors):
        return traced
    return replace(traced, tensors=all_on_device(traced.tensors, device))


def _is_differentiated(tensor: Tensor) -> bool:
    if in_transform() or in_forward_ad():
        return True
    return tensor.requires_grad and torch.is_grad_enabled()


def evaluate(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    *,
    b: torch.Tensor,
    real: torch.dtype = torch.float32,
    numbers: Sequence[bool | int | float] = (),
    guarded: bool = False,
    quick: bool = False,
    overwrite: str | None = None,
    spare: torch.Tensor | None = None,
    **inputs: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Computes the graph's results at given positions, in differentiable torch.

    Each input of the graph is an argument by its name: b, h, q_idx, kv_idx, score, grad, and inputs that
    `intervals.py` and `exponents.py` add.

    Positions are integer tensors of any shapes that broadcast; they are cast to the graph's index width.
    A result has the broadcast shape of the inputs that it reads, 0-d if it reads none.

        tensors     the captured tensors in order, host numbers too
        real        the dtype that replaces float32; float64 gives the reference results for kernels
        numbers     the values of parameters, by place
        guarded     a load outside of a tensor gives 0, as in a kernel
        quick       functions that take a CPU less time than torch's, see QUICKER, of plain tensors alone
        overwrite   the input that results may overwrite, "" for none; large values then share memory, and
                    autograd cannot record the evaluation
        spare       with `overwrite`: memory for a result

    Raises CaptureBoundsError for a load outside of a CPU tensor, if not `guarded`.
    """
    inputs["b"] = b
    tensors = all_on_device(tensors, b.device)
    if quick:
        tensors = [*map(as_plain_class, tensors)]
    steps, results = steps_of(graph)
    values: list[Any] = []
    last = None if overwrite is None else _last_uses(graph, overwrite)
    room = [] if spare is None else [spare]
    for place, step in enumerate(steps):
        if step.op == "param":
            values.append(numbers[step.value])
        elif step.op == "const":
            values.append(step.value)
        elif step.op == "load":
            tensor, indices = tensors[step.value], [values[a] for a in step.args]
            loaded = _guarded(tensor, indices) if guarded else _loaded(graph, place, tensor, indices)
            values.append(_cast(loaded, real_dtype(step.dtype, real)))
        else:
            free = [values[a] for a in last[place]] if last is not None else ()
            values.append(value_of(step, values, inputs, real, quick, free, room))
    pairs = zip(results, graph.results, strict=True)
    return tuple(_strong(values[place], r.dtype, real, b.device) for place, r in pairs)


class GraphStep(NamedTuple):
    """A node of a graph, its arguments by place, and the dtypes to which they are cast."""

    op: str
    args: tuple[int, ...]
    dtype: DType
    value: Any
    row: Op | None = None
    at: tuple[torch.dtype, ...] = ()


@lru_cache(1024)
def steps_of(graph: Graph) -> tuple[tuple[GraphStep, ...], tuple[int, ...]]:
    """The nodes in order, and the places of the results."""
    nodes, results = graph.flat
    steps: list[GraphStep] = []
    for node, (op, args, dtype, value, _) in zip(graph.nodes, nodes, strict=True):
        row = OPS.get(op)
        at = tuple([d for _, d in row.arguments(node)]) if row else ()
        steps.append(GraphStep(op, args, dtype, value, row, at))
    return tuple(steps), results


def real_dtype(dtype: DType, real: torch.dtype) -> torch.dtype:
    """A node's dtype when `real` replaces float32: all floats become `real` if it is wider."""
    known = strong(dtype)
    return real if known.is_floating_point and (real == torch.float64 or known == torch.float32) else known


def _strong(value: Any, dtype: DType, real: torch.dtype, device: torch.device) -> torch.Tensor:
    target = real_dtype(dtype, real)
    if isinstance(value, torch.Tensor):
        return value if value.dtype == target and value.device == device else value.to(device, target)
    return number(value, target).to(device)


@lru_cache(256)
def _last_uses(graph: Graph, overwrite: str) -> tuple[tuple[int, ...], ...]:
    """Returns by step the arguments whose memory is free for its result."""
    steps, results = steps_of(graph)
    # a cast may return its argument itself
    memory: list[int] = []
    users: dict[int, int | None] = {}
    for place, step in enumerate(steps):
        memory.append(memory[step.args[0]] if step.op == CAST else place)
        users |= {memory[a]: place for a in step.args if step.op != CAST}
    users |= {memory[result]: None for result in results}

    def is_free(argument: int, place: int) -> bool:
        owner = steps[memory[argument]]
        return (owner.row is not None or owner.value == overwrite != "") and users[memory[argument]] == place

    return tuple(tuple([a for a in step.args if is_free(a, at)]) for at, step in enumerate(steps))


def value_of(
    step: GraphStep,
    values: Sequence[Any],
    inputs: Mapping[str, Any],
    real: torch.dtype,
    quick: bool = False,
    free: Sequence[torch.Tensor] = (),
    room: list[torch.Tensor] | None = None,
) -> Any:
    """The value of an input, a cast or an operation, in `free` memory or in `room`, which then loses it."""
    result = real_dtype(step.dtype, real)
    if step.op == "input":
        return _cast(inputs[step.value], result)
    if step.row is None:
        return _argument(values[step.args[0]], result)
    arguments = [_argument(values[a], real_dtype(d, real)) for a, d in zip(step.args, step.at, strict=True)]
    own = step.row.torch
    function = QUICKER.get(own, own) if quick else own
    if step.row.at == "result" and result in HALF:  # in float32, then rounded, as kernels and torch do
        return function(*[a.float() for a in arguments]).to(result)
    room = [] if room is None else room
    for memory in [*free, *room]:
        if own in INTO_MEMORY and memory.numel() >= LARGE and _is_room(memory, arguments):
            room[:] = [other for other in room if other is not memory]
            return function(*arguments, out=memory)
    return function(*arguments)


def _tanh(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns tanh(x) by oneDNN, as exactly as torch.tanh and in a quarter of its time."""
    some = x.dim() and x.numel()  # oneDNN takes no tensor without dimensions or elements
    if x.dtype != torch.float32 or not some or not torch.backends.mkldnn.is_available():
        return torch.tanh(x, out=out)
    found = x.contiguous().to_mkldnn().tanh_().to_dense()
    return found if out is None else out.copy_(found)


QUICKER: dict[Any, Callable[..., torch.Tensor]] = {torch.tanh: _tanh}


def _is_room(memory: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
    """Is it of the shape and dtype of an operation's result?"""
    if not memory.dtype.is_floating_point or any(a.dtype != memory.dtype for a in arguments):
        return False
    return any(a.shape == memory.shape for a in arguments) and all(_fits(a, memory) for a in arguments)


def _fits(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Does it broadcast to the memory's shape?"""
    sizes = zip(tensor.shape[::-1], memory.shape[::-1], strict=False)
    return tensor.dim() <= memory.dim() and all(size in (1, room) for size, room in sizes)


def _loaded(graph: Graph, place: int, tensor: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """`tensor[indices]`."""
    if not indices:
        return tensor
    try:
        if tensor.dtype in HALF and tensor.requires_grad:  # its gradients are summed up in float32
            return tensor.to(torch.float32)[tuple(map(index, indices))].to(tensor.dtype)
        return tensor[tuple(map(index, indices))]
    except IndexError:
        node = graph.nodes[place]
        for dim, (found_at, size) in enumerate(zip(map(_place, indices), tensor.shape, strict=True)):
            least, most = int(found_at.min()), int(found_at.max())
            if least < -size or most >= size:
                name, mod = graph.captures[node.value].name, graph.mod_name
                found = most if most >= size else least
                raise CaptureBoundsError.of(name, mod, tensor.shape, dim, found, node.where) from None
        raise


def _guarded(tensor: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """`tensor[indices]`, 0 where an index is outside."""
    found = [wrapped(_place(i), size) for i, size in zip(indices, tensor.shape, strict=True)]
    places = tuple(place.clamp(0, size - 1) for (place, _), size in zip(found, tensor.shape, strict=True))
    outside = [~inside.to(tensor.device) for _, inside in found]
    loaded = tensor[places] if places else tensor
    for each in outside:
        loaded = torch.where(each, tensor.new_zeros(()), loaded)
    return loaded


def wrapped(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index, int64, with negative ones counted from the end, and whether it lies inside `size`."""
    index = index.long()
    place = torch.where(index < 0, index + size, index)
    return place, (place >= 0) & (place < size)


def _argument(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return _cast(value, dtype) if isinstance(value, torch.Tensor) else number(value, dtype)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value.to(dtype)`, sooner where nothing is to be done."""
    return value if value.dtype == dtype else value.to(dtype)


def _place(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")


def index(value: Any) -> Any:
    """A value as an index of a tensor."""
    # torch refuses indices of 8 or 16 bits, or takes them for a mask
    return value.long() if isinstance(value, torch.Tensor) and value.dtype.itemsize < 4 else value
