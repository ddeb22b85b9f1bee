"""What `build --dry-run` and `describe` tell beforehand, compared with what a server of objects has counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.cli.build import format_transfer
from megablend.inspect.description import RunDescription
from megablend.operations.dry_run import dry_run
from megablend.storage.transfer import Transfer
from tests.cases import others_slow
from tests.cli.commands import run
from tests.formats.writers import IDX_CODES
from tests.runs import make_config
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")


class Documents(NamedTuple):
    """Tokens, and how long each document is."""

    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]

    @property
    def table(self) -> pa.Table:
        """With a column of lists."""
        offsets = pa.array(np.append(0, np.cumsum(self.lengths)), pa.int32())
        return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, self.tokens)})


def draw(seed: int, num_tokens: int, longest: int = 2000) -> Documents:
    """Documents with about so many tokens in all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, max(1, 2 * num_tokens // longest))
    return Documents(lengths, rng.integers(0, 50_000, int(lengths.sum()), np.int32))


def write_parquet(path: Path, documents: Documents, **settings: Any) -> None:
    defaults = {
        "data_page_size": 64 << 10,
        "compression": "none",
        "write_page_index": True,
        "use_dictionary": False,
    }
    pq.write_table(documents.table, path, **defaults | settings)


def write_arrow(path: Path, documents: Documents) -> None:
    table = documents.table.append_column("other", pa.array(np.arange(len(documents.lengths))))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=40)


def write_stream(path: Path, documents: Documents, rows: int = 400) -> None:
    with pa.ipc.new_stream(str(path), documents.table.schema) as writer:
        writer.write_table(documents.table, max_chunksize=rows)


def write_batches(path: Path, documents: Documents) -> None:
    """Small ones, which are read along with those before them."""
    write_stream(path, documents, rows=40)


def write_raw(path: Path, documents: Documents) -> None:
    path.write_bytes(documents.tokens.tobytes())


def write_megatron(path: Path, documents: Documents) -> None:
    sizes = 4 * documents.lengths
    header = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([IDX_CODES["int32"]])
    counts = np.array([len(sizes), len(sizes) + 1], "<u8").tobytes()
    arrays = (
        documents.lengths.astype("<i4"),
        (np.cumsum(sizes) - sizes).astype("<i8"),
        np.arange(len(sizes) + 1),
    )
    path.with_suffix(".idx").write_bytes(
        b"".join([header, counts, *(each.tobytes() for each in arrays)])
    )
    path.write_bytes(documents.tokens.tobytes())


def write_small(folder: Path) -> None:
    for i in range(60):
        write_parquet(folder / f"{i:03d}.parquet", draw(i, 2_000 + 7_919 * i % 100_000))


def write_mixed(folder: Path) -> None:
    for i in range(24):
        write_parquet(folder / f"{i:03d}.parquet", draw(i, int(2_000 * 1.35**i)))


def write_many(folder: Path) -> None:
    for i in range(40):
        write_parquet(
            folder / f"{i:04d}.parquet", draw(i, 1_000 + 47_777 * i % 250_000), compression="zstd"
        )
    for i in range(40, 800):
        (folder / f"{i:04d}.parquet").write_bytes((folder / f"{i % 40:04d}.parquet").read_bytes())


def write_each(
    write: Callable[[Path, Documents], None], suffix: str, count: int, **drawn: int
) -> Callable[[Path], None]:
    def write_all(folder: Path) -> None:
        for i in range(count):
            write(folder / f"{i}{suffix}", draw(i, **drawn))

    return write_all


def write_large(folder: Path) -> None:
    settings = {"write_page_index": False, "row_group_size": 2000}
    for i in range(3):
        write_parquet(folder / f"{i}.parquet", draw(i, 1_000_000 * (2 + 3 * i)), **settings)
    write_parquet(
        folder / "3.parquet", draw(3, 4_000_000), use_dictionary=True, row_group_size=1000
    )


CORPORA: dict[str, Callable[[Path], None]] = {
    "small": write_small,
    "mixed": write_mixed,
    "many": write_many,
    "arrow": write_each(write_arrow, ".feather", 5, num_tokens=1_000_000),
    "stream": write_each(write_stream, ".arrow", 5, num_tokens=3_000_000),
    "batches": write_each(write_batches, ".arrow", 3, num_tokens=3_000_000),
    "raw": write_each(write_raw, ".raw", 3, num_tokens=3_000_000),
    "megatron": write_each(write_megatron, ".bin", 4, num_tokens=2_000_000, longest=40),
    "large": write_large,
}
SOME = ("mixed", "stream", "megatron", "large")


