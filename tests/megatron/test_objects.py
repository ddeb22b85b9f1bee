"""Pairs and Parquet files in an object store, under Megatron's builder and its DataLoader, and in `megatron-cache`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megablend.distributed.base import SingleProcess
from megablend.errors import ChangedFileError
from megablend.megatron.cache_builder.idx_copies import IdxCopies, copy_path, make_copies
from megablend.storage.by_scheme import make_storage
from tests.megatron.objects_driver import read_all
from tests.megatron.plugin_data import draw_documents, environment, write_word
from tests.storage.faulty import Faults, FaultySource

pytest.importorskip("obstore")
DRIVER = Path(__file__).with_name("objects_driver.py")


def write_words(folder: Path) -> tuple[list[str], list[str], dict[str, bytes]]:
    """A pair and Parquet files: as words of local files, as words of a bucket, and the bucket's contents."""
    words = [write_word(folder / kind, kind, draw_documents(i)) for i, kind in enumerate(("megatron", "parquet"))]
    files = {f"b/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return words, [word.replace(str(folder), "s3://b") for word in words], files


def run(driver_arguments: list[str], source: FaultySource) -> str:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": source.url}
    command = [sys.executable, str(DRIVER), *driver_arguments]
    done = subprocess.run(command, env=environment(**keys), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_forked_workers_read_an_object_store(tmp_path: Path) -> None:
    local, remote, files = write_words(tmp_path / "data")
    with FaultySource(files, Faults(latency=0.002, status={503: 0.05})) as source:
        found = run([str(tmp_path / "remote"), "2", *remote], source)
    assert source.faulty["503"] > 0
    assert found == read_all(tmp_path / "local", 0, local)
    assert (tmp_path / "remote/idx/b/megatron/pair.idx").read_bytes() == files["b/megatron/pair.idx"]


def test_copies_are_of_the_present_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with FaultySource({"b/x.idx": b"0123456789"}) as source:
        monkeypatch.setenv("AWS_ENDPOINT_URL", source.url)
        make_copies(["s3://b/x", "/local/y"], tmp_path, launch=SingleProcess(), storage=make_storage())
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


def test_megatron_cache_takes_prefixes_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote, files = write_words(tmp_path / "data")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    flags = ["--split", "90,10,0", "--seq-length", "16", "--train-samples", "50", "--valid-samples", "4"]
    flags += ["--test-samples", "0", "--tokenizer-identifiers", '{"class": "T"}']
    made: dict[str, list[bytes]] = {}
    with FaultySource(files) as source:
        monkeypatch.setenv("AWS_ENDPOINT_URL", source.url)
        for name, word in (("local", local[0]), ("remote", remote[0])):
            cache = tmp_path / name
            command = [sys.executable, "-m", "megablend", "megatron-cache", "--data-path", word, *flags]
            subprocess.run([*command, "--data-cache-path", str(cache)], check=True, timeout=300, capture_output=True)
            made[name] = [path.read_bytes() for path in cache.glob("*_index.npy")]
    assert sorted(made["local"]) == sorted(made["remote"])
    assert len(made["remote"]) == 6
