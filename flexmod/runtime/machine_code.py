"""What the machine code of a kernel for Hopper lacks of what its text asks for.

ptxas says in its log where it makes a kernel slower than its text (C7505 to C7519), and Triton keeps no log.
The machine code shows the same, and every compiled kernel has it at hand:

- A matrix instruction runs beside others until a wait, and each group of them ends in one that closes it.
  Where ptxas serializes them it does so in the whole function: each is a group of its own.
- Warps that hand registers to others do so by USETMAXREG. Where ptxas ignores `setmaxnreg` there is none.

An instruction has 16 bytes. Its lowest 12 bits say which it is; bits 84 to 86 of a matrix instruction name
the group that it closes, 7 for none. That is how `cuobjdump -sass` shows them: tests hold this module to it,
and to the log of ptxas.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

# HGMMA with its left operand in shared memory and in registers; USETMAXREG
MATRIX, REGISTERS = (0x9F0, 0xDF0), 0x9C8
NO_GROUP = 7
PROGRAM, EXECUTABLE = 1, 4  # in an ELF file: the kind of a section with contents, the flag of one that runs

SERIALIZED = "its matrix instructions are serialized"
EVEN_REGISTERS = "its warps hand over no registers"
MISADDRESSED = "ptxas has its matrix products read at wrong addresses"

_HOPPER = re.compile(r"^\.target sm_90", re.MULTILINE)


def losses(ptx: str, cubin: bytes) -> tuple[str, ...]:
    """What the assembler took from a kernel: of SERIALIZED and EVEN_REGISTERS, those that hold.

    Nothing where the text is not for Hopper, or `cubin` no ELF file.
    """
    if not cubin.startswith(b"\x7fELF") or not _HOPPER.search(ptx):
        return ()
    code = list(instructions(cubin))
    closed = {high >> 20 & 7 for low, high in code if low & 0xFFF in MATRIX}
    found = []
    # where the text itself has groups of one, nothing can be told
    if closed and NO_GROUP not in closed and ptx.count("wgmma.mma_async") > ptx.count("wgmma.commit_group"):
        found.append(SERIALIZED)
    if "setmaxnreg" in ptx and all(low & 0xFFF != REGISTERS for low, _ in code):
        found.append(EVEN_REGISTERS)
    return tuple(found)


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """The lower and the upper half of each, from all sections of the file that run."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for header in range(table, table + size * count, size):
        kind, flags, _, start, length = struct.unpack_from("<IQQQQ", cubin, header + 4)
        if kind == PROGRAM and flags & EXECUTABLE:
            halves = struct.unpack_from(f"<{length // 8}Q", cubin, start)
            yield from zip(halves[::2], halves[1::2], strict=True)
