"""What is fetched first."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from megablend.errors import ChangedFileError, ConfigError, CorruptFileError, MegablendError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages
from megablend.mirror.disk.room import Need
from megablend.mirror.node.due_order import find_lead, order_by_due
from megablend.mirror.node.engine import SOON_SECONDS
from megablend.mirror.node.frames import pack_error, pack_needs, unpack_error, unpack_needs
from tests.mirror.node.needs_of import make_need


@pytest.mark.parametrize("seed", range(20))
def test_parts_come_by_due_time_and_hold_every_page_that_is_due(seed: int) -> None:
    rng = random.Random(seed)
    keys = [FileKey(f"s3://b/{i}", "e", 1 << 30) for i in range(3)]
    needs = [
        make_need(
            keys[rng.randrange(3)],
            [
                (
                    rng.randrange(200),
                    1 << rng.randrange(64),
                    math.inf if rng.random() < 0.1 else rng.random() * 20,
                )
                for _ in range(rng.randrange(1, 60))
            ],
        )
        for _ in range(rng.randrange(1, 5))
    ]
    earliest: dict[tuple[str, int, int], float] = {}
    for key, pages, due in needs:
        for block, mask, when in zip(
            pages.blocks.tolist(), pages.masks.tolist(), due.tolist(), strict=True
        ):
            page = (key.location, block, mask.bit_length() - 1)
            if when < math.inf:
                earliest[page] = min(when, earliest.get(page, math.inf))
    parts = list(order_by_due(needs))
    firsts = [math.floor(part.due) for part in parts]
    assert firsts == sorted(firsts)
    seen: dict[tuple[str, int, int], float] = {}
    for key, pages, when, _ in parts:
        assert len({block // 4 for block in pages.blocks.tolist()}) == 1
        assert (np.diff(pages.blocks.astype(np.int64)) > 0).all()
        for block, mask in zip(pages.blocks.tolist(), pages.masks.tolist(), strict=True):
            for bit in range(64):
                if mask >> bit & 1:
                    seen.setdefault((key.location, block, bit), when)
    assert seen.keys() == earliest.keys()
    assert all(math.floor(seen[page]) == math.floor(earliest[page]) for page in seen)


def test_the_lead_ends_where_so_many_bytes_are_due() -> None:
    key = FileKey("s3://b/0", "e", 1 << 30)
    now = time.monotonic()
    needs = [
        make_need(key, [(i, 0b111, now + 4 - i) for i in range(4)]),
        make_need(key, [(9, 0b1, now + 2.5), (10, 0b1, now + 100), (11, 0b1, math.inf)]),
        make_need(key, [(12, 0b11111, now - 3)]),  # was read
    ]
    for pages, seconds in ((3, 1.0), (4, 2.0), (6, 2.0), (7, 2.5), (8, 3.0), (14, SOON_SECONDS)):
        lead = find_lead(needs, pages * PAGE_BYTES)
        assert seconds - (time.monotonic() - now) <= lead <= seconds, pages
    assert find_lead([], 1) == SOON_SECONDS


def test_needs_errors_and_states_arrive_as_they_were_sent() -> None:
    needs = [
        make_need(
            FileKey("https://h/ä b", 'e"1', 5_000_000_000),
            [(3, 1 << 63, 1e9), (70_000, 5, math.inf), (70_001, 1, time.monotonic() - 60)],
        ),
        Need(
            FileKey("/mnt/x", "", 0),
            Pages(np.zeros(0, np.uint32), np.zeros(0, np.uint64)),
            np.zeros(0),
        ),
    ]
    found = unpack_needs(pack_needs(needs))
    for need, other in zip(needs, found, strict=True):
        assert other.key == need.key
        assert other.pages.blocks.tolist() == need.pages.blocks.tolist()
        assert other.pages.masks.tolist() == need.pages.masks.tolist()
    assert found[0].due[1] == math.inf
    # What has passed is not due now
    assert abs(found[0].due[2] - needs[0].due[2]) < 30
    errors: list[MegablendError] = [
        CorruptFileError("s3://b/x", "truncated", offset=7),
        ChangedFileError("s3://b/x", "was replaced"),
        ConfigError("a\nb"),
    ]
    for error in errors:
        arrived = unpack_error(pack_error(error))
        assert type(arrived) is type(error)
        assert (str(arrived), vars(arrived)) == (str(error), vars(error))
    assert isinstance(unpack_error(pack_error(KeyError("x"))), RuntimeError)


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0", b"\1\0\0\0\5\0\0\0[1,2]\0\0\0\0", b"\xff" * 40])
def test_what_is_no_needs_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_needs(data)
