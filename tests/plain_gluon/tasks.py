"""Tasks that take turns: threads of which one runs at a time, in an order drawn from a seed.

What the chip does by itself, beside the tasks, is an event: it comes in any order, at any turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random


class Stuck(Exception):
    """All tasks wait, and nothing is under way that could end it: who waits, and where."""


class _Ended(BaseException):
    """Another task has failed."""


class Task:
    """`until`: what it waits for, if anything; `where` it does. `turn` is released when it may go on."""

    def __init__(self, name: str) -> None:
        self.name, self.where = name, ""
        self.until: Callable[[], bool] | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ended = False


class Tasks:
    """The tasks of one run."""

    def __init__(self, seed: int) -> None:
        self._random, self._here = Random(seed), threading.local()
        self._tasks: list[Task] = []
        self._events: list[Callable[[], object]] = []
        self._error: BaseException | None = None
        self._over = threading.Lock()

    def run(self, works: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """To the end of all; raises the first error of any."""
        self._over.acquire()
        for name, work in works:
            self.start(name, work)
        self._hand_on()
        with self._over:
            pass
        if self._error is not None:
            raise self._error
        if self._events:
            raise Stuck("all have ended, and an event is still to come")

    def start(self, name: str, work: Callable[[], object]) -> Task:
        task = Task(name)
        self._tasks.append(task)
        threading.Thread(target=self._live, args=(task, work), daemon=True).start()
        return task

    def event(self, happen: Callable[[], object]) -> None:
        """Let it happen at a turn to come."""
        self._events.append(happen)

    def pause(self, until: Callable[[], bool] | None = None, where: str = "") -> None:
        """Another task's turn, or the same one's. Raises what ends this task where it cannot go on."""
        task: Task = self._here.task
        task.until, task.where = until, where
        self._hand_on()
        task.turn.acquire()
        task.until = None
        if self._error is not None:
            raise _Ended

    def _live(self, task: Task, work: Callable[[], object]) -> None:
        task.turn.acquire()
        self._here.task = task
        try:
            if self._error is None:
                work()
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        task.ended = True
        self._tasks.remove(task)
        self._hand_on()

    def _hand_on(self) -> None:
        (self._next().turn if self._tasks else self._over).release()

    def _next(self) -> Task:
        while self._error is None:
            ready = [task for task in self._tasks if task.until is None or task.until()]
            if self._events and (not ready or self._random.random() < 0.25):
                self._happen(self._events.pop(self._random.randrange(len(self._events))))
            elif ready:
                return self._random.choice(ready)
            else:
                self._error = Stuck("; ".join(f"{task.name} in `{task.where}`" for task in self._tasks))
        return self._tasks[0]

    def _happen(self, event: Callable[[], object]) -> None:
        try:
            event()
        except Exception as error:
            self._error = error
