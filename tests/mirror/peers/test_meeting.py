"""Nodes meet before anything is fetched; what keeps them from it is said, with what to do."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import Want
from megablend.mirror.node.frames import PROTOCOL, batch_needs
from megablend.mirror.peers import assembly
from megablend.mirror.peers.meeting import Joining
from megablend.system.close_server import close_server
from megablend.system.limited_json import parse_json
from tests.certificates import Authority
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.mirror.peers.test_cluster import is_read_once, make_files
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
HASTY = Pace(ping=0.2, silent=5.0, gone=6.0, complete=1.5)
"""Who is missing is not waited for."""
FILES = {"d/0": b"\x07" * (3 << 20), "d/1": bytes(range(256)) * 8192}


async def fail(nodes: NodesOf, i: int, kind: type[MegablendError], message: str) -> None:
    """A read by a node fails so."""
    key = FileKey(f"{nodes.source.url}/d/0", "e", 5000)
    begin = time.monotonic()
    with pytest.raises(kind, match=message):
        await nodes.nodes[i].engine.obtain(Want(key, pages_of_file(5000), time.monotonic()))
    assert time.monotonic() - begin < 50
    assert nodes.source.requests == 0


def make_secret(path: Path, secret: bytes = b"0123456789abcdef") -> str:
    path.write_bytes(secret)
    path.chmod(0o600)
    return str(path)


def test_a_majority_goes_on_and_says_who_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, HASTY) as nodes:
            await nodes.start(0, 1)
            await nodes.read_all()
            assert is_read_once(source, 8)
            missing = rf"1 of 3 nodes are missing: {nodes.names[2]} \(Cannot connect.*continuing"
            assert re.search(missing, caplog.text)
            # Who comes later is met
            await nodes.start(2)
            await nodes.read_all()
            await nodes.settle()
            assert is_read_once(source, 8)

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


def test_who_comes_later_hears_at_first_of_all_pages_that_were_read_meanwhile(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        # With two copies each piece is announced to all three nodes
        async with NodesOf(tmp_path, source, 3, HASTY, copies=2) as nodes:
            await nodes.start(0, 1)
            await nodes.read_all()
            held = await nodes.assembly(0).announcements.find_all(nodes.names[2])
            pages = {need.key.location: need.pages for need in held}
            for name, data in source.files.items():
                found = pages[f"{source.url}/{name}"]
                assert np.array_equal(found.masks, pages_of_file(len(data)).masks)

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


def test_fewer_than_half_read_nothing_until_more_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 5, HASTY) as nodes:
            await nodes.start(0, 1)
            message = "3 of 5 nodes are missing: .* are not a majority"
            for i in (0, 1):
                await fail(nodes, i, ResourceError, message)
            # Who comes to those that wait does not take them for a cluster
            await nodes.stop(1)
            await nodes.start(1)
            await fail(nodes, 1, ResourceError, message)
            assert not nodes.cluster(1).as_json()["formed"]
            assert "not a majority" in nodes.cluster(0).as_json()["trouble"]
            await nodes.start(2)
            await nodes.settle()
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_with_strict_a_missing_node_is_an_error(count: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, HASTY, strict=True) as nodes:
            await nodes.start(*range(count))
            for i in range(count):
                message = (
                    rf"{3 - count} of 3 nodes are missing: .*{nodes.names[2]}.*\n.*`mirror.strict`"
                )
                await fail(nodes, i, ConfigError, message)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_two_nodes_of_one_name(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, 1)
            name = nodes.names[2]
            nodes.names[2] = nodes.names[0]
            nodes.settings_of[2] = {"nodes": sorted([*nodes.names[:2], name])}
            await nodes.start(2)
            message = f"{nodes.names[0]}: another node responds at that address\n.*`advertise`"
            await fail(nodes, 2, ConfigError, message)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_other_lists_of_nodes(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, members=[0, 1])
            await nodes.start(1, members=[0, 1, 2])
            message = r"differs from that of .*\n.*`nodes`.*`megablend node stop`"
            for i in (0, 1):
                await fail(nodes, i, ConfigError, message)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_pages_are_announced_only_to_a_node_that_accepts_the_greeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they take several requests, of which only the last one has the list of nodes."""
    monkeypatch.setattr(assembly, "batch_needs", partial(batch_needs, max_bytes=200))

    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=2) as nodes:
            await nodes.start(0, 1, members=[0, 1])
            await nodes.read_all()
            await nodes.settle()
            await nodes.stop(0)
            await nodes.stop(1, empties=True)
            source.requests = 0
            await nodes.start(0, members=[0, 1])
            await nodes.start(1, members=[0, 1, 2])
            for i in (0, 1):
                await fail(nodes, i, ConfigError, "differs from that of")
            for i in (0, 1):
                (met,) = nodes.cluster(i)._assemblies
                assert not met.holders._announced
            await nodes.stop(1)
            await nodes.start(1, members=[0, 1])
            await nodes.meet()
            await nodes.settle()
            assert is_read_once(source, 4 * 2)

    with FaultySource(make_files(4, 1 << 20)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("other", [None, b"fedcba9876543210"])
def test_other_secrets(other: bytes | None, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            nodes.settings_of[0] = {"secret_file": make_secret(tmp_path / "a")}
            if other is not None:
                nodes.settings_of[1] = {"secret_file": make_secret(tmp_path / "b", other)}
            await nodes.start(0, 1)
            for i in (0, 1):
                await fail(nodes, i, ConfigError, f"(?s){nodes.names[1 - i]}.*`secret_file`")
            for i in (0, 1):
                (line,) = await nodes.cluster(i).check()
                name = nodes.names[1 - i]
                assert line.startswith(f"{nodes.names[i]} cannot reach {name}: {name} ")
                assert "\n" not in line

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_a_fault_stays_one_until_it_is_mended(tmp_path: Path) -> None:
    """A majority does not go on beside a node that is there, and refuses."""

    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, HASTY) as nodes:
            secret = make_secret(tmp_path / "a")
            for i in range(2):
                nodes.settings_of[i] = {"secret_file": secret}
            other = make_secret(tmp_path / "b", b"another one, as long")
            nodes.settings_of[2] = {"secret_file": other}
            await nodes.start(0, 1, 2)
            for i in range(3):
                await fail(nodes, i, ConfigError, "(?s)`secret_file`")
            await asyncio.sleep(2 * HASTY.complete)
            for i in range(3):
                await fail(nodes, i, ConfigError, "(?s)`secret_file`")
            await nodes.stop(2)
            nodes.settings_of[2] = {"secret_file": secret}
            await nodes.start(2)
            await nodes.meet()
            await nodes.read_all()
            assert is_read_once(source, 4)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


@asynccontextmanager
async def listening(port: int, **headers: str) -> AsyncIterator[None]:
    """A web server that is no node of ours."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text="It works!", headers=headers)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("protocol", [None, "0"])
@pytest.mark.parametrize("has_secret", [False, True])
def test_something_else_at_a_node_s_name(
    protocol: str | None, has_secret: bool, tmp_path: Path
) -> None:
    async def run() -> None:
        settings: dict[str, Any] = {}
        if has_secret:
            settings["secret_file"] = make_secret(tmp_path / "s")
        headers = {} if protocol is None else {"Megablend-Protocol": protocol}
        async with (
            NodesOf(tmp_path, source, 2, PATIENT, **settings) as nodes,
            listening(nodes.ports[1], **headers),
        ):
            await nodes.start(0)
            message = (
                f"{nodes.names[1]} speaks protocol {protocol}, but this node speaks {PROTOCOL}"
            )
            await fail(nodes, 0, ConfigError, rf"{message}\nrun the same version .*their port")

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_something_that_speaks_no_http_is_a_missing_node(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, HASTY) as nodes:

            def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
                writer.close()

            server = await asyncio.start_server(talk, "127.0.0.1", nodes.ports[1])
            await nodes.start(0)
            await fail(nodes, 0, ResourceError, f"1 of 2 nodes are missing: {nodes.names[1]}")
            await close_server(server)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_a_port_in_use(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            with socket.socket() as other:
                other.bind(("127.0.0.1", nodes.ports[0]))
                other.listen()
                message = rf"port {nodes.ports[0]} of 127.0.0.1: .* in use\nset `mirror.port`"
                with pytest.raises(ConfigError, match=message):
                    await nodes.start(0)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_nodes_with_a_secret_read_once(tmp_path: Path) -> None:
    async def run() -> None:
        secret = make_secret(tmp_path / "s")
        async with NodesOf(tmp_path, source, 4, PATIENT, copies=2, secret_file=secret) as nodes:
            await nodes.start(0, 1, 2, 3)
            await nodes.read_all()
            await nodes.settle()
            await nodes.stop(2, empties=True)
            await nodes.start(2)
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(4, 6 << 20)) as source:
        asyncio.run(run())


def test_nodes_with_certificates_read_once(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl: nodes are not tried with certificates")

    async def run() -> None:
        tls = Authority(tmp_path / "ours").issue("IP:127.0.0.1")
        files = {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}
        async with NodesOf(tmp_path, source, 3, PATIENT, tls=files) as nodes:
            await nodes.start(0, 1, 2)
            await nodes.read_all()
            assert is_read_once(source, 8)
            # Another authority's node is none of them
            other = Authority(tmp_path / "others").issue("IP:127.0.0.1")
            await nodes.stop(2)
            nodes.settings_of[2] = {
                "tls": {"certificate": other.certificate, "key": other.key, "ca": other.ca}
            }
            nodes.pace = HASTY
            await nodes.start(2)
            key = await nodes.key("d/0")
            source.requests = 0
            wanted = Want(key._replace(etag="x"), pages_of_file(5000), time.monotonic())
            with pytest.raises(
                ResourceError, match=r"(?is)2 of 3 nodes are missing: .*certificate"
            ):
                await nodes.nodes[2].engine.obtain(wanted)
            assert source.requests == 0

    with FaultySource(make_files(2, 6 << 20)) as source:
        asyncio.run(run())


async def start_machines(nodes: NodesOf, *which: int) -> None:
    for i in which:
        await nodes.start(i, torchrun=len(nodes.names))


def test_machines_of_torchrun_tell_one_another_their_names(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=2) as nodes:
            # The first comes last, and one is late
            await start_machines(nodes, 2)
            await asyncio.sleep(0.5)
            await start_machines(nodes, 0)
            reading = asyncio.ensure_future(nodes.read_all(0, 2))
            await asyncio.sleep(0.5)
            assert source.bytes < 50
            assert not reading.done()
            await start_machines(nodes, 1)
            await reading
            await nodes.read_all()
            await nodes.settle()
            # Each starts again
            for i in range(3):
                await nodes.stop(i)
                await start_machines(nodes, i)
                await nodes.meet()
                await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


def test_a_missing_machine_of_torchrun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, HASTY) as nodes:
            await start_machines(nodes, 2, 0)
            await nodes.read_all()
            assert is_read_once(source, 8)
            assert "1 of 3 nodes are missing: machine 1; continuing" in caplog.text
            # They have begun without it
            await start_machines(nodes, 1)
            key = await nodes.key("d/0")
            with pytest.raises(
                ResourceError, match="joined after the other nodes had started without it"
            ):
                await nodes.nodes[1].engine.obtain(Want(key, pages_of_file(5000), 0.0))

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


def test_the_first_machine_s_process_of_the_last_job_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when the first machine's ranks of the next job come, perhaps after those of others."""
    asked = set[int]()
    answer = Joining.answer

    async def note(joining: Joining, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        try:
            return await answer(joining, node, query, body)
        finally:
            asked.add(parse_json(body)["rank"])

    monkeypatch.setattr(Joining, "answer", note)

    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, torchrun=2)
            await nodes.start(1, torchrun=2)
            await nodes.meet()
            await nodes.stop(1)
            asked.clear()
            await nodes.start(1, 2, torchrun=3)
            await until(lambda: asked == {1, 2})
            assert not nodes.cluster(1).as_json()["formed"]
            await nodes.stop(0)
            await nodes.start(0, torchrun=3)
            await nodes.meet()
            await nodes.read_all()
            assert is_read_once(source, 4)

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("first", [0, 1])
def test_too_few_machines_of_torchrun(first: int, tmp_path: Path) -> None:
    async def run() -> None:
        pace = HASTY._replace(silent=1.0)
        async with NodesOf(tmp_path, source, 4, pace) as nodes:
            some = [first, 2]
            await start_machines(nodes, *some)
            message = (
                "cannot get the list of nodes from .*: (.* is unreachable|not all nodes have joined)|"
                "2 of 4 nodes are missing: machine 1, machine 3"
            )
            for i in some:
                await fail(nodes, i, ResourceError, message)
            nodes.pace = PATIENT
            await start_machines(nodes, 1 - first, 3)
            await nodes.settle()
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("which", [(0, 1), (1,)])
def test_a_missing_machine_of_torchrun_with_strict(which: tuple[int, ...], tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, HASTY._replace(silent=1.0), strict=True) as nodes:
            await start_machines(nodes, *which)
            for i in which:
                await fail(
                    nodes,
                    i,
                    ConfigError,
                    r"(machine 2|cannot get the list of nodes .*)\n.*`mirror.strict`",
                )

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_two_machines_of_torchrun_with_one_name(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await start_machines(nodes, 0, 1)
            nodes.names[2] = nodes.names[1]
            await start_machines(nodes, 2)
            for i in range(3):
                await fail(
                    nodes, i, ConfigError, f"{nodes.names[1]}: two machines .*\n.*`advertise`"
                )

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())
