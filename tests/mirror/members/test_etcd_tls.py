"""Etcd by TLS that asks for certificates, a user and a password."""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError
from megablend.mirror.members.etcd import Etcd, EtcdAwayError
from megablend.mirror.peers.signing import make_contexts
from megablend.storage.mirror_options import TlsFiles
from megablend.system.tls import make_tls_context
from tests.certificates import Authority
from tests.mirror.catalog.test_cluster_datasets import keys, services
from tests.mirror.catalog.test_datasets import MIXED, check_folder, make_files
from tests.mirror.etcd import EtcdServer
from tests.mirror.members.test_etcd import _can_write, call, make_users, work
from tests.mirror.nodes import get_status

__all__ = ["keys"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl: no certificate is tried with etcd")
    return Authority(tmp_path / "ours")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    """The certificate of etcd and its clients."""
    return authority.issue("IP:127.0.0.1", subject="/")


@pytest.fixture
def locked(files: TlsFiles, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks for all three, of the user `node`, who may read and write below `megablend`."""
    server = EtcdServer(tmp_path / "etcd", files)
    server.start()
    make_users(server, "megablend")
    call(server, "auth/enable")
    yield server
    server.stop()


def make_client(tls: TlsFiles) -> ssl.SSLContext:
    contexts = make_contexts(tls)
    assert contexts is not None
    return contexts[1]


def test_who_is_refused(
    locked: EtcdServer, authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "others").issue("IP:127.0.0.1", subject="/")
    # It trusts etcd, which does not trust it
    foreign = make_client(other.model_copy(update={"ca": files.ca}))
    nobody = make_tls_context(ca_file=files.ca)
    about: dict[str, Any] = {"user": "node", "password": "canary-8141"}
    for context, reason in [
        (make_client(other), "(?i)certificate verify failed"),
        (foreign, "etcd is unreachable: https:"),
        (nobody, "etcd is unreachable: https:"),
        (None, "(?i)certificate verify failed"),
    ]:

        async def fail(client: Etcd, reason: str = reason) -> None:
            with pytest.raises(EtcdAwayError, match=reason) as raised:
                await client.get("megablend/")
            assert "canary" not in str(raised.value)

        work(fail, locked.url, tls=context, **about)

    async def lack_user(client: Etcd) -> None:
        with pytest.raises(ConfigError, match="refused a request without a user"):
            await client.get("megablend/")

    async def go_on(client: Etcd) -> None:
        await client.change({}, {"megablend/a": b"1"})
        assert (await client.get("megablend/"))[0]["megablend/a"].data == b"1"
        with pytest.raises(ConfigError, match=r"as user 'node': .*permission denied"):
            await _can_write(client)

    async def have_name(client: Etcd) -> None:
        with pytest.raises(
            ConfigError, match=r"refuses certificates with a common name .*\n.* empty$"
        ):
            await client.get("megablend/")

    named = authority.issue("IP:127.0.0.1")
    work(have_name, locked.url, tls=make_client(named), **about)
    work(lack_user, locked.url, tls=make_client(files))
    work(go_on, locked.url, tls=make_client(files), **about)


@pytest.mark.usefixtures("obstore", "keys")
def test_nodes_share_datasets(locked: EtcdServer, files: TlsFiles, tmp_path: Path) -> None:
    data = make_files("d", MIXED)
    password = tmp_path / "password"
    password.write_text("canary-8141\n")
    password.chmod(0o600)
    access = {
        "tls": files.model_dump(),
        "user": "node",
        "password_file": str(password),
    }
    with services(tmp_path, data, locked, 2, access=access) as (a, b):
        a.add("corpus", "d")
        assert b.ask("want", "corpus", "--copies", "all", "--wait")["complete"] == 2
        check_folder(a.ask("path", "corpus")["path"], data, "d")
        # It has to know them again
        locked.stop()
        locked.start()
        assert a.ask("unwant", "corpus")["want"] == "corpus@latest"
        b.ask("want", "corpus", "--copies", "2", "--wait")
        told = json.dumps([get_status(each.storage["mirror"]) for each in (a, b)])
        logs = [each.config.with_suffix(".log").read_text() for each in (a, b)]
    for text in (told, *logs):
        assert "canary" not in text
    for place in (tmp_path / "n0", tmp_path / "n1"):
        for path in place.rglob("*"):
            assert not path.is_file() or b"canary" not in path.read_bytes()
