"""Times of the same rows in several checkouts of flexmod, which take turns: is a commit slower than another?

    git worktree add /tmp/before HEAD~10
    python -m benchmarks.checkouts /tmp/before .                     all rows whose time is measured
    python -m benchmarks.checkouts /tmp/before . --rows causal "D64 no-op"

Each checkout runs in a process of its own, with its own rows, its own kernels and empty caches. Several
processes compile first. Then the checkouts take turns at each row, in alternating order. A time is the median
of the rounds' medians, of the GPU alone with a cold L2 (`gpu_time.py`); a ratio divides it by the time of the
first checkout. All results go to OUT/checkouts.json (--out), after each row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

WAYS = ("forward", "backward")
Times = dict[str, float]  # ms, by way


class Worker:
    """A process that measures rows of one checkout, with caches below `folder`."""

    def __init__(self, checkout: Path, folder: Path, small: bool) -> None:
        caches = {name: str(folder / name) for name in ("FLEXMOD_CACHE_DIR", "TRITON_CACHE_DIR")}
        path = [str(checkout), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        command = [sys.executable, __file__, "--worker", str(checkout), "small" if small else "whole"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join(path)},
        )

    def ask(self, question: str, argument: Any) -> Times:
        """Asks for a function of Rows. Raises RuntimeError with what went wrong there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([question, argument]) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline() or '"the process ended"')
        if isinstance(found, str):
            raise RuntimeError(f"{self.process.args[2:]}: {found}")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Rows:
    """In a worker: the row that is measured now."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.runs: dict[str, Any] = {}

    def waits(self, name: str) -> Times:
        """Compiles a row, and returns how long the GPU must wait before each of its calls."""
        import torch

        from benchmarks.gpu_time import wait_for
        from benchmarks.measure_row import first_calls, flexmod_forward, shrunk, tensors
        from benchmarks.rows import find

        self.runs.clear()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        row = shrunk(find(name)) if self.small else find(name)
        *inputs, grad_out = tensors(row, device)
        mods = row.mods(row, device)
        forward = flexmod_forward(row, mods, device)
        first_calls(forward, (*inputs, *mods.learned), grad_out, self.runs, {}, [])
        return {way: wait_for(self.runs[way]) for way in WAYS}

    def times(self, waits: Times) -> Times:
        from benchmarks.gpu_time import milliseconds

        return {way: milliseconds(self.runs[way], waits[way]) for way in WAYS}


def serve(small: bool) -> None:
    """Answers the questions of a Worker. What else is printed goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    rows = Rows(small)
    for line in sys.stdin:
        question, argument = json.loads(line)
        try:
            answer = getattr(rows, question)(argument)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


def prepare(workers: Sequence[Worker], names: Sequence[str]) -> None:
    """Compiles the rows, divided among the workers. A row that fails here fails again when it is measured."""

    def share(number: int) -> None:
        for name in names[number :: len(workers)]:
            with suppress(RuntimeError):
                workers[number].ask("waits", name)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(share, range(len(workers))))


def in_turns(workers: Sequence[Worker], name: str, rounds: int) -> list[list[Times]]:
    """The times of each round, by worker."""
    of_each = [worker.ask("waits", name) for worker in workers]
    waits = {way: max(times[way] for times in of_each) for way in WAYS}
    found: list[list[Times]] = [[] for _ in workers]
    for number in range(rounds):
        order = range(len(workers)) if number % 2 == 0 else reversed(range(len(workers)))
        for place in order:
            found[place].append(workers[place].ask("times", waits))
    return found


def table_row(name: str, found: Sequence[Sequence[Times]]) -> list[str]:
    """The median of each checkout, and for all but the first its ratio to the first."""
    cells = [name]
    for way in WAYS:
        medians = [statistics.median(times[way] for times in rounds) for rounds in found]
        cells += [f"{ms:.3f}" for ms in medians] + [f"{ms / medians[0]:.3f}" for ms in medians[1:]]
    return cells


def header(count: int) -> list[str]:
    names = ["first", *(f"no. {number}" for number in range(2, count + 1))]
    ratios = [f"{name} to first" for name in names[1:]]
    return ["ms", *(f"{way}, {name}" for way in WAYS for name in [*names, *ratios])]


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.argument("checkouts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rows", multiple=True, metavar="NAME", help="A row; may be given several times.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--prepare", "processes", default=14, show_default=True, help="Processes that compile first.")
@click.option("--cpu-smoke", is_flag=True, help="Tiny sizes without a GPU: does the script work.")
@click.option("--out", default=".", type=click.Path(path_type=Path), help="Folder for results.")
def main(
    checkouts: tuple[Path, ...],
    rows: tuple[str, ...],
    rounds: int,
    processes: int,
    cpu_smoke: bool,
    out: Path,
) -> None:
    from benchmarks.rows import SETS

    every = [row.name for rows_of_set in SETS.values() for row in rows_of_set if not row.memory]
    results: dict[str, list[list[Times]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = [(path.resolve(), Path(folder) / str(number)) for number, path in enumerate(checkouts)]

        def worker_of(place: tuple[Path, Path]) -> Worker:
            return Worker(*place, cpu_smoke)

        names = list(rows) or list(dict.fromkeys(every))
        for place in places:
            compiling = [worker_of(place) for _ in range(processes)]
            prepare(compiling, names)
            for worker in compiling:
                worker.end()
        workers = [worker_of(place) for place in places]
        for name in names:
            try:
                results[name] = in_turns(workers, name, rounds)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            (out / "checkouts.json").write_text(json.dumps(results, indent=1))
            print(*table_row(name, results[name]), sep="  ", file=sys.stderr, flush=True)
        for worker in workers:
            worker.end()
    lines = [table_row(name, found) for name, found in results.items()]
    click.echo(tabulate(lines, header(len(checkouts)), tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.path[0] = sys.argv[2]  # instead of this script's folder
        serve(small=sys.argv[3] == "small")
    else:
        main()
