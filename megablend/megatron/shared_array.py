"""A `.npy` file of int32 that all ranks of a launch write their parts of; it takes its name when all have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megablend.formats.base import Array
from megablend.index.disk import flush, open_part, remove_leftovers, temporary_beside, writing
from megablend.index.launch import Launch
from megablend.index.lock import build_lock
from megablend.megatron.artefacts import ArraySpec


@contextlib.contextmanager
def shared_array(path: Path, count: int, launch: Launch) -> Iterator[Callable[[int, Array], None]]:
    """Open the file for this rank's parts: `write(first, values)`, each entry by one rank. Called by all ranks.

    Raises: CacheError where it cannot be written, or another build holds its folder.
    """
    with contextlib.ExitStack() as stack, writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if launch.rank == 0:
            stack.enter_context(build_lock(path.parent))
            remove_leftovers(path.parent)
        beside = launch.bcast(temporary_beside(path))
        header = ArraySpec(name=path.stem, shape=(count,), dtype="int32").header()
        try:
            if launch.rank == 0:
                with beside.open("xb") as empty:
                    empty.write(header)
                    empty.truncate(len(header) + 4 * count)
            launch.barrier()
            with open_part(beside) as file:

                def write(first: int, values: Array) -> None:
                    file.seek(len(header) + 4 * first)
                    file.write(np.ascontiguousarray(values, "<i4").data)

                yield write
                flush(file)
            launch.barrier()
            if launch.rank == 0:
                beside.replace(path)
            launch.barrier()
        finally:
            if launch.rank == 0:
                beside.unlink(missing_ok=True)
