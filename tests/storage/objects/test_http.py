"""`http://` against nginx: URLs, braces, lists of URLs, queries; whole runs."""

from __future__ import annotations

import copy
import glob
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.find import find_store
from megablend.config import load_config
from megablend.errors import ChangedFileError, ConfigError, MissingFileError, UnsupportedFileError
from megablend.megatron.request.address import parse_address
from megablend.operations.session import Session
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.address import parse_location
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import FaultySource
from tests.storage.objects.conftest import WebServer


def write_parts(folder: Path, count: int) -> list[dict[str, Any]]:
    """Sources of Parquet files, by their paths."""
    sources = [
        write_source(folder, i, "parquet", documents(i, 30, 20, seed=i)) for i in range(count)
    ]
    return [each | {"path": list_files(each)} for each in sources]


def list_files(source: dict[str, Any]) -> list[str]:
    """Paths of a source's local files; a Megatron prefix itself."""
    given = source["path"] if isinstance(source["path"], list) else [source["path"]]
    return [path for pattern in given for path in sorted(glob.glob(str(pattern))) or [str(pattern)]]


def test_a_run_over_urls_has_the_same_index_and_samples(nginx: WebServer, tmp_path: Path) -> None:
    folder = nginx.folder / "run"
    folder.mkdir()
    paths = [Path(path) for each in write_parts(folder, 3) for path in each["path"]]
    names = sorted(path.relative_to(folder) for path in paths)
    (tmp_path / "list.urls").write_text(
        "# tokens\n" + "".join(f"{nginx.url}/run/{name}\n" for name in names)
    )
    plain = make_config(
        tmp_path,
        [{"name": "a", "path": [str(p) for p in paths], "weight": 1}],
        samples=8,
        cache=str(tmp_path / "x"),
    )
    expected = megablend.build(plain).ledger.digest
    samples = [megablend.open(plain)[k]["tokens"] for k in range(8)]
    listed = [f"{nginx.url}/run/{name}" for name in names]
    for number, path in enumerate([listed, str(tmp_path / "list.urls")]):
        config = plain | {
            "sources": [{"name": "a", "path": path, "weight": 1}],
            "cache": str(tmp_path / f"{number}"),
        }
        assert megablend.build(config).ledger.digest == expected
        data = pickle.loads(pickle.dumps(megablend.open(config)))
        assert all(data[k]["tokens"].equal(samples[k]) for k in range(8))
        assert megablend.verify(config["cache"], data=True).problems == ()


def test_braces_stand_for_urls(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, [{"name": "a", "path": "http://h/{x,y}/p-{08..10}.bin", "weight": 1}], samples=1
    )
    paths = load_config(config).sources["train"][0].path
    assert paths == tuple(f"http://h/{folder}/p-{i:02d}.bin" for folder in "xy" for i in (8, 9, 10))


def test_a_replaced_file_is_refused(nginx: WebServer) -> None:
    path = nginx.folder / "a b%.bin"
    path.write_bytes(b"0123456789")
    storage = make_storage()
    url = f"{nginx.url}/a%20b%25.bin"
    assert storage.read(url, 2, 3) == b"234"
    os.utime(path, (1, 1))
    with pytest.raises(ChangedFileError, match=r"a%20b%25\.bin: was replaced while it was in use"):
        storage.read(url, 2, 3)
    with pytest.raises(MissingFileError, match="no such object"):
        storage.read(f"{nginx.url}/none", 0, 1)


def test_what_a_web_server_cannot_do_is_refused(nginx: WebServer, tmp_path: Path) -> None:
    storage = make_storage()
    with pytest.raises(ConfigError, match=r"web servers do not list their files.*\{00\.\.12\}"):
        storage.find(f"{nginx.url}/*.bin")
    with pytest.raises(
        ConfigError, match=r"^http://h/x: contains a user or password; remove it"
    ) as caught:
        storage.stat("http://user:hush@h/x")
    assert "hush" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=rf"source 'a': {nginx.url}/none.parquet matches no file$"
    ):
        megablend.build(
            make_config(
                tmp_path,
                [{"name": "a", "path": f"{nginx.url}/none.parquet", "weight": 1}],
                samples=1,
            )
        )
    with pytest.raises(ConfigError, match="encoded slash"):
        storage.stat("http://h/a%2Fb")
    with pytest.raises(UnsupportedFileError, match="empty part"):
        storage.stat("http://h/a//b")
    (tmp_path / "bad.urls").write_text("http://h/x\n/local\n")
    with pytest.raises(
        ConfigError, match=r"sources\[0\].path: .*bad.urls: entry 2 is '/local', expected a URL"
    ):
        load_config(
            make_config(
                tmp_path,
                [{"name": "a", "path": str(tmp_path / "bad.urls"), "weight": 1}],
                samples=1,
            )
        )


