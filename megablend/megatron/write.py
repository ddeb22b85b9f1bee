"""Writing artefacts: arrays first, each beside its final name and renamed whole, the description last.

Megatron takes an artefact for present when its files exist, so a description must not appear before its arrays are
whole: a build that is killed is then never taken for a hit.
"""

from __future__ import annotations

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


class ArrayFile:
    """A `.npy` file that is written from front to back."""

    def __init__(self, file: IO[bytes], spec: ArraySpec) -> None:
        self.dtype = np.dtype(spec.dtype)
        self._file, self._left = file, spec.nbytes
        file.write(spec.header())

    def append(self, rows: Array) -> None:
        """Write the next rows; their type must be the array's."""
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
    """Writes one artefact; a context that commits it when it ends well, and leaves nothing otherwise."""

    def __init__(self, artefact: Artefact, cache: Path) -> None:
        self._artefact, self._cache = artefact, cache
        self._written: dict[str, Path] = {}

    def __enter__(self) -> ArtefactWriter:
        return self

    @contextmanager
    def array(self, name: str) -> Iterator[ArrayFile]:
        """Open the file of an array; it is whole on the disk when the context ends."""
        (spec,) = (spec for spec in self._artefact.arrays if spec.name == name)
        path = self._artefact.path(self._cache, name)
        beside = temporary_beside(self._cache / WORK_FOLDER / path.name)
        self._written[name] = beside
        with writing(path), beside.open("wb") as file:
            array = ArrayFile(file, spec)
            yield array
            array.close()

    def write(self, name: str, array: Array) -> None:
        """Write an array at once."""
        with self.array(name) as file:
            file.append(array)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._commit()
        else:
            for beside in self._written.values():
                beside.unlink(missing_ok=True)

    def _commit(self) -> None:
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
