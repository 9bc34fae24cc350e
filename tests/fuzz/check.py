"""How a call is judged: out, lse and all gradients beside dense attention in float64.

What an error may be. First, beside eager attention, dense and wholly in the call's dtype: 1.5 times its error
(RMS), twice its largest, and a part of the rounding of the largest element. On a GPU, the error of products
of float8 comes to eager's (`in_float8`). Most calls end here. One that is over gets a second look, at what
any computation in this precision must lose:

  - Cancellation. What is 0 or small may be the sum of large terms, each rounded. The terms' noise (a rounding
    of each weight's gradient, with random signs: of each by itself, and of whole rows alike) is sent through
    the derivative of the mods, and its size comes to the limit. A mod that computes in a half type rounds
    each term to it. A derivative may cancel in the mod itself (score - score has one of 0): a few roundings
    of float32 are allowed of what would come to the queries and keys without a mod, and where a learned
    table's gradient cancels to nothing, of all that could come to it.
  - Scores, which are rounded sums: a mod may magnify that, and jump (floor, a comparison) where a score lies.
    The truth is taken again with all scores moved, each up or down as far as its sum may round, with a mod
    that computes as it is written, in float32 or less, and with functions as far off as docs/operations.md
    says. How far these lie from the truth is allowed for, element by element.

Of large scores (the kind "huge") float32 keeps few digits or none: what counts is how a mod rounds its score
there, and the softmax of what it gives then. So the truth computes the mod as it is written, in float32 on
the CPU, and all else in float64; the attention beside it is rounded to the call's dtype where a flash
attention must be, in weights and results, but not in scores; and scores are moved as above, which turns what
lies at the edge of a rounding. Functions are off by a relative error: an absolute one only where a cap is
small. On the CPU, each tanh may be off by a unit in the last place, as oneDNN's is.

Last, luck: the largest error, and that of few elements, are matters of it, for eager attention too. A call
that is over still is drawn four times more, with other numbers in all tensors of floats; the errors are
taken together (RMS over all draws, the median of the largest). A fault of the program stays.

NaN, or an infinity where the truth has none, is a fault at once, unless moved scores have it too. Where the
truth is NaN, or a gradient of it is infinite (a derivative that overflows in float32), anything goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuzz import hostile, session
from fuzz.case import Call, Case, Results
from fuzz.dense import Dense, as_written, dense, eager, eps_of, folded, in_float8, inexact, moved

DRAWS = 4
HOWS = ("beside eager", "noise", "moved", "draws")  # a call passes by the first that it can


class Verdict(NamedTuple):
    """What is wrong, in words; how the case passed: "beside eager", "noise", "moved" or "draws".

    `refused`: the class of the error with which its last call ended.
    """

    faults: list[str]
    how: str = "beside eager"
    refused: str = ""


# the judgement


class _Draw(NamedTuple):
    """One drawing of a case: results, the truth, limits of (RMS, largest) errors, slack of elements."""

    found: Results
    truth: Results
    limits: dict[str, tuple[float, float]]
    slack: Results

    def errors(self, name: str) -> tuple[float, float]:
        finite = self._has_numbers(name)
        error = (self.found[name].double() - self.truth[name]).abs().where(finite, 0.0)
        if name in self.slack:
            error = (error - self.slack[name]).clamp(min=0.0)
        return error.square().mean().sqrt().item(), error.max().item()

    def other_infinities(self, name: str) -> bool:
        """NaN, or -inf in another place than the truth, where moved scores have none."""
        found, truth = self.found[name].double(), self.truth[name].double()
        lost = truth.isnan() | (name not in ("out", "lse"))
        wrong = ~torch.where(self._has_numbers(name), found.isfinite(), (found == truth) | lost)
        if name in self.slack:
            wrong &= found.isnan() | self.slack[name].isfinite()
        return bool(wrong.any())

    def _has_numbers(self, name: str) -> Tensor:
        """Where the truth is finite, in the dtype of the result too."""
        most = torch.finfo(self.found[name].dtype).max
        return self.truth[name].isfinite() & (self.truth[name].abs() < 0.99 * most)

    def faults(self) -> list[str]:
        faults = [f"{name}: NaN, or other infinities" for name in self.truth if self.other_infinities(name)]
        return faults or over({name: [(self.errors(name), self.limits[name])] for name in self.truth})


def check(case: Case) -> Verdict:
    """Run a case and judge each of its calls. Raises what flexmod raises."""
    made = session.run(case)
    hows = ["beside eager"]
    for number, each in enumerate(made):
        if not each.refused:
            verdict = _judged(case, number, each)
            if verdict.faults:
                return verdict._replace(faults=[f"call {number}, {fault}" for fault in verdict.faults])
            hows.append(verdict.how)
    refused = next((each.refused for each in made if each.refused), "")
    return Verdict([], max(hows, key=HOWS.index), refused)


def _judged(case: Case, number: int, made: session.Made) -> Verdict:
    call, found = made.call, made.found
    for place, kind in _disguises(case):
        whole_list = place.startswith(("kv_", "full_")) and kind in ("whole", "long")
        if kind in hostile.OTHER_NUMBERS and not whole_list:
            return Verdict([f"a result, where {place} is {kind}"])
    call, found = _on_one_device(case, call, found)
    work = dense(case, call)
    truth = _truth(case, work)
    for name in truth:
        if found[name].shape != truth[name].shape or found[name].dtype != _dtype_of(name, call):
            return Verdict([f"{name}: {found[name].dtype} {tuple(found[name].shape)}"])
    if any(x.is_meta or isinstance(x, FakeTensor) for x in found.values()):
        return Verdict([])  # of a call without numbers the shapes are right
    first = _Draw(found, truth, beside_eager(case, call, truth), {})
    if not first.faults():
        return Verdict([])
    lenient = _lenient(case, call, first, work)
    noisy = lenient._replace(slack={})
    if not noisy.faults():
        return Verdict([], "noise")
    if not lenient.faults():
        return Verdict([], "moved")
    draws = [lenient]
    for draw in range(1, DRAWS + 1):
        again = session.run(case, draw)[number]
        call, found = _on_one_device(case, again.call, again.found)
        work = dense(case, call)
        truth = _truth(case, work)
        draws.append(_lenient(case, call, _Draw(found, truth, beside_eager(case, call, truth), {}), work))
    for each in draws:
        if any(each.other_infinities(name) for name in truth):
            return Verdict(each.faults())
    faults = over({name: [(each.errors(name), each.limits[name]) for each in draws] for name in truth})
    return Verdict(faults, "draws")


def _disguises(case: Case) -> Iterator[tuple[str, str]]:
    """Place and kind of each tensor that is not plain."""
    for text in case.steps[0].before if case.kind == "hostile" else ():
        _, place, kind = text.split()
        yield place, kind


def _truth(case: Case, work: Dense) -> Results:
    """The results that a call is to have: an inference tensor wants no gradient."""
    operands = {"query": "dq", "key": "dk", "value": "dv"}
    without = [operands.get(place) for place, kind in _disguises(case) if kind == "inference"]
    return {name: x for name, x in work.results(work.scores).items() if name not in without}


def _on_one_device(case: Case, call: Call, found: Results) -> tuple[Call, Results]:
    """The truth of numbers, and of large scores, is computed on the CPU; a GPU divides otherwise there."""
    if case.kind == "plain" or not call.q.is_cuda:
        return call, found
    tables = {name: x.cpu() for name, x in call.tables.items()}
    return Call(*(x.cpu() for x in call[:-1]), tables), {name: x.cpu() for name, x in found.items()}


def over(errors: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]]) -> list[str]:
    """What is over its limit, by result the errors and limits of each draw."""
    faults = []
    for name, draws in errors.items():
        rms, limit = (math.sqrt(sum(draw[i][0] ** 2 for draw in draws) / len(draws)) for i in (0, 1))
        typical = sorted(draws, key=lambda draw: draw[0][1] / max(draw[1][1], 1e-300))[len(draws) // 2]
        if not (rms <= limit and typical[0][1] <= typical[1][1]):
            largest = f"largest {typical[0][1]:.3g} of {typical[1][1]:.3g}"
            faults.append(f"{name}: RMS error {rms:.3g} of {limit:.3g}, {largest}")
    return faults


def beside_eager(case: Case, call: Call, truth: Results) -> dict[str, tuple[float, float]]:
    plain, coarse = eager(case, call), in_float8(case, call)
    limits = {}
    for name, exact in truth.items():
        finite = exact.isfinite()
        error = _off(plain[name], exact)
        floor = _rounding(name, call) * exact.where(finite, 0.0).abs().max().item()
        if name == "lse":  # float32 whatever the inputs are
            floor = max(floor, _rounding(name, call))
            error = error if call.q.dtype.itemsize >= 4 else torch.zeros_like(error)
        errors = [error, _off(coarse[name], exact)] if name in coarse else [error]
        rms = sum(each.square().mean().sqrt().item() for each in errors)
        largest = sum(each.abs().max().item() for each in errors)
        limits[name] = (1.5 * rms + floor / 4, 2.0 * largest + floor)
    return limits


def _off(found: Tensor, exact: Tensor) -> Tensor:
    """How far results are from the truth, where it is finite."""
    return (found.double() - exact).where(exact.isfinite(), 0.0).nan_to_num(0.0, 0.0, 0.0)


def _lenient(case: Case, call: Call, draw: _Draw, work: Dense) -> _Draw:
    limits = dict(draw.limits)
    eps = max(map(eps_of, _dtypes(case, call)))
    for name, noise in (work.noise() if work.leaves else {}).items():
        rms, largest = limits[name]
        noise = noise.where(noise.isfinite(), 0.0)
        typical, most = noise.square().mean().sqrt().item(), noise.max().item()
        limits[name] = rms + 2 * eps * typical, largest + 4 * eps * most
    computed = eps_of(torch.promote_types(call.q.dtype, torch.float32))  # of what kernels compute in
    for name, size in (work.unmodified() if case.score else {}).items():
        # terms of a table's gradient may be rounded to its dtype before they cancel
        rounding = computed if name[1:] in "qk" else max(computed, eps_of(_dtype_of(name, call)))
        rms, largest = limits[name]
        typical, most = size.square().mean().sqrt().item(), size.max().item()
        limits[name] = rms + 4 * rounding * typical, largest + 8 * rounding * most
    # one sum over all queries that share keys; in eager one for each head, and then of these
    longer = math.sqrt(call.q.shape[:2].numel() / call.k.shape[:2].numel())
    for name in {"dk", "dv"} & limits.keys() if call.q.dtype.itemsize >= 4 else ():
        limits[name] = limits[name][0] * longer, limits[name][1] * longer
    others = [*inexact(case, call), *moved(case, call)]
    if case.kind != "huge":  # there the truth is as written
        others.append(as_written(case, call))
    else:
        others += folded(case, call)
    slack = {
        name: 2.0 * sum(_apart(x[name].double(), exact) for x in others) for name, exact in draw.truth.items()
    }
    if case.kind == "numbers" and call.q.dtype == torch.float64:
        # torch rounds what is made of numbers alone to their dtype, and not all that `as_written` rounds
        slack = {name: x.max().expand(x.shape) if x.numel() else x for name, x in slack.items()}
    return draw._replace(limits=limits, slack=slack)


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|, also of equal infinities."""
    return torch.where(x == y, 0.0, (x - y).abs())


