"""Pairs and Parquet files in an object store, under Megatron's builder and its DataLoader, and in `megatron-cache`."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megablend.distributed.base import SingleProcess
from megablend.errors import ChangedFileError, ConfigError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from megablend.megatron.cache_builder.idx_copies import IdxCopies, copy_path, make_copies
from megablend.storage.by_scheme import make_storage
from tests.megatron.cache_builder.objects_driver import read_all
from tests.megatron.plugin_data import draw_documents, environment, plugin_config, write_word
from tests.preloaded import python
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.conftest import S3Server

pytest.importorskip("obstore")
DRIVER = Path(__file__).with_name("objects_driver.py")


def write_words(folder: Path, bucket: str = "b") -> tuple[list[str], list[str], dict[str, bytes]]:
    """A pair and Parquet files: as words of local files, as words of a bucket, and the bucket's contents."""
    words = [
        write_word(folder / kind, kind, draw_documents(i))
        for i, kind in enumerate(("megatron", "parquet"))
    ]
    files = {
        f"{bucket}/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return words, [word.replace(str(folder), f"s3://{bucket}") for word in words], files


def run(driver_arguments: list[str], **keys: str) -> str:
    command = [*python("megatron"), str(DRIVER), *driver_arguments]
    done = subprocess.run(
        command, env=environment(**keys), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_forked_workers_read_an_object_store(tmp_path: Path) -> None:
    local, remote, files = write_words(tmp_path / "data")
    with FaultySource(files, Faults(latency=0.002, status={503: 0.05})) as source:
        keys = {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_ENDPOINT_URL": source.url,
        }
        found = run([str(tmp_path / "remote"), "2", *remote], **keys)
    assert source.faulty["503"] > 0
    assert found == read_all(tmp_path / "local", 0, local)
    assert (tmp_path / "remote/idx/b/megatron/pair.idx").read_bytes() == files[
        "b/megatron/pair.idx"
    ]


def test_settings_of_a_server_that_speaks_s3(
    tmp_path: Path, swift: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is in a file, or in the config; the environment has the keys."""
    local, remote, files = write_words(tmp_path / "data", bucket="megatron")
    swift.admin.make_bucket_if_missing("megatron")
    for name, data in files.items():
        swift.admin.put("megatron", name.partition("/")[2], data)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    settings = {
        "s3://": {"endpoint": "http://127.0.0.1:9"},
        "s3://megatron/": {"endpoint": swift.url},
    }
    file = tmp_path / "megablend.yaml"
    file.write_text(str({"storage": settings}))
    expected = read_all(tmp_path / "local", 0, local)
    found = run([str(tmp_path / "forked"), "2", *remote], MEGABLEND_STORAGE=str(file))
    assert found == expected
    assert read_all(tmp_path / "by keys", 0, remote, storage=settings) == expected
    of_blocks = read_all(tmp_path / "local blocks", 0, local, order="block")
    assert read_all(tmp_path / "blocks", 0, remote, storage=str(file), order="block") == of_blocks
    with pytest.raises(
        ConfigError, match=r"^storage: s3://: endpont: unknown setting; did you mean 'endpoint'\?"
    ):
        read_all(tmp_path / "wrong", 0, remote, storage={"s3://": {"endpont": swift.url}})


def test_copies_are_of_the_present_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with FaultySource({"b/x.idx": b"0123456789"}) as source:
        monkeypatch.setenv("AWS_ENDPOINT_URL", source.url)
        make_copies(
            ["s3://b/x", "/local/y"], tmp_path, launch=SingleProcess(), storage=make_storage()
        )
        copy = copy_path(tmp_path, "s3://b/x.idx")
        assert copy.read_bytes() == b"0123456789"
        copy.write_bytes(b"9876543210")  # to see which one is read
        assert IdxCopies(make_storage(), tmp_path).read("s3://b/x.idx", 0, 4) == b"9876"
        source.files["b/x.idx"] = b"abcdefghij"
        changed = IdxCopies(make_storage(), tmp_path)
        assert changed.read("s3://b/x.idx", 0, 4) == b"abcd"
        source.files["b/x.idx"] = b"ABCDEFGHIJ"
        with pytest.raises(ChangedFileError, match="was replaced while it was in use"):
            changed.read("s3://b/x.idx", 0, 4)
        make_copies(["s3://b/x"], tmp_path, launch=SingleProcess(), storage=make_storage())
        assert IdxCopies(make_storage(), tmp_path).read("s3://b/x.idx", 0, 4) == b"ABCD"
        assert copy.read_bytes() == b"ABCDEFGHIJ"


def test_megatron_cache_takes_prefixes_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote, files = write_words(tmp_path / "data")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    flags = [
        "--split",
        "90,10,0",
        "--seq-length",
        "16",
        "--train-samples",
        "50",
        "--valid-samples",
        "4",
    ]
    flags += ["--test-samples", "0", "--tokenizer-identifiers", '{"class": "T"}']
    made: dict[str, list[bytes]] = {}
    with FaultySource(files) as source:
        file = tmp_path / "settings.yaml"
        file.write_text(f"storage: {{'s3://b': {{endpoint: '{source.url}'}}}}")
        for name, word in (("local", local[0]), ("remote", remote[0])):
            cache = tmp_path / name
            command = [*python(), "-m", "megablend", "megatron-cache", "--data-path", word, *flags]
            command += ["--storage", str(file)]
            subprocess.run(
                [*command, "--data-cache-path", str(cache)],
                check=True,
                timeout=500,
                capture_output=True,
            )
            made[name] = [path.read_bytes() for path in cache.glob("*_index.npy")]
    assert sorted(made["local"]) == sorted(made["remote"])
    assert len(made["remote"]) == 6


def test_an_object_that_was_replaced_since_the_build_is_refused_and_the_next_job_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same lengths, and with others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    word = write_word(tmp_path / "data", "megatron", draw_documents(0))
    with FaultySource({}) as source:
        config = plugin_config(
            tmp_path / "cache",
            blend=(["s3://b/pair", "s3://b/other"], [1.0, 1.0]),
            split="100,0,0",
            storage={"s3://": {"endpoint": source.url}},
        )

        def put(documents: list[list[int]]) -> None:
            write_word(tmp_path / "data", "megatron", documents)
            for suffix in (".bin", ".idx"):
                source.files[f"b/pair{suffix}"] = Path(word + suffix).read_bytes()
                source.files.setdefault(f"b/other{suffix}", source.files[f"b/pair{suffix}"])

        def build() -> Any:
            builder: Any = MegablendDatasetBuilder
            return builder(MegablendGPTDataset, [40, 0, 0], lambda: True, config).build()[0]

        put(draw_documents(0))
        dataset = build()
        in_worker = pickle.dumps(dataset)
        again = [[token + 1 for token in document] for document in draw_documents(0)]
        put(again)
        with pytest.raises(ChangedFileError, match=r"pair\.bin: was replaced after this job began"):
            [dataset[k] for k in range(40)]
        expected = {token for each in (*again, *draw_documents(0)) for token in each}
        replaced = build()
        # Which has written the catalog again
        for running in (dataset, pickle.loads(in_worker)):
            with pytest.raises(ChangedFileError, match=r"pair\.bin: was replaced after this job"):
                [running[k] for k in range(40)]
        assert {t for k in range(40) for t in replaced[k]["tokens"].tolist()} <= expected
        put(draw_documents(1))
        other = build()
        assert not {t for k in range(40) for t in other[k]["tokens"].tolist()} <= expected