@pytest.mark.usefixtures("obstore")
def test_queries_are_for_the_requests_only(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    file = Path(write_parts(folder, 1)[0]["path"][0])
    name = file.name
    data = file.read_bytes()
    with FaultySource({f"d/{name}": data}) as server:
        signed = f"{server.url}/d/{name}?X-Signature=canary%2F&b=1"
        config = make_config(tmp_path, [{"name": "a", "path": signed, "weight": 1}], samples=4)
        megablend.build(config)
        samples = [megablend.open(config)[k]["tokens"] for k in range(4)]
        assert len(samples) == 4
        assert all(path.endswith("?X-Signature=canary%2F&b=1") for path in server.paths)
    kept = [path for path in Path(config["cache"]).rglob("*") if path.is_file()]
    assert kept
    assert not any(b"canary" in path.read_bytes() for path in kept)
    checked = load_config(config)
    assert "canary" not in repr(checked)
    with pytest.raises(
        ConfigError, match=r"^http://h/a: is given twice, with different queries .*; keep one$"
    ):
        load_config(
            config
            | {"sources": [{"name": "a", "path": ["http://h/a?x", "http://h/a?y"], "weight": 1}]}
        )


SIGNATURE = "X-Amz-Signature=s3cr3t"


def make_signed_run(nginx: WebServer, folder: Path, name: str) -> dict[str, Any]:
    """A built run over signed URLs; nginx answers whatever the query is."""
    (nginx.folder / name).mkdir()
    source = write_source(nginx.folder / name, 0, "parquet", documents(0, 60, 40, 3))
    urls = [
        f"{nginx.url}/{Path(path).relative_to(nginx.folder)}?{SIGNATURE}"
        for path in list_files(source)
    ]
    config = make_config(
        folder, [source | {"path": urls, "weight": 1}], samples=32, file_checks_per_second=0
    )
    megablend.build(config)
    return config


def test_a_pickle_has_no_query_and_its_first_read_says_so(nginx: WebServer, tmp_path: Path) -> None:
    dataset = megablend.open(make_signed_run(nginx, tmp_path, "signed"))
    for kept in (copy.copy(dataset), copy.deepcopy(dataset)):
        assert len(kept[31]["tokens"])
    stored = pickle.dumps(dataset)
    assert b"s3cr3t" not in stored
    with pytest.raises(
        ConfigError,
        match=r"/signed/.*: its query, which may be a signature, was not pickled",
    ):
        pickle.loads(stored)[0]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_started_get_the_query(
    nginx: WebServer, tmp_path: Path, method: str
) -> None:
    config = make_signed_run(nginx, tmp_path, f"signed-{method}")
    loader = megablend.Loader(
        megablend.open(config), micro_batch_size=4, num_workers=1, multiprocessing_context=method
    )
    assert sum(len(batch["tokens"]) for batch in loader) == 32


@pytest.mark.parametrize(
    "place",
    [
        "h/a%2Fb",
        "user:p4ss@h/b",
        "user:a/p4ss@h/b",
        "user:a?p4ss@h/b",
        "user:p4ss@h/a%2Fb",
        "/b",
        "[::1/b",
        "h:99999/b",
        "h h/b",
    ],
)
def test_signatures_of_refused_urls_are_not_printed(place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_location(f"https://{place}?{SIGNATURE}")
    assert "s3cr3t" not in str(caught.value)
    assert "p4ss" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("s3://b/k.parquet?X-Amz-Algorithm=AWS4&X-Amz-Signature=s3cr3t", "with a signature"),
        ("gs://b/k.parquet?X-Goog-Signature=s3cr3t", "with a signature"),
        ("az://c/k.parquet?sv=2024&sig=s3cr3t", "with a signature"),
        ("s3://key:s3cr3t@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://key:s3/cr3t@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://key:s3?cr3t@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://key:s3#cr3t@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://key:s3@cr3t/x@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://:s3/cr3t@b/k.parquet", r"s3://\.\.\.@b/k.parquet with a user or password"),
        ("s3://key:s3/cr3t@b/k?sig=cr3t", r"s3://\.\.\.@b/k with a user or password"),
        ("S3://key:s3cr3t@b/k.parquet", r"(?i)s3://\.\.\.@b/k.parquet with a user or password"),
    ],
)
def test_secrets_that_are_no_part_of_a_key_are_refused_and_not_printed(
    location: str, says: str
) -> None:
    given = {"cache": "c", "sequence_length": 8, "samples": 8}
    source = {"name": "a", "path": location, "weight": 1}
    for config in (
        given | {"sources": [source]},
        given | {"cache": location, "sources": [source | {"path": "x.parquet"}]},
    ):
        with pytest.raises(ConfigError, match=f"{says}, expected (only )?a ") as caught:
            load_config(config)
        assert "cr3t" not in str(caught.value)
    for use in (
        lambda: parse_address(f"parquet:{location}"),
        lambda: find_store(location),
        lambda: Session(location).run,
    ):
        with pytest.raises(ConfigError, match=f"{says}, expected (only )?a ") as caught:
            use()
        assert "cr3t" not in str(caught.value)


def test_keys_with_colons_and_at_signs_are_no_secrets() -> None:
    for location in (
        "s3://b/a:b/c@d.parquet",
        "gs://b/x@2024:01",
        "az://c/a@b?c:d@e",
        "s3://b/*:[a@b]",
    ):
        assert parse_location(location).key == location.split("/", 3)[3]


@pytest.mark.parametrize(
    "location", ["https://u:s3cr3t@h/c", "http://h/c?sig=s3cr3t", "ftp://u:s3cr3t@h/c"]
)
def test_secrets_of_urls_that_cannot_be_caches_are_not_printed(location: str) -> None:
    for use in (lambda: find_store(location), lambda: Session(location).run):
        with pytest.raises(
            ConfigError, match=r"^\w+://\.\.\.: .* expected a folder, or a prefix"
        ) as caught:
            use()
        assert "s3cr3t" not in str(caught.value)
