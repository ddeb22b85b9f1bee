"""Storages that answer late: as many requests in flight as they like, whatever the number of threads that decode."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megablend
from megablend.errors import MissingFileError
from megablend.formats.decoded import DecodedBlocks
from megablend.index.blocks.block_store import BlockStore
from megablend.prefetch.read_pipeline import ReadPipeline
from megablend.prefetch.reads import Read
from megablend.storage.base import Allocate, Bytes, Int64s, ReadLimits, Storage
from megablend.storage.wrapper import WrapperStorage
from tests.reader.loader_threads import LoaderThreads
from tests.runs import make_config, write_source
from tests.storages import STORAGE

LATENCY = 0.03
MAX_READS = 64
DECODING = 2


class LateStorage(WrapperStorage):
    """Local files of which each request for ranges takes LATENCY seconds; counts what is in flight."""

    def __init__(self) -> None:
        super().__init__(STORAGE)
        self.in_flight = self.most = self.requests = 0
        self.lock = threading.Lock()

    def limits(self, path: str) -> ReadLimits:
        return ReadLimits(max_gap_bytes=0, max_merged_bytes=1, max_reads=MAX_READS)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        return nullcontext(-1)

    def begin(self) -> None:
        with self.lock:
            self.requests += 1
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)

    def end(self) -> None:
        with self.lock:
            self.in_flight -= 1


class LateSynchronous(LateStorage):
    """Waits in the thread that asks."""

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self.begin()
        try:
            time.sleep(LATENCY)
            return super().read_ranges(path, offsets, sizes, allocate)
        finally:
            self.end()


class LateAsynchronous(LateStorage):
    """One event loop in a thread of its own, as clients of object stores have it: a request a range."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_after: int | None = None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        return asyncio.run_coroutine_threadsafe(
            self._fetch(path, offsets, sizes, allocate), self.loop
        )

    async def _fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        await asyncio.gather(*(self._request() for _ in offsets))
        if self.fails_after is not None and self.requests > self.fails_after:
            raise MissingFileError(path, "went away")
        return self.inner.read_ranges(path, offsets, sizes, allocate)

    async def _request(self) -> None:
        self.begin()
        await asyncio.sleep(LATENCY)
        self.end()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result(240)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(240)
        self.loop.close()


async def _cancel_others() -> None:
    """End the requests that nobody waits for any more."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture(params=["parquet", "arrow", "megatron"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    documents = [[(7 * i + j) % 1000 for j in range(37)] for i in range(2500)]
    sources = [
        write_source(tmp_path, number, request.param, documents, num_files=3) for number in range(2)
    ]
    sources = [source | {"weight": 1} for source in sources]
    config = make_config(
        tmp_path, sources, sequence_length=64, shuffle_window=64, samples=1024, block_bytes=1024
    )
    megablend.build(config)
    return config


@pytest.fixture(autouse=True)
def _two_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megablend.reader.batch_dataset.MAX_DECODING", DECODING)


@pytest.fixture
def asynchronous() -> Iterator[LateAsynchronous]:
    storage = LateAsynchronous()
    yield storage
    storage.close()


def tokens(config: dict[str, Any], **options: Any) -> torch.Tensor:
    loader = megablend.Loader(megablend.open(config, **options), micro_batch_size=8)
    return torch.cat([batch["tokens"] for batch in loader])


def test_requests_wait_together_and_give_the_same_tokens(
    config: dict[str, Any], asynchronous: LateAsynchronous
) -> None:
    local = tokens(config)
    assert torch.equal(tokens(config, storage=asynchronous), local)
    assert asynchronous.most > 4 * DECODING
    assert asynchronous.in_flight == 0


@pytest.mark.parametrize("after", [0, 200])
def test_what_a_request_raises_reaches_the_loop(
    config: dict[str, Any], asynchronous: LateAsynchronous, after: int, threads: LoaderThreads
) -> None:
    asynchronous.fails_after = after
    with pytest.raises(MissingFileError, match="went away"):
        tokens(config, storage=asynchronous)
    threads.await_end()


def test_threads_wait_together_where_a_storage_is_synchronous(config: dict[str, Any]) -> None:
    storage = LateSynchronous()
    assert torch.equal(tokens(config, storage=storage), tokens(config))
    assert 2 * DECODING < storage.most <= MAX_READS


@pytest.mark.parametrize(
    ("storage", "pool"), [(STORAGE, "read"), (LateSynchronous(), "decode")], ids=["local", "late"]
)
def test_local_blocks_are_decoded_by_the_thread_that_fetched_them(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, storage: Storage, pool: str
) -> None:
    decode = BlockStore.decode
    names = set[str]()

    def decode_noting_the_thread(store: BlockStore, *args: Any, **options: Any) -> DecodedBlocks:
        names.add(threading.current_thread().name)
        return decode(store, *args, **options)

    monkeypatch.setattr(BlockStore, "decode", decode_noting_the_thread)
    tokens(config, storage=storage)
    assert names
    assert all(name.startswith(f"megablend-{pool}") for name in names)


def test_single_samples_are_fetched_the_same_way(
    config: dict[str, Any], asynchronous: LateAsynchronous
) -> None:
    dataset = megablend.open(config)
    late = megablend.open(config, storage=asynchronous)
    for k in (0, 500, 1023):
        assert torch.equal(late[k]["tokens"], dataset[k]["tokens"])
    assert asynchronous.requests > 0


def test_closing_cancels_what_is_in_flight(
    config: dict[str, Any], asynchronous: LateAsynchronous, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = megablend.open(config, storage=asynchronous).run.store
    ids = np.arange(8)
    store.read_blocks(ids)  # opens the files
    monkeypatch.setattr(f"{__name__}.LATENCY", 3600.0)
    pipeline = ReadPipeline(store, max_bytes=1 << 30, num_fetching=2, num_decoding=1, pieces=False)
    before = asynchronous.requests
    pipeline.submit(
        Read(
            indices=ids,
            ids=ids,
            rows=store.snapshot.blocks(ids),
            size=1,
            reading=1,
            first_use=0,
            file=0,
        )
    )
    wait_until(lambda: asynchronous.requests > before)
    pipeline.close()
    wait_until(lambda: len(asyncio.all_tasks(asynchronous.loop)) == 0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 500
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()
