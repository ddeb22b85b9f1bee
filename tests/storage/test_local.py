import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megablend.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    DataError,
    MissingFileError,
)
from megablend.storage.by_scheme import make_storage
from megablend.storage.descriptors import DescriptorPool
from megablend.storage.local import LocalStorage


@pytest.fixture
def storage() -> LocalStorage:
    return LocalStorage()


def test_glob_sorts_recurses_and_leaves_out_folders(tmp_path: Path, storage: LocalStorage) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "[odd].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.txt").mkdir()
    names = [os.path.relpath(path, tmp_path) for path in storage.glob(f"{tmp_path}/**/*.txt")]
    assert names == ["[odd].txt", "a.txt", "b.txt", "deep/er/c.txt"]
    assert storage.glob(f"{tmp_path}/[odd].txt") == [f"{tmp_path}/[odd].txt"]
    assert storage.glob(f"{tmp_path}/?.txt") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert storage.glob(f"{tmp_path}/none*") == []
    assert storage.glob(f"{tmp_path}/deep") == []


def test_read_gives_exactly_what_is_asked(tmp_path: Path, storage: LocalStorage) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert storage.read(str(path), 3, 4) == b"3456"
    assert storage.read(str(path), 10, 0) == b""
    with pytest.raises(
        CorruptFileError, match=r"x at byte 8: is truncated \(expected 4 bytes .* ends at byte 10"
    ):
        storage.read(str(path), 8, 4)
    with pytest.raises(CorruptFileError, match="truncated"):
        storage.read(str(path), 0, 1 << 50)
    for offset, size in ((-1, 1), (0, -1), (1 << 62, 1 << 62)):
        with pytest.raises(CorruptFileError, match="invalid range"):
            storage.read(str(path), offset, size)


def test_short_reads_are_continued(
    tmp_path: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    pread: Callable[[int, int, int], bytes] = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 3), offset))
    assert storage.read(str(path), 1, 8) == b"12345678"
    with pytest.raises(CorruptFileError, match="truncated"):
        storage.read(str(path), 5, 8)


def test_what_is_not_there_or_no_file(tmp_path: Path, storage: LocalStorage) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(MissingFileError, match="missing: no such file"):
        storage.stat(missing)
    with pytest.raises(MissingFileError, match="missing: no such file"):
        storage.read(missing, 0, 1)
    with pytest.raises(DataError, match="is a folder, not a regular file; restore the file"):
        storage.stat(str(tmp_path))
    with pytest.raises(
        DataError, match=r"cannot be read: Is a directory; specify the path of a file$"
    ):
        storage.read(str(tmp_path), 0, 1)


def test_stat_tells_versions_apart_and_reads_follow_find(
    tmp_path: Path, storage: LocalStorage
) -> None:
    path = tmp_path / "x"
    other = tmp_path / "y"
    path.write_bytes(b"old!")
    other.write_bytes(b"new!")
    before = storage.stat(str(path))
    assert before == storage.stat(str(path))
    assert before.size == 4
    assert storage.read(str(path), 0, 4) == b"old!"
    other.replace(path)
    with pytest.raises(ChangedFileError, match=f"{path}: was replaced while it was in use"):
        storage.stat(str(path))
    assert storage.read(str(path), 0, 4) == b"old!"
    storage.find(str(path))
    assert storage.stat(str(path)).etag != before.etag
    assert storage.read(str(path), 0, 4) == b"new!"


@pytest.mark.parametrize("capacity", [1, 8])
def test_readers_of_another_storage_do_not_change_which_file_is_read(
    tmp_path: Path, capacity: int
) -> None:
    pool = DescriptorPool(capacity)
    path = tmp_path / "x"
    for name, content in (("x", b"old!"), ("y", b"new!")):
        (tmp_path / name).write_bytes(content)
    first = LocalStorage(pool)
    second = LocalStorage(pool)
    assert first.read(str(path), 0, 4) == b"old!"
    (tmp_path / "y").replace(path)
    assert second.stat(str(path)).size == 4
    assert second.read(str(path), 0, 4) == b"new!"
    if capacity > 1:
        assert first.read(str(path), 0, 4) == b"old!"
        return
    with pytest.raises(ChangedFileError, match=f"{path}: was replaced while it was in use"):
        first.read(str(path), 0, 4)
    assert second.read(str(path), 0, 4) == b"new!"


