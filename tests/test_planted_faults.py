"""The faults that are planted by hand can still be planted, one in each room at least."""

from __future__ import annotations

import pytest
from planted_faults import FAULTS, ROOT, Fault

ROOMS = {
    "ir", "block_mask", "backends", "runtime", "mods", "masks", "errors", "tools", "integrations", "calls",
    "templates", "codegen",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_a_text_occurs_once(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.text) == 1
    assert fault.text != fault.replacement
    files = [word for word in fault.tests.split() if word.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files)


def test_every_room_has_a_fault() -> None:
    paths = [fault.file.removeprefix("flexmod/").removesuffix(".py").split("/") for fault in FAULTS]
    assert not ROOMS - {path[0] for path in paths}
    assert len(FAULTS) >= 30
