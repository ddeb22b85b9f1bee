"""Which ranks see the same cache folder, and so build it together: one group on a shared file system, one a node otherwise.

Ranks of one machine whose folder is one inode need no test. Of each such set the first rank leaves a nonce in the folder, and
sets that find each other's nonces are one.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from megablend.errors import ConfigError
from megablend.index.disk import writing
from megablend.megatron.agree import AgreedLaunch

SHARED_FS = ("auto", "yes", "no")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NONCE = ".megablend-nonce-"
_SEEN_SECONDS = 2.0
"""Network file systems may show another node's file some seconds late."""


def builders(launch: AgreedLaunch, cache: Path | None, shared_fs: str) -> list[int]:
    """The ranks that build this rank's cache folder, itself among them. Collective.

    Args:
        cache: this rank's folder, made where it is not there; None on a rank that builds nothing.
        shared_fs: "yes" where all ranks share the folder, "no" where only those of one machine may, "auto" to find out.

    Returns: sorted ranks of the launch; none for a rank that builds nothing.
    Raises: ConfigError for another `shared_fs`; CacheError where the folder cannot be written.
    """
    if shared_fs not in SHARED_FS:
        raise ConfigError(f"shared_fs is {shared_fs!r}; choose one of {', '.join(SHARED_FS)}")
    places = launch.all(None if cache is None else _place(cache))
    building = [rank for rank, place in enumerate(places) if place is not None]
    if cache is None:
        return _keep_up(launch, shared_fs)
    if shared_fs == "yes":
        return building
    together = [rank for rank in building if places[rank] == places[launch.rank]]
    if shared_fs == "no":
        return together
    seen = _first_seen(launch, cache, speaks=together[0] == launch.rank)
    first = [seen[next(other for other in building if places[other] == places[rank])] for rank in building]
    mine = first[building.index(launch.rank)]
    return [rank for rank, leader in zip(building, first, strict=True) if leader == mine]


def _place(cache: Path) -> tuple[str, int, int]:
    """What two ranks have in common only if their folder is one."""
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        state = cache.stat()
    return _BOOT_ID.read_text(encoding="ascii").strip(), state.st_dev, state.st_ino


def _first_seen(launch: AgreedLaunch, cache: Path, *, speaks: bool) -> list[int | None]:
    """For each rank that speaks for its set, the first of those whose nonce it finds; None for the others."""
    nonce = _leave_nonce(cache) if speaks else None
    try:
        nonces = launch.all(nonce)
        return launch.all(_look(cache, nonces, launch.rank) if speaks else None)
    finally:
        if nonce is not None:
            (cache / nonce).unlink(missing_ok=True)


def _leave_nonce(cache: Path) -> str | None:
    """The name of a new file in the folder; None where it cannot be written, and so only be looked at."""
    name = f"{_NONCE}{secrets.token_hex(8)}"
    try:
        (cache / name).touch()
    except OSError:
        return None
    return name


def _look(cache: Path, nonces: list[str | None], rank: int) -> int:
    """The first rank whose nonce is in the folder; `rank` where none is."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        found = [number for number, nonce in enumerate(nonces) if nonce is not None and (cache / nonce).exists()]
        if len(found) == len(nonces) - nonces.count(None) or time.monotonic() > deadline:
            return min(found, default=rank)
        time.sleep(0.1)


def _keep_up(launch: AgreedLaunch, shared_fs: str) -> list[int]:
    """Take part in what the others exchange."""
    if shared_fs == "auto":
        launch.all(None)
        launch.all(None)
    return []
