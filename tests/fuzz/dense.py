"""Dense attention: in float64, which is the truth, and in what a call computes in.

`check.py` says what each of them is for.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fuzz.case import Call, Case, Results, device_of, mod_of
from fuzz.float8_model import rounded_weights, summed_in_14_bits

MOVES = 4
# functions whose error is absolute, and what it may be
INEXACT = ("tanh", "erf", "erfc", "sin", "cos", "tan", "log", "log2")
INEXACT_BY = 5e-7
SMALL_CAP = 128.0
ONE_PLACE = 2.0**-23


class Inexact:
    """torch, whose inexact functions are off, by so much up or down; `relative`: of their value.

    `seed`: each value by itself, up or down by chance, if relative.
    """

    def __init__(
        self, by: float, relative: bool = False, names: Container[str] = INEXACT, seed: int | None = None
    ) -> None:
        self._by, self._relative, self._names, self._seed = by, relative, names, seed

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name not in self._names:
            return function
        if self._relative:
            return lambda x: function(x) * (1 + self._by * self._signs(x))
        return lambda x: function(x) + self._by

    def _signs(self, x: Tensor) -> Tensor | int:
        if self._seed is None:
            return 1
        random = torch.Generator(x.device).manual_seed(self._seed)
        return torch.randint(0, 2, x.shape, generator=random, device=x.device) * 2 - 1


class Divisions(TorchFunctionMode):
    """Makes whole numbers divisible by 0, where torch raises on the CPU: behind a condition they may be.

    A number may be 0 in the dtype of what it divides.
    """

    NAMES = ("floor_divide", "floordiv", "rfloordiv", "remainder", "mod", "rmod", "fmod", "div")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        place = 0 if name in ("rfloordiv", "rmod") else 1
        rounds = name in self.NAMES and (name != "div" or (kwargs or {}).get("rounding_mode"))
        if rounds and self._is_whole(args[1 - place]) and self._is_whole(args[place]):
            divided, divisor = args[1 - place], args[place]
            if isinstance(divisor, Tensor):
                safe = divisor.where(divisor != 0, 1)
            else:
                safe = divisor if torch.tensor(divisor).to(divided.dtype) else 1
            args = (*args[:place], safe, *args[place + 1 :])
        return function(*args, **kwargs or {})

    @staticmethod
    def _is_whole(x: Any) -> bool:
        return not x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, int)


def dense(case: Case, call: Call) -> Dense:
    """What the truth is computed with."""
    return Dense(case, call, torch.float64, case.kind != "huge")


def moved(case: Case, call: Call) -> list[Results]:
    """The truth of scores that are moved, each as far as its sum may round, up and down by chance."""
    work = dense(case, call)
    with torch.no_grad():
        products = work.inputs["q"].abs() @ work.key.abs().mT * abs(work.scale)
        sizes = eps_of(work.real) * (products + 4 * work.scores.abs() + 4)
        random = torch.Generator(sizes.device).manual_seed(case.seed)
        shape = (MOVES, *sizes.shape)
        moves = sizes * (torch.randint(0, 2, shape, generator=random, device=sizes.device) * 2 - 1)
    return [work.results(work.scores + move) for way in (moves, -moves) for move in way]


def as_written(case: Case, call: Call) -> Results:
    """In float64, but for the mod: it sees float32 scores and rounds where it says so."""
    work = Dense(case, call, torch.float64, False, rounds=case.kind == "numbers")
    return work.results(work.scores)


def folded(case: Case, call: Call) -> list[Results]:
    """Of a mod with numbers that float32 has few digits of: what is constant in it may keep float64's."""
    if not any(f"e-{size}" in case.score for size in (38, 39, 40)):
        return []
    work = Dense(case, call, torch.float64, True)
    return [work.results(work.scores)]


def inexact(case: Case, call: Call) -> list[Results]:
    """The truth, but for functions that are off."""
    huge = case.kind == "huge"
    relative = huge and any(value > SMALL_CAP for _, value in case.numbers)
    functions = [Inexact(by, relative) for by in (INEXACT_BY, -INEXACT_BY)]
    if huge and case.backend == "cpu":  # its tanh is oneDNN's
        functions += [Inexact(ONE_PLACE, True, ("tanh",), seed) for seed in range(MOVES)]
    works = [Dense(case, call, torch.float64, not huge, of) for of in functions]
    return [work.results(work.scores) for work in works]


