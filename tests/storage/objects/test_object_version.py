"""Versions of objects: what makes two of them the same, and which requests are answered for one only."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from megablend.storage.objects.object_version import (
    ObjectVersion,
    make_version,
    normalise_etag,
    version_of_response,
)

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
SECONDS = int(TIME.timestamp())
VERSION = ObjectVersion(size=10, etag="a", modified=SECONDS)


def answer(size: int = 10, etag: str | None = '"a"', time: datetime = TIME) -> dict[str, Any]:
    return {"size": size, "e_tag": etag, "last_modified": time, "version": "v1"}


@pytest.mark.parametrize(
    ("version", "other", "says"),
    [
        (VERSION, VERSION, None),
        (VERSION, ObjectVersion(11, "a", SECONDS), "it has 11 bytes, but had 10"),
        (VERSION, ObjectVersion(10, "b", SECONDS), "its etag is b, but was a"),
        (VERSION, ObjectVersion(10, "a", SECONDS + 1), None),  # the same content, copied
        (VERSION, ObjectVersion(10, "", SECONDS), None),
        (
            VERSION,
            ObjectVersion(10, "", SECONDS + 1),
            "it was last modified at 2026-01-02 03:04:06 UTC, but previously at 2026-01-02 03:04:05 UTC",
        ),
        (
            ObjectVersion(10, "", SECONDS),
            ObjectVersion(10, "b", SECONDS + 1),
            "it was last modified at 2026-01-02 03:04:06 UTC, but previously at",
        ),
        (ObjectVersion(10, "", SECONDS), ObjectVersion(10, "", 0), None),
        (ObjectVersion(10, "", 0), ObjectVersion(10, "", SECONDS), None),
        (ObjectVersion(10, "", 0), ObjectVersion(9, "", 0), "it has 9 bytes, but had 10"),
    ],
)
def test_differences(version: ObjectVersion, other: ObjectVersion, says: str | None) -> None:
    found = version.find_difference(other)
    assert found == says or (says is not None and found is not None and found.startswith(says))


def test_an_answer_is_of_the_expected_version_where_etag_and_size_are_equal() -> None:
    assert version_of_response(answer(), VERSION, versions=False) is VERSION
    assert version_of_response(answer(size=11), VERSION, versions=False).size == 11
    assert version_of_response(answer(etag='"b"'), VERSION, versions=False).etag == "b"
    unnamed = ObjectVersion(10, "", SECONDS)
    later = TIME.replace(second=6)
    assert (
        version_of_response(answer(etag=None, time=later), unnamed, versions=False).modified
        == SECONDS + 1
    )
    assert version_of_response(answer(), None, versions=False) == VERSION


@pytest.mark.parametrize(
    ("etag", "plain"),
    [('"a"', "a"), ("a", "a"), (' "a" ', "a"), ('W/"a"', ""), ("W/a", ""), ("", ""), (None, "")],
)
def test_etags_without_quotes_and_weak_ones_as_none(etag: str | None, plain: str) -> None:
    assert normalise_etag(etag) == plain


def test_what_is_sent_along_with_a_request() -> None:
    assert VERSION.conditions == {"if_match": '"a"'}
    assert ObjectVersion(10, "", SECONDS).conditions == {"if_unmodified_since": TIME}
    assert ObjectVersion(10, "", 0).conditions == {}
    assert make_version(answer(), versions=True).conditions == {"version": "v1"}
    assert make_version(answer()).version_id is None


def test_what_readers_know_a_version_by() -> None:
    assert VERSION.stat.etag == "a"
    assert ObjectVersion(10, "", SECONDS).stat.etag == f"modified-{SECONDS}"
    early = make_version(answer(etag=None, time=datetime(1960, 1, 1, tzinfo=timezone.utc)))
    assert (early.modified, early.stat.size) == (0, 10)
