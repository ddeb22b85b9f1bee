"""Reading ahead changes nothing but the time: same batches, same errors, nothing left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import megablend
from megablend.prefetch.read_amplification import read_amplification
from megablend.storage.base import Allocate, Bytes, Int64s
from megablend.storage.wrapper import WrapperStorage
from tests.cases import each_pair
from tests.reader.loader_threads import LoaderThreads
from tests.runs import EOD, documents, make_config, write_source
from tests.storages import STORAGE

KINDS = ["parquet", "arrow", "megatron"]


def make(folder: Path, **settings: Any) -> dict[str, Any]:
    sources = [
        write_source(folder, d, kind, documents(d, 60, 30, seed=4)) for d, kind in enumerate(KINDS)
    ]
    for source, weight in zip(sources, (5, 3, 2), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    config = make_config(folder, sources, **({"samples": 240, "split": "90,10,0"} | settings))
    megablend.build(config)
    return config


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return make(tmp_path)


FLAGS: list[dict[str, Any]] = [
    {},
    {"add_extra_token_to_sequence": False, "eod_mask_loss": True},
    {"reset_position_ids": True, "reset_attention_mask": True, "create_attention_mask": True},
    {"inter_document_masking": True, "eod_mask_loss": True},
    {
        "inter_document_masking": True,
        "add_extra_token_to_sequence": False,
        "lanes": 6,
        "shuffle_window": 7,
    },
]


@pytest.mark.parametrize(
    ("flags", "split", "drop_last"), each_pair(FLAGS, ["train", "valid"], [True, False])
)
def test_batches_are_the_single_samples_collated(
    tmp_path: Path, flags: Any, split: str, drop_last: bool
) -> None:
    dataset = megablend.open(make(tmp_path, **flags), split)
    options_of_both: list[dict[str, Any]] = [{"collate_fn": default_collate}, {}]
    expected, found = (
        list(
            megablend.Loader(
                dataset, micro_batch_size=7, drop_last=drop_last, consumed_samples=3, **options
            )
        )
        for options in options_of_both
    )
    assert len(found) == len(expected) > 0
    for batch, other in zip(found, expected, strict=True):
        assert list(batch) == list(other)
        for name, tensor in batch.items():
            assert (tensor.dtype, tensor.is_contiguous()) == (other[name].dtype, True)
            assert torch.equal(tensor, other[name]), name


def test_tensors_of_a_batch_share_no_memory(config: dict[str, Any]) -> None:
    batches = list(megablend.Loader(megablend.open(config), micro_batch_size=4))
    for batch in batches[:3]:
        for name in batch:
            batch[name].zero_()
    again = list(megablend.Loader(megablend.open(config), micro_batch_size=4))
    assert all(
        torch.equal(a["tokens"], b["tokens"]) for a, b in zip(batches[3:], again[3:], strict=True)
    )
    alone = batches[5]["labels"].clone()
    batches[5]["tokens"].fill_(-1)
    assert torch.equal(batches[5]["labels"], alone)


def test_little_memory_gives_the_same_batches(tmp_path: Path) -> None:
    config = make(tmp_path, memory=60_000)
    whole = [
        batch["tokens"]
        for batch in megablend.Loader(
            megablend.open(config | {"memory": "1GiB"}), micro_batch_size=2
        )
    ]
    tight = [
        batch["tokens"] for batch in megablend.Loader(megablend.open(config), micro_batch_size=2)
    ]
    assert torch.equal(torch.cat(whole), torch.cat(tight))


def test_reads_ahead_use_what_the_windows_in_flight_allow(tmp_path: Path) -> None:
    """One with a large block, which takes memory while it is read, does not limit those that follow it."""
    listed = documents(0, 400, 20, seed=4)
    listed[200] = list(range(1, 1501))
    source = write_source(tmp_path, 0, "parquet", listed) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=300, memory=36_000, block_bytes=256)
    megablend.build(config)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=2)
    allowed = set[int]()
    for _ in loader:
        assert loader._steps is not None
        ahead = loader._steps._ahead
        assert ahead is not None
        assert ahead._max_bytes == min(each.window.max_bytes for each in ahead._in_flight)
        allowed.add(ahead._max_bytes)
    assert len(allowed) > 1


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    dataset = megablend.open(make(tmp_path, memory="1KiB", shuffle_window=64, sequence_length=20))
    with pytest.raises(
        megablend.ConfigError,
        match=r"memory: found 1.0 KiB, expected \d+.\d KiB or more \(blocks of 4 lanes: .* lower `shuffle_window",
    ):
        megablend.Loader(dataset, micro_batch_size=4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_errors_of_threads_reach_the_loop(
    tmp_path: Path, config: dict[str, Any], workers: int, threads: LoaderThreads
) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4, num_workers=workers)
    place = int(loader.dataset.run.store.snapshot.blocks([0])["offset"][0])
    for path in tmp_path.glob("source0/*.parquet"):
        data = bytearray(path.read_bytes())
        data[place : place + 8] = bytes(8)  # the first page's header
        path.write_bytes(data)
    with pytest.raises(
        megablend.DataError, match=r"source0/\d\.parquet: changed since it was indexed"
    ):
        list(loader)
    threads.await_end()


def test_the_end_of_a_run_leaves_no_threads(config: dict[str, Any], threads: LoaderThreads) -> None:
    list(megablend.Loader(megablend.open(config), micro_batch_size=4))
    threads.await_end()


def test_a_loop_that_is_left_leaves_no_threads_when_its_loader_goes(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    next(iter(loader))
    assert threads.running()
    del loader
    gc.collect()
    threads.await_end()


def test_closing_stops_threads_and_going_on_starts_them_again(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    seen = [next(iter(loader))["tokens"]]
    loader.close()
    threads.await_end()
    seen += [batch["tokens"] for batch in loader]
    assert torch.equal(
        torch.cat(seen),
        torch.cat(
            [
                b["tokens"]
                for b in megablend.Loader(loader.dataset, micro_batch_size=4, consumed_samples=0)
            ]
        ),
    )


def test_an_interrupt_loses_no_batch(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, threads: LoaderThreads
) -> None:
    whole = [
        batch["tokens"] for batch in megablend.Loader(megablend.open(config), micro_batch_size=4)
    ]
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    seen = []
    for _, batch in zip(range(5), loader, strict=False):
        seen.append(batch["tokens"])

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megablend.prefetch.read_ahead.gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    monkeypatch.undo()
    threads.await_end()
    seen += [batch["tokens"] for batch in loader]
    assert torch.equal(torch.cat(seen), torch.cat(whole))


def test_a_forked_child_goes_on_alone(config: dict[str, Any]) -> None:
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    whole = [
        batch["tokens"] for batch in megablend.Loader(megablend.open(config), micro_batch_size=4)
    ]
    first = next(iter(loader))["tokens"]
    reading, writing = os.pipe()
    if (child := _fork()) == 0:
        try:
            rest = torch.cat([first, *(batch["tokens"] for batch in loader)])
            os.write(writing, b"same" if torch.equal(rest, torch.cat(whole)) else b"other")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == b"same"
    assert torch.equal(torch.cat([first, *(batch["tokens"] for batch in loader)]), torch.cat(whole))


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_opens_leave_no_files_behind(config: dict[str, Any]) -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for turn in range(6):
        loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
        next(iter(loader))
        if turn == 2:
            before = files()
    del loader
    gc.collect()
    assert files() <= before


class CountingStorage(WrapperStorage):
    """Local files; bytes that are read from `.bin` files are counted."""

    def __init__(self) -> None:
        super().__init__(STORAGE)
        self._reads: list[int] = []

    @property
    def bytes(self) -> int:
        return sum(self._reads)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self._reads.append(int(sizes.sum()) * path.endswith(".bin"))  # from several threads
        return super().read_ranges(path, offsets, sizes, allocate)


@pytest.mark.parametrize(("micro_batch", "ranks"), [(4, 1), (2, 2), (3, 1), (1, 5)])
def test_amplification_is_what_is_measured(tmp_path: Path, micro_batch: int, ranks: int) -> None:
    source = write_source(tmp_path, 0, "megatron", [[t] * 40 for t in range(1, 400)], num_files=1)
    config = make_config(
        tmp_path, [source], samples=900, shuffle_window=30, sequence_length=16, block_bytes=4096
    )
    megablend.build(config)
    run = megablend.open(config).run
    expected = read_amplification(
        run,
        micro_batch_size=micro_batch,
        data_parallel_size=ranks,
        num_workers=0,
        stop=900,
    )
    storage = CountingStorage()
    for rank in range(ranks):
        list(
            megablend.Loader(
                megablend.open(config, storage=storage),
                micro_batch_size=micro_batch,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                drop_last=False,
            )
        )
    spans = run.locate_spans(*run.plan.locate_many(np.arange(900)))
    used = [block for _, block in {*zip(spans.epochs.tolist(), spans.blocks.tolist(), strict=True)}]
    bytes_used = int(run.store.snapshot.blocks(used)["stored_bytes"].sum())
    assert storage.bytes / bytes_used == pytest.approx(expected, rel=0.05)
