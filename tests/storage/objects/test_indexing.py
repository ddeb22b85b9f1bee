"""Indexing files of an object store: rounds of requests a file, each byte requested once, and the index of local files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import ConfigError, CorruptFileError
from megablend.formats.raw.raw_format import RawFormat
from megablend.inspect.description import RunDescription
from megablend.operations.dry_run import dry_run
from megablend.storage.by_scheme import make_storage
from megablend.storage.head_and_tail import TAIL_BYTES, KeptHeadsAndTails
from megablend.storage.portions import read_portions
from tests.formats.writers import KINDS
from tests.index.index_data import LAUNCHERS
from tests.preloaded import python
from tests.pyarrow_versions import INSTALLED
from tests.runs import make_config
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.servers.fill import AzureContainer
from tests.storage.objects.servers.forward import RoundsInFront

pytestmark = pytest.mark.usefixtures("obstore")
ROUND = 0.1
"""Seconds without a further request after which a round is over: far more than a client takes between two of its requests."""
RNG = np.random.default_rng(3)
LENGTHS = RNG.integers(0, 3000, 400)
TOKENS = RNG.integers(0, 50_000, int(LENGTHS.sum())).astype(np.int32)
DOCUMENTS = [each.tolist() for each in np.split(TOKENS, np.cumsum(LENGTHS)[:-1])]
ROWS = pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(LENGTHS)), pa.int32()), TOKENS)
MAX_ROUNDS = 3
LEVEL_ROUNDS = 2
"""Further ones where a page index has no histograms of levels: pages' headers, then pages."""
OLD_ROUNDS = LEVEL_ROUNDS if INSTALLED < 20 else 0
"""Those for page indexes of this pyarrow."""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


def write_parquet(path: Path, **settings: Any) -> None:
    defaults = {"row_group_size": 60, "data_page_size": 16 << 10, "compression": "zstd"}
    pq.write_table(pa.table({"input_ids": ROWS}), path, **defaults | settings)


def write_long_footer(path: Path) -> None:
    """A Parquet file with more bytes of metadata than are read of the end of a file at first."""
    others = {f"c{i}": pa.array(range(len(DOCUMENTS))) for i in range(250)}
    table = pa.table({"input_ids": ROWS} | others)
    pq.write_table(table, path, row_group_size=60, write_page_index=True)
    assert pq.read_metadata(path).serialized_size > 2 * TAIL_BYTES


