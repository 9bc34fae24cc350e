"""What the machine code of a kernel for Hopper lacks of what its text asks for.

ptxas says in its log where it makes a kernel slower than its text (C7505 to C7519), and Triton keeps no log.
The machine code shows the same, and every compiled kernel has it at hand:

- A matrix instruction runs beside others until a wait, and each group of them ends in one that closes it.
  Where ptxas serializes them it does so in the whole function: each is a group of its own.
- Warps that hand registers to others do so by USETMAXREG. Where ptxas ignores `setmaxnreg` there is none.

It also shows where ptxas is wrong: that of CUDA 12.8, which Triton 3.6 brings along, loses the address that
the descriptors of two products share (where one tile lies in shared memory at the place of an earlier one),
and makes the second product's of any number that a register holds. See `misaddressed`.

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

# UIADD3 with two registers, or a register and a number; bit 74: with a carry of another
SUMS, WITH_CARRY = (0x290, 0x890), 1 << 10
# what else writes uniform registers: ULDC, UMOV, USHF, ULEA, ULOP3, USGXT, USEL, UIMAD, UIADD3.64, S2UR, R2UR
UNIFORM = {
    0xAB9, 0xC82, 0x882, 0x299, 0x899, 0x291, 0x891, 0x292, 0x892, 0x29A, 0x89A, 0x287, 0x887, 0x2A4, 0x8A4,
    0x2A5, 0x8A5, 0x297, 0x897, 0x9C3, 0x2CA, 0x3C2, *SUMS,
}  # fmt: skip
HOPPER = 90
ZERO, NO_PREDICATE = 63, 7  # the uniform register of zeros, the predicate that always holds

_HOPPER = re.compile(r"^\.target sm_90", re.MULTILINE)


def losses(ptx: str, cubin: bytes) -> tuple[str, ...]:
    """What the assembler took from a kernel: of SERIALIZED and EVEN_REGISTERS, those that hold.

    Nothing where the text is not for Hopper, or `cubin` no ELF file.
    """
    if not cubin.startswith(b"\x7fELF") or not _HOPPER.search(ptx):
        return ()
    code = list(_instructions(cubin))
    closed = {high >> 20 & 7 for low, high in code if low & 0xFFF in MATRIX}
    found = []
    # where the text itself has groups of one, nothing can be told
    if closed and NO_GROUP not in closed and ptx.count("wgmma.mma_async") > ptx.count("wgmma.commit_group"):
        found.append(SERIALIZED)
    if "setmaxnreg" in ptx and all(low & 0xFFF != REGISTERS for low, _ in code):
        found.append(EVEN_REGISTERS)
    return tuple(found)


def misaddressed(cubin: bytes) -> bool:
    """Does a kernel for Hopper add 64-bit addresses of which both halves are read from one register?

    No text asks for that: ptxas has lost the address. A register that is written between the halves counts
    as another one. False where `cubin` is no ELF file, or not for Hopper.
    """
    if not cubin.startswith(b"\x7fELF") or not _for_hopper(cubin):
        return False
    lower: dict[int, set[int]] = {}  # by the predicate of a carry: the registers that its sum was made of
    for low, high in _instructions(cubin):
        operation, written = low & 0xFFF, low >> 16 & 0xFF
        if operation in SUMS and high & WITH_CARRY:
            carries = {high >> 23 & 7, high >> 13 & 7} - {NO_PREDICATE}
            if any(lower.get(carry, set()) & _read(low, high) for carry in carries):
                return True
        if operation in UNIFORM:
            lower = {carry: registers - {written} for carry, registers in lower.items()}
        if operation in SUMS and not high & WITH_CARRY:
            made = {high >> 17 & 7, high >> 20 & 7} - {NO_PREDICATE}
            lower |= dict.fromkeys(made, _read(low, high))
    return False


def _for_hopper(cubin: bytes) -> bool:
    """The chip's number stands in the lowest byte of the file's flags, in the next one since CUDA 13."""
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return HOPPER in (flags & 0xFF, flags >> 8 & 0xFF)


def _read(low: int, high: int) -> set[int]:
    """The registers that a UIADD3 adds."""
    second = {low >> 32 & 0xFF} if low & 0xFFF == SUMS[0] else set()
    return ({low >> 24 & 0xFF, high & 0xFF} | second) - {ZERO}


def _instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """The lower and the upper half of each, from all sections of the file that run."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for header in range(table, table + size * count, size):
        kind, flags, _, start, length = struct.unpack_from("<IQQQQ", cubin, header + 4)
        if kind == PROGRAM and flags & EXECUTABLE:
            halves = struct.unpack_from(f"<{length // 8}Q", cubin, start)
            yield from zip(halves[::2], halves[1::2], strict=True)