def write_corpus(corpus: str, folder: Path) -> dict[str, bytes]:
    """Write the files of a corpus. Returns: these, by keys in bucket b."""
    folder.mkdir()
    CORPORA[corpus](folder)
    return {f"b/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def list_data(files: dict[str, bytes]) -> list[bytes]:
    """The contents of the data files."""
    return [data for name, data in files.items() if not name.endswith(".idx")]


def is_told(least: float, most: float, seen: float) -> bool:
    """Whether a figure is right to 5 %, or is a range that has what was seen and whose ends differ by a factor of 1.5 at most.

    Requests that take long are sent once more: half a per cent of them, which the server sees and nobody can tell beforehand.
    """
    near = max(abs(seen - least), abs(seen - most)) <= 0.05 * seen
    return near or (least <= seen <= 1.01 * most and most <= 1.5 * least)


def configure(
    corpus: str, folder: Path, source: FaultySource, *, is_named: bool = False
) -> dict[str, Any]:
    column: dict[str, Any] = {"column": "input_ids"}
    if corpus == "raw":
        column = {"format": "raw", "format_options": {"dtype": "int32", "eod_token": 7}}
    elif corpus == "megatron":
        column = {}
    data = [f"s3://{name}" for name in source.files if not name.endswith(".idx")]
    paths = data if is_named else [f"s3://b/*{data[0][data[0].rindex('.') :]}"]
    config = make_config(folder, [{"name": "s", "weight": 1, "path": paths, **column}])
    server = {
        "endpoint": source.url,
        "anonymous": True,
        "price_per_1000_requests": 0.5,
        "price_per_gb": 2.0,
    }
    return config | {
        "storage": {"s3://": server},
        "sequence_length": 2048,
        "epochs": 1,
        "block_bytes": 1 << 18,
    }


@pytest.mark.parametrize(
    ("corpus", "is_named"),
    [*((corpus, False) for corpus in CORPORA), *((corpus, True) for corpus in SOME)],
)
def test_a_dry_run_tells_what_indexing_takes(
    corpus: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no listing shows how large the files are."""
    monkeypatch.setattr("megablend.index.build.file_parts.PART_BYTES", 8 << 20)
    files = write_corpus(corpus, tmp_path / "data")
    with FaultySource(files) as tried, FaultySource(files) as source:
        (told,) = dry_run(configure(corpus, tmp_path, tried, is_named=is_named))
        assert not (tmp_path / "cache").exists()
        megablend.build_index(configure(corpus, tmp_path, source, is_named=is_named))
    assert (told.files, told.bytes) == (len(list_data(files)), sum(map(len, list_data(files))))
    assert is_told(told.requests, told.most_requests, source.requests)
    assert is_told(told.source_bytes, told.most_source_bytes, source.bytes)
    assert told.cost == pytest.approx(told.requests / 1000 * 0.5 + told.source_bytes / 1e9 * 2.0)
    assert (told.requests == told.most_requests) == (corpus != "many")
    if corpus in ("large", "megatron"):
        assert tried.bytes < 0.02 * sum(map(len, files.values()))


def test_commands_print_figures_and_ranges(tmp_path: Path) -> None:
    files = write_corpus("arrow", tmp_path / "data")
    path = tmp_path / "config.json"
    with FaultySource(files) as source:
        config = configure("arrow", tmp_path, source)
        path.write_text(json.dumps(config))
        (told,) = dry_run(config)
        figures = f"{told.requests} requests, {told.source_bytes / 1e9:.2f} GB, which costs {told.cost:.2f}"
        assert (
            f"5 files, 0.02 GB; indexing takes {figures}\n"
            in run("build", path, "--dry-run").stdout
        )
        path.write_text(json.dumps(config | {"order": "document"}))
        assert f"{figures}; its order needs the lengths" in run("build", path, "--dry-run").stdout
        path.write_text(json.dumps(config))
        megablend.build(config)
        assert re.search(
            r"takes 13. requests, 0.02 GB, which costs 0.11 with one loader",
            run("describe", path).stdout,
        )
    wide = {
        "requests": 990,
        "most_requests": 1200,
        "bytes": 10**9,
        "most_bytes": 10**9,
        "cost": 1.0,
        "most_cost": 2.5,
    }
    assert format_transfer(wide) == "990 to 1,200 requests, 1.00 GB, which costs 1.00 to 2.50"


def read_all(
    config: dict[str, Any], *, micro_batch_size: int, data_parallel_size: int, num_workers: int
) -> None:
    """Read train as each rank does, one after another."""
    for rank in range(data_parallel_size):
        ranks: dict[str, Any] = {
            "data_parallel_rank": rank,
            "data_parallel_size": data_parallel_size,
        }
        dataset = megablend.open(config)
        loader = megablend.Loader(
            dataset, micro_batch_size=micro_batch_size, num_workers=num_workers, **ranks
        )
        num_batches = len(loader)
        assert sum(1 for _ in loader) == num_batches


READINGS = [
    *((corpus, 1, 0) for corpus in CORPORA if corpus != "raw"),
    *((corpus, 3, 0) for corpus in SOME),
    ("stream", 1, 2),
]
SLOW_READINGS = [("many", 1, 0), ("large", 3, 0)]


@pytest.mark.parametrize(
    ("corpus", "ranks", "workers"),
    others_slow(READINGS, quick=[each for each in READINGS if each not in SLOW_READINGS]),
)
def test_describe_tells_what_reading_takes(
    corpus: str, ranks: int, workers: int, tmp_path: Path
) -> None:
    told, plain, source = describe_and_read(corpus, ranks, workers, tmp_path)
    assert is_told(told.requests, told.most_requests, source.requests)
    assert is_told(told.bytes, told.most_bytes, source.bytes)
    assert told.cost == pytest.approx(told.requests / 1000 * 0.5 + told.bytes / 1e9 * 2.0)
    if ranks == 1 and not workers:
        assert is_told(plain.requests, plain.most_requests, source.requests)


@pytest.mark.parametrize(
    ("corpus", "ranks"),
    others_slow(product(["mixed", "megatron"], [1, 6]), quick=[("mixed", 6), ("megatron", 1)]),
)
def test_describe_plans_parts_of_long_runs(
    corpus: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its samples, where a process reads many, or some of its processes; so few here that the ranges are wide."""
    monkeypatch.setattr("megablend.prefetch.plan_stretches._WIDEST", 100)
    for module in ("windows", "plan_stretches"):
        monkeypatch.setattr(f"megablend.prefetch.{module}.WINDOW_SAMPLES", 128)
    monkeypatch.setattr("megablend.prefetch.plan_stretches._PLANNED_SAMPLES", 512)
    told, _, source = describe_and_read(corpus, ranks, 0, tmp_path)
    assert told.requests < source.requests < told.most_requests < 4 * told.requests
    assert told.bytes < source.bytes < told.most_bytes < 4 * told.bytes


def describe_and_read(
    corpus: str, ranks: int, workers: int, folder: Path
) -> tuple[Transfer, Transfer, FaultySource]:
    """What `describe` tells of loaders, and of one; and the source that the loaders have read from."""
    files = write_corpus(corpus, folder / "data")
    loaders: dict[str, Any] = {
        "micro_batch_size": 2,
        "data_parallel_size": ranks,
        "num_workers": workers,
    }
    with FaultySource(files) as source:
        config = configure(corpus, folder, source) | {"file_checks_per_second": 0}
        megablend.build(config)
        described = megablend.describe(config, **loaders)
        plain = megablend.describe(config)
        source.requests = source.bytes = 0
        read_all(config, **loaders)
    assert isinstance(described, RunDescription)
    assert isinstance(plain, RunDescription)
    assert described.transfer is not None
    assert plain.transfer is not None
    return described.transfer, plain.transfer, source


def test_files_in_object_stores_are_opened_once(tmp_path: Path) -> None:
    """Also where several threads need one at the same time."""
    files = write_corpus("large", tmp_path / "data")
    with FaultySource(files, Faults(latency=0.05)) as source:
        config = configure("large", tmp_path, source) | {"file_checks_per_second": 0}
        megablend.build(config)
        source.headers.clear()
        store = megablend.open(config).run.store
        numbers = np.arange(16)  # of one file
        rows = store.snapshot.blocks(numbers)
        with ThreadPoolExecutor(16) as threads:
            reads = threads.map(
                lambda i: store.begin_read(numbers[i : i + 1], rows[i : i + 1]), range(16)
            )
            assert len({id(read[0].reader) for read in reads}) == 1
    assert len(source.headers) == 2  # its state and its end
