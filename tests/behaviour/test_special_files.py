"""A pipe, a device, a folder, an empty or a huge file in place of any file of a cache: an error or a repair, never a wait."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import MegablendError
from tests.runs import documents, make_config, write_source

pytestmark = pytest.mark.long
MOST_SECONDS = 100.0


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket has at most 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


PUT: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "zeros": link_to_zeros,
    "socket": make_socket,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "huge": make_huge,
}


@contextmanager
def limit(what: str) -> Iterator[None]:
    """Fail what waits, rather than wait with it."""

    def stop(*_: object) -> None:
        raise AssertionError(f"{what} waited for {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("special")
    sources = [
        write_source(folder, i, "parquet", documents(i, 60, 40, 3)) | {"weight": 1}
        for i in range(2)
    ]
    given = make_config(folder, sources, samples=96, order="document", split="90,10,0")
    megablend.build(given)
    megablend.skip(given, 32, 48, batch_size=4)
    return given


def outcome(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call returns, or the message of its error."""
    try:
        return run(), None
    except MegablendError as error:
        return None, str(error)


def read_all(config: dict[str, Any]) -> list[list[int]]:
    dataset = megablend.open(config)
    return [dataset[k]["tokens"].tolist() for k in range(0, len(dataset), 7)]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        pytest.param(
            kind, files, marks=pytest.mark.slow if files == "all" and kind != "pipe" else ()
        )
        for kind in PUT
        for files in ("some", "all")
        if (kind, files) != ("pipe", "some")
    ],
)
def test_no_command_waits_and_no_sample_is_wrong(
    config: dict[str, Any], tmp_path: Path, kind: str, files: str
) -> None:
    """Every file is a pipe once, and a third of them each of the others."""
    expected = read_all(config)
    names = sorted(
        path.relative_to(config["cache"])
        for path in Path(config["cache"]).rglob("*")
        if path.is_file()
    )
    assert len(names) > 12
    step = 3 if files == "some" else 1
    for number, name in enumerate(names[list(PUT).index(kind) % step :: step]):
        cache = tmp_path / f"{number}"
        shutil.copytree(config["cache"], cache)
        (cache / name).unlink()
        PUT[kind](cache / name)
        given = config | {"cache": str(cache)}
        commands: dict[str, Callable[[], Any]] = {
            "open": partial(read_all, given),
            "verify": partial(megablend.verify, given["cache"]),
            "describe": partial(megablend.describe, given),
            "runs list": partial(megablend.list_runs, given["cache"]),
            "gc": partial(megablend.gc, given["cache"], dry_run=True),
            "build": partial(megablend.build, given),
            "open after build": partial(read_all, given),
        }
        for command, run in commands.items():
            with limit(f"{command} with a {kind} in place of {name}"):
                found, message = outcome(run)
            assert message is None or str(cache) in message, (command, name)
            if command.startswith("open") and message is None:
                assert found == expected, (command, name)
        shutil.rmtree(cache)
