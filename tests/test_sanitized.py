"""The calls that run under compute-sanitizer on a GPU are calls that run."""

from __future__ import annotations

import pytest
from gpu.sanitized import FORMS, LEARNED, MODS, Call, attend, calls


def test_every_mod_and_every_form_is_called() -> None:
    made = list(calls())
    assert len(set(made)) == len(made)
    assert {call.mods for call in made} == {*MODS, *LEARNED}
    assert {(c.template, c.dim, c.dtype, c.deterministic) for c in made} == {*FORMS}


@pytest.mark.parametrize("mods", ["documents", "bias of keys"])
def test_a_call(mods: str) -> None:
    attend(Call(mods, "auto", 40, "float32", deterministic=False))
