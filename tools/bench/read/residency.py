"""Which part of files lies in the page cache, and how to bring it in or drop it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def resident(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in memory, by mincore(2); 0 where the files hold nothing."""
    found = pages = 0
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                continue
            with mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
                view = np.frombuffer(mapped, np.uint8)
                address = view.ctypes.data
                del view
                if _LIBC.mincore(address, size, states.ctypes.data):
                    raise OSError(ctypes.get_errno(), f"{path}: mincore failed")
                found += int((states & 1).sum())
                pages += len(states)
    return found / pages if pages else 0.0


def drop(paths: Iterable[Path]) -> None:
    """Write what is not written yet, and ask the kernel to forget the files' pages; pages that are mapped stay."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(paths: Iterable[Path]) -> None:
    """Read the files once."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
