"""Finds out from a Hopper kernel's machine code whether ptxas made it slower than its text.

ptxas reports this in its log (C7505 to C7519), but Triton keeps no log. The machine code shows it too:

- Matrix instructions run asynchronously until a wait; the last one of each group closes the group. If ptxas
  serializes them, it does so in the whole function: each instruction is its own group.
- Warps pass registers to others by USETMAXREG. If ptxas ignores `setmaxnreg`, there is no such instruction.

An instruction has 16 bytes. Its lowest 12 bits are the opcode; bits 84 to 86 of a matrix instruction are the
group that it closes, 7 for none. Tests compare this module with `cuobjdump -sass` and with the log of ptxas.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

# HGMMA and QGMMA, each with its left operand in shared memory and in registers; USETMAXREG
MATRIX, REGISTERS = (0x9F0, 0xDF0, 0x9F3, 0xDF3), 0x9C8
NO_GROUP = 7
PROGRAM, EXECUTABLE = 1, 4  # in an ELF file: the kind of a section with contents, the flag of one that runs

SERIALIZED = "its matrix instructions are serialized"
EVEN_REGISTERS = "its warps hand over no registers"
MISADDRESSED = "ptxas has its matrix products read at wrong addresses"

_HOPPER = re.compile(r"^\.target sm_90", re.MULTILINE)


def losses(ptx: str, cubin: bytes) -> tuple[str, ...]:
    """Returns which of SERIALIZED and EVEN_REGISTERS apply to a kernel.

    Returns nothing if the text is not for Hopper, or `cubin` is no ELF file.
    """
    if not cubin.startswith(b"\x7fELF") or not _HOPPER.search(ptx):
        return ()
    code = list(instructions(cubin))
    closed = {high >> 20 & 7 for low, high in code if low & 0xFFF in MATRIX}
    found = []
    # if the text itself has groups of one instruction, the machine code shows no difference
    if closed and NO_GROUP not in closed and ptx.count("wgmma.mma_async") > ptx.count("wgmma.commit_group"):
        found.append(SERIALIZED)
    if "setmaxnreg" in ptx and all(low & 0xFFF != REGISTERS for low, _ in code):
        found.append(EVEN_REGISTERS)
    return tuple(found)


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yields the lower and upper half of each instruction, from the file's executable sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for header in range(table, table + size * count, size):
        kind, flags, _, start, length = struct.unpack_from("<IQQQQ", cubin, header + 4)
        if kind == PROGRAM and flags & EXECUTABLE:
            halves = struct.unpack_from(f"<{length // 8}Q", cubin, start)
            yield from zip(halves[::2], halves[1::2], strict=True)
