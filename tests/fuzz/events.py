"""What may happen to the objects of a session, as texts of a few words.

copy WHAT HOW       an object (score_mod, mask_mod, mask, handle, all) becomes its copy
original            the first objects again
recombine HOW       the block mask becomes itself by way of its algebra
write list NAME HOW a list of the block mask is written in place, or assigned
write WHAT          query, key, value, out, lse, or what the score_mod or the mask_mod captures
assign mask_mod     the block mask gets another mask_mod
another call        forward and backward, of other values
another forward     its backward comes after
backward twice      the second one counts
forget              the block mask and the handle are let go
disguise PLACE KIND a tensor of the call becomes one of `hostile.py`
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuzz.case import call_of

if TYPE_CHECKING:
    from fuzz.session import Session

COPIES = ("copy", "deepcopy", "pickle2", "pickle5", "save", "module")
LISTS = tuple(
    f"{full}{axis}_{what}"
    for full in ("", "full_")
    for axis in ("kv", "q")
    for what in ("num_blocks", "indices")
)
LIST_WRITES = ("zero", "flip", "assign zero", "assign flip")
WRITES = ("query", "key", "value", "out", "lse", "score_mod", "mask_mod")


def happen(session: Session, text: str) -> None:
    what, *words = text.split()
    if text == "backward twice":  # the session sees to it
        return
    HAPPENINGS[what](session, *words)


# copies


def _copy(session: Session, what: str, how: str) -> None:
    names = ("score_mod", "mask_mod", "mask", "handle") if what == "all" else (what,)
    objects = {name: session.object(name) for name in names}
    for name, x in objects.items():
        session.originals.setdefault(name, x)
    session.objects |= copied(objects, how)
    if what in ("score_mod", "mask_mod"):  # what was made of the original is made again
        for made in ("mask", "handle"):
            session.objects.pop(made, None)


def copied(objects: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "copy":
        return {name: copy.copy(x) for name, x in objects.items()}
    if how == "deepcopy":
        return copy.deepcopy(objects)
    if how == "save":
        buffer = io.BytesIO()
        torch.save(objects, buffer)
        buffer.seek(0)
        return dict(torch.load(buffer, weights_only=False))
    if how == "module":
        module = torch.nn.Module()
        module.__dict__.update(objects)
        return {name: copy.deepcopy(module).__dict__[name] for name in objects}
    return dict(pickle.loads(pickle.dumps(objects, int(how.removeprefix("pickle")))))


def _original(session: Session) -> None:
    session.objects |= session.originals


def _recombine(session: Session, how: str) -> None:
    mask = session.object("mask")
    ways = {"complement": lambda: ~~mask, "and": lambda: mask & mask, "or": lambda: mask | mask}
    session.objects["mask"] = ways[how]()


# writes


def fill(table: Tensor, values: Tensor, number: int) -> None:
    """Write to a tensor in one of the ways that users have."""
    with torch.no_grad():
        if number % 2:
            table.fill_(values.flatten()[0])
        else:
            table.copy_(values)


def _write(session: Session, what: str, *words: str) -> None:
    assert session.now is not None
    if what == "list":
        _write_list(session.object("mask"), *words)
    elif what in ("score_mod", "mask_mod"):
        text = session.case.score if what == "score_mod" else session.case.mask
        for name, x in session.tables.items():
            if name in text:
                _overwrite(x)
    else:
        now = session.now
        _overwrite(getattr(now, what) if what in ("out", "lse") else now.inputs[what[0]])


def _overwrite(x: Tensor) -> None:
    """Other numbers: zeros where they are whole, since they may be indices."""
    with torch.no_grad():
        one = _of_one_place_each(x)
        if x.is_floating_point():
            one.mul_(-2).add_(1)
        else:
            one.zero_()


def _of_one_place_each(x: Tensor) -> Tensor:
    """Without repeated elements, which torch does not write to."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0:
            x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return x


def _write_list(mask: Any, name: str, *how: str) -> None:
    part = getattr(mask, name, None)
    if part is None:
        return
    new = torch.zeros_like(part) if how[-1] == "zero" else part.flip(-1).clone()
    if how[0] == "assign":
        setattr(mask, name, new)
        return
    place = _of_one_place_each(part)
    place.copy_(new[tuple(slice(size) for size in place.shape)])


def _assign(session: Session, what: str) -> None:
    setattr(session.object("mask"), what, _checkered)


def _checkered(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx + kv_idx) % 2 == 0


# other calls


def _another(session: Session, what: str) -> None:
    call = call_of(session.case, session.draw + 50)
    forward = session.forward(call)
    if what == "forward":
        session.waiting.append(forward)
    else:
        session.finish(forward)


def _forget(session: Session) -> None:
    session.objects.clear()
    gc.collect()


def _disguise(session: Session, place: str, kind: str) -> None:
    session.disguises[place] = kind


HAPPENINGS = {
    "copy": _copy,
    "original": _original,
    "recombine": _recombine,
    "write": _write,
    "assign": _assign,
    "another": _another,
    "forget": _forget,
    "disguise": _disguise,
}
