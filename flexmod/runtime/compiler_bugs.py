"""Detects wrong and slow machine code.

The section "Compiler bugs" of docs/archive/design_choices.md lists the bugs that flexmod works around. The
workarounds that read compiled code stand here.

ptxas reports in its log (C7505 to C7519) why it made a Hopper kernel slower than its text, but Triton keeps
no log. The machine code shows it too:

- Matrix instructions run asynchronously until a wait; the last one of each group closes the group. If ptxas
  serializes them, it does so in the whole function: each instruction is its own group.
- Warps pass registers to others by USETMAXREG. If ptxas ignores `setmaxnreg`, there is no such instruction.

An instruction has 16 bytes. Its lowest 12 bits are the opcode; bits 84 to 86 of a matrix instruction are the
group that it closes, 7 for none. Tests compare this module with `cuobjdump -sass` and with the log of ptxas.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flexmod.errors import MisaddressedProductsError, RoundedProductsError

if TYPE_CHECKING:
    from flexmod.codegen.kernels import Made


WrongProducts = type[RoundedProductsError] | type[MisaddressedProductsError]


def wrong(kernels: Made, asm: Mapping[str, Any]) -> WrongProducts | None:
    """Returns the error for a kernel that the compilers made wrong, or None."""
    if kernels.spec.exact and "kind::tf32" in asm.get("ptx", ""):
        return RoundedProductsError
    if misaddressed(asm.get("cubin", b"")):
        return MisaddressedProductsError
    return None


# UIADD3 with two registers, or a register and a number; bit 74: with a carry of another
_SUMS, _WITH_CARRY = (0x290, 0x890), 1 << 10
# what else writes uniform registers: ULDC, UMOV, USHF, ULEA, ULOP3, USGXT, USEL, UIMAD, UIADD3.64, S2UR, R2UR
_UNIFORM = {
    0xAB9, 0xC82, 0x882, 0x299, 0x899, 0x291, 0x891, 0x292, 0x892, 0x29A, 0x89A, 0x287, 0x887, 0x2A4, 0x8A4,
    0x2A5, 0x8A5, 0x297, 0x897, 0x9C3, 0x2CA, 0x3C2, *_SUMS,
}  # fmt: skip
_HOPPER = 90
_ZERO, _NO_PREDICATE = 63, 7  # the uniform register of zeros, the predicate that always holds


def misaddressed(cubin: bytes) -> bool:
    """Returns whether a Hopper kernel adds 64-bit addresses and reads both halves from one register.

    No source asks for that: ptxas has lost the address. A register with a write between the halves counts as
    two. Returns False if `cubin` is no ELF file, or not for Hopper.
    """
    if not _for_hopper(cubin):
        return False
    lower: dict[int, set[int]] = {}  # by the predicate of a carry: the registers that its sum was made of
    for low, high in instructions(cubin):
        operation, written = low & 0xFFF, low >> 16 & 0xFF
        if operation in _SUMS and high & _WITH_CARRY:
            carries = {high >> 23 & 7, high >> 13 & 7} - {_NO_PREDICATE}
            if any(lower.get(carry, set()) & _read(low, high) for carry in carries):
                return True
        if operation in _UNIFORM:
            lower = {carry: registers - {written} for carry, registers in lower.items()}
        if operation in _SUMS and not high & _WITH_CARRY:
            made = {high >> 17 & 7, high >> 20 & 7} - {_NO_PREDICATE}
            lower |= dict.fromkeys(made, _read(low, high))
    return False


def _for_hopper(cubin: bytes) -> bool:
    """Reads the chip's number from the lowest byte of an ELF file's flags, or the next byte since CUDA 13."""
    if not cubin.startswith(b"\x7fELF"):
        return False
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return _HOPPER in (flags & 0xFF, flags >> 8 & 0xFF)


def _read(low: int, high: int) -> set[int]:
    """Returns the registers that a UIADD3 adds."""
    second = {low >> 32 & 0xFF} if low & 0xFFF == _SUMS[0] else set()
    return ({low >> 24 & 0xFF, high & 0xFF} | second) - {_ZERO}


# HGMMA and QGMMA, each with its left operand in shared memory and in registers; USETMAXREG
MATRIX, REGISTERS = (0x9F0, 0xDF0, 0x9F3, 0xDF3), 0x9C8
NO_GROUP = 7
PROGRAM, EXECUTABLE = 1, 4  # in an ELF file: the kind of a section with contents, the flag of one that runs

SERIALIZED = "its matrix instructions are serialized"
EVEN_REGISTERS = "its warps hand over no registers"
MISADDRESSED = "ptxas has its matrix products read at wrong addresses"


def losses(ptx: str, cubin: bytes) -> tuple[str, ...]:
    """Returns which of SERIALIZED and EVEN_REGISTERS apply to a kernel.

    Returns nothing if `cubin` is no ELF file, or not for Hopper.
    """
    if not _for_hopper(cubin):
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


def size(cubin: bytes) -> int:
    """Returns the bytes of a kernel's instructions; 0 if `cubin` is no ELF file, or not for Hopper."""
    return sum(map(len, _programs(cubin))) if _for_hopper(cubin) else 0


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yields the lower and upper half of each instruction."""
    for program in _programs(cubin):
        yield from struct.iter_unpack("<QQ", program)


def _programs(cubin: bytes) -> Iterator[bytes]:
    """Yields the file's executable sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for header in range(table, table + size * count, size):
        kind, flags, _, start, length = struct.unpack_from("<IQQQQ", cubin, header + 4)
        if kind == PROGRAM and flags & EXECUTABLE:
            yield cubin[start : start + length]
