"""The scalar graph: flexmod's form of a user's function.

    Node  = input(name)                      score, b, h, q_idx, kv_idx; in derivative graphs also grad
          | const(number)                    a Python number (weak dtype), a 0-d tensor's value (strong dtype)
          | param(slot)                      a constant that became a run-time argument
          | load(capture, index nodes)       one element of a captured tensor
          | op(args)                         any row of `ops.py`, or a cast to the node's dtype
    Graph = results + the captures they load from

Nodes are immutable and compared by identity. A GraphBuilder shares equal ones, so identity is equality within
one graph (except for constants, see `GraphBuilder.const`). Each Node knows the user's line that made it, and
its `home`: the set of inputs that it reads ("score" and "grad" stand for all four positions too).

`expect_size` lets a mod state its number of heads, batch entries or positions; a call with another number
raises.

    slopes[expect_size(h, len(slopes), "mods.alibi", "slopes")]

The trace records the size if the index is b, h, q_idx or kv_idx itself, or q_idx or kv_idx plus a number,
such as an offset. Any other index that a user computes, such as h + first_head, selects an entry on purpose,
and the call's size is not checked.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from flexmod.errors import CallSizeError, Where
from flexmod.runtime.private_torch import assume_constant, innermost_mode_name

# A dtype is a torch dtype, or `bool`, `int`, `float` for a Python number, which is weak in torch's promotion.
DType = torch.dtype | type

Shared = TypeVar("Shared")
Found = TypeVar("Found")
Structure = tuple[object, ...]
FlatNode = tuple[str, tuple[int, ...], DType, object, Where | None]
Home = frozenset[str]
POSITIONS = ("b", "h", "q_idx", "kv_idx")
# the inputs of a mod, or of a derivative, by kind of graph
ARGUMENTS = {"mask": POSITIONS, "score": ("score", *POSITIONS), "grad": ("grad", "score", *POSITIONS)}
UNIFORM: Home = frozenset({"b", "h"})
ROW: Home = UNIFORM | {"q_idx"}
COLUMN: Home = UNIFORM | {"kv_idx"}
ELEMENT: Home = frozenset(POSITIONS)
HomeName = Literal["program", "row", "column", "element"]
HOMES: dict[HomeName, Home] = {"program": UNIFORM, "row": ROW, "column": COLUMN}
# homes of inputs that belong to no position, see `exponents.py`: one number a launch, one a column of a tile
_HOMES: dict[str, Home] = {"scale": frozenset(), "offset": frozenset({"kv_idx"})}


class Immutable:
    """Base of objects that deep copies share."""

    __slots__ = ()

    def __deepcopy__(self: Shared, memo: object) -> Shared:
        return self


@dataclass(frozen=True, eq=False, slots=True)
class Node(Immutable):
    op: str
    args: tuple[Node, ...]
    dtype: DType
    value: Any = None  # an input's name, a number, a parameter's place, a captured tensor's number
    where: Where | None = None
    home: Home = frozenset()

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def is_input(self, name: str) -> bool:
        return self.op == "input" and self.value == name

    def __repr__(self) -> str:
        return f"<{self.op} {self.dtype}>"


def home_of(*nodes: Node) -> HomeName:
    """Where a kernel computes nodes that are used together: "program", "row", "column" or "element"."""
    reads = frozenset().union(*[node.home for node in nodes])
    return next((name for name, home in HOMES.items() if reads <= home), "element")


@dataclass(frozen=True)
class Capture:
    """A captured tensor's properties that a kernel depends on."""

    name: str
    dtype: torch.dtype
    rank: int
    wide: bool = False  # does it reach beyond 2**31 elements, so that offsets need 64 bits?
    by_distance: bool = False  # made by the kernels themselves, see `codegen/by_distance.py`


class ExpectedSize(NamedTuple):
    """How many batch entries, heads or positions a mod was made for; see `check_sizes`."""

    axis: str  # one of POSITIONS
    size: int
    owner: str
    argument: str
    start: int = 0  # the first position that the mod reads


