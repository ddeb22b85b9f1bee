"""The start of a node process by the first process that needs one."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError
from megablend.mirror.node.frames import Kind, read_frame
from megablend.mirror.rank import connection, opening
from megablend.mirror.rank.connection import Connection
from megablend.storage.object_options import ObjectOptions
from tests.mirror.nodes import connect, find_node, kill_node, mirror, options_of


@pytest.mark.parametrize("is_taken", [False, True])
def test_nobody_else_can_put_a_file_where_starts_are_locked(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of all users anyone could make the lock's file, and so prevent all starts."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if is_taken:
        (temporary / f"megablend-{os.geteuid()}").write_text("another user's")
    with mirror(tmp_path / "m", "s3://bucket") as settings:
        assert connect(settings).command(Kind.STATUS)["files"] == 0
    made = [each for each in temporary.iterdir() if each.is_dir()]
    assert len(made) == 1
    assert stat.S_IMODE(made[0].stat().st_mode) == 0o700
    others = {each.name for each in temporary.iterdir()} - {made[0].name}
    assert others == ({f"megablend-{os.geteuid()}"} if is_taken else set())


def test_a_start_that_fails_is_said_where_sigchld_is_ignored(tmp_path: Path) -> None:
    """A process may inherit this from its parent; exit codes of its own processes are then lost."""
    (tmp_path / "m").touch()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ConfigError, match="m: cannot be used for a mirror: File exists"):
            connect({"folder": str(tmp_path / "m"), "prefixes": ["s3://bucket/"]}).command(
                Kind.STATUS
            )
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_kill_that_was_not_noticed_yet_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for answers comes to know of it after the next request was sent."""
    is_over = threading.Event()
    read = read_frame

    def read_late(*arguments: Any) -> tuple[int, int, bytes]:
        try:
            return read(*arguments)
        except EOFError:
            if threading.current_thread().name == "megablend-mirror":
                is_over.wait(500)
            raise

    monkeypatch.setattr(connection, "read_frame", read_late)
    with mirror(tmp_path / "m", "s3://bucket") as settings:
        connected = connect(settings)
        before = connected.command(Kind.STATUS)["pid"]
        kill_node(tmp_path / "m")
        answer = connected.request(Kind.STATUS, b"").result(500)
        assert str(before).encode() not in answer
        is_over.set()


def test_an_answer_that_comes_as_the_connection_is_lost_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the unanswered requests fail, one after another, the second one's answer is taken."""
    is_failing = threading.Event()
    is_answered = threading.Event()
    frames = list[tuple[int, int, bytes]]()
    read = read_frame

    def read_second(*arguments: Any) -> tuple[int, int, bytes]:
        if threading.current_thread().name != "megablend-mirror":
            return read(*arguments)
        while len(frames) < 3:
            frames.append(read(*arguments))
        is_failing.wait(60)
        if len(frames) == 3:
            frames.append(frames[1])
            return frames[1]
        raise EOFError

    def wait_for_answer(_: object) -> None:
        is_failing.set()
        is_answered.wait(60)

    with mirror(tmp_path / "m", "s3://bucket") as settings:
        connect(settings).command(Kind.STATUS)
        monkeypatch.setattr(connection, "read_frame", read_second)
        connected = connect(settings)
        answers = [connected.request(Kind.CHECK, b"") for _ in range(3)]
        answers[0].add_done_callback(wait_for_answer)
        answers[1].add_done_callback(lambda _: is_answered.set())
        connected.close()
        assert wait(answers, timeout=60).not_done == set()


def test_a_process_of_another_version_can_stop_a_node_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the message says that refuses it as a reader."""
    with mirror(tmp_path / "m", "s3://bucket") as settings:
        reader = connect(settings)
        reader.command(Kind.STATUS)
        monkeypatch.setattr(opening, "PROTOCOL", 0)
        with pytest.raises(ConfigError, match=r"this process speaks 0\n.*`megablend node stop`"):
            connect(settings).command(Kind.STATUS)
        other = Connection(options_of(settings), ObjectOptions(), None, starts=False)
        other.command(Kind.STOP)
        end = time.monotonic() + 60
        while find_node(tmp_path / "m") is not None:
            assert time.monotonic() < end
            time.sleep(0.02)
