"""A `.npy` file of int32 that the ranks of a launch write together. Each rank writes a part of it.
The file gets its final name when all parts are written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megablend.distributed.base import Communicator
from megablend.formats.base import Array
from megablend.megatron.cache_builder.artefacts import ArraySpec
from megablend.system.atomic_write import (
    flush,
    open_part,
    remove_leftovers,
    temp_sibling,
    translate_os_errors,
)
from megablend.system.build_lock import build_lock


@contextlib.contextmanager
def shared_array(
    path: Path, count: int, launch: Communicator
) -> Iterator[Callable[[int, Array], None]]:
    """Create a file for an array of `count` entries. All ranks must call this function. The context
    manager yields a function `write(first, values)`, with which a rank writes its entries. Each
    entry must be written by exactly one rank.

    Raises: CacheError if the file cannot be written, or another build holds its folder.
    """
    with contextlib.ExitStack() as stack, translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if launch.rank == 0:
            stack.enter_context(build_lock(path.parent))
            remove_leftovers(path.parent)
        temporary = launch.bcast(temp_sibling(path))
        header = ArraySpec(name=path.stem, shape=(count,), dtype="int32").header
        try:
            if launch.rank == 0:
                with temporary.open("xb") as empty:
                    empty.write(header)
                    empty.truncate(len(header) + 4 * count)
            launch.barrier()
            with open_part(temporary) as file:
                launch.barrier()  # a rank that fails removes the file, which the others must have open

                def write(first: int, values: Array) -> None:
                    file.seek(len(header) + 4 * first)
                    file.write(np.ascontiguousarray(values, "<i4").data)

                yield write
                flush(file)
            launch.barrier()
            if launch.rank == 0:
                temporary.replace(path)
            launch.barrier()
        finally:
            if launch.rank == 0:
                temporary.unlink(missing_ok=True)
