"""docs/support.md: each cell of its first table runs where it says so, and is refused elsewhere."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from support_features import FEATURES, Setting
from torch import Tensor

from flexmod import errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "support.md").read_text()
TABLE = PAGE.partition("## Features")[2].partition("##")[0]
DTYPES = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 2e-4, "float64": 1e-9}  # and their errors
CELLS = {"all": set(DTYPES), "all but float64": set(DTYPES) - {"float64"}, "none": set[str]()}
BACKENDS = {
    "CPU": {},
    "REFERENCE": {"BACKEND": "REFERENCE"},
    "INTERPRET": {"BACKEND": "INTERPRET"},
    "CUDA": {},
}


def cells() -> dict[tuple[str, str], str]:
    """The text of each cell of the table, by feature and backend."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.splitlines()
        if line.startswith("|")
    ]
    backends = [name.strip("`") for name in header[1:]]
    return {(row[0], name): cell for row in rows for name, cell in zip(backends, row[1:], strict=True)}


def marked(backend: str, dtype: str) -> list[pytest.MarkDecorator]:
    if backend == "CUDA":
        return [pytest.mark.gpu]
    return [pytest.mark.long] if backend == "INTERPRET" and dtype != "float32" else []


CASES = [
    pytest.param(feature, backend, dtype, marks=marked(backend, dtype))
    for feature in FEATURES
    for backend in BACKENDS
    for dtype in DTYPES
]


@functools.cache
def exact(feature: str) -> list[Tensor]:
    return FEATURES[feature](Setting(torch.float64, "cpu", {"BACKEND": "REFERENCE"}))


@pytest.mark.parametrize(("feature", "backend", "dtype"), CASES)
def test_cell(feature: str, backend: str, dtype: str) -> None:
    device = "cuda" if backend == "CUDA" else "cpu"
    setting = Setting(getattr(torch, dtype), device, BACKENDS[backend])
    if dtype not in CELLS[cells()[feature, backend]]:
        with pytest.raises(errors.FlexmodError):
            FEATURES[feature](setting)
        return
    limit = DTYPES[dtype]
    for result, expected in zip(FEATURES[feature](setting), exact(feature), strict=True):
        assert result.isfinite().logical_or(expected.isinf().to(device)).all()
        torch.testing.assert_close(result.cpu().double(), expected, atol=limit, rtol=limit)


def test_the_table_has_every_feature_and_backend() -> None:
    assert set(cells()) == {(feature, backend) for feature in FEATURES for backend in BACKENDS}
    assert set(cells().values()) <= set(CELLS)


def test_the_tests_that_the_page_names_exist() -> None:
    assert all((ROOT / name).exists() for name in re.findall(r"`(tests/\S+)`", PAGE))
