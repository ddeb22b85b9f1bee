"""Manifests: the same files have the same revision, whatever lists them."""

from __future__ import annotations

import random
from bisect import bisect_left

import numpy as np
import pytest

from megablend.mirror.catalog import manifest
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.disk.folder import FileKey
from megablend.storage.file_table import make_table
from tests.mirror.manifests import make_manifest as make_naively

FILES = [
    DataFile("a/b.bin", FileKey("s3://b/a/b.bin", '"e1"', 10)),
    DataFile("c", FileKey("s3://b/c \ud800", "", 0)),
]


def make_manifest(files: list[DataFile]) -> Manifest:
    rows = [(file.path, *file.key) for file in files]
    return Manifest.of_table(make_table(rows, ("path", "location", "etag", "size")))


def test_a_manifest_is_read_as_it_was_written() -> None:
    revision = make_manifest(FILES).revision
    data = make_manifest(FILES).pack()
    # Persisted, and compared between machines: it never changes
    assert revision == "3d06150a4844e25cd558473ad1aebc98"
    assert list(Manifest.unpack(revision, data)) == FILES
    other = make_manifest(FILES[:1]).revision
    with pytest.raises(ValueError, match="its digest"):
        Manifest.unpack(other, data)
    for at in range(len(data)):
        with pytest.raises(ValueError, match="is damaged"):
            Manifest.unpack(revision, data[:at])


def draw_files(draw: random.Random, count: int) -> list[DataFile]:
    """Files with names and sizes of all lengths, sorted by path."""
    letters = 'ab/\n\t\\"]}, \u00e9\U0001f600\udcff'
    paths = {"".join(draw.choices(letters, k=draw.randrange(12))) for _ in range(count)}
    return [
        DataFile(
            path,
            FileKey(
                f"s3://{path}",
                draw.choice(["", "]", "9"]),
                draw.randrange(10 ** draw.randrange(1, 19)),
            ),
        )
        for path in sorted(paths)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_any_files(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list of them, in portions that end anywhere."""
    draw = random.Random(seed)
    monkeypatch.setattr(manifest, "_LINES_AT_A_TIME", 7)
    monkeypatch.setattr(manifest, "_SCANNED_BYTES", 11)
    files = draw_files(draw, 40 * seed)
    packed = make_manifest(files)
    assert packed._text == make_naively(files)._text
    assert list(packed) == files
    assert [packed[i] for i in range(len(files))] == files
    assert packed[3:9] == files[3:9]
    assert packed.sizes.tolist() == [file.key.size for file in files]
    assert [each.tobytes().hex() for each in packed.digests] == [file.key.digest for file in files]
    assert packed.digests.dtype == np.uint8
    for path in [*(file.path for file in files), "", "a", "zz"]:
        assert bisect_left(packed, (path,)) == bisect_left(files, (path,))
    left = [file for file in files if draw.random() < 0.5]
    gone = list(packed.list_gone(make_manifest([*left, DataFile("zzz", FILES[0].key)])))
    assert gone == [file for file in files if file not in left]
