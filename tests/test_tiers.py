"""The cases that `make test` runs have all values, or pairs of values, of a test's parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from tiers import covering

SIZES = (4, 3, 2, 2)


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 16), (3, 36), (4, 48)])
def test_every_combination_is_covered(strength: int, most: int) -> None:
    cases = [dict(zip("abcd", values, strict=True)) for values in product(*map(range, SIZES))]
    kept = covering(cases, strength)
    assert len(kept) <= most
    for names in combinations("abcd", strength):
        wanted = {tuple(case[name] for name in names) for case in cases}
        assert {tuple(cases[number][name] for name in names) for number in kept} == wanted


def test_cases_that_are_left_out_of_a_product() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 1, "b": 1}]
    assert covering(cases, 1) == {0, 2}
    assert covering(cases, 2) == {0, 1, 2}
    assert covering(cases, 3) == {0, 1, 2}


def test_values_occur_equally_often() -> None:
    cases = [{"name": name, "backend": backend} for name, backend in product(range(12), range(3))]
    kept = [cases[number] for number in covering(cases, 1)]
    assert [sum(case["backend"] == backend for case in kept) for backend in range(3)] == [4, 4, 4]


def test_a_larger_set_has_the_smaller_one() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(3), range(3))]
    pairs = covering(cases, 2)
    triples = covering(cases, 3, pairs)
    assert len(pairs) == 12 and pairs < triples and len(triples) == 36
