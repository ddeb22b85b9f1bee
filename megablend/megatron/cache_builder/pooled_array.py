"""Read entries of `.npy` arrays through the process's pool of open files, so that an array needs no
memory map and no open file of its own."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from megablend.errors import CorruptFileError
from megablend.lazy import cached_property
from megablend.megatron.cache_builder.artefacts import read_header
from megablend.storage.base import Storage

if TYPE_CHECKING:
    from megablend.formats.base import Array

ENTRIES_START = 128
"""The offset in bytes at which the entries of a `.npy` file begin, for arrays of one or two
dimensions that numpy.save has written."""


class PooledArray(NDArrayOperatorsMixin):
    """A picklable array of one or two dimensions in a `.npy` file. The file is opened when an entry
    is first read.

    Arithmetic operators read the whole array and return a numpy array.

    Any access may raise MissingFileError, or CorruptFileError if the file does not contain such an
    array.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self._storage = storage

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array: (entries,) or (rows, columns)."""
        return self._header[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the entries."""
        return self._header[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: Any) -> Any:
        """Return entry i, or row i of a two-dimensional array. Slices and other kinds of indices
        work as in numpy. Raises: IndexError if i is out of range."""
        length = len(self)
        if isinstance(i, slice) and i.step in (None, 1):
            start, stop, _ = i.indices(length)
            return self._read(start, max(0, stop - start))
        if not isinstance(i, int | np.integer):
            return np.asarray(self)[i]
        number = int(i)
        if not -length <= number < length:
            raise IndexError(
                f"{self.path}: entry {number} is out of range: the array has {length} entries"
            )
        return self._read(number % length, 1)[0]

    def descriptor(self) -> AbstractContextManager[int]:
        """Return a context manager that yields a file descriptor. The entries begin at offset
        ENTRIES_START of the file. Raises: MissingFileError."""
        return self._storage.descriptor(self.path)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of numpy.ndarray (`max`, `tolist`, ...). This reads the whole
        array."""
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(np.asarray(self), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._read(0, len(self)).astype(dtype or self.dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **options: Any) -> Any:
        outputs = options.get("out", ())
        # Neither a method in place nor an output may change the file
        if method == "at" or any(isinstance(output, PooledArray) for output in outputs):
            return NotImplemented
        arrays = (
            np.asarray(value) if isinstance(value, PooledArray) else value for value in inputs
        )
        return getattr(ufunc, method)(*arrays, **options)

    def _read(self, first: int, count: int) -> Array:
        """Read `count` entries or rows, beginning with number `first`."""
        shape, dtype = self._header
        width = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        data = self._storage.read(self.path, ENTRIES_START + first * width, count * width)
        return np.frombuffer(data, dtype).reshape(count, *shape[1:])

    @cached_property
    def _header(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape and dtype, from the header of the file."""
        # The cache may have been rebuilt since the pool opened the file, which `stat` notices
        self._storage.stat(self.path)
        head = io.BytesIO(self._storage.read(self.path, 0, ENTRIES_START))
        try:
            version, shape, fortran_order, dtype = read_header(head)
        except ValueError as error:
            raise CorruptFileError(
                self.path, f"not a .npy file ({error}); remove it and rebuild the cache"
            ) from error
        if version != (1, 0) or fortran_order or head.tell() != ENTRIES_START:
            order = "Fortran" if fortran_order else "C"
            raise CorruptFileError(
                self.path,
                f"has version {version}, {order} order and {head.tell()} bytes of header; expected (1, 0), C order "
                f"and {ENTRIES_START}: remove it and rebuild the cache",
            )
        return shape, dtype
