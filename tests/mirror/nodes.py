"""Mirrors with a real node process, for tests."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.mirror.disk.block_map import BlockMap
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.pages import PAGE_BYTES
from megablend.mirror.node.frames import Kind
from megablend.mirror.rank.connection import Connection, find_connection
from megablend.mirror.rank.opening import NodeLostError
from megablend.storage.mirror_options import MirrorOptions, parse_mirror
from megablend.storage.object_options import ObjectOptions

PATIENCE = 100.0
"""Seconds in which a node process starts on a machine that does much else."""


@contextlib.contextmanager
def mirror(folder: Path, url: str, **settings: Any) -> Iterator[dict[str, Any]]:
    """The `mirror` setting of a mirror of what is below `url`; its node process ends with the context."""
    written = {
        "folder": str(folder),
        "prefixes": [f"{url}/"],
        "reserve": 0,
        "patience": PATIENCE,
        **settings,
    }
    try:
        yield written
    finally:
        kill_node(folder)
        find_connection.cache_clear()


def connect(settings: dict[str, Any], objects: ObjectOptions | None = None) -> Connection:
    """A connection of its own to a mirror's node process."""
    options = parse_mirror(settings)
    return Connection(options, objects or ObjectOptions(), options)


def options_of(settings: dict[str, Any]) -> MirrorOptions:
    return parse_mirror(settings)


def find_node(folder: Path) -> int | None:
    """The node process that owns the folder, if it runs."""
    try:
        mirror_folder = MirrorFolder.attach(folder)
        with mirror_folder.lock():
            return None
    except ConfigError:
        owner: int | None = mirror_folder.read_owner().get("pid") if folder.exists() else None
        return owner


def kill_node(folder: Path, number: int = signal.SIGKILL) -> None:
    """End the node process, and wait until it is gone."""
    if not (folder / "mirror.json").exists() or (pid := find_node(folder)) is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    end = time.monotonic() + PATIENCE
    while find_node(folder) is not None:
        assert time.monotonic() < end, f"node process {pid} does not end"
        time.sleep(0.01)


def get_status(settings: dict[str, Any]) -> dict[str, Any]:
    """What the node process says of itself."""
    try:
        status: dict[str, Any] = connect(settings).command(Kind.STATUS)
    except NodeLostError as error:
        raise AssertionError("no node process answers") from error
    return status


Held = dict[tuple[str, int], int]
"""By file and block: the pages that a folder holds."""


def find_held(path: Path) -> Held:
    """What a mirror's folder holds of files of more than 64 KiB, whoever owns it."""
    held: Held = {}
    for place in (path / "files").rglob("*.map"):
        with contextlib.suppress(FileNotFoundError), place.open("rb") as file:
            found = BlockMap.read(file.fileno(), mmap.ACCESS_READ)
            if found is not None:
                blocks, masks = found.held()
                pairs = zip(blocks.tolist(), masks.tolist(), strict=True)
                held |= {(place.stem, block): mask for block, mask in pairs}
    return held


def count_only(some: Held, others: Iterable[Held]) -> int:
    """Bytes of what none of the others holds."""
    left = dict(some)
    for other in others:
        for place in left:
            left[place] &= ~other.get(place, 0)
    return PAGE_BYTES * sum(mask.bit_count() for mask in left.values())
