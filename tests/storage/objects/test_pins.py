"""Versions of objects: what makes two of them the same, and which requests are answered for one only."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from megablend.storage.objects.pins import Pin, make_pin, normalise_etag, pin_answer

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
SECONDS = int(TIME.timestamp())
PIN = Pin(size=10, etag="a", modified=SECONDS)


def answer(size: int = 10, etag: str | None = '"a"', time: datetime = TIME) -> dict[str, Any]:
    return {"size": size, "e_tag": etag, "last_modified": time, "version": "v1"}


@pytest.mark.parametrize(
    ("pin", "other", "says"),
    [
        (PIN, PIN, None),
        (PIN, Pin(11, "a", SECONDS), "it has 11 bytes, had 10"),
        (PIN, Pin(10, "b", SECONDS), "its etag is b, was a"),
        (PIN, Pin(10, "a", SECONDS + 1), None),  # the same content, copied
        (PIN, Pin(10, "", SECONDS), None),
        (
            PIN,
            Pin(10, "", SECONDS + 1),
            "it was modified at 2026-01-02 03:04:06 UTC, before at 2026-01-02 03:04:05 UTC",
        ),
        (Pin(10, "", SECONDS), Pin(10, "b", SECONDS + 1), "it was modified at 2026-01-02 03:04:06 UTC, before at"),
        (Pin(10, "", SECONDS), Pin(10, "", 0), None),
        (Pin(10, "", 0), Pin(10, "", SECONDS), None),
        (Pin(10, "", 0), Pin(9, "", 0), "it has 9 bytes, had 10"),
    ],
)
def test_differences(pin: Pin, other: Pin, says: str | None) -> None:
    found = pin.find_difference(other)
    assert found == says or (says is not None and found is not None and found.startswith(says))


def test_an_answer_is_of_the_expected_version_where_etag_and_size_are_equal() -> None:
    assert pin_answer(answer(), PIN, versions=False) is PIN
    assert pin_answer(answer(size=11), PIN, versions=False).size == 11
    assert pin_answer(answer(etag='"b"'), PIN, versions=False).etag == "b"
    unnamed = Pin(10, "", SECONDS)
    later = TIME.replace(second=6)
    assert pin_answer(answer(etag=None, time=later), unnamed, versions=False).modified == SECONDS + 1
    assert pin_answer(answer(), None, versions=False) == PIN


@pytest.mark.parametrize(
    ("etag", "plain"),
    [('"a"', "a"), ("a", "a"), (' "a" ', "a"), ('W/"a"', ""), ("W/a", ""), ("", ""), (None, "")],
)
def test_etags_without_quotes_and_weak_ones_as_none(etag: str | None, plain: str) -> None:
    assert normalise_etag(etag) == plain


def test_what_is_sent_along_with_a_request() -> None:
    assert PIN.conditions == {"if_match": '"a"'}
    assert Pin(10, "", SECONDS).conditions == {"if_unmodified_since": TIME}
    assert Pin(10, "", 0).conditions == {}
    assert make_pin(answer(), versions=True).conditions == {"version": "v1"}
    assert make_pin(answer()).version is None


def test_what_readers_know_a_version_by() -> None:
    assert PIN.stat.etag == "a"
    assert Pin(10, "", SECONDS).stat.etag == f"modified-{SECONDS}"
    early = make_pin(answer(etag=None, time=datetime(1960, 1, 1, tzinfo=timezone.utc)))
    assert (early.modified, early.stat.size) == (0, 10)
