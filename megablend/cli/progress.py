"""Show the progress of a command on stderr: as a bar on a terminal, as a plain line every few
seconds in a log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from megablend.cli.output import printable
from megablend.index.build.build import Progress

LOG_SECONDS = 5.0
"""The time in seconds between two lines in a log."""


@contextlib.contextmanager
def progress_on(
    stream: TextIO, *, quiet: bool = False, doing: str = "indexing", done: str = "indexed"
) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function to call with each Progress; None if nothing is shown, because this rank
    is `quiet` or only errors are logged.

    Args:
        doing, done: the verb of the command, for the bar and for the lines of a log.
    """
    if quiet or not logging.getLogger("megablend").isEnabledFor(logging.WARNING):
        yield None
    elif stream.isatty():
        with _bar(stream, doing) as bar:
            yield bar
    else:
        yield _Lines(stream, done)


@contextlib.contextmanager
def _bar(stream: TextIO, doing: str) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on a terminal. Yields: the function that updates it."""
    describe = _Describer()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[status]}"),
    )
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(doing, total=None, status="")

        def update(progress: Progress) -> None:
            if progress.waiting_for or progress.message:
                bar.console.print(_write_notice(progress), markup=False, highlight=False)
                return
            bar.update(
                task, completed=progress.files, total=progress.num_files, status=describe(progress)
            )

        yield update


class _Lines:
    """Prints a line every LOG_SECONDS, and one at the end."""

    def __init__(self, stream: TextIO, done: str) -> None:
        self.stream = stream
        self.done = done
        self._describe = _Describer()
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, progress: Progress) -> None:
        if progress.waiting_for or progress.message:
            log_line(_write_notice(progress), self.stream)
            return
        status = self._describe(progress)
        now = time.monotonic()
        if now >= self._next or progress.files >= progress.num_files:
            self._next = now + LOG_SECONDS
            log_line(f"megablend: {self.done} {status}", self.stream)


def log_line(text: str, stream: TextIO) -> None:
    """Print a line. If this fails, for example because the log's disk is full, the work
    continues."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def _write_notice(progress: Progress) -> str:
    """Return the text of a Progress that has a notice instead of numbers."""
    if progress.message:
        return printable(f"megablend: {progress.message}")
    return printable(f"megablend: waiting for another build of this cache ({progress.waiting_for})")


class _Describer:
    """Describes a Progress: files, megabytes, and the remaining time at the speed since the first
    call. Reused files were counted before that call, so they do not add to the speed."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        """The time of the first call, and the bytes (or files) that were done by then."""
        self._is_text = False

    def __call__(self, progress: Progress) -> str:
        is_text = bool(progress.tokenised)
        if is_text != self._is_text:  # tokenising and indexing differ in speed
            self._is_text = is_text
            self._first = None
        parts = [f"{progress.files:,} of {progress.num_files:,} files"]
        if is_text:
            parts = [f"(tokenising) {progress.tokenised}"]
        done = progress.files
        total = progress.num_files
        if progress.num_bytes:
            done = progress.bytes
            total = progress.num_bytes
            parts.append(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        started, done_before = self._first
        if done_before < done < total:
            seconds_left = (now - started) * (total - done) / (done - done_before)
            parts.append(f"about {format_seconds(seconds_left)} left")
        return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a length of time as text, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