def write_arrow(path: Path, codec: str | None) -> None:
    table = pa.table({"other": pa.array(np.arange(len(ROWS))), "input_ids": ROWS})
    with pa.ipc.new_file(
        str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(table, max_chunksize=27)  # the last one is shorter


WRITERS = {
    "page index": lambda path: write_parquet(path, write_page_index=True, use_dictionary=False),
    "page index and dictionaries": lambda path: write_parquet(
        path, write_page_index=True, data_page_version="2.0"
    ),
    "arrow": lambda path: write_arrow(path, None),
    "arrow, or a stream": lambda path: write_arrow(path, None),
    "arrow, compressed": lambda path: write_arrow(path, "zstd"),
    "a stream of one batch": lambda path: write_stream(path, len(DOCUMENTS)),
    "megatron": lambda path: KINDS["megatron"].write(path, DOCUMENTS),
}
SUFFIXES = {
    "page index": ".parquet",
    "page index and dictionaries": ".parquet",
    "megatron": ".bin",
    "arrow, or a stream": ".arrow",
    "a stream of one batch": ".arrow",
    "long footer": ".parquet",
}


def copy_files(folder: Path, count: int) -> dict[str, bytes]:
    """Copy the files in a folder, 0.*, to 1.* and so on. Returns: what is there then, by keys in bucket b."""
    for path in list(folder.iterdir()):
        for i in range(1, count):
            shutil.copy(path, path.with_stem(str(i)))
    return {f"b/{path.name}": path.read_bytes() for path in folder.iterdir()}


ROOTS = {
    "listed": "s3://b",
    "single": "s3://b",
    "no tails": "s3://b",
    "no room": "s3://b",
    "web": "{url}/b",
}
"""How files are named and where they are; also on servers that refuse requests for a file's end, and where no ends are kept."""


def build(
    folder: Path, source: FaultySource, named: str = "listed", **entries: Any
) -> tuple[str, str]:
    """Digests of the indexes of the local files in `folder` and of the source's."""
    column = {} if list(folder.glob("*.bin")) else {"column": "input_ids"}
    suffix = next(path.suffix for path in sorted(folder.iterdir()))
    names = (
        ["*" + suffix]
        if named == "listed"
        else [path.name for path in sorted(folder.glob("*" + suffix))]
    )
    made = {"name": "s", "weight": 1, **column, **entries}
    configs = [
        make_config(
            folder.parent,
            [made | {"path": [f"{root}/{each}" for each in names]}],
            samples=5,
            cache=f"{folder.parent}/{name}{source.port}",
        )
        | {"block_bytes": 1 << 16, "storage": {"s3://": {"endpoint": source.url}}}
        for root, name in ((folder, "plain"), (ROOTS[named].format(url=source.url), "remote"))
    ]
    plain, remote = (megablend.build(config).index for config in configs)
    return plain.digest, remote.digest


def build_in_rounds(
    folder: Path,
    files: dict[str, bytes],
    named: str = "listed",
    *,
    rounds: int = MAX_ROUNDS,
    **entries: Any,
) -> FaultySource:
    """Build from a source that answers all requests of a round at once. Returns: it, with the rounds of each file.

    A busy machine may take longer between two requests of a round: then it is tried again with longer ones.
    """
    for seconds in (ROUND, 10 * ROUND):
        with FaultySource(files, Faults(round=seconds)) as source:
            source.has_tails = named != "no tails"
            plain, remote = build(folder, source, named, **entries)
        assert plain == remote
        listings = source.rounds.pop("b", 0)
        assert listings == (named == "listed")  # sizes and etags are those of the listing
        if max(source.rounds.values()) <= rounds:
            break
    return source


CASES = [
    *((kind, named) for kind in WRITERS for named in ("listed", "single")),
    ("page index and dictionaries", "no tails"),
    ("arrow", "no tails"),
    ("arrow, or a stream", "no tails"),
    ("arrow, compressed", "no tails"),
    ("megatron", "no tails"),
    ("page index and dictionaries", "no room"),
    ("arrow", "no room"),
    ("long footer", "listed"),
    ("long footer", "single"),
    ("page index and dictionaries", "web"),
    ("arrow, or a stream", "web"),
]


@pytest.mark.parametrize(("kind", "named"), CASES, ids=map(", ".join, CASES))
def test_a_file_is_indexed_in_three_rounds(
    kind: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its size is not known beforehand, and if it has to be told from its content what it is."""
    if named == "no room":
        monkeypatch.setattr(KeptHeadsAndTails, "max_bytes", 0)
    folder = tmp_path / "data"
    folder.mkdir()
    writer = write_long_footer if kind == "long footer" else WRITERS[kind]
    writer(folder / f"0{SUFFIXES.get(kind, '.feather')}")
    files = copy_files(folder, 3)
    # Smaller ones are read whole
    assert min(len(data) for name, data in files.items() if not name.endswith(".idx")) > 1 << 19
    rounds = MAX_ROUNDS + (OLD_ROUNDS if SUFFIXES.get(kind) == ".parquet" else 0)
    source = build_in_rounds(folder, files, named, rounds=rounds)
    assert set(source.rounds) == set(files)
    assert max(source.rounds.values()) <= rounds
    repeated = Counter((h["range"], p) for h, p in _ranges(source)) - Counter(
        {(h["range"], p) for h, p in _ranges(source)}
    )
    assert repeated.total() <= 1  # on a busy machine a late one may be hedged
    sent = dict.fromkeys(files, 0)
    for headers, path in _ranges(source):
        sent[path[1:]] += _count_bytes(headers["range"], len(files[path[1:]]))
    if kind != "a stream of one batch" and not (kind == "page index" and OLD_ROUNDS):
        assert all(sent[name] < len(files[name]) or name.endswith(".idx") for name in files)


def _ranges(source: FaultySource) -> list[tuple[dict[str, str], str]]:
    """Requests of ranges that do not begin at the first byte."""
    pairs = zip(source.headers, source.paths, strict=True)
    return [
        (headers, path)
        for headers, path in pairs
        if not headers.get("range", "bytes=0-").startswith("bytes=0-")
    ]


def _count_bytes(value: str, size: int) -> int:
    first, _, last = value.removeprefix("bytes=").partition("-")
    return int(last) + 1 - int(first) if first else min(size, int(last))


def test_pages_whose_index_has_no_counts_are_requested_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions of pyarrow write it: where lists may be empty, every page has to be looked into."""
    indexing = "megablend.formats.parquet.indexing"
    monkeypatch.setattr(
        f"{indexing}.chunks.has_token_counts",
        lambda counts, _: np.zeros(len(counts.has_levels), np.bool_),
    )
    monkeypatch.setattr(
        f"{indexing}.by_headers.has_histogram", lambda chunks, _: np.zeros(len(chunks), np.bool_)
    )
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS["page index"](folder / "0.parquet")
    source = build_in_rounds(folder, {"b/0.parquet": (folder / "0.parquet").read_bytes()})
    assert source.rounds["b/0.parquet"] == 3  # the end with the page index, headers, pages


@pytest.mark.parametrize("documents", [False, True], ids=["tokens", "documents"])
def test_without_a_page_index_a_file_is_read_once(
    documents: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.storage.objects.bucket.MAX_PART_BYTES", 1 << 18)
    folder = tmp_path / "data"
    folder.mkdir()
    write_parquet(folder / "0.parquet", row_group_size=1000, use_dictionary=False)  # a single chunk
    write_parquet(folder / "1.parquet", compression="none")
    files = {f"b/{path.name}": path.read_bytes() for path in folder.iterdir()}
    source = build_in_rounds(folder, files, append_eod=0 if documents else None)
    total = sum(map(len, files.values()))
    # Besides the footer, and samples for the digest
    assert source.bytes < total + 2 * (70_000 + 16 * 4096)
    assert source.requests < total // (1 << 18) + 2 * (16 + 8)
    assert max(source.rounds.values()) <= MAX_ROUNDS


def test_a_raw_file_with_separators_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RawFormat, "scan_bytes", 1 << 17)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "0.raw").write_bytes(TOKENS.astype("<i4").tobytes())
    files = {"b/0.raw": (folder / "0.raw").read_bytes()}
    options = {"format": "raw", "format_options": {"dtype": "int32", "eod_token": 7}}
    with FaultySource(files, Faults(latency=0.05)) as source:
        digests = list[str]()
        for root in (folder, "s3://b"):
            made = {"name": "s", "weight": 1, "path": f"{root}/*.raw", **options}
            config = make_config(
                tmp_path, [made], samples=5, cache=str(tmp_path / f"c{len(digests)}")
            )
            config |= {"block_bytes": 1 << 16, "storage": {"s3://": {"endpoint": source.url}}}
            digests.append(megablend.build(config).index.digest)
    assert digests[0] == digests[1]
    assert source.bytes < 1.05 * len(files["b/0.raw"]) + 16 * 4096
    assert source.most_in_flight > 3


def write_stream(path: Path, rows: int) -> None:
    table = pa.table({"input_ids": ROWS})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize(
    ("rows", "small"), [(2, 256 << 10), (40, 1 << 12)], ids=["small batches", "large batches"]
)
def test_streams_of_batches(
    rows: int, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small batches are read in portions at the same time; large ones are passed over, in many files at the same time."""
    monkeypatch.setattr("megablend.formats.arrow_stream.look_ahead.PORTION_BYTES", 1 << 18)
    monkeypatch.setattr("megablend.formats.arrow_stream.look_ahead.SMALL_BYTES", small)
    folder = tmp_path / "data"
    folder.mkdir()
    num_files = 1 if rows == 2 else 40
    num_batches = 200 if rows == 2 else 10
    write_stream(folder / "00.arrow", rows)
    for i in range(1, num_files):
        shutil.copy(folder / "00.arrow", folder / f"{i:02d}.arrow")
    files = {f"b/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with FaultySource(files, Faults(round=ROUND)) as source:
        plain, remote = build(folder, source)
        del source.rounds["b"]
        assert plain == remote
        if rows == 2:
            assert source.most_in_flight >= 4
            assert max(source.rounds.values()) < num_batches // 10
            assert source.bytes < 1.2 * len(files["b/00.arrow"]) + 16 * 4096
        else:
            assert source.bytes < 0.2 * sum(map(len, files.values()))
            paths = [path for _, path in _ranges(source)]
            last_of_first = len(paths) - paths[::-1].index(paths[0])
            assert {f"/{name}" for name in files} == set(paths[:last_of_first])


def write_files(folder: Path, count: int) -> dict[str, bytes]:
    """So many Parquet files with page indices, by their keys in bucket b."""
    folder.mkdir()
    WRITERS["page index"](folder / "0.parquet")
    return copy_files(folder, count)


def test_a_damaged_file_among_others_is_named(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", 3)
    files["b/1.parquet"] = files["b/1.parquet"][:-100]
    refused = pytest.raises(
        CorruptFileError, match=r"s3://b/1\.parquet.*not a complete Parquet file"
    )
    with FaultySource(files) as source, refused:
        build(tmp_path / "data", source)


def test_ranks_request_each_range_once(tmp_path: Path) -> None:
    """Two MPI ranks; single paths, whose sizes no listing has: one rank meets a file, another one indexes it."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(4):
        KINDS["megatron"].write(folder / f"{i}.bin", DOCUMENTS[i : i + 300])
        write_arrow(folder / f"{i}.arrow", None)
    files = {f"b/{path.name}": path.read_bytes() for path in folder.iterdir()}
    paths = {kind: [f"s3://b/{i}.{kind}" for i in range(4)] for kind in ("bin", "arrow")}
    made: list[dict[str, Any]] = [
        {"name": kind, "weight": 1, "path": each} for kind, each in paths.items()
    ]
    made[1]["column"] = "input_ids"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
    }
    command = [
        "mpirun",
        "-n",
        "2",
        *python(),
        "-m",
        "megablend",
        "build",
        str(tmp_path / "config.json"),
    ]
    for seconds in (ROUND, 10 * ROUND):
        with FaultySource(files, Faults(round=seconds)) as source:
            config = make_config(tmp_path, made, samples=5, cache=str(tmp_path / f"cache{seconds}"))
            # On a busy machine an answer may take so long that a request is sent a second time
            config |= {"storage": {"s3://": {"endpoint": source.url, "read_timeout": 400}}}
            (tmp_path / "config.json").write_text(json.dumps(config))
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=500, check=False, env=environment
            )
            assert done.returncode == 0, done.stderr
        requested = Counter(
            (h.get("range"), p) for h, p in zip(source.headers, source.paths, strict=True)
        )
        assert set(requested.values()) == {1}
        if max(source.rounds.values()) <= MAX_ROUNDS:
            break
    assert set(source.rounds) == set(files)
    assert max(source.rounds.values()) <= MAX_ROUNDS


