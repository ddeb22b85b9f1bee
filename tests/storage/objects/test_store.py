"""What a storage of objects knows without a request: ranges outside a version."""

from __future__ import annotations

import pytest

from megablend.errors import CorruptFileError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.known_objects import Known
from megablend.storage.objects.object_version import ObjectVersion
from megablend.storage.objects.store import ObjectStorage

PATH = "s3://bucket/x"


@pytest.mark.parametrize(
    ("offset", "size", "says"),
    [
        (-1, 2, "invalid range: offset -1, length 2; restore the file, or index it again$"),
        (0, -1, "invalid range: offset 0, length -1; restore the file, or index it again$"),
        (
            8,
            3,
            r"is truncated \(expected 3 bytes here, but the file ends at byte 10\); restore the file",
        ),
        (
            11,
            0,
            r"is truncated \(expected 0 bytes here, but the file ends at byte 10\); restore the file",
        ),
    ],
)
def test_ranges_outside_an_object(
    monkeypatch: pytest.MonkeyPatch, offset: int, size: int, says: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody answers a request
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    storage = ObjectStorage(ObjectOptions())
    storage.add_known_files({PATH: Known(ObjectVersion(10, "a", 0))})
    with pytest.raises(CorruptFileError, match=says):
        storage.read(PATH, offset, size)