def in_float8(case: Case, call: Call) -> Results:
    """What a matrix unit makes of float8 queries and keys, see `float8_model`; nothing without them.

    Hopper's kernels round weights to the format of the values, and take tanh.approx then. The largest weight
    of a row is exp2(s * c - m), and m is a rounded s * c. Of large scores it is not 1, and rounded too.
    """
    if case.float8 is None or case.float8.tensors != "qkv" or device_of(case).type == "cpu":
        return {}
    of_values = case.backend == "hopper" and case.float8.by[2] != "block"
    functions = Inexact(2.0**-11, True, ("tanh",)) if of_values else torch
    work = Dense(case, call, torch.float64, True, functions)
    dtype = getattr(torch, case.float8.format) if of_values else torch.float16
    work.rounded = lambda weights: rounded_weights(weights, dtype, 1 + 2.0**-12)  # type: ignore[method-assign]
    return work.results(summed_in_14_bits(work.inputs["q"], work.key.mT) * work.scale)


def eager(case: Case, call: Call) -> Results:
    """Attention written out, each step's result rounded to the call's dtype; of large scores none is.

    There the largest weight of a row is not 1, see `in_float8`, and half the rounding of 1 is taken for it.
    """
    dtype = call.q.dtype
    if case.kind != "huge":
        work = Dense(case, call, dtype, False)
        return work.results(work.scores)
    work = Dense(case, call, torch.promote_types(dtype, torch.float32), False)
    work.rounded_to = dtype
    if dtype.itemsize == 2:
        peak = 1 + torch.finfo(dtype).eps / 2
        work.rounded = lambda weights: rounded_weights(weights, dtype, peak)  # type: ignore[method-assign]
    return {n: x.to(call.q.dtype) if n == "out" else x for n, x in work.results(work.scores).items()}


