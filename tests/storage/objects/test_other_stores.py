"""`gs://` against fake-gcs-server, and `az://` against Azurite: finding, reading, versions. Neither is the real thing."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest

from megablend.errors import ChangedFileError, MissingFileError, RefusedFileError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import parse_options
from tests.storage.objects.servers.fill import AzureContainer, GoogleBucket

DATA = np.random.default_rng(7).integers(0, 256, 100_000, np.uint8).tobytes()
KEYS = ("a/x.bin", "a/y z%.bin", "a/sub/w.bin")


def check_store(storage: Storage, root: str) -> None:
    """A store that holds DATA under a/x.bin, a/y z%.bin and a/sub/w.bin."""
    assert storage.glob(f"{root}/a/*.bin") == [f"{root}/a/x.bin", f"{root}/a/y z%.bin"]
    assert storage.glob(f"{root}/**/w.bin") == [f"{root}/a/sub/w.bin"]
    for path in storage.glob(f"{root}/a/**/*.bin"):
        assert storage.stat(path).size == len(DATA)
        assert storage.stat(path) == storage.for_checking().stat(path)
        assert storage.read(path, 77_777, 333) == DATA[77_777:78_110]
    with pytest.raises(MissingFileError, match="no such object"):
        storage.read(f"{root}/a/none.bin", 0, 1)


def test_google_cloud_storage(fake_gcs: str) -> None:
    bucket = GoogleBucket(fake_gcs, "bucket")
    for key in KEYS:
        bucket.put(key, DATA)
    storage = make_storage(
        objects=parse_options({"gs://": {"endpoint": fake_gcs, "anonymous": True}})
    )
    check_store(storage, "gs://bucket")
    bucket.put("a/x.bin", DATA[::-1])
    with pytest.raises(ChangedFileError, match=r"a/x.bin: was replaced while it was in use"):
        storage.read("gs://bucket/a/x.bin", 0, 100)


def test_azure(azurite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box = AzureContainer(azurite, "box")
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    for key in KEYS:
        box.put(key, DATA)
    storage = make_storage(objects=parse_options({"az://": {"endpoint": azurite}}))
    check_store(storage, "az://box")
    box.put("a/x.bin", DATA[::-1])
    with pytest.raises(ChangedFileError, match=r"a/x.bin: was replaced while it was in use"):
        storage.read("az://box/a/x.bin", 0, 100)


@pytest.mark.parametrize("is_in_environment", [False, True])
def test_an_expired_signature_of_azure(
    azurite: str, monkeypatch: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    import obstore
    from obstore.store import AzureStore

    box = AzureContainer(azurite, f"signed{int(is_in_environment)}")
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    box.put("x.bin", DATA)
    store = AzureStore(box.name, endpoint=azurite, client_options={"allow_http": True})
    url, _, query = obstore.sign(store, "GET", "x.bin", timedelta(0)).partition("?")
    time.sleep(1.5)
    options = ObjectOptions(urls=((url, query),))
    if is_in_environment:
        url = f"az://{box.name}/x.bin"
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", query)
        options = parse_options({"az://": {"endpoint": azurite}})
    with pytest.raises(RefusedFileError, match=r"signature expired at 20.* UTC; sign it") as caught:
        make_storage(objects=options).stat(url)
    assert "sig=" not in str(caught.value)
