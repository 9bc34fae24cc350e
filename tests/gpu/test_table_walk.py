"""Every row of the table over special values, on a card; the chip's own texts too."""

from __future__ import annotations

import pytest
import torch
from table_walk import DTYPES, SOURCES, Source, check, rows_of

from flexmod.ir.ops import Op

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300, method="thread")]

DEVICE = torch.device("cuda")
CASES = [
    pytest.param(row, dtype, source, id=f"{row.name}-{str(dtype)[6:]}-{source}")
    for dtype in DTYPES
    for source in ((*SOURCES, "score on sm_90") if dtype == torch.float32 else SOURCES[:1])
    for row in rows_of(dtype, source)
]


@pytest.mark.parametrize(("row", "dtype", "source"), CASES)
def test_triton_text_does_what_torch_does(row: Op, dtype: torch.dtype, source: Source) -> None:
    if source == "score on sm_90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("texts of another chip")
    check(row, dtype, source, DEVICE)
