"""Whole runs over a source that fails: built and read as from local files.

MEGABLEND_TEST_SOURCES sets how many of them go wrong at random in the long part, MEGABLEND_TEST_SEED the first one's seed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import MegablendError
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import FAULTS, Faults, FaultySource
from tests.storage.objects.test_http import list_files

pytestmark = pytest.mark.usefixtures("obstore")
KINDS = ("parquet", "arrow", "megatron")
SOURCES = int(os.environ.get("MEGABLEND_TEST_SOURCES", "20"))
SEED = int(os.environ.get("MEGABLEND_TEST_SEED", "0"))
MIXED = Faults(status={503: 0.08, 429: 0.04}, reset=0.04, truncated=0.04, latency=0.001, seed=3)


@dataclass
class Run:
    """A run over local files, built, and the same one over a source that has these files."""

    source: FaultySource
    plain: dict[str, Any]
    remote: dict[str, Any]
    built: Any

    def build(self, **options: Any) -> None:
        """Build the remote run, and compare its digests."""
        built = megablend.build(self.remote, **options)
        assert (built.ledger.digest, built.index.digest) == (
            self.built.ledger.digest,
            self.built.index.digest,
        )

    def check(self) -> None:
        """Compare the batches of both."""
        assert read_digests(megablend.open(self.remote)) == read_digests(megablend.open(self.plain))


def read_digests(dataset: Any) -> list[bytes]:
    """Digests of the batches that a Loader gives."""
    batches = megablend.Loader(dataset, micro_batch_size=4)
    return [hashlib.blake2b(batch["tokens"].numpy().tobytes()).digest() for batch in batches]


def make_run(
    folder: Path, source: FaultySource, *, scale: int, is_listed: bool = False, **settings: Any
) -> Run:
    """With files by their URLs, or, where it is listed, those of a bucket by patterns, among markers of folders."""
    data = folder / "data"
    listed = [
        write_source(data, i, kind, documents(i, 120 * scale, 40, seed=i), num_files=4 * scale)
        | {"weight": 1}
        for i, kind in enumerate(KINDS)
    ]
    config = {"sequence_length": 64, "block_bytes": 2048, "samples": 25 * scale, **settings}
    plain = make_config(folder, listed, cache=str(folder / "plain"), **config)
    source.files = {
        f"d/{path.relative_to(data)}": path.read_bytes()
        for path in data.rglob("*")
        if path.is_file()
    }
    storage: dict[str, dict[str, Any]] = {"http://": {"read_timeout": 0.5}}
    urls = [
        each | {"path": [path.replace(str(data), f"{source.url}/d") for path in list_files(each)]}
        for each in listed
    ]
    if is_listed:
        storage = {"s3://d": {"read_timeout": 0.5, "endpoint": source.url, "anonymous": True}}
        urls = [
            each | {"path": each["path"].replace(str(data), "s3://d").replace("/*", "/**/*")}
            for each in listed
        ]
        folders = {f"d/{path.parent.relative_to(data)}" for path in data.rglob("*")}
        source.files |= {
            f"{each.removesuffix('/.')}/{more}": b""
            for each in folders
            for more in ("", "none/", "a.bin/")
        }
    remote = make_config(folder, urls, cache=str(folder / "remote"), storage=storage, **config)
    return Run(source, plain, remote, megablend.build(plain))


@pytest.mark.parametrize(
    ("faults", "scale"),
    [pytest.param(MIXED, 1, id="mixed")]
    + [pytest.param(each, 8, id=name, marks=pytest.mark.slow) for name, each in FAULTS.items()],
)
def test_a_run_is_the_same_through_faults(faults: Faults, scale: int, tmp_path: Path) -> None:
    with FaultySource({}, faults) as source:
        run = make_run(tmp_path, source, scale=scale)
        run.build()
        run.check()
        assert sum(source.faulty.values()) >= 5 * scale


def check_source(folder: Path, seed: int) -> None:
    """A run over a source that goes wrong in several ways is the same, or, where pages come in place of data, an error."""
    rng = random.Random(seed)

    def share() -> float:
        return rng.choice([0, 0, 0.01, 0.05])

    shares: dict[str, Any] = {
        kind: share() for kind in ("tail", "reset", "truncated", "stall", "silent")
    }
    status = {status: share() for status in (429, 500, 503)}
    with FaultySource({}) as source:
        run = make_run(folder, source, scale=1, is_listed=rng.random() < 0.5)
        source.faults = Faults(
            latency=0.001, page=rng.choice([0, 0, 0.01, 0.3]), status=status, **shares, seed=seed
        )
        problem = None
        try:
            run.build()
            run.check()
        except MegablendError as error:
            problem = str(error)
        assert problem is None or source.faulty["page"], problem
        assert problem is None or source.url in problem or "s3://d" in problem


def test_a_source_that_goes_wrong_in_several_ways(tmp_path: Path) -> None:
    check_source(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + SOURCES))
def test_sources_that_go_wrong_in_several_ways(tmp_path: Path, seed: int) -> None:
    check_source(tmp_path, seed)


@pytest.mark.parametrize(
    ("seconds", "scale"),
    [(2, 1), pytest.param(60, 8, marks=[pytest.mark.slow])],
)
def test_a_run_goes_on_after_an_outage(
    seconds: float, scale: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        FaultySource({}, Faults(latency=0.002)) as source,
        caplog.at_level(logging.WARNING, "megablend"),
    ):
        run = make_run(tmp_path, source, scale=scale)
        run.build()
        dataset = megablend.open(run.remote)
        assert dataset[0]["tokens"].equal(megablend.open(run.plain)[0]["tokens"])
        source.is_down = True
        threading.Timer(seconds, lambda: setattr(source, "is_down", False)).start()
        found = read_digests(dataset)
        assert not source.is_down
        assert found == read_digests(megablend.open(run.plain))
    assert len([each for each in caplog.records if "are being retried" in each.getMessage()]) <= 2


@pytest.mark.parametrize(
    ("share", "scale"),
    [(0.2, 1), *(pytest.param(share, 8, marks=pytest.mark.slow) for share in (0.02, 0.2))],
)
def test_no_flipped_bit_becomes_a_token_where_there_are_checksums(
    share: float, scale: int, tmp_path: Path
) -> None:
    with FaultySource({}) as source:
        run = make_run(tmp_path, source, scale=scale)
        run.build(checksums=True)
        source.faults = Faults(flip=share)
        run.check()
        assert source.faulty["flip"] >= 5
