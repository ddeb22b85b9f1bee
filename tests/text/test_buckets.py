"""Text in a bucket, and token files in one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megablend.operations.build import build
from megablend.operations.session import Session
from megablend.reader.dataset import Dataset
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.text.token_folder import TokenFolder
from tests.text.test_build import make_config, token_files, write_text

pytestmark = pytest.mark.usefixtures("obstore", "small_parts")


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_text_and_tokens_in_a_bucket(tmp_path: Path, remote_moto: str, suffix: str) -> None:
    write_text(tmp_path / "data", num_files=3, suffix=suffix)
    prefix = ObjectPrefix(remote_moto, ObjectOptions())
    for path in (tmp_path / "data").iterdir():
        prefix.write(f"data/{path.name}", path)
    local = make_config(tmp_path)
    build(local)
    source = local["sources"][0] | {"path": f"{remote_moto}/data/*.jsonl{suffix}"}
    remote = local | {"cache": f"{remote_moto}/cache", "sources": [source]}
    built = build(remote, processes=2)
    expected = token_files(tmp_path / "cache/tokens")
    folder = TokenFolder(f"{remote_moto}/cache/tokens", ObjectOptions())
    digest = next(iter(expected)).partition("/")[0]
    listed = list(folder.list_files(digest))
    assert [name for name in listed if name.endswith(".parquet")] == list(expected)
    one = Dataset(Session(local).open())
    two = Dataset(Session(remote).open())
    for k in range(0, len(one), 17):
        assert one.sample(k).tokens.tolist() == two.sample(k).tokens.tolist()
    # Nothing is made again, with the record and without
    assert build(remote).index.digest == built.index.digest
    (record,) = (name for name in listed if "/.text-" in name)
    folder.remove(record)
    assert build(remote).index.digest == built.index.digest
    assert list(folder.list_files(digest)) == listed
    prefix.write("data/copy.jsonl" + suffix, tmp_path / f"data/0001.jsonl{suffix}")
    build(remote | {"run": "two"})
    copies = [name for name in folder.list_files(digest) if "/copy.jsonl" in name]
    assert len(copies) == len([name for name in expected if "/0001.jsonl" in name])


@pytest.mark.long
def test_a_refused_put_leaves_nothing(
    tmp_path: Path, remote_moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megablend.errors import CacheError

    write_text(tmp_path / "data")
    config = make_config(tmp_path, token_files=f"{remote_moto}/tokens")
    create = ObjectPrefix.create
    calls = []

    def refuse_later(self: ObjectPrefix, key: str, data: bytes) -> bool:
        calls.append(key)
        if len(calls) == 3:
            raise CacheError(f"{key}: refused")
        return create(self, key, data)

    monkeypatch.setattr(ObjectPrefix, "create", refuse_later)
    with pytest.raises(CacheError, match="refused"):
        build(config, processes=1)
    build(config, processes=1)
    build(config | {"token_files": str(tmp_path / "local"), "cache": str(tmp_path / "two")})
    folder = TokenFolder(f"{remote_moto}/tokens", ObjectOptions())
    expected = token_files(tmp_path / "local")
    digest = next(iter(expected)).partition("/")[0]
    found = {name for name in folder.list_files(digest) if name.endswith(".parquet")}
    assert found == set(expected)
    assert len(calls) == len(expected) + 1


def test_a_file_is_there_after_requests_that_collided(
    tmp_path: Path, remote_moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TokenFolder(remote_moto, ObjectOptions())
    (tmp_path / "part").write_bytes(b"tokens")
    monkeypatch.setattr(ObjectPrefix, "create", lambda *_: False)
    folder.commit(tmp_path / "part", "a/0.parquet")
    assert folder.read("a/0.parquet") == b"tokens"


def test_a_committed_file_does_not_change_again(tmp_path: Path) -> None:
    """A build that finds it records its inode and times; FUSE shows a later change only after a second."""
    folder = TokenFolder(str(tmp_path / "tokens"), ObjectOptions())
    final = tmp_path / "tokens/a/0.parquet"
    states = []
    for _ in range(2):
        with folder.writing("a") as path:
            path.write_bytes(b"tokens")
            folder.commit(path, "a/0.parquet")
            states.append(final.stat())
            time.sleep(0.02)  # longer than the clock of file systems ticks
        states.append(final.stat())
    assert {(state.st_ino, state.st_ctime_ns, state.st_nlink) for state in states} == {
        (states[0].st_ino, states[0].st_ctime_ns, 1)
    }