def test_a_file_replaced_under_its_readers_is_an_error_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(DescriptorPool(capacity=1))
    path = tmp_path / "x"
    for name, content in (("x", b"old!"), ("y", b"new!"), ("z", b"zzzz")):
        (tmp_path / name).write_bytes(content)
    storage.stat(str(path))
    assert storage.read(str(path), 0, 4) == b"old!"
    (tmp_path / "y").replace(path)
    assert storage.read(str(path), 0, 4) == b"old!"
    storage.read(str(tmp_path / "z"), 0, 4)  # takes the descriptor's place
    with pytest.raises(ChangedFileError, match=f"{path}: was replaced while it was in use"):
        storage.read(str(path), 0, 4)
    storage.find(str(path))
    assert storage.read(str(path), 0, 4) == b"new!"


def test_a_stale_file_was_only_replaced_in_use_if_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"text")

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    try_again = rf"^{path}: cannot be read: Stale file handle; the file server replaced or removed it: try again"
    for call in ("open", "stat"):
        storage = LocalStorage(DescriptorPool(capacity=0))
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(DataError, match=try_again) as caught:
                storage.read(str(path), 0, 4) if call == "open" else storage.stat(str(path))
            assert not isinstance(caught.value, ChangedFileError)
        assert storage.read(str(path), 0, 4) == b"text"  # tried again
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(ChangedFileError, match=f"{path}: was replaced while it was in use"):
                storage.read(str(path), 0, 4) if call == "open" else storage.stat(str(path))


def test_a_storage_for_checking_reads_what_is_there_now(
    tmp_path: Path, storage: LocalStorage
) -> None:
    path = tmp_path / "x"
    checking = storage.for_checking()
    for name, content in (("x", b"old!"), ("y", b"new!")):
        (tmp_path / name).write_bytes(content)
    assert storage.read(str(path), 0, 4) == checking.read(str(path), 0, 4) == b"old!"
    (tmp_path / "y").replace(path)
    checking.stat(str(path))
    assert checking.read(str(path), 0, 4) == b"new!"
    assert storage.read(str(path), 0, 4) == b"old!"
    with pytest.raises(DataError, match="is a folder, not a regular file; restore the file"):
        checking.stat(str(tmp_path))


def test_it_is_picklable_and_works_after_a_fork(tmp_path: Path, storage: LocalStorage) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert pickle.loads(pickle.dumps(storage)) == storage
    assert storage.read(str(path), 0, 2) == b"01"
    child = os.fork()
    if not child:
        os._exit(0 if storage.read(str(path), 2, 2) == b"23" else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("hf://datasets/a/b/*.parquet", "download the dataset once"),
        ("msc://profile/x", "use the bucket's s3://"),
        ("gcs://b/x", "write gs://"),
        ("hdfs://n/x", r"expected a plain path or one of s3://, gs://, az://, http://, https://"),
    ],
)
def test_a_scheme_without_a_storage_is_refused_with_what_works_instead(
    path: str, instead: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{path.split(':')[0]}:// is not supported: .*{instead}"
    ):
        make_storage().find(path)


@pytest.mark.parametrize("name", ["x.parquet", "x:y.bin", "s3:x", "a:/x"])
def test_plain_paths_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    for path in (name, str(tmp_path / name)):
        assert make_storage().read(path, 0, 1) == b"1"
    with pytest.raises(ConfigError, match="without file://"):
        make_storage().stat(f"file://{tmp_path / name}")


@pytest.mark.long
def test_few_descriptors_suffice_for_many_files(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / str(i)).write_bytes(b"x")
    script = (
        "import sys; from megablend.storage.local import LocalStorage\n"
        f"print(sum(len(LocalStorage().read(f'{tmp_path}/{{i}}', 0, 1)) for i in range(60)))"
    )
    command = ["sh", "-c", 'ulimit -n 40; exec "$0" -c "$1"', sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert result.stdout == "60\n", result.stderr
