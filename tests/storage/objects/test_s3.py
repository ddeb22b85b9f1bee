"""`s3://` against a real server (Swift's S3 API): finding, reading, versions, whole runs."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.errors import (
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
    UnsupportedFileError,
)
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import find_options, parse_options
from tests.runs import documents, make_config, write_source
from tests.storage.objects.conftest import S3Server

DATA = np.random.default_rng(5).integers(0, 256, 300_000, np.uint8).tobytes()
KEYS = [
    "t/a.bin",
    "t/b.bin",
    "t/sub/c.bin",
    "t/sub/deep/d.bin",
    "t/ sp ace.bin",
    "t/%20.bin",
    "t/[1].bin",
    "t/é.bin",
]
KEYS += ["t/q?.bin", "t/+&#=;.bin", "t/'\"<>.bin", "t/.hidden.bin", "t/empty.bin", "tt/x.bin"]


@pytest.fixture(scope="session")  # a process of pytest-xdist may run the module in parts
def bucket(swift_server: S3Server) -> str:
    swift_server.admin.make_bucket("keys")
    for key in KEYS:
        swift_server.admin.put("keys", key, b"" if "empty" in key else DATA + key.encode())
    swift_server.admin.put("keys", "t/sub/", b"")  # a console's marker of a folder
    swift_server.admin.put("keys", "bad/folder//x.bin", DATA)
    return "s3://keys"


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        (
            "t/*.bin",
            [
                key
                for key in KEYS
                if key.count("/") == 1 and "hidden" not in key and key.startswith("t/")
            ],
        ),
        ("t/a.bin", ["t/a.bin"]),
        ("t/[ab].bin", ["t/a.bin", "t/b.bin"]),
        ("t/[1].bin", ["t/[1].bin"]),
        ("t/[[]1].bin", ["t/[1].bin"]),
        ("t/q?.bin", ["t/q?.bin"]),
        ("t/ sp ace.bin", ["t/ sp ace.bin"]),
        ("t/%20.bin", ["t/%20.bin"]),
        ("t/é.bin", ["t/é.bin"]),
        ("t/.*.bin", ["t/.hidden.bin"]),
        ("t*/x.bin", ["tt/x.bin"]),
        ("t/*/c.bin", ["t/sub/c.bin"]),
        ("t/**/d.bin", ["t/sub/deep/d.bin"]),
        ("t/sub/**/*.bin", ["t/sub/c.bin", "t/sub/deep/d.bin"]),
        ("t/sub/**", ["t/sub/c.bin", "t/sub/deep/d.bin"]),
        ("*/x.bin", ["tt/x.bin"]),
        ("t/", []),
        ("t", []),
        ("nothing/*.bin", []),
        ("tt/x.bin/*", []),
    ],
)
def test_patterns_match_keys_as_on_a_local_disk(
    swift: S3Server, bucket: str, pattern: str, keys: list[str]
) -> None:
    assert make_storage().glob(f"{bucket}/{pattern}") == sorted(f"{bucket}/{key}" for key in keys)


def test_folders_that_a_pattern_matches_are_told(swift: S3Server, bucket: str) -> None:
    """As on a local disk: what is in them is not listed, and would be left out silently."""
    storage = make_storage()
    assert storage.find(f"{bucket}/t*").folders == (f"{bucket}/t", f"{bucket}/tt")
    assert storage.find(f"{bucket}/t/s*").folders == (f"{bucket}/t/sub",)
    assert (
        storage.find(f"{bucket}/t/**/s*").folders == storage.find(f"{bucket}/t/sub").folders == ()
    )


def test_every_key_is_read_and_a_listing_tells_what_a_request_tells(
    swift: S3Server, bucket: str
) -> None:
    storage = make_storage()
    paths = storage.glob(f"{bucket}/t/**/*.bin") + storage.glob(f"{bucket}/t/.*")
    assert len(paths) == len(KEYS) - 1
    for path in paths:
        key = path.removeprefix(f"{bucket}/")
        expected = b"" if "empty" in key else DATA + key.encode()
        assert storage.stat(path) == storage.for_checking().stat(path) == make_storage().stat(path)
        assert storage.read(path, 0, len(expected)) == expected


def test_a_key_with_an_empty_part_fails_its_listing_by_name(swift: S3Server, bucket: str) -> None:
    storage = make_storage()
    named = rf"s3://keys/bad/\*\*/\*.bin: cannot be listed: the object {bucket}/bad/folder//x.bin has an empty part.*copy it"
    with pytest.raises(UnsupportedFileError, match=named):
        storage.find(f"{bucket}/bad/**/*.bin")
    with pytest.raises(
        UnsupportedFileError,
        match=r"bad/folder//x\.bin: its key has an empty part.*copy the object",
    ):
        storage.read(f"{bucket}/bad/folder//x.bin", 0, 1)


def test_folders_are_what_has_keys_below(swift: S3Server, bucket: str) -> None:
    storage = make_storage()
    assert [
        storage.is_folder(f"{bucket}/{each}") for each in ("t", "t/sub/", "", "t/a.bin", "x")
    ] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_ranges_are_slices(
    swift: S3Server, bucket: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.storage.objects.bucket.MAX_PART_BYTES", 50_000)
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(0, len(DATA), 40))
    sizes = np.where(rng.random(40) < 0.5, np.append(np.diff(starts), 0), rng.integers(0, 1000, 40))
    sizes = np.minimum(sizes, len(DATA) - starts)
    out, begins = make_storage().read_ranges(
        f"{bucket}/t/a.bin", starts, sizes, lambda size: np.empty(size, np.uint8)
    )
    for start, size, begin in zip(starts.tolist(), sizes.tolist(), begins.tolist(), strict=True):
        assert out[begin : begin + size].tobytes() == DATA[start : start + size]


def test_ranges_that_are_not_there_are_refused(swift: S3Server, bucket: str) -> None:
    storage = make_storage()
    path = f"{bucket}/t/a.bin"
    size = len(DATA) + 7
    with pytest.raises(
        CorruptFileError,
        match=rf"a.bin at byte {size - 1}: is truncated \(expected 2 bytes .* {size}",
    ):
        storage.read(path, size - 1, 2)
    with pytest.raises(CorruptFileError, match="invalid range: offset 3, length -1"):
        storage.read(path, 3, -1)
    with pytest.raises(MissingFileError, match=r"s3://keys/t/none\.bin: no such object"):
        storage.read(f"{bucket}/t/none.bin", 0, 1)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "megatron"])
def test_a_run_has_the_same_index_and_samples(swift: S3Server, tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path, 0, kind, documents(0, 60, 20, seed=1)) | {"weight": 1}
    remote = upload(swift, f"run-{kind}", tmp_path, source)
    plain = make_config(tmp_path, [source], samples=12, cache=str(tmp_path / "plain"))
    other = make_config(tmp_path, [remote], samples=12, cache=str(tmp_path / "other"))
    built = [megablend.build(config) for config in (plain, other)]
    assert built[0].ledger.digest == built[1].ledger.digest
    a = megablend.open(plain)
    b = pickle.loads(pickle.dumps(megablend.open(other)))
    assert all(a[k]["tokens"].equal(b[k]["tokens"]) for k in range(12))
    assert megablend.show(other, 3).to_dict()["pieces"][0]["file"].startswith(f"s3://run-{kind}/")
    assert megablend.verify(other["cache"], data=True).problems == ()
    assert megablend.check(other).problems == ()


def upload(server: S3Server, bucket: str, folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The same source with its files in a bucket of the server."""
    server.admin.make_bucket_if_missing(bucket)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            server.admin.put(bucket, str(path.relative_to(folder)), path.read_bytes())
    paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
    return source | {"path": [str(path).replace(str(folder), f"s3://{bucket}") for path in paths]}


