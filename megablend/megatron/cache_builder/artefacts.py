"""Artefacts: the units that a cache consists of. An artefact is a description (a text file) and the
arrays that belong to it. This module names their files, and checks whether they are complete.

Files in a cache are used only after their text, shapes, types and sizes have been checked. Megatron
writes the description first, and then writes the arrays directly to their final files. So a build
of Megatron's that was killed may leave arrays that are missing or incomplete.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megablend.lazy import cached_property
from megablend.system.after_fork import ProcessLock

_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX_BYTES = len(_MAGIC) + 2
_ALIGNMENT = 64
_DESCRIPTORS = {name: np.dtype(name).str for name in ("int16", "int32", "uint32", "int64")}
_ITEM_BYTES = {name: np.dtype(name).itemsize for name in _DESCRIPTORS}
_DIGITS = 21
"""Number of characters that numpy reserves in a header for the first dimension, so that it can grow
in place."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """The name, shape and dtype of an array of an artefact."""

    name: str
    """Name of the array: document_index, sample_index, ..."""
    shape: tuple[int, ...]
    dtype: str
    """int16, int32, uint32 or int64."""

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of the array, without the file's header."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @cached_property
    def header(self) -> bytes:
        """The bytes that numpy.save writes before the array. (This is ten times as fast as numpy's
        own code.)

        Source: numpy.lib.format, version 1.0.
        """
        text = f"{{'descr': '{_DESCRIPTORS[self.dtype]}', 'fortran_order': False, 'shape': {self.shape}, }}"
        text += " " * (_DIGITS - len(str(self.shape[0])))
        padding = _ALIGNMENT - (_PREFIX_BYTES + len(text) + 1) % _ALIGNMENT
        padded = f"{text}{' ' * padding}\n".encode()
        return _MAGIC + struct.pack("<H", len(padded)) + padded


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A description and its arrays, which are the indices of a dataset or of a blend."""

    base: str
    """The common prefix of the file names: <md5>-<class>-<split>."""
    description: str
    arrays: tuple[ArraySpec, ...]

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of all arrays. (The description is small in comparison.)"""
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def file_names(self) -> tuple[str, ...]:
        """The names of all files, the description first."""
        return (self.description_name, *(self.file_name(array.name) for array in self.arrays))

    @property
    def description_name(self) -> str:
        """The name of the file of the description."""
        return f"{self.base}-description.txt"

    def file_name(self, array: str) -> str:
        """Return the name of an array's file."""
        return f"{self.base}-{array}.npy"

    def path(self, cache: Path, array: str) -> Path:
        """Return the path of an array's file."""
        return cache / self.file_name(array)

    def description_path(self, cache: Path) -> Path:
        """Return the path of the file of the description."""
        return cache / self.description_name


def names_in(cache: Path) -> frozenset[str] | None:
    """Return the names of the files in a cache; None if they cannot be listed."""
    try:
        # Takes a third of the time of Path.iterdir
        return frozenset(os.listdir(cache))  # noqa: PTH208
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return None


def problem_with(
    artefact: Artefact, cache: Path, names: frozenset[str] | None = None
) -> str | None:
    """Return the reason why the cached files of an artefact cannot be used; "" if the description
    is missing, None if the files can be used.

    Args:
        names: the result of `names_in`, so that missing files need not be looked up one by one.
    """
    if names is not None and artefact.description_name not in names:
        return ""
    text = artefact.description.encode()
    # Nearly all artefacts are complete, which can be determined without parsing the files
    is_complete = _has_content(f"{cache}/{artefact.description_name}", text, len(text)) and all(
        _has_content(
            f"{cache}/{artefact.file_name(array.name)}",
            array.header,
            len(array.header) + array.nbytes,
        )
        for array in artefact.arrays
    )
    return None if is_complete else _find_problem(artefact, cache)


def _has_content(path: str, beginning: bytes, size: int) -> bool:
    """Return whether a file can be read, has `size` bytes, and starts with the given bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_size == size and os.pread(fd, len(beginning), 0) == beginning
    except OSError:
        return False
    finally:
        os.close(fd)


def _find_problem(artefact: Artefact, cache: Path) -> str | None:
    """Parse the files of an artefact, and return the same result as `problem_with`. Valid files are
    accepted even if they differ byte for byte from what megablend and numpy write."""
    path = artefact.description_path(cache)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if text != artefact.description:
        return f"{path}: the text does not match the hash in the file's name"
    for array in artefact.arrays:
        description = _describe_file(artefact.path(cache, array.name))
        expected = _describe(array.shape, array.dtype, array.nbytes)
        if description != expected:
            return f"{artefact.path(cache, array.name)}: {description}; expected {expected}"
    return None


_parsing = ProcessLock()
"""A lock that is held while a header is parsed. Numpy parses headers as Python code, and Python
3.11 may raise SystemError if several threads parse at the same time."""


def read_header(file: IO[bytes]) -> tuple[tuple[int, int], tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a `.npy` file that is open at its start.

    Returns: the version of the format, the shape, whether the array is in Fortran order, and the
        dtype. Only the version is meaningful if it is not (1, 0).
    Raises: ValueError if the file is not a `.npy` file.
    """
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        return version, (), False, np.dtype(np.void)
    try:
        with _parsing.lock:
            return version, *np.lib.format.read_array_header_1_0(file)
    except (SyntaxError, tokenize.TokenError) as error:
        # Raised for a damaged header, which numpy parses as Python
        raise ValueError(f"its header cannot be read: {error}") from error


def _describe_file(path: Path) -> str:
    """Return a description of the content of an array's file, for messages. It is based on the
    file's header and size."""
    try:
        with path.open("rb") as file:
            version, shape, fortran_order, dtype = read_header(file)
            if version != (1, 0):
                return "has an unsupported .npy version"
            nbytes = path.stat().st_size - file.tell()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "not a .npy file"
    return _describe(shape, f"Fortran {dtype}" if fortran_order else str(dtype), nbytes)


def _describe(shape: tuple[int, ...], dtype: str, nbytes: int) -> str:
    return f"contains {dtype} {list(shape)} in {nbytes:,} bytes"