class GraphBuilder:
    """Makes Nodes and shares equal ones. One for each graph.

    `copies` are its nodes by the nodes of another graph that they replace.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Node] = {}
        self.copies: dict[Node, Node] = {}

    def node(
        self, op: str, args: Sequence[Node], dtype: DType, value: object = None, where: Where | None = None
    ) -> Node:
        key = (op, tuple(args), dtype, _freeze(value))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _operation(op, tuple(args), dtype, value, where)
        return found

    def input(self, name: str, dtype: torch.dtype) -> Node:
        return self._known.setdefault(("input", name), _input(name, dtype))

    def const(
        self, value: bool | int | float, dtype: DType | None = None, where: Where | None = None
    ) -> Node:
        """A shared constant; `fresh_const` makes one that is not shared."""
        return self.node("const", (), dtype or type(value), value, where)

    def keep(self, node: Node, args: tuple[Node, ...]) -> Node:
        """A node of another builder, with these arguments."""
        if node.op == "input":
            return self.input(node.value, node.dtype)  # type: ignore[arg-type]
        return self.node(node.op, args, node.dtype, node.value, node.where)

    def copied(self, node: Node) -> Node:
        """A copy of another builder's node and of its arguments; a node of `copies` is not copied again."""
        return computed(node, self.copies, lambda n: self.keep(n, tuple([self.copies[a] for a in n.args])))

    @staticmethod
    def fresh_const(
        value: bool | int | float, dtype: DType | None = None, where: Where | None = None
    ) -> Node:
        """A constant that is not shared: two equal ones may differ in the next call (see `skeleton`)."""
        return Node("const", (), dtype or type(value), value, where)


@cache
def _input(name: str, dtype: torch.dtype) -> Node:
    home = frozenset({name}) if name in POSITIONS else _HOMES.get(name, ELEMENT | {name})
    return Node("input", (), dtype, name, None, home)


def _operation(op: str, args: tuple[Node, ...], dtype: DType, value: object, where: Where | None) -> Node:
    home: Home = frozenset().union(*[a.home for a in args])
    return Node(op, args, dtype, value, where, home)


def _freeze(value: object) -> object:
    # 0.0 == -0.0 == False and nan != nan must not decide which constants are shared
    return (type(value), value.hex()) if isinstance(value, float) else (type(value), value)


