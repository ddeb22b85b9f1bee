"""Views of an object storage, in this process or through a helper: each stays with the versions that it met first."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from megablend.errors import ChangedFileError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.fork_safe import ForkSafeStorage
from megablend.storage.objects.helper import close_helper
from megablend.storage.wrapper import WrapperStorage
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
PATH = "b/x"
OLD = b"0123456789"
NEW = b"abcdefghij"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultySource]:
    """One object; this process has no client yet, whatever other tests have used."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    use_client(monkeypatch, is_used=False)
    with FaultySource({PATH: OLD}) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found
    close_helper()


STORAGES: dict[str, Callable[[], Storage]] = {
    "alone": make_storage,
    "wrapped": lambda: WrapperStorage(make_storage()),
    "through a helper": lambda: ForkSafeStorage(make_storage()),
}


def use_client(monkeypatch: pytest.MonkeyPatch, *, is_used: bool) -> None:
    monkeypatch.setattr(
        "megablend.storage.objects.fork_safe.loop", SimpleNamespace(is_used=lambda: is_used)
    )


@pytest.mark.parametrize("kind", STORAGES)
def test_views_of_an_object_storage_have_their_own_versions(
    source: FaultySource, kind: str
) -> None:
    storage = STORAGES[kind]()
    path = f"s3://{PATH}"
    first = storage.for_reading()
    assert first.read(path, 0, 4) == OLD[:4]
    source.files[PATH] = NEW
    assert storage.find(path).files
    assert storage.read(path, 0, 4) == NEW[:4]
    assert storage.for_reading().read(path, 0, 4) == NEW[:4]
    assert pickle.loads(pickle.dumps(first)).read(path, 0, 4) == NEW[:4]
    with pytest.raises(ChangedFileError, match="was replaced while it was in use"):
        first.read(path, 4, 4)


@pytest.mark.parametrize("then", ["another helper", "its own client"])
def test_versions_met_through_a_helper_outlive_it(
    source: FaultySource, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ForkSafeStorage(make_storage())
    path = f"s3://{PATH}"
    assert storage.read(path, 0, 4) == OLD[:4]
    source.files[PATH] = NEW
    if then == "another helper":
        close_helper()
    else:
        use_client(monkeypatch, is_used=True)
    with pytest.raises(ChangedFileError, match="was replaced while it was in use"):
        storage.read(path, 4, 4)
    with pytest.raises(ChangedFileError, match="was replaced while it was in use"):
        storage.read_ranges(
            path, np.array([4]), np.array([4]), lambda size: np.empty(size, np.uint8)
        )


def test_a_helpers_storage_reads_what_it_has_found_again(source: FaultySource) -> None:
    storage = ForkSafeStorage(make_storage())
    path = f"s3://{PATH}"
    assert storage.read(path, 0, 4) == OLD[:4]
    source.files[PATH] = NEW
    assert [each.path for each in storage.find("s3://b/*").files] == [path]
    data, begins = storage.read_ranges(
        path, np.array([6, 1]), np.array([3, 2]), lambda size: np.zeros(size, np.uint8)
    )
    assert [data[begin : begin + 2].tobytes() for begin in begins.tolist()] == [NEW[6:8], NEW[1:3]]
    assert storage.read(path, 0, 4) == NEW[:4]


def test_a_helpers_storage_for_checking_meets_new_versions(source: FaultySource) -> None:
    storage = ForkSafeStorage(make_storage())
    path = f"s3://{PATH}"
    checking = storage.for_checking()
    before = storage.stat(path)
    assert checking.stat(path) == before
    source.files[PATH] = NEW
    assert storage.stat(path) == before
    assert checking.stat(path) != before
    assert checking.read(path, 0, 4) == NEW[:4]


def test_ends_of_files_come_from_the_helper_once(source: FaultySource) -> None:
    source.files[PATH] = OLD * 1000
    storage = ForkSafeStorage(make_storage())
    path = f"s3://{PATH}"
    assert storage.find(path).files
    ends = storage.get_ends(path)
    assert ends is not None
    assert (ends.size, ends.head, ends.tail) == (10_000, OLD * 409 + OLD[:6], OLD * 1000)
    requests = source.requests
    storage.read_ends(path)
    assert source.requests == requests
    source.files[PATH] = NEW * 1000
    assert storage.find("s3://b/*").files
    assert storage.get_ends(path) is None  # a listing found another version
    storage.read_ends(path)
    ends = storage.get_ends(path)
    assert ends is not None
    assert (ends.head[:10], ends.tail) == (NEW, NEW * 1000)
