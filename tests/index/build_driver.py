"""Builds an index as a command does, under an MPI launcher: CACHE, then pairs NAME=PATTERN. Rank 0 prints the report.

MEGABLEND_TEST_SLOW=SECONDS slows the indexing of each file, or part of one; MEGABLEND_TEST_FAIL=RANK:data or RANK:bug makes it
fail on a rank; MEGABLEND_TEST_PIDS=FOLDER leaves each rank's process id in a file, and a name for each part that it indexed;
MEGABLEND_TEST_PART_BYTES=N is the size of the parts of large files; MEGABLEND_TEST_HANG=N makes a rank that has indexed N of them
leave a file `hangs-RANK` in that folder, and wait to be killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megablend.config.read_spec import ReadSpec
from megablend.distributed.base import Communicator
from megablend.distributed.launch import detect
from megablend.errors import CorruptFileError
from megablend.formats import FORMATS
from megablend.formats.base import FileIndex, Format
from megablend.formats.parquet import PARQUET
from megablend.index.build import file_parts as parts
from megablend.index.build.build import Progress, SourceSpec, build_index
from megablend.storage.base import Storage
from tests.storages import STORAGE


class Troubled:
    """A format that takes its time, and fails on one rank."""

    def __init__(self, kind: Format, launch: Communicator) -> None:
        self._kind = kind
        self._seconds = float(os.environ.get("MEGABLEND_TEST_SLOW", "0"))
        rank, _, self._failure = os.environ.get("MEGABLEND_TEST_FAIL", "-1:").partition(":")
        self._rank = launch.rank
        self._fails = launch.rank == int(rank)
        self._parts_left = int(os.environ.get("MEGABLEND_TEST_HANG", "-1"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        self._trouble(path)
        return self._kind.index(path, read, storage=storage)

    def _trouble(self, path: str) -> None:
        time.sleep(self._seconds)
        if self._fails and self._failure == "bug":
            raise ZeroDivisionError("nothing to divide by")
        if self._fails:
            raise CorruptFileError(path, "is truncated", offset=17)


class TroubledParts(Troubled):
    """The same for one that indexes parts of files."""

    def index_part(
        self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        self._trouble(path)
        if folder := os.environ.get("MEGABLEND_TEST_PIDS"):
            if self._parts_left == 0:
                Path(folder, f"hangs-{self._rank}").touch()
                time.sleep(600)
            self._parts_left -= 1
            Path(folder, f"part-{span[0]}-{self._rank}").touch()
        return PARQUET.index_part(path, read, span=span, storage=storage)


def main() -> None:
    launch = detect()
    if folder := os.environ.get("MEGABLEND_TEST_PIDS"):
        beside = Path(folder, f"{launch.rank}.part")
        beside.write_text(str(os.getpid()))
        beside.rename(Path(folder, str(launch.rank)))
    formats: dict[str, Any] = FORMATS  # these wrap formats instead of deriving from them
    formats["arrow"] = Troubled(FORMATS["arrow"], launch)
    formats["parquet"] = TroubledParts(PARQUET, launch)
    parts.PART_BYTES = int(os.environ.get("MEGABLEND_TEST_PART_BYTES", parts.PART_BYTES))
    sources = [
        SourceSpec(name=name, patterns=(pattern,), read=ReadSpec())
        for name, _, pattern in (argument.partition("=") for argument in sys.argv[2:])
    ]
    seen: list[Progress] = []
    report = build_index(sys.argv[1], sources, launch=launch, progress=seen.append, storage=STORAGE)
    reports = launch.gather(report)
    if launch.rank == 0:
        assert reports == [report] * launch.size
        last = dataclasses.asdict(seen[-1])
        print(
            json.dumps(
                {**dataclasses.asdict(report), "progress": last, "mpi": "mpi4py" in sys.modules}
            )
        )


if __name__ == "__main__":
    main()