@dataclass(frozen=True, eq=False)
class Graph(Immutable):
    """`kind` is "mask", "score" or, for derivatives, "grad"; `results` are the roots.

    `lines`: comparisons include the user's lines. Texts for people need them; mods that differ only in their
    lines share kernels. `expected`: the sizes that a call must have. Comparisons include them until they are
    checked; kernels use the graph without them. `ranges`: the bounds of parameters, by place.
    """

    kind: str
    results: tuple[Node, ...]
    captures: tuple[Capture, ...] = ()
    lines: bool = False
    expected: tuple[ExpectedSize, ...] = ()
    ranges: tuple[tuple[int, tuple[float, float]], ...] = ()

    @property
    def mod_name(self) -> str:
        """How messages call the graph's mod."""
        return "score_mod" if self.kind in ("score", "grad") else "mask_mod"

    @property
    def captured_names(self) -> tuple[str, ...]:
        """How messages call the captured tensors."""
        return tuple(f"{capture.name}, captured by {self.mod_name}," for capture in self.captures)

    def of(self, results: Iterable[Node], kind: str | None = None) -> Graph:
        """The graph with other results."""
        return replace(self, kind=kind or self.kind, results=tuple(results))

    @cached_property
    def of_any_size(self) -> Graph:
        """The graph for calls of any size."""
        return replace(self, expected=()) if self.expected else self

    def __eq__(self, other: object) -> bool:
        """Equal structure, constants, captures and expected sizes."""
        return self is other or isinstance(other, Graph) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as a flat list of nodes: nested pickling would exceed Python's recursion limit."""
        return _unpickled, (self.kind, *self.flat, self.captures, self.lines, self.expected, self.ranges)

    @property
    def result(self) -> Node:
        return self.results[0]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every Node once, arguments before their users."""
        return arguments_first(self.results)

    @cached_property
    def flat(self) -> tuple[tuple[FlatNode, ...], tuple[int, ...]]:
        """The nodes with places in place of their arguments, and the places of the results."""
        places = {n: i for i, n in enumerate(self.nodes)}
        nodes = [(n.op, tuple([places[a] for a in n.args]), n.dtype, n.value, n.where) for n in self.nodes]
        return tuple(nodes), tuple([places[result] for result in self.results])

    @cached_property
    def users(self) -> Counter[Node]:
        """How often each node is used: by other nodes, and as a result."""
        return Counter([*self.results, *(a for node in self.nodes for a in node.args)])

    @cached_property
    def reads(self) -> Home:
        """The positions that the results depend on."""
        return frozenset().union(*(n.home for n in self.results))

    def groups(self, sizes: Sequence[int]) -> tuple[int, int]:
        """The numbers of batch entries and heads with results of their own, of these sizes or 1."""
        return sizes[0] if "b" in self.reads else 1, sizes[1] if "h" in self.reads else 1

    @cached_property
    def with_lines(self) -> Graph:
        """The graph, equal only to graphs of the same lines: errors of torch's evaluation name them."""
        return replace(self, lines=True)

    @cached_property
    def key(self) -> Structure:
        """The structure, the constants, and with `lines` the user's lines; hashable."""
        structure, numbers = self.skeleton
        lines = tuple([n.where for n in self.nodes]) if self.lines else None
        return structure, tuple(map(_freeze, numbers)), lines

    @cached_property
    def skeleton(self) -> tuple[Structure, tuple[bool | int | float, ...]]:
        """The key without its constants, and the constants in order.

        Two calls of one mod that differ only in captured Python numbers have the same skeleton.
        """
        nodes, roots = self.flat
        numbers: list[Any] = [value for op, _, _, value, _ in nodes if op == "const"]
        structure = [
            (op, dtype, None if op == "const" or value is None else _freeze(value), *args)
            for op, args, dtype, value, _ in nodes
        ]
        facts = self.kind, self.captures, self.expected, self.ranges
        return (*facts, *structure, *roots), tuple(numbers)

    def __str__(self) -> str:
        head = ", ".join(f"{c.name}: {dtype_name(c.dtype)}[rank {c.rank}]" for c in self.captures)
        body: list[str] = []
        names: dict[Node, str] = {}
        for n in self.nodes:
            if n.op == "input":
                names[n] = str(n.value)
            elif n.is_const:
                names[n] = _number(n.value)
            elif n.op == "param":
                names[n] = f"param{n.value}"
            else:
                names[n] = f"%{len(body)}"
                args = ", ".join(names[a] for a in n.args)
                call = f"{n.op}({args})"
                if isinstance(n.value, int) and n.op == "load":
                    call = f"{self.captures[n.value].name}[{args}]"
                line = f"  {names[n]}: {dtype_name(n.dtype)} = {call}"
                body.append(f"{line:<52}# {n.where}" if n.where else line)
        returns = ", ".join(names[r] for r in self.results)
        return "\n".join([f"{self.kind}({head}):", *body, f"  return {returns}"])


def _unpickled(kind: str, nodes: Sequence[FlatNode], results: Sequence[int], *facts: Any) -> Graph:
    """Rebuilds a pickled graph from its nodes, and shares them as before."""
    made: list[Node] = []
    for op, places, dtype, value, where in nodes:
        args = tuple(made[place] for place in places)
        is_input = op == "input"
        made.append(_input(str(value), dtype) if is_input else _operation(op, args, dtype, value, where))
    return Graph(kind, tuple(made[place] for place in results), *facts)


def arguments_first(results: Sequence[Node], known: Container[Node] = ()) -> tuple[Node, ...]:
    """Every node that the results are made of, once, arguments before their users; no `known` one.

    Passes that visit nodes in this order need no recursion, which a deep graph would exceed.
    """
    order: dict[Node, None] = {}
    stack = [node for node in reversed(results) if node not in known]
    while stack:
        left = [a for a in reversed(stack[-1].args) if a not in order and a not in known]
        if left:
            stack += left
        else:
            order[stack.pop()] = None
    return tuple(order)


def computed(node: Node, known: dict[Node, Found], compute: Callable[[Node], Found]) -> Found:
    """Computes something for a node's arguments, then for the node; `known` keeps what was computed."""
    for one in arguments_first([node], known):
        known[one] = compute(one)
    return known[node]


Change = Callable[[GraphBuilder, Node, tuple[Node, ...]], Node | None]


def rebuild(graph: Graph, change: Change | None = None, builder: GraphBuilder | None = None) -> Graph:
    """Copies the graph, and replaces each node by the result of `change(builder, node, new_args)`.

    The result None keeps the node, with its new arguments. Passes are written with this function. `builder`
    gets the nodes, and its `copies` has them by the old ones.
    """
    builder = builder or GraphBuilder()
    for n in graph.nodes:
        args = tuple(builder.copies[a] for a in n.args)
        builder.copies[n] = (change and change(builder, n, args)) or builder.keep(n, args)
    return graph.of(builder.copies[r] for r in graph.results)


