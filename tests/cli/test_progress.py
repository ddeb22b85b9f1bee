"""How far a build has come, on a terminal and in a log."""

import io
import logging
import sys

import pytest

from megablend.cli.main import _TO_STDERR
from megablend.cli.progress import format_seconds, progress_on
from megablend.index.build.build import Progress

HALF = Progress(files=500, num_files=1000, bytes=2_000_000, num_bytes=4_000_000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_counts_files_and_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with progress_on(stream) as progress:
        assert progress is not None
        progress(HALF)
    assert "500 of 1,000 files, 2 of 4 MB" in stream.getvalue()


def test_a_log_has_a_line_at_the_end() -> None:
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert progress is not None
        progress(HALF)
        progress(Progress(files=1000, num_files=1000, bytes=4_000_000, num_bytes=4_000_000))
    assert stream.getvalue() == "megablend: indexed 1,000 of 1,000 files, 4 of 4 MB\n"


def test_the_time_left_is_told_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the speed since the first report: what was reused before it took no time."""
    clock = iter([0.0, 10.0, 10.0, 20.0, 20.0, 330.0, 330.0])
    monkeypatch.setattr("megablend.cli.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert progress is not None
        for done in (2_000_000, 2_100_000, 3_000_000):
            progress(Progress(files=500, num_files=1000, bytes=done, num_bytes=4_000_000))
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith("500 of 1,000 files, 2 of 4 MB")
    assert second.endswith("about 3 min 10 s left")
    assert third.endswith("about 5 min 20 s left")


def test_lengths_of_time_are_told_in_two_units() -> None:
    assert [format_seconds(seconds) for seconds in (0.4, 59.7, 61, 3599, 3600, 90_061)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "59 min 59 s",
        "1 h 0 min",
        "25 h 1 min",
    ]


def test_quiet_commands_tell_no_progress() -> None:
    log = logging.getLogger("megablend")
    log.setLevel(logging.ERROR)
    try:
        with progress_on(Terminal()) as progress:
            assert progress is None
    finally:
        log.setLevel(logging.NOTSET)


def test_other_ranks_say_nothing() -> None:
    with progress_on(Terminal(), quiet=True) as progress:
        assert progress is None


def test_the_work_continues_where_no_line_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115  # closing it fails too
    with progress_on(stream) as progress:
        assert progress is not None
        progress(Progress(files=1, num_files=1, bytes=4, num_bytes=4))
        progress(Progress(files=1, num_files=1, bytes=4, num_bytes=4, waiting_for="host a, pid 1"))
    monkeypatch.setattr(sys, "stderr", stream)
    _TO_STDERR.emit(logging.LogRecord("megablend", logging.WARNING, "", 0, "a warning", None, None))
    with pytest.raises(OSError, match="No space left on device"):
        stream.close()
