"""Errors in a mask_mod or score_mod: its signature, its result, its operations, its captures.

The library of mods also raises one of them for its arguments.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from flexmod.errors.base import FlexmodError, Where, counted, shown


class ModArityError(FlexmodError, TypeError, AssertionError):
    what = "{mod} takes {count} without defaults; a score_mod takes 5 (score, b, h, q_idx, kv_idx) and a mask_mod 4 (b, h, q_idx, kv_idx)."
    instead = "write {expected}."


class NotCallable(FlexmodError, TypeError, RuntimeError):
    what = "{mod} is {type}, which cannot be called."
    instead = "pass a function of scalars, e.g. {expected}."


class NotMadeError(FlexmodError, TypeError):
    what = "{function} is a function that makes a {kind}_mod, and it was not called."
    instead = "call it: {call}."


class NoSignatureError(FlexmodError, TypeError):
    what = "{mod} is {function}, and Python cannot tell what arguments it takes."
    instead = "write a function, e.g. {expected}."


class MaskResultError(FlexmodError, TypeError, AssertionError):
    what = "mask_mod returned {dtype}; a mask says True or False."
    instead = "return a comparison, e.g. q_idx >= kv_idx. Numbers to add to scores are a score_mod, lambda score, b, h, q_idx, kv_idx: score + ..."


class ScoreResultError(FlexmodError, TypeError):
    what = "score_mod returned {dtype}; a score is a floating-point number."
    instead = "return the changed score, e.g. torch.where(condition, score, -float('inf'))."


class NotScalarError(FlexmodError, TypeError):
    what = "{what}, of shape {shape}, where a scalar is needed: a mod works on one (query, key) pair."
    instead = "index it down to one element, e.g. {example}."


class NoResultError(FlexmodError, TypeError):
    what = "{mod} returned {result}."
    instead = "return {expected}."


class ControlFlowError(FlexmodError, TypeError, RuntimeError):
    what = "Python asked for the truth of a traced value (if, while, and, or, not, in): it has no value yet."
    instead = "{advice}"


class ConcreteValueError(FlexmodError, TypeError, RuntimeError):
    what = "{operation} needs the value of a traced scalar, which has none while the mod is compiled."
    instead = "{advice}"


class ReductionError(FlexmodError, TypeError):
    what = "{operation} reduces over elements, but a mod sees one (query, key) pair."
    instead = "compute it before the call and capture the result, e.g. total = x.sum(-1), then total[q_idx]; only a captured row of up to 16 elements is reduced inside."


class RandomNumberError(FlexmodError, NotImplementedError):
    what = "{operation} draws random numbers inside a mod: they would change with the tiling."
    instead = "draw them before the call and capture the tensor, e.g. noise[q_idx, kv_idx], or make them of the positions and a captured seed, as docs/operations.md shows."


class MutationError(
    FlexmodError, RuntimeError
):  # not a TypeError: in `captured += 1` that would make Python try `captured + 1`
    what = "{operation} writes in place inside a mod; a mod is a pure function."
    instead = "use the form that returns a new value, or do the write before the call."


class UnknownOperationError(FlexmodError, NotImplementedError):
    what = "{operation} is not an operation that flexmod can trace."
    instead = "{advice}"


class UnknownAttributeError(FlexmodError, AttributeError):
    what = "a traced value has no attribute {name!r}.{close}"
    instead = "use operators and the functions in docs/operations.md."


class OperationArgumentError(FlexmodError, TypeError):
    what = "{operation} was called with {problem}."
    instead = "{advice}"


class ForeignCaptureError(FlexmodError, TypeError):
    what = "{name} is {type}: only a tensor can be indexed with a traced value."


class IndexDtypeError(FlexmodError, TypeError):
    what = "{name} is indexed with a {dtype} value; an index is an integer."
    instead = "cast it, e.g. {name}[index.to(torch.int32)]."


class CaptureIndexError(FlexmodError, IndexError):
    what = "{name}, of shape {shape}, is indexed {problem}."
    instead = "{advice}"


class CaptureBoundsError(FlexmodError, IndexError):
    what = "{name}, of shape {shape}, captured by {mod}, is indexed with {index} in dimension {dim}, which has {elements}."
    instead = "use an index from -{size} to {last}, e.g. index.clamp(0, {last}): what a mask rules out counts too."

    @classmethod
    def of(
        cls, name: str, mod: str, shape: Sequence[int], dim: int, index: int, where: Where | None
    ) -> CaptureBoundsError:
        """Builds the error for an index into dimension `dim` of a tensor with this shape."""
        size = shape[dim]
        facts = {"name": name, "mod": mod, "shape": tuple(shape), "dim": dim, "index": index, "size": size}
        return cls(where=where, last=size - 1, elements=counted(size, "element"), **facts)


class ModDtypeError(FlexmodError, TypeError):
    what = "{name} has dtype {dtype}, which a mod cannot use; it takes {accepted}."
    instead = "convert it before the call."


class MaskCaptureGradientError(FlexmodError, TypeError):
    what = "{name}, captured by mask_mod, requires grad; a mask has no derivative."
    instead = "capture {name}.detach()."


class NoDerivativeError(FlexmodError, NotImplementedError):
    what = "{operation} has no derivative in flexmod, and a gradient through it is asked for."
    instead = "write it with differentiable operations, or detach what it reads."


class LibraryArgumentError(FlexmodError, ValueError):
    what = "{function}: {name} is {value}; it must be {rule}."

    @classmethod
    def check(cls, function: str, *rows: tuple[str, object, bool, str, str]) -> None:
        """Raises the error for the first row (name, value, right, rule, advice) whose value is not right."""
        for name, value, right, rule, advice in rows:
            if not right:
                raise cls(function=function, name=name, value=shown(value), rule=rule, advice=advice)


class NotPicklableError(FlexmodError, pickle.PicklingError, TypeError):
    what = "{mod} cannot be pickled, since it cannot be traced: {error}, {reason}"
    instead = "mend the mod: flexmod.explain({kind}_mod={kind}_mod) says the same, with the line that is at fault."


class CallSizeError(FlexmodError, ValueError):
    what = "{owner} is made for {size} (its {argument}), but {place} has {given}."

    @classmethod
    def of(
        cls, kind: str, axis: str, size: int, given: int, owner: str, argument: str, place: str, start: int = 0
    ) -> CallSizeError:
        """Builds the error for a mod with `size` entries along an axis, in a call or a mask with `given`
        entries from `start` on.
        """
        units = {"b": "batch entry", "h": "head", "q_idx": "query", "kv_idx": "key"}
        extents = {"b": "B", "h": "H", "q_idx": "Q_LEN", "kv_idx": "KV_LEN"}
        names = ["score"] * (kind == "score") + [*units]
        part = ", ".join(f"{name} + first" if name == axis else name for name in names)
        advice = [f"give it {counted(start + given, units[axis])}"]
        if place != "the call" and start < size:
            advice.append(f"build {place} with {extents[axis]}={size - start}")
        if given < size and not start:
            advice.append(f"say which they are, lambda {', '.join(names)}: {kind}_mod({part})")
        return cls(
            owner=owner, argument=argument, size=counted(size, units[axis]), place=place,
            given=f"{given}, from position {start} on" if start else given,
            advice=", or ".join(advice),
        )  # fmt: skip

    @classmethod
    def of_sequences(cls, size: int, count: int, owner: str, argument: str) -> CallSizeError:
        """Builds the error for a mod with `size` batch entries within `count` packed sequences."""
        return cls(
            owner=owner, argument=argument, size=counted(size, "batch entry"), place="the packing",
            given=counted(count, "sequence"), advice=f"give it {counted(count, 'batch entry')}",
        )  # fmt: skip
