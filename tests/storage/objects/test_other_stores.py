"""`gs://` against fake-gcs-server, and `az://` against Azurite: finding, reading, versions. Neither is the real thing."""

from __future__ import annotations

import urllib.request

import numpy as np
import pytest

from megablend.errors import ChangedFileError, MissingFileError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.object_options import parse_options

DATA = np.random.default_rng(7).integers(0, 256, 100_000, np.uint8).tobytes()
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that Azurite always has; it is public."""


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
    def post(path: str, data: bytes, kind: str) -> None:
        request = urllib.request.Request(f"{fake_gcs}{path}", data, {"Content-Type": kind}, method="POST")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()

    post("/storage/v1/b?project=p", b'{"name": "bucket"}', "application/json")
    for key in ("a%2Fx.bin", "a%2Fy%20z%25.bin", "a%2Fsub%2Fw.bin"):
        post(f"/upload/storage/v1/b/bucket/o?uploadType=media&name={key}", DATA, "application/octet-stream")
    storage = make_storage(objects=parse_options({"gs://": {"endpoint": fake_gcs, "anonymous": True}}))
    check_store(storage, "gs://bucket")
    post("/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fx.bin", DATA[::-1], "application/octet-stream")
    with pytest.raises(ChangedFileError, match=r"a/x.bin: was replaced while it was in use"):
        storage.read("gs://bucket/a/x.bin", 0, 100)


def test_azure(azurite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import AzureStore

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
    store = AzureStore("box", endpoint=azurite, client_options={"allow_http": True})
    make_container(azurite)
    for key in ("a/x.bin", "a/y z%.bin", "a/sub/w.bin"):
        obstore.put(store, key, DATA)
    storage = make_storage(objects=parse_options({"az://": {"endpoint": azurite}}))
    check_store(storage, "az://box")
    obstore.put(store, "a/x.bin", DATA[::-1])
    with pytest.raises(ChangedFileError, match=r"a/x.bin: was replaced while it was in use"):
        storage.read("az://box/a/x.bin", 0, 100)


def make_container(url: str) -> None:
    """By a request that the account's key signs."""
    import base64
    import datetime
    import hashlib
    import hmac

    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{lines}/devstoreaccount1/devstoreaccount1/box\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{signature}"
    request = urllib.request.Request(f"{url}/box?restype=container", headers=headers, method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()
