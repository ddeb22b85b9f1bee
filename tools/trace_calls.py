"""Through how much of the package an operation goes: python tools/trace_calls.py [--names OPERATION]

For each operation on a small run (two Parquet files, one process) the table has the functions of megablend that are entered
(generators among them, but no comprehensions, which are functions only before Python 3.12), the files and the rooms (top folders)
that they are in, and the deepest stack of their frames. Importing is not counted: each operation is done once on another run
before it is traced. `--names` lists the functions of one operation, by file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import megablend

PACKAGE = str(Path(megablend.__file__).parent) + "/"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


class Trace(NamedTuple):
    """What was entered while an operation ran."""

    functions: dict[CodeType, str]
    """In the order in which they were entered first, each with the name of the thread that did."""
    depths: list[int]

    @property
    def files(self) -> set[str]:
        """Paths below the package."""
        return {code.co_filename.removeprefix(PACKAGE) for code in self.functions}

    @property
    def rooms(self) -> set[str]:
        """Top folders of the package; modules at its top are rooms of their own."""
        return {file.partition("/")[0] for file in self.files}


@contextmanager
def tracing() -> Iterator[Trace]:
    """Trace this thread and those that it starts."""
    trace = Trace({}, [0])
    local = threading.local()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        depth = getattr(local, "depth", 0)
        if event == "call":
            local.depth = depth + 1
            trace.depths[0] = max(trace.depths[0], depth + 1)
            trace.functions.setdefault(code, threading.current_thread().name)
        elif event == "return":
            local.depth = max(0, depth - 1)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def make_config(folder: Path) -> dict[str, Any]:
    """A run of two sources, of one file each, without a cache; EODs are appended to the second."""
    sources = []
    for number, name in enumerate(("a", "b")):
        path = folder / f"{name}.parquet"
        documents = [
            [1 + (number * 7919 + i * 31 + j) % 1000 for j in range(5 + i % 50)] for i in range(600)
        ]
        pq.write_table(
            pa.table({"ids": pa.array(documents, pa.list_(pa.int32()))}), path, data_page_size=800
        )
        sources.append({"name": name, "path": str(path), "column": "ids", "weight": 1 + number})
    sources[1]["append_eod"] = 0
    settings = {
        "sequence_length": 16,
        "samples": 800,
        "lanes": 4,
        "shuffle_window": 8,
        "split": "90,10,0",
    }
    return {"cache": str(folder / "cache"), "sources": sources, **settings}


def amended(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a stage that changes the shares."""
    stages = [{"samples": config["samples"]}, {"sources": {"a": {"weight": 3}}}]
    return config | {"samples": 2 * config["samples"], "stages": stages}


def operate(folder: Path, run: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Do all operations on a new run, each by `run`, with its name."""
    config = make_config(folder)
    run("build", lambda: megablend.build(config))
    dataset = run("open", lambda: megablend.open(config))
    run("dataset[0]", lambda: dataset[0])
    run("dataset[700]", lambda: dataset[700])
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    batches = iter(loader)
    run("first batch", lambda: next(batches))
    for _ in range(21):
        next(batches)
    run("23rd batch", lambda: next(batches))
    loader.close()
    run("show", lambda: megablend.show(config, 3))
    run("describe", lambda: megablend.describe(config))
    run("amend", lambda: megablend.amend(amended(config), at=320))
    run("open, amended", lambda: megablend.open(amended(config)))


def main() -> None:
    """Print the table, or the functions of one operation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", metavar="OPERATION")
    wanted = parser.parse_args().names
    traces: dict[str, Trace] = {}

    def trace(name: str, operation: Callable[[], Any]) -> Any:
        with tracing() as traces[name]:
            return operation()

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        operate(Path(first), lambda _, operation: operation())
        operate(Path(second), trace)
    if wanted is not None:
        if wanted not in traces:
            parser.error(f"found operation {wanted!r}, expected one of {', '.join(traces)}")
        for code in sorted(
            traces[wanted].functions, key=lambda code: (code.co_filename, code.co_firstlineno)
        ):
            print(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_name}")
        return
    print(f"{'operation':16}{'functions':>10}{'files':>8}{'rooms':>8}{'deepest':>9}")
    for name, found in traces.items():
        counts = (len(found.functions), len(found.files), len(found.rooms), found.depths[0])
        print(f"{name:16}{counts[0]:10,}{counts[1]:8,}{counts[2]:8,}{counts[3]:9,}")


if __name__ == "__main__":
    main()
