"""What the rows are aimed at, as flexmod's time over a peer's: forward, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from tabulate import tabulate

Ratios = tuple[float, float]


class Target(NamedTuple):
    """The ratios for a row: `goal` to reach, and `floor`, the required minimum, if any."""

    peer: str
    goal: Ratios
    floor: Ratios | None = None


_EITHER_WIDTH = {
    "window 1024 + causal": Target("flex", (0.63, 0.68), (0.70, 0.78)),
    "prefix 2048": Target("flex", (0.63, 0.68), (0.70, 0.78)),
    "8 documents + causal": Target("flex", (0.63, 0.70), (0.74, 0.85)),
    "ALiBi + causal": Target("flex", (0.65, 0.70), (0.70, 0.80)),
    "soft-cap + causal": Target("flex", (0.43, 0.45), (0.50, 0.55)),
    "relative position": Target("flex", (0.75, 0.64), (0.80, 0.75)),
    "NATTEN 7x7": Target("flex", (0.65, 0.55), (0.78, 0.75)),
    "image window 8": Target("flex", (0.65, 0.55), (0.78, 0.75)),
}
TARGETS = {
    "no-op": Target("cuDNN", (0.91, 0.88), (0.97, 0.99)),
    "causal": Target("cuDNN", (0.88, 0.86), (0.93, 0.98)),
    **_EITHER_WIDTH,
    "D64 no-op": Target("cuDNN", (0.86, 0.85), (0.92, 1.01)),
    "D64 causal": Target("cuDNN", (0.97, 0.85), (1.02, 1.01)),
    **{f"D64 {name}": target for name, target in _EITHER_WIDTH.items()},
    **dict.fromkeys(("GQA 32/8", "D192/Dv128", "D256", "S512 D64"), Target("flex", (0.75, 0.75))),
}


def table(found: list[tuple[str, dict[str, Any]]]) -> str:
    """Each row that has a target: the ratio, floor and goal, and which of these it meets."""
    header = ["flexmod's time over", "peer"]
    for way in ("forward", "backward"):
        header += [way, "floor", "goal", ""]
    lines = []
    for name, value in found:
        if name not in TARGETS:
            continue
        target = TARGETS[name]
        line = [name, target.peer]
        for number, way in enumerate(("forward", "backward")):
            ours, theirs = (value["ms"].get(peer, {}).get(way) for peer in ("flexmod", target.peer))
            floor, goal = target.floor and target.floor[number], target.goal[number]
            ratio = ours / theirs if ours and theirs else None
            line += ["-" if x is None else f"{x:.2f}" for x in (ratio, floor, goal)]
            line.append(_met(ratio, floor, goal))
        lines.append(line)
    return tabulate(lines, header, tablefmt="github", disable_numparse=True) if lines else ""


def _met(ratio: float | None, floor: float | None, goal: float) -> str:
    if ratio is None:
        return "not measured"
    if ratio <= goal:
        return "goal"
    return "floor" if floor is not None and ratio <= floor else "missed"
