"""Groups the ranks that see the same cache folder, and therefore build it together. On a shared
file system all ranks are one group; otherwise the ranks of each node are a group.

Ranks of one machine whose folder has the same inode certainly see the same folder. The first rank
of each such set of ranks writes a file with a random name, a nonce, to the folder. Sets that find
each other's nonces are merged. A missing folder is not created at this point, so that a refused
build leaves no folder behind. Such a folder is identified by the nearest existing parent folder and
the rest of its path.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megablend.distributed.fail_together import FailTogether
from megablend.errors import ConfigError
from megablend.system.atomic_write import translate_os_errors

AUTO = "auto"
SHARED_FS = (AUTO, "yes", "no")
"""The values of `shared_fs`."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file with a random id that differs between machines."""
_NONCE = ".megablend-nonce-"
"""The prefix of the file names of nonces."""
_SEEN_SECONDS = 2.0
"""The maximum number of seconds until a file that one node created is visible to other nodes on a
network file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The identity of a cache folder, which is equal for ranks of one machine that see the same
    folder."""

    machine: str
    device: int
    inode: int
    """The inode of the nearest existing folder."""
    rest: tuple[str, ...]
    """The components of the path from the nearest existing folder to the cache."""


def ranks_sharing_folder(launch: FailTogether, cache: Path | None, shared_fs: str) -> list[int]:
    """Return the ranks that see the same cache folder as this rank, and build it together.
    Collective.

    Args:
        cache: this rank's folder, which need not exist; None on a rank that builds nothing.
        shared_fs: "yes" if all ranks share the folder, "no" if only ranks of the same machine may
            share it, "auto" to detect which ranks share it.

    Returns: the sorted ranks, including this one; an empty list on a rank that builds nothing.
    Raises: ConfigError for any other `shared_fs`; CacheError if the path cannot be inspected, or is
        not a folder.
    """
    if shared_fs not in SHARED_FS:
        raise ConfigError(f"shared_fs is {shared_fs!r}; choose one of {', '.join(SHARED_FS)}")
    folder, own = (None, None) if cache is None else _find_place(cache)
    places = launch.allgather(own)
    building = [rank for rank, place in enumerate(places) if place is not None]
    at_own_place = [rank for rank in building if own is not None and places[rank] == own]
    if shared_fs == "yes" or len({places[rank] for rank in building}) < 2:
        return [] if own is None else building
    if shared_fs == "no":
        return at_own_place
    # The first rank of each place represents all ranks of the place. Places whose representatives
    # find the same rank's nonce first are one group
    is_representative = at_own_place[:1] == [launch.rank]
    first_seen = _find_first_seen(launch, folder if is_representative else None, places)
    if own is None:
        return []
    representatives = dict[_Place | None, int]()
    for rank in building:
        representatives.setdefault(places[rank], rank)
    leaders = {rank: first_seen[representatives[places[rank]]] for rank in building}
    return [rank for rank in building if leaders[rank] == leaders[launch.rank]]


def _find_place(cache: Path) -> tuple[Path, _Place]:
    """Return the nearest existing folder on the path of a cache, and the identity of the cache
    folder."""
    folder = cache.resolve()
    rest = list[str]()
    with translate_os_errors(cache):
        while not folder.is_dir():
            if folder.exists():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            rest.insert(0, folder.name)
            folder = folder.parent
        state = folder.stat()
    machine = _BOOT_ID.read_text(encoding="ascii").strip()
    return folder, _Place(
        machine=machine, device=state.st_dev, inode=state.st_ino, rest=tuple(rest)
    )


def _find_first_seen(
    launch: FailTogether, folder: Path | None, places: Sequence[_Place | None]
) -> list[int | None]:
    """For each rank, return the first rank whose nonce it finds, in rank order. Only the first rank
    of each place writes a nonce and looks for nonces; the result of all other ranks is None.
    Collective.

    Args:
        folder: the nearest existing folder on the path of this rank's cache; None if this rank is
            not the first one of its place.
    """
    nonce = None if folder is None else _leave_nonce(folder)
    try:
        nonces = launch.allgather(nonce)
        first = None if folder is None else _find_first_nonce(folder, nonces, places, launch.rank)
        return launch.allgather(first)
    finally:
        if folder is not None and nonce is not None:
            (folder / nonce).unlink(missing_ok=True)


def _leave_nonce(folder: Path) -> str | None:
    """Create a file with a random name in the folder. Returns: the name; None if the file could not
    be created, for example because the folder is read-only."""
    name = f"{_NONCE}{secrets.token_hex(8)}"
    try:
        (folder / name).touch()
    except OSError:
        return None
    return name


def _find_first_nonce(
    folder: Path, nonces: Sequence[str | None], places: Sequence[_Place | None], rank: int
) -> int:
    """Return the first rank whose nonce is in the folder, and whose cache has the same path below
    the folder as this rank's. Returns `rank`, this rank, if there is none."""
    own = places[rank]
    assert own is not None
    possible = {
        other: nonce
        for other, (nonce, place) in enumerate(zip(nonces, places, strict=True))
        if nonce is not None and place is not None and place.rest == own.rest
    }
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        visible = [other for other, nonce in possible.items() if (folder / nonce).exists()]
        if len(visible) == len(possible) or time.monotonic() > deadline:
            return min(visible, default=rank)
        time.sleep(0.1)
