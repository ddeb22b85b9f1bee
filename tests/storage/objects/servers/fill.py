"""Filling the stand-ins for Google's and Azure's stores."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import urllib.parse
import urllib.request
from typing import ClassVar

AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Of the account that Azurite always has; it is public."""


def _send(request: urllib.request.Request) -> None:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=500).close()


class GoogleBucket:
    """A new bucket of fake-gcs-server."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self._post("/storage/v1/b?project=p", b'{"name": "%s"}' % name.encode(), "application/json")

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        query = f"uploadType=media&name={urllib.parse.quote(key, safe='')}"
        self._post(f"/upload/storage/v1/b/{self.name}/o?{query}", data, "application/octet-stream")

    def _post(self, path: str, data: bytes, kind: str) -> None:
        _send(
            urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": kind}, method="POST")
        )


class AzureContainer:
    """A new container of Azurite's account."""

    environment: ClassVar = {
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
    }
    """With which its account is read; also needed by `put`."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
        lines = "".join(f"{header}:{value}\n" for header, value in headers.items())
        text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{lines}/devstoreaccount1/devstoreaccount1/{name}\nrestype:container"
        signature = base64.b64encode(
            hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256)
        )
        headers["Authorization"] = f"SharedKey devstoreaccount1:{signature.decode()}"
        _send(
            urllib.request.Request(f"{url}/{name}?restype=container", headers=headers, method="PUT")
        )

    def put(self, key: str, data: bytes) -> None:
        """Write a blob."""
        import obstore
        from obstore.store import AzureStore

        obstore.put(
            AzureStore(self.name, endpoint=self.url, client_options={"allow_http": True}), key, data
        )
