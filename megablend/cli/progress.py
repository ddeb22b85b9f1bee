"""The progress of a build: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from megablend.cli.lines import printable
from megablend.index.build import Progress

LOG_SECONDS = 5.0


@contextlib.contextmanager
def progress_on(
    stream: TextIO, *, quiet: bool = False, doing: str = "indexing", done: str = "indexed"
) -> Iterator[Callable[[Progress], None] | None]:
    """A function to call with each Progress; None for a rank that reports nothing."""
    if quiet:
        yield None
    elif stream.isatty():
        with _bar(stream, doing) as bar:
            yield bar
    else:
        yield _Lines(stream, done)


@contextlib.contextmanager
def _bar(stream: TextIO, doing: str) -> Iterator[Callable[[Progress], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("files"),
        TextColumn("{task.fields[megabytes]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(doing, total=None, megabytes="")

        def update(progress: Progress) -> None:
            if progress.waiting_for:
                bar.console.print(_waiting(progress), markup=False, highlight=False)
                return
            bar.update(task, completed=progress.files, total=progress.num_files, megabytes=_megabytes(progress))

        yield update


class _Lines:
    """A line every LOG_SECONDS, and one at the end."""

    def __init__(self, stream: TextIO, done: str) -> None:
        self.stream, self.done = stream, done
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, progress: Progress) -> None:
        if progress.waiting_for:
            log_line(_waiting(progress), self.stream)
            return
        if time.monotonic() < self._next and progress.files < progress.num_files:
            return
        self._next = time.monotonic() + LOG_SECONDS
        files = f"{progress.files:,} of {progress.num_files:,} files"
        status = ", ".join(filter(None, [files, _megabytes(progress)]))
        log_line(f"megablend: {self.done} {status}", self.stream)


def log_line(text: str, stream: TextIO) -> None:
    """Print a line that nothing depends on: if that is not possible, because the log's disk is full, the work continues."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def _waiting(progress: Progress) -> str:
    return printable(f"megablend: waiting for another build of this cache ({progress.waiting_for})")


def _megabytes(progress: Progress) -> str:
    if not progress.num_bytes:
        return ""
    return f"{progress.bytes / 1e6:,.0f} of {progress.num_bytes / 1e6:,.0f} MB"
