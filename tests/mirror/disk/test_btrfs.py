"""btrfs frees an extent only when all of it has become a hole."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megablend.mirror.disk.pages import BLOCK_BYTES
from tests.mirror.disk.mirrors import key_of, open_store, pages_at, put

MIB = 1 << 20


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A new file system."""
    image = tmp_path / "image"
    folder = tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 256 * MIB)
    make = ["mkfs.btrfs", "-q", str(image)]
    if shutil.which(make[0]) is None or subprocess.run(make, check=False).returncode:
        pytest.skip("there is no mkfs.btrfs here, or it fails")
    mount = ["mount", "-o", "loop", str(image), str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this user cannot mount btrfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def count_used(folder: Path) -> int:
    """The bytes that are in use, after everything was written to the disk."""
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return shutil.disk_usage(folder).used


def test_pages_that_were_written_together_are_freed_one_by_one(btrfs: Path) -> None:
    used = count_used(btrfs)
    store = open_store(btrfs / "mirror", size=16 * MIB)
    first = key_of(16 * MIB)
    second = key_of(16 * MIB, name="b")
    now = time.monotonic()
    for i in range(16):
        assert put(store, first, pages_at((i * MIB, MIB)), now + 1000)
    count_used(btrfs)  # what was written is now on the disk, in as few extents as it could be
    # The first block of each MiB is evicted for a block of another file
    for i in range(16):
        store.drop(first, pages_at((i * MIB, BLOCK_BYTES)))
    for i in range(16):
        assert put(store, second, pages_at((i * MIB, BLOCK_BYTES)), now + 1000)
    assert int(store.count_held([first.digest]).sum()) * 4096 == 12 * MIB
    assert int(store.count_held([second.digest]).sum()) * 4096 == 4 * MIB
    assert count_used(btrfs) - used < 18 * MIB
