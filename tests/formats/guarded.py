"""Arrow buffers between bytes that nobody may touch: going beyond an end, or reading what was let go, ends the process."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import pyarrow as pa

PAGE_BYTES = 4096
READ_WRITE = 3
PRIVATE_ANONYMOUS = 0x22
LIBC = ctypes.CDLL(None, use_errno=True)
ADDRESS = ctypes.c_void_p
SIZE = ctypes.c_size_t
NUMBER = ctypes.c_int
LIBC.mmap.restype = ADDRESS
LIBC.mmap.argtypes = [ADDRESS, SIZE, NUMBER, NUMBER, NUMBER, ctypes.c_long]
LIBC.munmap.argtypes = [ADDRESS, SIZE]
LIBC.mprotect.argtypes = [ADDRESS, SIZE, NUMBER]


def guarded(size: int) -> pa.Buffer:
    """A buffer of `size` bytes that ends where nothing may be read or written; unmapped when the last one lets go."""
    inside = -(-size // PAGE_BYTES) * PAGE_BYTES
    mapped = inside + 2 * PAGE_BYTES
    address = LIBC.mmap(None, mapped, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
    if address == ADDRESS(-1).value:
        raise MemoryError(f"{size} bytes")
    for edge in (address, address + PAGE_BYTES + inside):
        assert LIBC.mprotect(edge, PAGE_BYTES, 0) == 0
    array: Any = (ctypes.c_uint8 * size).from_address(address + PAGE_BYTES + inside - size)
    weakref.finalize(array, LIBC.munmap, address, mapped).atexit = False
    return pa.py_buffer(array)


def guard() -> None:
    """From now on all that formats allocate through Arrow is such a buffer."""
    vars(pa)["allocate_buffer"] = guarded
