"""What a case does: its calls with the same objects, and what happens to these in between.

The mods, the handle and the block mask are made when a call needs them, and stay for the next calls. A plain
case is a session of one call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexmod
from flexmod.errors import FlexmodError
from fuzz import events, hostile
from fuzz.case import Call, Case, Results, Step, block_mask, call_of, device_of, mod_of, poison

BACKENDS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "interpret": {"BACKEND": "INTERPRET"},
    "python": {"BACKEND": "INTERPRET", "TEMPLATE": "hopper"},
    "triton": {"TEMPLATE": "portable"},
    "hopper": {"TEMPLATE": "hopper"},
}
# what flexmod may refuse, by a class of its errors: a copy, a backward after a write, anything of odd tensors
REFUSABLE = {"copies": ("before",), "writes": ("between",), "hostile": ("before", "forward", "between")}
# how torch refuses a tensor that was written to
WRITTEN = ("modified by an inplace operation", "has been modified inplace")


class Made(NamedTuple):
    """One call: its tensors as its forward met them, and its results, or how it was refused."""

    call: Call
    found: Results
    refused: str = ""


class Forward(NamedTuple):
    """A forward, and what its backward takes.

    `call`: copies of its tensors as they were; `leaves`: tensors that want a gradient; `found`: its results.
    """

    call: Call
    inputs: dict[str, Any]
    out: Any
    lse: Any
    leaves: dict[str, Tensor]
    found: Results


def run(case: Case, draw: int = 0) -> list[Made]:
    """The calls of a case, up to the first that is refused, from memory that held NaN before."""
    if case.backend != "python":
        return list(_run(case, draw))
    from plain_gluon import on_python  # not on every path of a script
    from plain_gluon.tiles import single

    # tiles of float64 beside mods of float32 would round large scores apart
    tiles = single() if case.kind == "huge" else nullcontext()
    with on_python(seed=case.seed, ordered=case.seed % 2 == 1), tiles:
        return list(_run(case, draw))


def _run(case: Case, draw: int) -> Iterator[Made]:
    session = Session(case, draw)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.deterministic)  # torch fills what it allocates with NaN then
    try:
        for number, step in enumerate(case.steps):
            call = session.next_call(number)
            try:
                yield from session.run(call, step)
            except Exception as error:
                if not session.may_refuse(step, error):
                    raise
                yield Made(call, {}, type(error).__name__)
                return
    finally:
        torch.use_deterministic_algorithms(before)


class Session:
    """The objects of a case, while its calls go on. `disguises`: of tensors by name, see `hostile.py`."""

    def __init__(self, case: Case, draw: int) -> None:
        self.case, self.draw = case, draw
        self.tables: dict[str, Tensor] = {}
        self.disguises: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.originals: dict[str, Any] = {}
        self.waiting: list[Forward] = []
        self.now: Forward | None = None
        self.stage = "before"

    # what it holds

    def object(self, name: str) -> Any:
        """The score_mod, mask_mod, mask or handle; made where there is none yet."""
        if name not in self.objects:
            self.objects[name] = getattr(self, f"_{name}")()
        return self.objects[name]

    def _score_mod(self) -> Any:
        return _importable(mod_of(self.case.score, self.case, self._tables(learned=True)))

    def _mask_mod(self) -> Any:
        return _importable(mod_of(self.case.mask, self.case, self._tables(learned=False)))

    def _tables(self, learned: bool) -> dict[str, Any]:
        tables = {name: x if learned else x.detach() for name, x in self.tables.items()}
        return {name: hostile.disguised(x, self.disguises.get(name, "")) for name, x in tables.items()}

    def _mask(self) -> Any:
        if not self.case.mask:
            return None

        def lists(name: str, x: Any) -> Any:
            return hostile.disguised(x, self.disguises.get(name, "")) if x is not None else x

        return block_mask(self.case, self.object("mask_mod"), device_of(self.case), lists)

    def _handle(self) -> Any:
        return flexmod.compile(
            self.object("score_mod"),
            self.object("mask_mod") if self.case.route == "handle" else None,
            scale=self.case.scale, enable_gqa=self._grouped, kernel_options=self._options,
            layout=self.case.layout,
        )  # fmt: skip

    @property
    def _options(self) -> dict[str, Any]:
        return dict(self.case.options) | BACKENDS[self.case.backend]

    @property
    def _grouped(self) -> bool:
        return self.case.heads[0] != self.case.heads[1]

    # calls

    def next_call(self, number: int) -> Call:
        """The tensors of a call; captured ones stay the same tensors and get new values, if they have any."""
        call = call_of(self.case, self.draw, number)
        for table in self.case.tables:
            if number == 0:
                self.tables[table.name] = call.tables[table.name].detach().requires_grad_(table.learned)
            elif table.values:
                events.fill(self.tables[table.name], call.tables[table.name], number)
        if number and self.case.kind == "numbers":
            self.objects.pop("mask", None)  # it is of the numbers that there were
            if any(table.reach == "number" for table in self.case.tables):
                self.objects.pop("score_mod", None)
        return call

    def run(self, call: Call, step: Step) -> Iterator[Made]:
        self.stage = "before"
        for text in step.before:
            events.happen(self, text)
        self.stage = "forward"
        self.now = self.forward(call)
        self.stage = "between"
        for text in step.between:
            events.happen(self, text)
        yield self.finish(self.now, twice="backward twice" in step.between)
        for forward in self.waiting:
            yield self.finish(forward)
        self.waiting.clear()

    def may_refuse(self, step: Step, error: Exception) -> bool:
        """Is it an error that a user may get where the session is?"""
        if isinstance(error, FlexmodError | hostile.NotMade):
            return self.stage in REFUSABLE.get(self.case.kind, ())
        if self.case.kind == "hostile" and any(text in str(error) for text in hostile.OWN_REFUSALS):
            return True
        written = type(error) is RuntimeError and any(text in str(error) for text in WRITTEN)
        return written and bool(step.between)

    def forward(self, call: Call) -> Forward:
        case = self.case
        tables = {name: x.detach().clone() for name, x in self.tables.items()}
        before = Call(*(x.clone() for x in call[:-1]), tables)
        inputs: dict[str, Any] = {}
        for name, place in zip("qkv", ("query", "key", "value"), strict=True):
            x = hostile.disguised(getattr(call, name).detach(), self.disguises.get(place, ""))
            wants = name in case.wanted and isinstance(x, Tensor) and x.is_floating_point()
            wants = wants and not x.is_inference()
            inputs[name] = x.detach().requires_grad_() if wants else x
        poison(call.q, call.grad_out, call.grad_lse)
        options, given = self._float8(call), inputs
        if case.float8:
            given = {name: case.float8.given(name, x, case.seed) for name, x in inputs.items()}
        query, key, value = (self._laid_out(x) for x in given.values())
        if case.route == "eager":
            out, lse = flexmod.flex_attention(
                query, key, value, self.object("score_mod"), self.object("mask"), scale=case.scale,
                enable_gqa=self._grouped, return_lse=True, kernel_options=self._options, layout=case.layout,
                **options,
            )  # fmt: skip
        else:
            mask = self.object("mask") if case.route == "handle with mask" else None
            out, lse = self.object("handle")(query, key, value, mask, return_lse=True, **options)
        out = self._laid_out(out)
        found = {name: hostile.revealed(x.detach()).clone() for name, x in {"out": out, "lse": lse}.items()}
        leaves = {n: x for n, x in (inputs | self.tables).items() if getattr(x, "requires_grad", False)}
        return Forward(before, inputs, out, lse, leaves, found)

    def _float8(self, call: Call) -> dict[str, Any]:
        """The arguments of a call on float8 tensors."""
        float8, seed = self.case.float8, self.case.seed
        if float8 is None:
            return {}
        found = [float8.scale(name, getattr(call, name), seed) for name in "qkv"]
        scales = flexmod.Scales(*found) if any(x is not None for x in found) else None
        return {"scales": scales, "out_dtype": getattr(torch, self.case.dtype)}

    def _laid_out(self, x: Any) -> Any:
        swaps = self.case.layout == "bshd" and isinstance(x, Tensor) and x.dim() == 4
        return x.transpose(1, 2) if swaps else x

    def finish(self, forward: Forward, twice: bool = False) -> Made:
        """The backward, and all results."""
        call, _, out, lse, leaves, found = forward
        given = [(out, call.grad_out), (lse, call.grad_lse)][: 1 + self.case.grad_lse]
        given = [(result, grad.to(result.device)) for result, grad in given if result.requires_grad]
        if leaves and not given:  # a number that no derivative reaches, say of a comparison
            found |= {f"d{name}": torch.zeros_like(x) for name, x in leaves.items()}
        elif leaves:
            learned = (call.tables[t.name] for t in self.case.tables if t.learned)
            poison(call.q, call.k, call.v, call.grad_lse, call.q.float(), *learned)
            for again in (True, False) if twice else (False,):
                gradients = torch.autograd.grad(
                    [result for result, _ in given], list(leaves.values()), [grad for _, grad in given],
                    retain_graph=again, allow_unused=True, materialize_grads=True,
                )  # fmt: skip
            shown = map(hostile.revealed, gradients)
            found |= dict(zip((f"d{name}" for name in leaves), shown, strict=True))
        return Made(call, found)


def _importable(mod: Any) -> Any:
    """A function that a pickle finds by its name, like a function of a user's file."""
    if isinstance(mod, types.FunctionType) and mod.__qualname__ == mod.__name__:
        module = sys.modules.setdefault(f"fuzz_{mod.__name__}", types.ModuleType("mods"))
        mod.__module__ = f"fuzz_{mod.__name__}"
        setattr(module, mod.__name__, mod)
    return mod
