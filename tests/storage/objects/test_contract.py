"""The contract of storages, for object stores and web servers, each with a server of its own."""

from __future__ import annotations

import itertools
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import pytest

from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from megablend.testing.storages import StorageContract
from tests.storage.objects.conftest import S3Server, WebServer
from tests.storage.objects.servers.fill import AzureContainer, GoogleBucket

NUMBERS = itertools.count()
"""Of buckets and folders on the servers, which all tests share."""


class ObjectContract(StorageContract):
    works_after_fork = (
        False  # the client's threads do not survive it; the storage refuses, see test_fork
    )
    missing = "no such object"
    # the servers are slow
    examples = 3
    fetches = 5


class TestS3(ObjectContract):
    @pytest.fixture(autouse=True)
    def _server(self, swift: S3Server) -> None:
        self.server = swift.admin
        self.bucket = f"contract-{next(NUMBERS)}"
        self.server.make_bucket(self.bucket)

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        for name, content in files.items():
            self.server.put(self.bucket, name, content)
        return f"s3://{self.bucket}"

    def make_storage(self) -> Storage:
        return make_storage()


@pytest.mark.slow
class TestCeph(TestS3):
    @pytest.fixture(autouse=True)
    def _server(self, ceph: S3Server) -> None:
        self.server = ceph.admin
        self.bucket = f"contract-{next(NUMBERS)}"
        self.server.make_bucket(self.bucket)


class TestGoogle(ObjectContract):
    @pytest.fixture(autouse=True)
    def _server(self, fake_gcs: str) -> None:
        self.url = fake_gcs
        self.bucket = GoogleBucket(fake_gcs, f"contract-{next(NUMBERS)}")

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        for name, content in files.items():
            self.bucket.put(name, content)
        return f"gs://{self.bucket.name}"

    def make_storage(self) -> Storage:
        return make_storage(
            objects=parse_options({"gs://": {"endpoint": self.url, "anonymous": True}})
        )


class TestAzure(ObjectContract):
    @pytest.fixture(autouse=True)
    def _server(self, azurite: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = azurite
        self.container = AzureContainer(azurite, f"contract-{next(NUMBERS)}")
        for name, value in self.container.environment.items():
            monkeypatch.setenv(name, value)

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        for name, content in files.items():
            self.container.put(name, content)
        return f"az://{self.container.name}"

    def make_storage(self) -> Storage:
        return make_storage(objects=parse_options({"az://": {"endpoint": self.url}}))


class TestWeb(ObjectContract):
    lists_files = False

    @pytest.fixture(autouse=True)
    def _server(self, nginx: WebServer) -> None:
        self.server = nginx
        self.folder = f"contract-{next(NUMBERS)}"
        self.times = itertools.count(10**9)

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        """Files of a new time each, by which the server tells versions apart."""
        for name, content in files.items():
            path = self.server.folder / self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (now := next(self.times), now))
        return f"{self.server.url}/{self.folder}"

    def make_storage(self) -> Storage:
        return make_storage()

    def locate(self, root: str, name: str) -> str:
        return f"{root}/{urllib.parse.quote(name)}"
