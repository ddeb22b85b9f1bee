"""Writing the files of artefacts in a temporary folder; `commit` renames them when they are complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.artefacts import ArraySpec, Artefact
from megablend.megatron.cache_builder.commit import MAX_BUFFERS, Commits, StoppedError, write_all

_BUFFER_BYTES = 1 << 20
"""Rows are collected up to this size before they are written: a system call for each small array costs more than the array."""


class ArrayFile:
    """A `.npy` file that is written from front to back."""

    def __init__(self, fd: int, spec: ArraySpec, stop: threading.Event) -> None:
        self.dtype = np.dtype(spec.dtype)
        self._fd, self._left, self._stop = fd, spec.nbytes, stop
        self._buffers: list[Any] = [spec.header]
        self._buffered = 0

    def append(self, rows: Array) -> None:
        """Write the next rows, which must have the array's type and are not changed afterwards. Raises: StoppedError."""
        if self._stop.is_set():
            raise StoppedError
        assert rows.dtype == self.dtype
        if rows.nbytes:
            self._left -= rows.nbytes
            self._buffered += rows.nbytes
            self._buffers.append(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        if self._buffered >= _BUFFER_BYTES or len(self._buffers) == MAX_BUFFERS:
            self._write()

    def extend(self, parts: Iterable[Array]) -> None:
        """Write the remaining rows, part by part."""
        for rows in parts:
            self.append(rows)

    def close(self) -> None:
        """Write what is left; the array must be complete."""
        assert self._left == 0, f"{self._left} bytes of the array are missing"
        self._write()

    def _write(self) -> None:
        write_all(self._fd, self._buffers)
        self._buffers, self._buffered = [], 0


class ArtefactWriter:
    """Writes one artefact; a context that hands it to `commits` when it ends well, and leaves nothing otherwise.

    Once the build has stopped nothing more is written: StoppedError is raised.
    """

    def __init__(self, artefact: Artefact, commits: Commits) -> None:
        self._artefact, self._commits = artefact, commits
        self._written: set[str] = set()

    def __enter__(self) -> ArtefactWriter:
        return self

    @contextmanager
    def array(self, name: str) -> Iterator[ArrayFile]:
        """Open the file of an array; it is complete when the context ends."""
        spec = self._spec(name)
        with self._new_file(spec) as fd:
            array = ArrayFile(fd, spec, self._commits.stop)
            yield array
            array.close()

    def write(self, name: str, array: Array) -> None:
        """Write an array at once."""
        with self.array(name) as file:
            file.append(array)

    def path(self, name: str) -> Path:
        """Where an array's file is until it is committed."""
        return self._commits.folder / self._artefact.file_name(name)

    def reserve(self, name: str) -> None:
        """Make the whole file of an array, all zeros, for others to write into."""
        spec = self._spec(name)
        with self._new_file(spec) as fd:
            header = spec.header
            write_all(fd, [header])
            os.truncate(fd, len(header) + spec.nbytes)

    def _spec(self, name: str) -> ArraySpec:
        (spec,) = (spec for spec in self._artefact.arrays if spec.name == name)
        return spec

    @contextmanager
    def _new_file(self, spec: ArraySpec) -> Iterator[int]:
        name = self._artefact.file_name(spec.name)
        self._written.add(spec.name)
        with self._commits.new_file(name) as fd:
            yield fd

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._commit()
        else:
            self._commits.discard(self._artefact)

    def _commit(self) -> None:
        assert self._written == {array.name for array in self._artefact.arrays}
        with self._commits.new_file(self._artefact.description_name) as fd:
            write_all(fd, [self._artefact.description.encode()])
        self._commits.add(self._artefact)
