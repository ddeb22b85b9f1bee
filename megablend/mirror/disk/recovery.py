"""What of a mirror's files can be believed when its owner starts: after a process was killed, or
the machine lost its power."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megablend.mirror.disk.block_map import DURABLE
from megablend.mirror.disk.disk_calls import DiskCalls
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.pages import by_block, count_pages, pages_of_file
from megablend.mirror.disk.small_file import read_small
from megablend.mirror.disk.stored_file import StoredFile, discard

_NAME = re.compile(r"([0-9a-f]{32})\.(data|map|data\.new)")
_SLACK_BYTES = 1 << 20


class Recovered(NamedTuple):
    """A file that is there."""

    key: FileKey
    found: float
    num_pages: int
    """Held ones."""
    num_lost: int
    """Those that were held, but are not believed."""
    is_durable: bool
    """Whether all that is held is on the disk for sure."""


def recover(folder: MirrorFolder, boot: bytes, calls: DiskCalls) -> Iterator[Recovered]:
    """All files of a folder whose lock is held, repaired. Raises: DataError if the disk fails."""
    digests: dict[str, set[str]] = {}
    for place in sorted((folder.path / "files").glob("??")):
        for path in place.iterdir():
            if found := _NAME.fullmatch(path.name):
                digests.setdefault(found[1], set()).add(found[2])
    for digest, kinds in digests.items():
        if "data.new" in kinds:
            Path(f"{folder.data_path(digest)}.new").unlink()
        if "map" in kinds:
            stored = StoredFile.open(folder, digest, calls) if "data" in kinds else None
            if stored is None:
                discard(folder, digest)
            else:
                yield _recover(stored, boot)
        elif small := read_small(folder, digest):
            held = count_pages(pages_of_file(small.key.size).masks)
            yield Recovered(small.key, small.found, held, 0, True)


def _recover(stored: StoredFile, boot: bytes) -> Recovered:
    """Believe blocks that are durable, and others if the machine was not started again since, or
    their checksum is right."""
    stored.repair()
    lost = 0
    if stored.map.boot != boot:
        doubtful = stored.map.held(without=DURABLE)
        for part in by_block(doubtful):
            lost += stored.remove(stored.read(part)[1])
        stored.map.store_header(boot)
    num_pages = count_pages(stored.map.held().masks)
    is_durable = not len(stored.map.held(without=DURABLE).blocks)
    return Recovered(stored.key, stored.map.found, num_pages, lost, is_durable)
