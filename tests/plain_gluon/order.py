"""Who has seen what: vector clocks, which tell whether one access of shared memory comes before another.

An actor is a partition of a program's warps, or the program before it starts them. A barrier is one too, for
what the TMA unit writes. An access has its actor's number and time. It comes before another if the other's
actor knows of that time, from itself or through a barrier. So each order of turns shows the same races.

What the TMA unit and the matrix unit meet of others' writes must have been behind a fence. So a clock has two
rows: what it knows of, and what of that was behind a fence.
"""

from __future__ import annotations

import linecache
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plain_gluon.tasks import Tasks

ACTORS = 48  # of a program, barriers among them
PARTITIONS = 5  # of these the first ones, which read
SOURCE = "<generated module>"

Clock = np.ndarray  # [2, ACTORS]


class Race(Exception):
    """Two accesses of shared memory, one of them a write, in no order; or a result that is not there yet."""


def source_line() -> str:
    """The line of the generated module that is being run."""
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename != SOURCE:
        frame = frame.f_back
    return linecache.getline(SOURCE, frame.f_lineno).strip() if frame else "?"


class Read:
    """A read of shared memory by `actor`, whose result may not be used: a step ahead of the last one may read
    anything. A read that is too early, or in no order with a write, has a fault: an error once it is used.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor, self.line, self.fault, self.is_used = actor, source_line(), "", False

    def finish(self) -> None:
        """Notes the time by which it has read: a write that knows less spoils it."""
        self.actor.finished[self.actor.time] = self
        self.actor.tick()

    def spoil(self, fault: str) -> None:
        self.fault = self.fault or f"{self.actor.name}: {self.line}: {fault}"
        if self.is_used:
            raise Race(self.fault)

    def use(self) -> None:
        self.is_used = True
        if self.fault:
            raise Race(self.fault)


class Actor:
    """A partition of a program's warps. `actors` are the program's, which it joins; `name` is for messages.

    `products`: the asynchronous ones that are under way; `stores`: the TMA unit's that have still to read.
    `finished`: reads by the time when they had read.
    """

    def __init__(self, actors: list[Actor], name: str) -> None:
        self.number, self.name, self.actors = len(actors), name, actors
        assert self.number < PARTITIONS
        self.clock: Clock = actors[0].clock.copy() if actors else np.zeros((2, ACTORS), dtype=np.int32)
        self.clock[0, self.number] = 1
        self.products: list[Any] = []
        self.stores: list[Any] = []
        self.finished: dict[int, Read] = {}
        actors.append(self)

    @property
    def time(self) -> int:
        return int(self.clock[0, self.number])

    def tick(self) -> Clock:
        """What it knows until now; what the actor does next is later."""
        until_now = self.clock.copy()
        self.clock[0, self.number] += 1
        return until_now

    def fence(self) -> None:
        self.clock[1] = self.tick()[0]

    def hear(self, clock: Clock) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def caught(self, times: list[int], by: str) -> None:
        """Reads of these times are in no order with a write, or come after it."""
        for time in times:
            found = f"{by}: writes what {self.name} may still have to read"
            if time not in self.finished:
                raise Race(found)
            self.finished[time].spoil(found)


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes have come."""

    def __init__(self, number: int) -> None:
        assert PARTITIONS <= number < ACTORS
        self.number = number
        self.phase = self.count = self.missing = self.bytes = self.copies = 0
        self.read_message, self.gathered = (np.zeros((2, ACTORS), dtype=np.int32) for _ in range(2))

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, actor: Actor, count: int = 1, expected: int = 0) -> None:
        np.maximum(self.gathered, actor.tick(), out=self.gathered)
        self.missing -= count
        self.bytes += expected
        if self.missing < 0:
            raise Race(f"more arrivals than the barrier counts: {source_line()}")
        self._turn()

    def come(self, size: int) -> None:
        """Bytes of a copy."""
        self.copies -= 1
        self.bytes -= size
        self._turn()

    def over(self, phase: int) -> bool:
        return self.phase & 1 != phase & 1

    def _turn(self) -> None:
        if self.missing or self.bytes:
            return
        if self.copies:
            raise Race("a phase ends before its copies have come")
        self.phase += 1
        self.missing = self.count
        self.gathered[:, self.number] = self.phase
        np.maximum(self.read_message, self.gathered, out=self.read_message)


@dataclass
class Program:
    """One program of a launch."""

    number: int
    tasks: Tasks
    actors: list[Actor] = field(default_factory=list)
    barriers: int = 0

    def enter(self) -> None:
        """From here on this thread is the program, before its partitions."""
        here.program, here.actor = self, Actor(self.actors, f"program {self.number}")

    def barrier(self) -> Barrier:
        self.barriers += 1
        return Barrier(PARTITIONS - 1 + self.barriers)


class Here(threading.local):
    """The program that runs in this thread, and which of its actors."""

    program: Program
    actor: Actor


here = Here()
