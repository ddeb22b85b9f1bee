"""A source that fails: the same bytes, few requests more, and limits that hold."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megablend.errors import ChangedFileError, CorruptFileError, DataError
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.storage.faulty import FAULTS, Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
DATA = np.random.default_rng(6).integers(0, 256, 4_000_000, np.uint8).tobytes()


def read_pages(storage: object, url: str, pages: int, size: int = 16_384) -> None:
    """Read pages in a random order, and compare them."""
    offsets = np.random.default_rng(1).permutation(pages) * size
    out, begins = storage.read_ranges(  # type: ignore[attr-defined]
        url, offsets, np.full(pages, size), lambda total: np.empty(total, np.uint8)
    )
    for offset, begin in zip(offsets.tolist(), begins.tolist(), strict=True):
        assert out[begin : begin + size].tobytes() == DATA[offset : offset + size]


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_pages_are_right_through_a_fifth_of_each_fault(faults: Faults) -> None:
    options = parse_options({"http://": {"read_timeout": 0.5}})
    with FaultySource({"b/x": DATA}) as source:
        storage = make_storage(objects=options)
        # The file's version is known by one request before the others begin
        read_pages(storage, f"{source.url}/b/x", 1)
        source.faults = replace(faults, together=9)
        read_pages(storage, f"{source.url}/b/x", 120)
        assert max(source.faulty.values()) >= 2
        assert source.most_in_flight >= 9


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=[pytest.mark.slow])])
def test_an_outage_is_waited_for_and_said_once(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultySource({"b/x": DATA}) as source:
        storage = make_storage()
        url = f"{source.url}/b/x"
        read_pages(storage, url, 4)
        source.is_down = True
        timer = threading.Timer(seconds, lambda: setattr(source, "is_down", False))
        timer.start()
        with caplog.at_level(logging.WARNING, "megablend"):
            read_pages(storage, url, 50)
        assert source.is_down is False
    assert [
        record.getMessage() for record in caplog.records if "being retried" in record.getMessage()
    ] != []
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(f"{source.url}: ")
    assert "each for at most 600 s" in caplog.records[0].getMessage()


def test_it_is_given_up_after_the_time_that_was_set() -> None:
    options = parse_options({"http://": {"give_up_after": 1}})
    with FaultySource({"b/x": DATA}) as source:
        storage = make_storage(objects=options)
        storage.stat(f"{source.url}/b/x")
        source.faults = Faults(status={503: 1.0})
        with pytest.raises(
            DataError,
            match=r"b/x: cannot be read: the source is busy \(HTTP 503\); tried \d+ times in [1-5] s",
        ):
            storage.read(f"{source.url}/b/x", 0, 10)


def test_words_of_a_key_do_not_explain_a_failure() -> None:
    key = "tokens/credential/proxy/certificate/dns error"
    options = parse_options({"http://": {"give_up_after": 0.5}})
    with FaultySource({f"b/{key}": DATA}) as source:
        storage = make_storage(objects=options)
        url = f"{source.url}/b/{key.replace(' ', '%20')}"
        storage.stat(url)
        source.faults = Faults(reset=1.0)
        with pytest.raises(
            DataError, match=r"cannot be read: the connection broke; tried \d+ times"
        ):
            storage.read(url, 0, 10)


@pytest.mark.parametrize(
    ("rate", "rounds"),
    [(6e5, 1), pytest.param(1e6, 4, marks=[pytest.mark.slow])],
)
def test_a_slow_source_is_not_asked_twice(rate: float, rounds: int) -> None:
    """Behind a limited rate a request takes long because others are served: sending it again would make it slower."""
    data = np.tile(np.frombuffer(DATA, np.uint8), 5).tobytes()
    pages = 280 * rounds
    size = 65_536 if rounds > 1 else 16_384
    with FaultySource({"b/x": data}, Faults(rate=rate)) as source:
        storage = make_storage()
        url = f"{source.url}/b/x"
        storage.stat(url)
        source.bytes = 0
        offsets = np.random.default_rng(1).permutation(pages) * ((len(data) - size) // pages)
        out, begins = storage.read_ranges(
            url, offsets, np.full(pages, size), lambda total: np.empty(total, np.uint8)
        )
        for offset, begin in zip(offsets.tolist(), begins.tolist(), strict=True):
            assert out[begin : begin + size].tobytes() == data[offset : offset + size]
        # Many wait, also where the machine is slow to ask for all of them
        assert source.most_in_flight > 128
        assert source.bytes <= 1.01 * pages * size


def test_the_rate_and_the_requests_in_flight_are_limited() -> None:
    options = parse_options({"http://": {"max_source_rate": 1_000_000, "max_requests": 6}})
    with FaultySource({"b/x": DATA}, Faults(latency=0.001, tail=0.05)) as source:
        storage = make_storage(objects=options)
        begin = time.monotonic()
        read_pages(storage, f"{source.url}/b/x", 180)
        assert time.monotonic() - begin > 180 * 16_384 / 1e6 - 1.1
        assert source.most_in_flight <= 6
        assert source.requests <= 181


def test_late_answers_are_asked_for_twice_but_few() -> None:
    with FaultySource({"b/x": DATA}) as source:
        options = parse_options({"http://": {"max_requests": 8}})
        storage = make_storage(objects=options)
        url = f"{source.url}/b/x"
        for _ in range(2):
            read_pages(storage, url, 120)
        source.faults = Faults(latency=0.02, tail=0.02)
        before = source.requests
        out, _ = storage.read_ranges(
            url,
            np.arange(200) * 20_000,
            np.full(200, 16_384),
            lambda total: np.empty(total, np.uint8),
        )
        assert out[-16_384:].tobytes() == DATA[199 * 20_000 :][:16_384]
        assert 1 <= source.requests - before - 200 <= 0.005 * source.requests + 1


def test_a_server_that_ignores_conditions_is_compared() -> None:
    with FaultySource({"b/x": b"0123456789"}) as source:
        source.ignores_conditions = True
        storage = make_storage()
        url = f"{source.url}/b/x"
        assert storage.read(url, 0, 4) == b"0123"
        source.files["b/x"] = b"9876543210"
        with pytest.raises(
            ChangedFileError,
            match=r"was replaced while it was in use \(its etag is \w+, but was \w+\)",
        ):
            storage.read(url, 0, 4)
        source.files["b/x"] = b"01234"
        with pytest.raises(ChangedFileError, match=r"\(it has 5 bytes, but had 10\)"):
            storage.read(url, 0, 4)


@pytest.mark.parametrize("kind", ["weak_etags", "no_etags"])
def test_without_a_strong_etag_time_and_size_decide_and_it_is_said(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        FaultySource({"b/x": b"0123456789"}) as source,
        caplog.at_level(logging.WARNING, "megablend"),
    ):
        setattr(source, kind, True)
        storage = make_storage()
        url = f"{source.url}/b/x"
        assert storage.read(url, 0, 4) == b"0123"
        assert source.headers[-1]["if-unmodified-since"] == "Wed, 21 Oct 2015 07:28:00 GMT"
        assert "if-match" not in source.headers[-1]
        source.files["b/x"] = b"012345678"
        with pytest.raises(ChangedFileError, match="it has 9 bytes, but had 10"):
            storage.read(url, 0, 4)
    assert len(caplog.records) == 1
    assert "does not send strong etags" in caplog.records[0].getMessage()


class SilentOnce(FaultySource):
    """Never answers the first HEAD."""

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        if method == "HEAD" and not self.faulty["silent"]:
            self.faulty["silent"] += 1
            await asyncio.sleep(3600)
        return await super()._answer(writer, method, target, headers)


def test_a_head_that_is_not_answered_is_sent_again() -> None:
    with SilentOnce({"b/x": b""}) as source:
        storage = make_storage(objects=parse_options({"http://": {"read_timeout": 0.5}}))
        assert storage.stat(f"{source.url}/b/x").size == 0
        assert source.faulty["silent"] == 1


class StalledListing(FaultySource):
    """Stops in the middle of the first listing."""

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        if "list-type" in target:
            self.faults = Faults(stall=float(not self.faulty["stall"]))
        return await super()._answer(writer, method, target, headers)


@pytest.mark.parametrize("pattern", ["*", "**"])
def test_a_listing_that_stops_is_asked_for_again(pattern: str) -> None:
    """After a few times `read_timeout`; it took 30 s whatever that was."""
    with StalledListing({"b/x": b"1", "b/y": b"2"}) as source:
        options = {"endpoint": source.url, "anonymous": True, "read_timeout": 0.2}
        found = make_storage(objects=parse_options({"s3://b": options})).find(f"s3://b/{pattern}")
        assert [each.path for each in found.files] == ["s3://b/x", "s3://b/y"]
        assert source.faulty["stall"] == 1


@pytest.mark.parametrize("pattern", ["*/*", "**"])
def test_a_web_page_is_no_listing_of_an_empty_folder(pattern: str) -> None:
    with FaultySource({"b/x/y": b"1", "b/x/void/": b"", "b/z/y": b"2", "b/z/void/": b""}) as source:
        storage = make_storage(
            objects=parse_options({"s3://b": {"endpoint": source.url, "anonymous": True}})
        )
        source.pages.update(["prefix=x", "prefix=x", "prefix=z"])
        assert storage.glob(f"s3://b/{pattern}") == ["s3://b/x/y", "s3://b/z/y"]
        assert +source.pages == Counter()


def test_a_listing_that_is_wrong_about_a_size_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with FaultySource({"b/x": b"0123456789"}) as source:
        storage = make_storage(objects=parse_options({"s3://b": {"endpoint": source.url}}))
        assert storage.glob("s3://b/*") == ["s3://b/x"]
        source.ignores_conditions = True
        source.files["b/x"] = b"0123"
        with pytest.raises(ChangedFileError, match="it has 4 bytes, but had 10"):
            storage.read("s3://b/x", 2, 8)
        with pytest.raises(CorruptFileError, match="ends at byte 10"):
            storage.read("s3://b/x", 2, 9)