class Dense:
    """Attention in `dtype`. `exact`: nothing of the mod is rounded to less than float64.

    `functions` stands for torch in the score mod. `rounds`: the mod of a float64 call may round as others do,
    since torch computes with a number of a lower dtype in that.
    """

    def __init__(
        self,
        case: Case,
        call: Call,
        dtype: torch.dtype,
        exact: bool,
        functions: Any = torch,
        rounds: bool = False,
    ) -> None:
        self.functions, self.rounded_to = functions, dtype
        self.real = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        # float64 calls compute their mods in float64 throughout
        exact = exact or (self.real == torch.float64 and not rounds)
        self.case, self.call, self.exact = case, call, exact
        self.inputs = {n: getattr(call, n).detach().to(dtype).requires_grad_(n in case.wanted) for n in "qkv"}
        self.tables, self.leaves = {}, {n: x for n, x in self.inputs.items() if n in case.wanted}
        for table in case.tables:
            x = call.tables[table.name].detach()
            if exact and x.is_floating_point():
                x = x.double()
            if table.padding:  # what no pair that counts reads
                x = x.clone()
                x[..., -1] = 0
            if table.learned:
                self.leaves[table.name] = x = x.clone().requires_grad_()
            # a tensor of one element is used as it is: it must not be weaker than the others
            weak = x.dim() == 0 and not table.values
            self.tables[table.name] = x.reshape(1, 1, 1, 1) if weak else x
        self.scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
        group = case.heads[0] // case.heads[1]
        self.key, self.value = (self.inputs[n].repeat_interleave(group, 1) for n in "kv")
        self.scores = (self.inputs["q"] @ self.key.mT) * self.scale
        self.modified = self.scores

    def results(self, scores: Tensor) -> Results:
        self.weights, lse = self._weights(scores)
        out = self.rounded(self.weights) @ self.value
        out = out.to(self.rounded_to).to(out.dtype)  # as its gradient is, too
        found = {"out": out.detach(), "lse": lse.detach()}
        if self.leaves:
            loss = (out * self.call.grad_out.to(out.dtype)).sum()
            if self.case.grad_lse:
                alive = lse.isfinite()
                incoming = self.call.grad_lse.where(alive, 0.0).to(lse.dtype)
                loss = loss + (lse.where(alive, 0.0) * incoming).sum()
            self.gradients = dict(zip(self.leaves, self._grad(loss), strict=True))
            found |= {f"d{n}": x for n, x in self.gradients.items()}
            self._forget_overflows(found, loss, scores)
        return found

    def _forget_overflows(self, found: Results, loss: Tensor, scores: Tensor) -> None:
        """Makes dq and dk NaN where the gradient of a score has no number in the call's dtype.

        A mod's derivative may be that large. Attention multiplies these gradients in that dtype. Hopper's
        kernels multiply a derivative by dp - delta last, which is NaN in a row whose output is.
        """
        if not (scores.requires_grad and loss.requires_grad):
            return
        of_scores = torch.autograd.grad(loss, scores, retain_graph=True, materialize_grads=True)[0]
        over = of_scores.abs() >= torch.finfo(self.call.q.dtype).max
        if self.case.backend in ("hopper", "python"):
            over |= found["out"].isnan().any(-1, keepdim=True)
        of_keys = over.any(2).unflatten(1, (self.case.heads[1], -1)).any(2)  # [B, Hkv, N]
        if self.case.batch[1] == 1:
            of_keys = of_keys.any(0, keepdim=True)
        for name, lost in (("dq", over.any(3)), ("dk", of_keys)):
            if name in found:
                found[name] = found[name].masked_fill(lost[..., None], torch.nan)

    def rounded(self, weights: Tensor) -> Tensor:
        return weights.to(self.rounded_to).to(weights.dtype)

    def _grad(self, loss: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves.values())
        if not loss.requires_grad:
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)

    def _weights(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        modified = self._modified(scores)
        keep = self._kept(scores)
        self.modified = modified = modified if keep is None else torch.where(keep, modified, -torch.inf)
        dead = (modified == -torch.inf).all(-1, keepdim=True)
        alive = modified.masked_fill(dead, 0.0)
        weights = torch.softmax(alive, -1).masked_fill(dead, 0.0)
        # torch's own logsumexp takes its derivative from the rounded sum, which large scores leave no digits
        largest = alive.amax(-1, keepdim=True).detach()
        lse = ((alive - largest).exp().sum(-1, keepdim=True).log() + largest).squeeze(-1)
        return weights, lse.masked_fill(dead.squeeze(-1), -torch.inf)

    def _modified(self, scores: Tensor) -> Tensor:
        mod = mod_of(self.case.score, self.case, self.tables, not self.exact, self.functions)
        if mod is None:
            return scores
        seen = scores if self.exact else scores.to(self.real)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.exact else default)
        try:
            with Divisions():
                modified = mod(seen, *self._positions(scores))
            return modified.to(scores.dtype).expand(scores.shape)
        finally:
            torch.set_default_dtype(default)

    def _kept(self, scores: Tensor) -> Tensor | None:
        native = {name: x.reshape(1, 1, 1, 1) if x.dim() == 0 else x for name, x in self.call.tables.items()}
        mod = mod_of(self.case.mask, self.case, native)
        with Divisions():
            return None if mod is None else mod(*self._positions(scores))

    def _positions(self, scores: Tensor) -> list[Tensor]:
        """b, h, q_idx and kv_idx, each along its own dimension."""
        views = [[-1 if dim == own else 1 for dim in range(4)] for own in range(4)]
        places = [torch.arange(size, device=scores.device) for size in scores.shape]
        return [place.view(view) for place, view in zip(places, views, strict=True)]

    @torch.no_grad()
    def _size(self) -> Tensor:
        """Of what is added up in each score's gradient."""
        terms = (self.weights * (self.call.grad_out.double() @ self.value.mT)).abs()
        return terms + self.weights * terms.sum(-1, keepdim=True)

    def noise(self) -> Results:
        """What a rounding of each weight's gradient comes to, for each gradient; see the head of the file."""
        size = self._size()
        if self.case.grad_lse:
            size = size + self.weights.detach() * self.call.grad_lse.double().abs()[..., None]
        found = {f"d{n}": torch.zeros_like(x, dtype=torch.float64) for n, x in self.leaves.items()}
        random = torch.Generator(size.device).manual_seed(self.case.seed)
        finite = torch.where(self.modified > -torch.inf, self.modified, 0.0)
        for shape in (size.shape, size.shape, (*size.shape[:3], 1), (*size.shape[:3], 1)):
            signs = torch.randn(shape, generator=random, device=size.device, dtype=torch.float64)
            terms = ((self.weights.detach() * signs) @ self.value * self.call.grad_out.double()).sum()
            for name, x in zip(found, self._grad((finite * (size * signs)).sum() + terms), strict=True):
                found[name] += x.double().abs()
        return found

    def unmodified(self) -> Results:
        """The sizes of the gradients of queries and keys if the mod were none, and of tables' that cancel."""
        most = (self.scores.detach().abs() * self._size()).sum()
        cancelled = {
            f"d{name}": most.expand(x.shape)
            for name, x in self.leaves.items()
            if name not in "qkv" and not self.gradients[name].any()
        }
        names = [name for name in self.leaves if name in "qk"]
        leaves = [self.leaves[name] for name in names]
        terms = (self.scores * self._size()).sum()
        found = torch.autograd.grad(terms, leaves, retain_graph=True) if names else ()
        return cancelled | {f"d{name}": x.double().abs() for name, x in zip(names, found, strict=True)}


def eps_of(dtype: torch.dtype) -> float:
    """A rounding; of float64 eight, since the truth has those too."""
    return torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 1)