def test_a_replaced_object_is_refused_and_a_deleted_one_missing(swift: S3Server) -> None:
    swift.admin.make_bucket("pins")
    for key in ("a", "b"):
        swift.admin.put("pins", key, b"0123456789")
    storage = make_storage()
    storage.find("s3://pins/*")
    assert storage.read("s3://pins/a", 2, 3) == b"234"
    swift.admin.put("pins", "a", b"9876543210")
    swift.admin.delete("pins", "b")
    with pytest.raises(
        ChangedFileError,
        match="s3://pins/a: was replaced while it was in use; restore the original",
    ):
        storage.read("s3://pins/a", 2, 3)
    with pytest.raises(MissingFileError, match="s3://pins/b: was deleted while it was in use"):
        storage.read("s3://pins/b", 2, 3)
    assert storage.stat("s3://pins/a") != storage.for_checking().stat("s3://pins/a")
    storage.find("s3://pins/a")
    assert storage.read("s3://pins/a", 2, 3) == b"765"


def test_versions_are_read_on(swift: S3Server) -> None:
    swift.admin.make_bucket("versions")
    swift.admin.enable_versions("versions")
    swift.admin.put("versions", "a", b"0123456789")
    storage = make_storage(objects=parse_options({"s3://versions": {"versions": True}}))
    assert storage.glob("s3://versions/*") == ["s3://versions/a"]
    swift.admin.put("versions", "a", b"other")
    assert storage.read("s3://versions/a", 2, 3) == b"234"
    assert make_storage().read("s3://versions/a", 0, 5) == b"other"


