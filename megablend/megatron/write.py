"""Writing artefacts: arrays first, each beside its final name and renamed whole, the description last.

Megatron takes an artefact for present when its files exist, so a description must not appear before its arrays are
whole: a build that is killed is then never taken for a hit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megablend.formats.base import Array
from megablend.index.disk import flush, temporary_beside, write_flushed, writing
from megablend.megatron.artefacts import ArraySpec, Artefact

WORK_FOLDER = ".megablend"
"""Inside the cache, on the same file system: the build lock, and files that are not whole yet."""


class StoppedError(Exception):
    """The build has failed elsewhere; whatever is under way ends, and is not heard of."""


class ArrayFile:
    """A `.npy` file that is written from front to back."""

    def __init__(self, file: IO[bytes], spec: ArraySpec, stop: threading.Event) -> None:
        self.dtype = np.dtype(spec.dtype)
        self._file, self._left, self._stop = file, spec.nbytes, stop
        file.write(spec.header())

    def append(self, rows: Array) -> None:
        """Write the next rows; their type must be the array's. Raises: StoppedError."""
        if self._stop.is_set():
            raise StoppedError
        assert rows.dtype == self.dtype
        self._left -= rows.nbytes
        self._file.write(np.ascontiguousarray(rows).data)

    def extend(self, parts: Iterable[Array]) -> None:
        """Write all that follows, part by part."""
        for rows in parts:
            self.append(rows)

    def close(self) -> None:
        """See that the array is complete, and on the disk."""
        assert self._left == 0, f"{self._left} bytes of the array are missing"
        flush(self._file)


class ArtefactWriter:
    """Writes one artefact; a context that commits it when it ends well, and leaves nothing otherwise.

    Once `stop` is set nothing more is written or committed: StoppedError is raised.
    """

    def __init__(self, artefact: Artefact, cache: Path, stop: threading.Event) -> None:
        self._artefact, self._cache, self._stop = artefact, cache, stop
        self._written: dict[str, Path] = {}

    def __enter__(self) -> ArtefactWriter:
        return self

    @contextmanager
    def array(self, name: str) -> Iterator[ArrayFile]:
        """Open the file of an array; it is whole on the disk when the context ends."""
        spec, path = self._spec(name), self._artefact.path(self._cache, name)
        with writing(path), self._beside(name).open("xb") as file:
            array = ArrayFile(file, spec, self._stop)
            yield array
            array.close()

    def write(self, name: str, array: Array) -> Path:
        """Write an array at once; where it lies until it is committed."""
        with self.array(name) as file:
            file.append(array)
        return self._written[name]

    def reserve(self, name: str) -> Path:
        """Make the whole file of an array, all zeros, for others to write into; where it lies until it is committed."""
        spec = self._spec(name)
        with writing(self._artefact.path(self._cache, name)), self._beside(name).open("xb") as file:
            header = spec.header()
            file.write(header)
            file.truncate(len(header) + spec.nbytes)
            flush(file)
        return self._written[name]

    def _spec(self, name: str) -> ArraySpec:
        (spec,) = (spec for spec in self._artefact.arrays if spec.name == name)
        return spec

    def _beside(self, name: str) -> Path:
        beside = temporary_beside(self._cache / WORK_FOLDER / self._artefact.path(self._cache, name).name)
        self._written[name] = beside
        return beside

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for beside in self._written.values():
                beside.unlink(missing_ok=True)

    def _commit(self) -> None:
        if self._stop.is_set():
            raise StoppedError
        description = self._artefact.description_path(self._cache)
        assert set(self._written) == {array.name for array in self._artefact.arrays}
        with writing(description):
            # A description of damaged arrays must not stand while they are replaced one by one.
            description.unlink(missing_ok=True)
            for name, beside in self._written.items():
                beside.replace(self._artefact.path(self._cache, name))
            beside = temporary_beside(self._cache / WORK_FOLDER / description.name)
            write_flushed(beside, [self._artefact.description.encode()])
            beside.replace(description)