def dtype_name(dtype: DType) -> str:
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def _number(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return repr(value)


def used_captures(nodes: Iterable[Node]) -> tuple[int, ...]:
    """The numbers of the captures that the nodes load from, ascending."""
    return tuple(sorted({n.value for n in nodes if n.op == "load" and isinstance(n.value, int)}))


def flowing(result: Node) -> set[Node]:
    """The result, and the nodes whose values reach it as floats, not by comparisons or indices."""
    seen, queue = {result}, [result]
    while queue:
        node = queue.pop()
        if node.op != "load":  # its arguments are indices
            ways = {arg for arg in node.args if _is_float(arg.dtype)} - seen
            seen |= ways
            queue += ways
    return seen


def as_int(value: object) -> int | None:
    """An integer of any library as an int; None for anything else, and for bools."""
    if isinstance(value, (int, torch.SymInt)):  # unchanged: `operator.index` would fix a symbolic length
        return None if isinstance(value, bool) else value  # type: ignore[return-value]
    if isinstance(value, str):  # not every TorchDynamo catches the TypeError
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_bool(value: object) -> bool:
    """The truth value, a symbol's of torch.compile too; bool() leaves it a symbol."""
    return not not value  # noqa: SIM208


def _is_float(dtype: DType) -> bool:
    return dtype is float or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


def line_of_load(nodes: Iterable[Node], number: int) -> Where | None:
    """The user's line that first reads a capture."""
    return next((n.where for n in nodes if n.op == "load" and n.value == number), None)


CARRIER = torch.positive


def expect_size(index: Any, size: Any, owner: str, argument: str, sequences: bool = False) -> Any:
    """Returns `index`, and records that the mod has `size` entries for it; see `check_sizes`.

    `owner` and `argument` appear in the error: the library's function, and its argument with that size.
    With `sequences`, `index` is one of `size` packed sequences, which another mod gets as its batch entry.
    """
    if has_torch_function_unary(index):
        return handle_torch_function(expect_size, (index,), index, size, owner, argument, sequences)
    if torch.compiler.is_compiling() and _recorded():
        return CARRIER(index, size, owner, argument, sequences)  # type: ignore[call-arg]
    return index


def look_up(table: Any, owner: str, argument: str, *indices: Any) -> Any:
    """Returns table[indices], and records that the mod has as many entries as the table; see `expect_size`.

    A table with fewer dimensions is the same for all values of the first indices, and a number for all.
    """
    if not isinstance(table, torch.Tensor) or not table.dim():
        return table
    rest = indices[max(0, len(indices) - table.dim()) :]
    return table[tuple([expect_size(i, n, owner, argument) for i, n in zip(rest, table.shape, strict=False)])]


def as_position(value: Any, index: Any, largest: int, least: int = 0) -> Any:
    """A number that was found in a table at `index`, as a position for another mod: arithmetic with it never
    wraps, as with `index` itself.

    The sum with the index gives it the index's dtype, which `widen` changes. The ends tell when int32 is too
    small.
    """
    return (index * 0 + value).clamp(least, largest)


@assume_constant
def _recorded() -> bool:
    """Does TorchDynamo run the mod in a Recorder (`record.py`)?

    There, `has_torch_function_unary` ignores modes, and a mode sees only torch's own functions. So the
    Recorder reads a call of CARRIER with these arguments as a call of `expect_size`.
    """
    return innermost_mode_name() == "Recorder"


def check_sizes(graph: Graph, sizes: Sequence[int], place: str) -> None:
    """Raises CallSizeError if a mod's sizes do not fit (B, H, M, N) of a call or a block mask.

    `place` names it in the error: "the call" or "the block mask".
    Numbers of batch entries and heads must be equal. Positions may be fewer, since a shorter sequence or a
    shortened block mask has the first positions.
    """
    for axis, size, owner, argument, start in graph.expected:
        given = sizes[POSITIONS.index(axis)]
        if given + start > size or (given < size and axis in UNIFORM):
            raise CallSizeError.of(graph.kind, axis, size, given, owner, argument, place, start)
