"""What a storage with copies is told before a loader reads: all that it reads, in the order in which it is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.arrays import Float64s, Int64s
from megablend.errors import MissingFileError
from megablend.formats.arrow.reader import ARROW
from megablend.formats.parquet.decoding.dictionaries import CACHE
from megablend.prefetch import due_reporter
from megablend.prefetch.due_ranges import plan_due
from megablend.prefetch.due_reporter import FIRST_SECONDS, count_horizon
from megablend.prefetch.read_schedule import StepSequence
from megablend.run.run import Run
from megablend.storage import registry
from megablend.storage.base import Allocate, Bytes, ReadLimits
from megablend.storage.hints import DueRanges
from megablend.storage.wrapper import WrapperStorage
from megablend.testing.documents import Documents
from tests.formats.writers import KINDS, index
from tests.reader import test_extra_columns as with_extra
from tests.runs import EOD, documents, make_config, write_source

pytestmark = pytest.mark.long
BATCH = 4


class Log:
    """What was told, and what was read, of all files."""

    def __init__(self) -> None:
        self.told = list[Sequence[DueRanges]]()
        self.read = list[tuple[str, int, int]]()
        self.least = 0
        """Reads wait until it was told so many times."""
        self.num_failures = 0
        """So many times telling fails."""
        self._changed = threading.Condition()

    def wait_told(self, count: int) -> None:
        """Until it was told so many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) >= count, timeout=60)

    def tell(self, ranges: Sequence[DueRanges]) -> None:
        with self._changed:
            if self.num_failures:
                self.num_failures -= 1
                raise MissingFileError("x", "is not there now")
            self.told.append(ranges)
            self._changed.notify_all()

    def note(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        self.wait_told(self.least)
        with self._changed:
            self.read += [
                (path, offset, size)
                for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
                if offset or not path.endswith(".idx")
            ]


class RecordingStorage(WrapperStorage):
    """Local files, of which copies seem to be kept. What is read to open a file is left out."""

    log = Log()

    def limits(self, path: str) -> ReadLimits:
        return replace(super().limits(path), max_gap_bytes=0)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self.log.note(path, offsets, sizes)
        return super().read_ranges(path, offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        return nullcontext(-1)

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        self.log.tell(ranges)

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        raise AssertionError("nothing is wrong")


@contextmanager
def recording() -> Iterator[Log]:
    """What loaders that are opened in this context do."""
    make = registry.STORAGES[""]
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordingStorage, "log", log)
        patch.setitem(registry.STORAGES, "", lambda options: RecordingStorage(make(options)))
        CACHE.clear()
        yield log


def write_by_dictionary(path: Path, listed: Documents) -> None:
    """Pages of tokens by dictionary between pages of text; later row groups have other dictionaries."""
    table = pa.table(
        {"text": ["x" * 50] * len(listed), "ids": pa.array(listed, pa.list_(pa.int32()))}
    )
    pq.write_table(table, path, data_page_size=100, write_batch_size=5, row_group_size=60)


def write_batches(path: Path, listed: Documents, *, text: str = "") -> None:
    """Batches of an Arrow file that are read whole, unless there is text beside the tokens."""
    table = pa.table({"ids": pa.array(listed, pa.list_(pa.int32()))})
    if text:
        table = table.add_column(0, "text", pa.array([text] * len(listed)))
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


def write_data(data: Path) -> list[dict[str, Any]]:
    """Sources of Parquet, with and without dictionaries, `.bin` and Arrow."""
    sources = [
        write_source(data, d, kind, documents(d, 120, 40, 5)) | {"weight": 1 + d}
        for d, kind in enumerate(("parquet", "megatron"))
    ]
    for i in range(2):
        write_by_dictionary(data / f"{i}.parquet", documents(5, 120, 40, i))
        write_batches(data / f"{i}.arrow", documents(6, 40, 300, i))
    for suffix in ("parquet", "arrow"):
        path = f"{data}/*.{suffix}"
        sources.append({"name": suffix, "path": path, "column": "ids", "weight": 2})
    return sources


def make_run(folder: Path, **settings: Any) -> dict[str, Any]:
    """A built run of each of them."""
    sources = write_data(folder / "data")
    config = make_config(folder, sources, shuffle_window=8, **({"epochs": 2} | settings))
    megablend.build(config)
    return config


def make_loader(config: dict[str, Any], log: Log, **options: Any) -> megablend.Loader:
    """A loader that reads only after it was told for the second time, which is all of it."""
    loader = megablend.Loader(megablend.open(config), micro_batch_size=BATCH, **options)
    log.least = 2
    return loader


def list_batches(first: int, num_batches: int, stride: int) -> list[range]:
    """The samples of each."""
    return [range(first + i * stride, first + i * stride + BATCH) for i in range(num_batches)]


def due_by_byte(told: Sequence[DueRanges]) -> dict[str, Float64s]:
    """When each byte of a file is first due; never, if nothing was said of it."""
    found = dict[str, Float64s]()
    for path, offsets, sizes, due in told:
        when = found.setdefault(path, np.full(Path(path).stat().st_size, np.inf))
        for offset, size, seconds in zip(
            offsets.tolist(), sizes.tolist(), due.tolist(), strict=True
        ):
            when[offset : offset + size] = np.minimum(when[offset : offset + size], seconds)
    return found


def find_first_steps(
    config: dict[str, Any], batches: Sequence[Sequence[int]]
) -> dict[str, Float64s]:
    """The first step that needs each byte: read sample by sample, with nothing read ahead."""
    found = dict[str, Float64s]()
    with recording() as log:
        dataset = megablend.open(config)
        for step, batch in enumerate(batches):
            log.read.clear()
            for k in batch:
                dataset[k]
            for path, offset, size in log.read:
                when = found.setdefault(path, np.full(Path(path).stat().st_size, np.inf))
                when[offset : offset + size] = np.minimum(when[offset : offset + size], step)
    return found


def check_told(
    told: Sequence[DueRanges],
    read: Sequence[tuple[str, int, int]],
    steps: dict[str, Float64s],
    pace: float,
    suffixes: Sequence[str] = (".parquet", ".bin", ".idx", ".arrow"),
) -> None:
    """All that was read was told, and each byte is due when the first step that needs it is: from
    when planning began, which took some time."""
    due = due_by_byte(told)
    began = min(float(each.due.min()) for each in told if len(each.due))
    assert -10 < began <= 0
    for path, offset, size in read:
        assert path in due, path
        assert np.isfinite(due[path][offset : offset + size]).all(), (path, offset, size)
    assert {Path(path).suffix for path in steps} == set(suffixes)
    for path, first in steps.items():
        needed = np.isfinite(first)
        np.testing.assert_allclose(
            due[path][needed] - began, pace * first[needed], atol=1e-9, err_msg=path
        )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_that_a_rank_reads_is_told_before(rank: int, tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with recording() as log:
        loader = make_loader(config, log, data_parallel_rank=rank, data_parallel_size=3)
        num_batches = sum(1 for _ in loader)
        num_told = 3  # or more, if the steps were not as fast as was told
        log.wait_told(num_told)
        while log.told[num_told - 1]:
            num_told += 1
            log.wait_told(num_told)  # nothing more, at the end
    steps = find_first_steps(config, list_batches(rank * BATCH, num_batches, 3 * BATCH))
    check_told(log.told[1], log.read, steps, FIRST_SECONDS)
    due = [each.due.max() for each in log.told[0]]
    assert 0 < max(due) < 64 * FIRST_SECONDS  # the first steps, which are planned in no time


def test_a_resumed_loader_tells_what_is_left(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    state = megablend.open(config).state_dict(40 * BATCH)
    with recording() as log:
        loader = make_loader(config, log)
        loader.load_state_dict(state)
        num_batches = sum(1 for _ in loader)
    assert num_batches == loader.batches_total - 40
    steps = find_first_steps(config, list_batches(40 * BATCH, num_batches, BATCH))
    check_told(log.told[1], log.read, steps, FIRST_SECONDS)


def test_it_is_told_to_the_end_of_the_next_epoch_and_later_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_reporter, "_REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(due_reporter, "_TURN_SECONDS", 0.01)
    firsts = list[int]()

    def plan(run: Run, future: StepSequence, step: int, *rest: Any) -> list[DueRanges]:
        firsts.append(step)
        return plan_due(run, future, step, *rest)

    monkeypatch.setattr(due_reporter, "plan_due", plan)
    config = make_run(tmp_path, epochs=5)
    with recording() as log:
        loader = make_loader(config, log)
        batches = iter(loader)
        num_told = count_horizon(loader.dataset.run, 0) // BATCH
        assert 2 * num_told < len(loader)
        for _ in range(30):
            next(batches)
        told = log.told[1]
        # The next one may have begun before the last batch was taken
        num_told_before = len(log.told)
        log.wait_told(num_told_before + 2)
        later = log.told[num_told_before + 1]
        first = firsts[num_told_before + 1]
        loader.close()
    check_told(
        told,
        log.read[:1],
        find_first_steps(config, list_batches(0, num_told, BATCH)),
        FIRST_SECONDS,
    )
    # What was asked for ahead of the 30 steps is due no more
    assert 30 < first < len(loader) - num_told
    steps = find_first_steps(config, list_batches(first * BATCH, num_told, BATCH))
    due = due_by_byte(later).values()
    latest = max(each[np.isfinite(each)].max() for each in due) - min(each.min() for each in due)
    last = max(first[np.isfinite(first)].max() for first in steps.values())
    check_told(later, log.read[:0], steps, float(latest / last))


def test_an_amended_run(tmp_path: Path) -> None:
    """Files that came later are in another index; those from before are in both."""
    config = make_run(tmp_path, epochs=None, stages=[{"samples": 160}])
    data = tmp_path / "data"
    write_by_dictionary(data / "00.parquet", documents(5, 120, 40, 7))
    write_batches(data / "00.arrow", documents(6, 40, 300, 7))
    KINDS["megatron"].write(data / "source1" / "00.bin", documents(1, 60, 40, 7))
    stages = [{"samples": 160}, {"samples": 4000, "new_data": True}]
    grown = config | {"stages": stages}
    megablend.build_index(grown)
    megablend.amend(grown, at=160)
    with recording() as log:
        loader = make_loader(grown, log)
        num_batches = sum(1 for _ in loader)
    names = {Path(path).name for path, _, _ in log.read}
    assert names >= {"00.parquet", "00.arrow", "00.bin", "0.parquet", "0.arrow", "0.bin"}
    steps = find_first_steps(grown, list_batches(0, num_batches, BATCH))
    check_told(log.told[1], log.read, steps, FIRST_SECONDS)


@pytest.mark.parametrize("append_eod", [None, EOD])
@pytest.mark.parametrize("is_amended", [False, True])
def test_extra_columns(append_eod: int | None, is_amended: bool, tmp_path: Path) -> None:
    source = with_extra.write_source(tmp_path, 0, "parquet", documents(0, 300, 60, 5)) | {
        "weight": 1,
        "append_eod": append_eod,
    }
    stages = [{"samples": 400}]
    config = make_config(tmp_path, [source], stages=stages)
    megablend.build(config)
    if is_amended:
        later = with_extra.columns(documents(1, 200, 60, 5))
        with_extra.write(tmp_path / "source0" / "00.parquet", "parquet", later)
        config |= {"stages": [*stages, {"samples": 4000, "new_data": True}]}
        megablend.build_index(config)
        megablend.amend(config, at=400)
    with recording() as log:
        num_batches = sum(1 for _ in make_loader(config, log))
    assert is_amended == any(path.endswith("00.parquet") for path, _, _ in log.read)
    steps = find_first_steps(config, list_batches(0, num_batches, BATCH))
    check_told(log.told[1], log.read, steps, FIRST_SECONDS, [".parquet"])


def test_telling_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(due_reporter, "_REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(due_reporter, "_TURN_SECONDS", 0.01)
    config = make_run(tmp_path)
    with recording() as log, caplog.at_level("WARNING", "megablend"):
        log.num_failures = 3
        loader = make_loader(config, log)
        assert sum(1 for _ in loader) == loader.batches_total
        assert log.told
    assert [each.message for each in caplog.records] == [
        "cannot announce coming reads to the mirror: x: is not there now"
    ]


def test_of_a_batch_with_other_columns_only_the_message_is_told(tmp_path: Path) -> None:
    """Where the tokens are, the message says."""
    path = tmp_path / "x.arrow"
    write_batches(path, documents(1, 60, 40, 7), text="x" * 50)
    blocks = index(path, "ids").blocks
    stops = np.append(blocks["offset"][1:], path.stat().st_size)
    (found,) = ARROW.list_ranges(str(path), blocks, lambda: stops)
    assert found.offsets.tolist() == blocks["offset"].tolist()
    assert set(found.sizes.tolist()) == {1}
