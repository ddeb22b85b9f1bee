"""How far a build has come, on a terminal and in a log."""

import io
import logging
import sys

import pytest

from megablend.cli.main import _TO_STDERR
from megablend.cli.progress import progress_on
from megablend.index.build import Progress

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
    assert "500/1000 files" in stream.getvalue()
    assert "2 of 4 MB" in stream.getvalue()


def test_a_log_has_a_line_at_the_end() -> None:
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert progress is not None
        progress(HALF)
        progress(Progress(files=1000, num_files=1000, bytes=4_000_000, num_bytes=4_000_000))
    assert stream.getvalue() == "megablend: indexed 1,000 of 1,000 files, 4 of 4 MB\n"


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