def test_a_server_that_refuses_the_end_of_a_file_is_soon_asked_for_it_no_more(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_arrow(folder / "0.feather", None)
    files = copy_files(folder, 20)
    with FaultySource(files) as source:
        source.has_tails = False
        plain, remote = build(folder, source, "single")
    assert plain == remote
    refused = sum(headers.get("range", "").startswith("bytes=-") for headers in source.headers)
    assert 3 <= refused < 20  # those of the files that are met at the same time


def test_a_file_on_azure_is_indexed_in_three_rounds(
    azurite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its protocol has no requests for the end of a file."""
    box = AzureContainer(azurite, "rounds")
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "data"
    folder.mkdir()
    write_arrow(folder / "0.arrow", None)
    WRITERS["page index and dictionaries"](folder / "0.parquet")
    for path in folder.iterdir():
        box.put(path.name, path.read_bytes())
    server, _, account = azurite.rpartition("/")
    for seconds in (ROUND, 10 * ROUND):
        digests = list[str]()
        with RoundsInFront(server, seconds) as source:
            for root in (folder, "az://rounds"):
                made = [
                    {"name": kind, "weight": 1, "path": f"{root}/0.{kind}", "column": "input_ids"}
                    for kind in ("arrow", "parquet")
                ]
                config = make_config(
                    tmp_path, made, samples=5, cache=f"{tmp_path}/{seconds}{len(digests)}"
                )
                config |= {"storage": {"az://": {"endpoint": f"{source.url}/{account}"}}}
                digests.append(megablend.build(config).index.digest)
        assert digests[0] == digests[1]
        assert set(source.rounds) == {f"{account}/rounds/0.arrow", f"{account}/rounds/0.parquet"}
        if max(source.rounds.values()) <= MAX_ROUNDS + OLD_ROUNDS:
            break
    assert max(source.rounds.values()) <= MAX_ROUNDS + OLD_ROUNDS


def test_a_dry_run_and_describe_tell_requests_bytes_and_cost(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    files = write_files(folder, 4)
    with FaultySource(files) as source:
        prices = {"price_per_1000_requests": 0.5, "price_per_gb": 2.0}
        made = {"name": "s", "weight": 1, "path": "s3://b/*.parquet", "column": "input_ids"}
        config = make_config(tmp_path, [made], samples=5) | {
            "storage": {"s3://": {"endpoint": source.url} | prices}
        }
        (predicted,) = dry_run(config)
        assert not Path(config["cache"]).exists()
        assert (predicted.files, predicted.bytes) == (4, sum(map(len, files.values())))
        before = source.requests
        sent = source.bytes
        megablend.build_index(config)
        assert source.requests - before == pytest.approx(predicted.requests, rel=0.1)
        assert source.bytes - sent == pytest.approx(predicted.source_bytes, rel=0.1)
        assert predicted.cost == pytest.approx(
            predicted.requests / 1000 * 0.5 + predicted.source_bytes / 1e9 * 2.0
        )
        megablend.build(config)
        described = megablend.describe(config)
        assert isinstance(described, RunDescription)
        transfer = described.transfer
        assert transfer is not None
        assert 0 < transfer.requests < 20
        assert transfer.cost == pytest.approx(
            transfer.requests / 1000 * 0.5 + transfer.bytes / 1e9 * 2.0
        )
    plain = make_config(
        tmp_path, [made | {"path": f"{folder}/*.parquet"}], samples=5, cache=str(tmp_path / "plain")
    )
    assert [each.requests for each in dry_run(plain)] == [0]
    megablend.build(plain)
    assert "transfer" not in megablend.describe(plain).to_dict()


def test_documents_of_several_files_are_counted_at_a_time(tmp_path: Path) -> None:
    files = write_files(tmp_path / "data", 6)
    with FaultySource(files, Faults(latency=0.05)) as source:
        made = {
            "name": "s",
            "weight": 1,
            "path": "s3://b/*.parquet",
            "column": "input_ids",
            "append_eod": 0,
        }
        config = make_config(tmp_path, [made], samples=5) | {
            "storage": {"s3://": {"endpoint": source.url}}
        }
        config |= {"order": "document", "block_bytes": 1 << 20}
        megablend.build_index(config | {"order": "block"})
        source.paths.clear()
        built = megablend.build(config)
        firsts = list(dict.fromkeys(path for path in source.paths if path.endswith(".parquet")))
        last_of_first = len(source.paths) - source.paths[::-1].index(firsts[0])
    assert built.documents is not None
    assert built.documents.counted == 6 * len(DOCUMENTS)
    # Before the first one is done
    assert {f"/{name}" for name in files} <= set(source.paths[:last_of_first])


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20, (3 << 20) + 5])
def test_portions_of_a_file_are_requested_at_the_same_time(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    num_portions = -(-size // (1 << 18))
    with FaultySource({"b/x": data}, Faults(together=min(12, num_portions))) as source:
        storage = make_storage()
        found = list(read_portions(storage, f"{source.url}/b/x", size, 1 << 18))
        assert b"".join(part for _, part in found) == data
        assert [start for start, _ in found] == list(range(0, size, 1 << 18))
        assert source.most_in_flight >= min(12, num_portions)


@pytest.mark.parametrize("folder", ["books[1]", ""])
def test_a_folder_in_a_bucket_is_answered_with_its_files(tmp_path: Path, folder: str) -> None:
    """As a local one is; the pattern that the answer names can be read."""
    kind = KINDS["arrow"]
    kind.write(tmp_path / "a.arrow", [[1, 2, 3], [4, 5]])
    below = f"b/{folder}/".replace("//", "/")
    shards = {f"{below}{name}/data-0.arrow": (tmp_path / "a.arrow").read_bytes() for name in "xy"}
    with FaultySource(shards | {f"{below}info.json": b"{}"}) as source:
        place = f"s3://b/{folder}".rstrip("/")
        listed = {"name": "a", "path": place, "column": kind.column, "weight": 1}
        config = make_config(
            tmp_path,
            [listed],
            samples=1,
            storage={"s3://b": {"endpoint": source.url, "anonymous": True}},
        )
        remedy = f"{place}/**/*.arrow".replace("[", "[[]")
        says = f"{re.escape(place)} is a folder: specify its files as `{re.escape(remedy)}`"
        with pytest.raises(ConfigError, match=says):
            megablend.build_index(config)
        listed["path"] = remedy
        assert megablend.build_index(config | {"sources": [listed]}).index.num_files == 2


@pytest.mark.parametrize(("folder", "denied"), [("data", ""), ("b/t/data", "_delta_log")])
def test_what_might_be_a_table_is_built_where_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, denied: str
) -> None:
    """There is nothing above a bucket called `data`; and a folder next to it may not be listed."""
    file = tmp_path / "part-00000-dbadd770-48be-4e69-9197-642d62ace002-c000.arrow"
    write_arrow(file, None)
    with FaultySource({f"{folder}/{file.name}": file.read_bytes()}) as source:
        source.denied = denied
        config = make_config(
            tmp_path,
            [{"name": "s", "weight": 1, "path": f"s3://{folder}/*.arrow", "column": "input_ids"}],
            samples=5,
        )
        built = megablend.build(config | {"storage": {"s3://": {"endpoint": source.url}}})
    assert built.index.num_files == 1
    assert not any("table" in warning for warning in built.warnings)