@pytest.mark.parametrize("server", ["swift", pytest.param("ceph", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_versions_that_it_began_with(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = request.getfixturevalue(server)
    bucket = "versions-run"
    folder = tmp_path / "data"
    source = write_source(folder, 0, "parquet", documents(0, 60, 20, seed=1)) | {"weight": 1}
    store.admin.make_bucket(bucket)
    store.admin.enable_versions(bucket)
    remote = upload(store, bucket, folder, source)
    plain, other = (
        make_config(
            tmp_path, [each], samples=12, cache=str(tmp_path / name), file_checks_per_second=0
        )
        for name, each in (("plain", source), ("other", remote))
    )
    other |= {"storage": {f"s3://{bucket}": {"versions": True}}, "file_checks_per_second": 10}
    for config in (plain, other):
        megablend.build(config)
    expected = [
        batch["tokens"].tolist()
        for batch in megablend.Loader(megablend.open(plain), micro_batch_size=2)
    ]
    dataset = megablend.open(other)
    for k in range(len(dataset)):  # the versions of all files are known
        dataset[k]
    write_source(tmp_path / "new", 0, "parquet", documents(0, 60, 20, seed=2))
    upload(store, bucket, tmp_path / "new", source)
    batches = iter(megablend.Loader(dataset, micro_batch_size=2))
    found = [next(batches)["tokens"].tolist()]
    # A thread would go on checking files, or have found that they were replaced
    assert all(thread.name != "megablend-watch" for thread in threading.enumerate())
    found += [batch["tokens"].tolist() for batch in batches]
    assert found == expected
    assert dataset[7]["tokens"].tolist() == expected[3][1]
    with pytest.raises(ChangedFileError, match=rf"s3://{bucket}/.*was replaced|changed"):
        megablend.open(other)[7]  # begins with the version of now


def test_endpoints_are_by_prefix_and_the_longest_wins(
    swift: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    swift.admin.make_bucket("prefix")
    swift.admin.put("prefix", "a/b", b"0123456789")
    wrong = {"endpoint": "http://127.0.0.1:9", "give_up_after": 0.1}
    right = {"endpoint": swift.url}
    options = parse_options(
        {"s3://": wrong, "s3://prefix/a": right, "s3://prefix": {"region": "us-east-1"}}
    )
    storage = make_storage(objects=options)
    assert storage.read("s3://prefix/a/b", 0, 2) == b"01"
    with pytest.raises(
        DataError, match="s3://prefix/ab: cannot be read: no connection to the server"
    ):
        storage.read("s3://prefix/ab", 0, 2)
    assert pickle.loads(pickle.dumps(storage)).read("s3://prefix/a/b", 0, 2) == b"01"
    assert find_options(options, "s3://other/x").region is None
    assert find_options(ObjectOptions(), "s3://prefix/a").endpoint is None


MARKED = ["m/a.parquet", "m/sub/b.parquet", "m/sub/deep/c.parquet"]


@pytest.fixture(scope="session")
def marked(swift_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data below folders for each of which Hadoop, or a console, has made an empty object; some have nothing else."""
    folder = tmp_path_factory.mktemp("marked")
    source = write_source(folder, 0, "parquet", documents(0, 60, 40, 3))
    data = next(Path(source["path"]).parent.glob("*")).read_bytes()
    swift_server.admin.make_bucket("marked")
    for key in MARKED:
        swift_server.admin.put("marked", key, data)
    for key in ("m/", "m/sub/", "m/sub/deep/", "m/nothing/", "m/sub/void.parquet/"):
        swift_server.admin.put("marked", key, b"")
    for key in ("m_$folder$", "m/sub_$folder$", "m/other_$folder$"):  # as Hadoop marks folders
        swift_server.admin.put("marked", key, b"")
    return "s3://marked"


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("m/*", ["m/a.parquet"]),
        ("m/*.parquet", ["m/a.parquet"]),
        ("*/*", ["m/a.parquet"]),
        ("*/*/*", ["m/sub/b.parquet"]),
        ("m/*/*", ["m/sub/b.parquet"]),
        ("m/**", MARKED),
        ("m/**/*.parquet", MARKED),
        ("**", MARKED),
        ("m/sub/*", ["m/sub/b.parquet"]),
        ("m/nothing/*", []),
        ("*", []),
    ],
)
def test_markers_of_folders_are_no_files(
    swift: S3Server, marked: str, pattern: str, keys: list[str]
) -> None:
    storage = make_storage()
    assert storage.glob(f"{marked}/{pattern}") == [f"{marked}/{key}" for key in keys]


def test_what_is_named_like_a_marker_but_has_bytes_is_a_file(
    swift: S3Server, swift_server: S3Server
) -> None:
    swift_server.admin.make_bucket("named")
    swift_server.admin.put("named", "tokens_$folder$", b"1234")
    swift_server.admin.put("named", "empty_$folder$", b"")
    for pattern in ("*", "**"):
        assert make_storage().glob(f"s3://named/{pattern}") == ["s3://named/tokens_$folder$"]


@pytest.mark.parametrize("pattern", ["m/*", "*/*", "m/sub/**", "m/**/*.parquet"])
@pytest.mark.parametrize("scheme", ["s3", "S3"])
def test_a_run_over_folders_with_markers(
    swift: S3Server, marked: str, tmp_path: Path, pattern: str, scheme: str
) -> None:
    path = f"{scheme}://{marked.partition('://')[2]}/{pattern}"
    source = {"name": "a", "path": path, "format": "parquet", "weight": 1}
    config = make_config(tmp_path, [source], samples=64)
    built = megablend.build(config)
    assert built.problems == ()
    dataset = megablend.open(config)
    assert len(dataset[63]["tokens"]) == len(dataset[0]["tokens"])
    assert megablend.check(config).problems == ()