def _dtype_of(name: str, call: Call) -> torch.dtype:
    if name in ("out", "lse"):
        return call.q.dtype if name == "out" else call.grad_lse.dtype
    return (call._asdict() | call.tables)[name[1:]].dtype  # type: ignore[no-any-return]


def _dtypes(case: Case, call: Call) -> list[torch.dtype]:
    """In which each element of a gradient may be rounded: the call's, those that its mod computes in, and
    those of its tables, say float32 ones of a float64 call.
    """
    lower = [x.dtype for x in call.tables.values() if x.is_floating_point()]
    casts = {".to(BFLOAT16)": torch.bfloat16, ".to(FLOAT16)": torch.float16}
    casts |= {".float()": torch.float32, ".to(score.dtype)": torch.float32}
    casts["F.hardsigmoid"] = torch.float32  # torch's derivative of it is 1/6 in float32, whatever the dtype
    lower += [dtype for text, dtype in casts.items() if text in case.score]
    return [call.q.dtype, *lower]


def _rounding(name: str, call: Call) -> float:
    """A rounding of a result; of lse a quarter of one of the inputs', or four of its own."""
    if name == "lse":
        return max(eps_of(call.q.dtype) / 4, 4 * eps_of(call.grad_lse.dtype))
    return max(eps_of(call.q.dtype), eps_of(_dtype_of(name, call)))


def report(cases: Iterable[Case]) -> None:
    """Print what is wrong with each."""
    for case in cases:
        verdict = check(case)
        how = f"refused: {verdict.refused}" if verdict.refused else f"within its limits ({verdict.how})"
        print(case, *(verdict.faults or [how]), sep="\n    ")
