"""A device function under construction: its lines, its names, and the user's lines above them."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexmod.codegen.expressions import WIDTH, UserLines, tidy
from flexmod.ir.graph import Graph, Node

# by kind of graph
ARGUMENTS = {
    "mask": ("b", "h", "q_idx", "kv_idx"),
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "grad": ("grad", "score", "b", "h", "q_idx", "kv_idx"),
}


@dataclass
class Function:
    """`uses`: the further parameters that it takes, in order; `bound`: the names of some expressions."""

    name: str
    arguments: list[str]
    home: str = "element"
    lines: list[str] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)
    uses: dict[str, None] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    user: UserLines = field(default_factory=UserLines)

    def quote(self, node: Node) -> None:
        """Writes the user's line that made a node, as a comment."""
        self.lines += self.user.new(node.where)

    def bind(self, name: str, text: str) -> str:
        """Writes a line that gives an expression a name."""
        self.lines.append(f"{name} = {tidy(text)}")
        return name

    def give_back(self, *values: str) -> None:
        """Writes the return statement; a value that the line before names is returned without its name."""
        text = ", ".join(map(tidy, values))
        last = self.lines[-1] if self.lines else ""
        if last.startswith(f"{text} = "):
            self.lines.pop()
            text = last.removeprefix(f"{text} = ")
        self.lines.append(f"return {text}")

    def source(self, decorator: str = "") -> str:
        """The whole function, with the places of the user's lines above it."""
        given = [*self.arguments, *self.uses]
        head = f"def {self.name}({', '.join(given)}):"
        if len(head) > WIDTH + 14:
            head = "\n".join([f"def {self.name}(", *(f"    {name}," for name in given), "):"])
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"{self.user.above}{decorator}{head}\n{body}\n"


def fresh(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; adds it to `taken`."""
    candidate, n = name, 0
    while candidate in taken:
        n += 1
        candidate = f"{name}_{n}"
    taken.add(candidate)
    return candidate


def count_users(graph: Graph) -> dict[Node, int]:
    """How often each node is used: by other nodes, and as one of several results."""
    users = {} if len(graph.results) == 1 else dict.fromkeys(graph.results, 1)
    for node in graph.nodes:
        for argument in node.args:
            users[argument] = users.get(argument, 0) + 1
    return users
