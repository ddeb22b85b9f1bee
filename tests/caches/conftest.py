from __future__ import annotations

import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.objects.conftest import (
    S3Server,
    azurite,
    ceph,
    ceph_server,
    environments,
    obstore,
    plain_environment,
    swift,
    swift_server,
)
from tests.storage.objects.servers.fill import AzureContainer
from tests.storage.objects.servers.start import (
    find_free_port,
    make_environment,
    running,
    wait_for_port,
)

__all__ = [
    "azurite",
    "ceph",
    "ceph_server",
    "environments",
    "obstore",
    "plain_environment",
    "swift",
    "swift_server",
]


@pytest.fixture(scope="session")
def container(azurite: str) -> AzureContainer:
    return AzureContainer(azurite, "caches")


@pytest.fixture(scope="session")
def moto(
    obstore: None, tmp_path_factory: pytest.TempPathFactory, environments: Path
) -> Iterator[str]:
    """The URL of an imitation of S3, in which one of several conditional PUTs wins."""
    # moto[server] would also install what imitations of other services need
    packages = ["moto==5.2.5", "flask", "flask-cors", "PyYAML", "py-partiql-parser"]
    program = make_environment(environments, "moto", packages) / "moto_server"
    log = tmp_path_factory.mktemp("moto") / "log"
    port = find_free_port()
    with running([str(program), "-H", "127.0.0.1", "-p", str(port)], log) as process:
        wait_for_port(port, process, log)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def remote_moto(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a cache in a bucket of this imitation in which nothing is built yet."""
    settings = {
        "AWS_ACCESS_KEY_ID": "canary-key",
        "AWS_SECRET_ACCESS_KEY": "canary-secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in (settings | {"AWS_ENDPOINT_URL": moto}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    bucket = f"caches-{secrets.token_hex(4)}"
    request = urllib.request.Request(f"{moto}/{bucket}", method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()
    return f"s3://{bucket}/of/x"


@pytest.fixture
def remote_ceph(ceph: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same in a bucket of Ceph."""
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    bucket = f"caches-{secrets.token_hex(4)}"
    ceph.admin.make_bucket(bucket)
    return f"s3://{bucket}/of/x"


@pytest.fixture(params=["azurite", pytest.param("ceph", marks=pytest.mark.slow)])
def each_remote(request: pytest.FixtureRequest) -> str:
    """The URL of a cache in each store."""
    return str(
        request.getfixturevalue(
            "remote" if request.param == "azurite" else f"remote_{request.param}"
        )
    )


def use_container(container: AzureContainer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a cache in an object store in which nothing is built yet; a node's copies are in the folder."""
    for name, value in container.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container.url)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(folder / "node"))
    return f"az://{container.name}/of/{secrets.token_hex(4)}"


@pytest.fixture
def remote(container: AzureContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of such a cache."""
    return use_container(container, tmp_path, monkeypatch)
