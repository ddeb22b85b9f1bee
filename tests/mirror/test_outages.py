"""A source that is off for long: what is held is read, what is not is waited for, and why is said."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megablend.errors import DataError
from megablend.prefetch.read_counts import ReadMeter
from tests.mirror.nodes import mirror
from tests.mirror.rank.test_mirror_storage import DATA, cut, make, read
from tests.storage.faulty import Faults, FaultySource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("obstore")]
PATIENCE = 0.5
"""Seconds. Reading goes on long after a process would have given up a node process that hangs."""


def test_what_is_missing_is_waited_for_until_the_source_is_back(tmp_path: Path) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, patience=PATIENCE) as settings,
    ):
        url = f"{source.url}/d/x"
        storage = make(settings)
        read(storage, url, (0, 10))
        source.faults = Faults(status={503: 1.0})
        meter = ReadMeter()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(read, storage, url, (500_000, 9))
            end = time.monotonic() + 8 * PATIENCE
            while time.monotonic() < end:
                assert read(storage, url, (5, 20)) == cut((5, 20))
                time.sleep(0.1)
            assert not waiting.done()
            assert source.faulty["503"] > 2
            source.faults = Faults()
            assert waiting.result(500) == cut((500_000, 9))
        assert meter.take().direct_bytes == 0
        assert source.bytes <= 2 * 4096 + 16


def test_who_gives_up_is_told_of_the_source(tmp_path: Path) -> None:
    with (
        FaultySource({"d/x": DATA}) as source,
        mirror(tmp_path / "m", source.url, patience=PATIENCE) as settings,
    ):
        url = f"{source.url}/d/x"
        storage = make(settings, **{f"{source.url}/": {"give_up_after": 2.0}})
        read(storage, url, (0, 10))
        source.is_down = True
        with pytest.raises(DataError) as raised:
            read(storage, url, (500_000, 9))
        assert f"{url}: cannot be read: the connection broke; tried " in str(raised.value)
        assert "check the source and the network, or increase `give_up_after`" in str(raised.value)
        assert read(storage, url, (5, 20)) == cut((5, 20))
        # And a process that comes meanwhile
        assert read(
            make(settings, **{f"{source.url}/": {"give_up_after": 2.0}}), url, (5, 20)
        ) == cut((5, 20))
        source.is_down = False
        assert read(storage, url, (500_000, 9)) == cut((500_000, 9))
