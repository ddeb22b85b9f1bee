"""What others ask of a node: whatever it is, the node lives, and fetches nothing that it may not."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from megablend.errors import ChangedFileError, DataError, MissingFileError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages, pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import Mode, Want
from megablend.mirror.node.frames import PROTOCOL, pack_needs, pack_pages, unpack_pages
from tests.mirror.node.test_metrics import parse_metrics
from tests.mirror.peers.clusters import MOST_FILES, PATIENT, NodesOf, until
from tests.mirror.peers.test_cluster import make_files
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
FILES = {"d/0": b"\x07" * (3 << 20), "d/1": bytes(range(256)) * 8192}


def find_key(nodes: NodesOf, key: FileKey, home: int) -> FileKey:
    """A key like this one, of a file whose first piece a node is the home of."""
    placement = nodes.assembly(home).placement
    keys = (key._replace(location=f"{key.location}{i}") for i in range(1000))
    return next(each for each in keys if placement.order(each, 0, 1) == [nodes.names[home]])


def one_page(key: FileKey, block: int = 0) -> Need:
    return Need.of(key, Pages(np.array([block], np.uint32), np.array([1], np.uint64)), 0.0)


async def ask(
    nodes: NodesOf, i: int, path: str, body: bytes, **headers: str
) -> tuple[int, Any, bytes]:
    """Status, headers and body of a node's answer, to whoever is on this machine."""
    names = {"protocol": str(PROTOCOL), "node": nodes.names[1 - i], "to": nodes.names[i]} | headers
    given = {f"Megablend-{name.title()}": value for name, value in names.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{nodes.names[i]}{path}", data=io.BytesIO(body), headers=given
        ) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


def test_a_file_that_is_missing_is_no_node_that_is_away(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            await nodes.start(0, 1)
            known = await nodes.key("d/0")
            await nodes.read(0, "d/0")
            missing = find_key(nodes, FileKey(f"{source.url}/d/none", "e", 5000), 1)
            source.files["d/new"] = FILES["d/1"]
            changed = known._replace(location=f"{source.url}/d/new")
            for key in (missing, changed):
                for due in (0.0, time.monotonic() + 1000):
                    with pytest.raises((MissingFileError, ChangedFileError)):
                        await nodes.nodes[0].engine.obtain(Want(key, pages_of_file(5000), due))
            assert not nodes.cluster(0).as_json()["away"]

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_a_holder_s_failing_disk_fails_nobody_s_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=3) as nodes:
            await nodes.start(0, 1, 2)
            key = await nodes.key("d/0")

            async def fail(_: Want) -> Any:
                raise DataError("/disk", "fails (EIO)")

            for i in (0, 1):
                monkeypatch.setattr(nodes.nodes[i].engine, "read_held", fail)
            # Its home reads the source, and tells of it
            key = find_key(nodes, key, 0)
            name = key.location.removeprefix(f"{source.url}/")
            source.files[name] = FILES["d/0"]
            await nodes.nodes[0].engine.obtain(Want(key, pages_of_file(key.size), 0.0))
            holders = nodes.assembly(2).holders
            await until(lambda: bool(holders.find(key, one_page(key).pages)))
            await nodes.read(2, name)
            assert not nodes.cluster(2).as_json()["away"]

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def _pack_rows(key: FileKey, rows: list[tuple[int, int]]) -> bytes:
    blocks = np.array([block for block, _ in rows], np.uint32)
    masks = np.array([mask for _, mask in rows], np.uint64)
    return pack_needs([Need.of(key, Pages(blocks, masks), 0.0)])


def make_hostile(url: str, key: FileKey) -> list[tuple[str, bytes]]:
    """Requests, which are all to be refused."""
    ones = 2**64 - 1
    held = f"{url}/d/0"
    bodies = [
        b"",
        b"\xff" * 3,
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xff" * 100,
        b"\1\0\0\0\xff\xff\xff\xff{}",
        b"\1\0\0\0\2\0\0\0{}\0\0\0\0",
        b"\1\0\0\0\2\0\0\0[]\xff\xff\xff\xff",
        pack_needs([]),
        pack_needs([one_page(key), one_page(key)]),
        _pack_rows(key, []),
        _pack_rows(key, [(0, 0)]),
        # Beyond the end, by blocks and by pages; out of order, twice, too many
        _pack_rows(key, [(12, 1)]),
        _pack_rows(key, [(1 << 31, 1)]),
        _pack_rows(key, [(1 << 31, 1), (0, 1)]),
        _pack_rows(key, [(1, 1), (0, 1)]),
        _pack_rows(key, [(1, 1), (1, 2)]),
        _pack_rows(key._replace(size=5000), [(0, 4)]),
        _pack_rows(key._replace(size=1 << 50), [(i, ones) for i in range(65)]),
        _pack_rows(key._replace(size=0), [(0, 1)]),
        _pack_rows(key._replace(size=-1), [(0, 1)]),
        _pack_rows(key._replace(size=1 << 62), [(0, 1)]),
        _pack_rows(key._replace(size=10**400), [(0, 1)]),
        _pack_rows(key._replace(size=1e400), [(0, 1)]),  # type: ignore[arg-type]
        _pack_rows(key._replace(size="x"), [(0, 1)]),  # type: ignore[arg-type]
    ]
    locations = [
        f"{url}/../etc/passwd",
        f"{url}/d/../0",
        f"{url}/d/0?x=1",
        f"{url}/d/0\0",
        f"{url}/\ud800",
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/x",
        "http://localhost:1/x",
        "http://2130706433/x",
        "/etc/passwd",
        "file:///etc/passwd",
        "s3://other/bucket",
        "",
    ]
    bodies += [pack_needs([one_page(key._replace(location=each))]) for each in locations]
    assert key.location == held
    return [("/v1/pages", body) for body in bodies]


def test_hostile_requests_are_refused_and_the_node_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            await nodes.start(0, 1)
            await nodes.read(0, "d/0")
            await nodes.settle()
            key = await nodes.key("d/0")
            before = source.requests
            for path, body in make_hostile(source.url, key):
                status, headers, text = await ask(nodes, 0, path, body)
                assert status in (400, 409), (body, status, text)
                assert headers["Megablend-Protocol"] == str(PROTOCOL)
            for body in (b"", b"{}", b"[1]", b"\xff", b"[" * 1000):
                for path in ("/v1/tell", "/v1/join", "/v1/due"):
                    status, _, text = await ask(nodes, 0, path, body)
                    assert status in (400, 503), (path, body, text)
            for body in (_pack_rows(key, [(1 << 31, 1), (0, 1)]), _pack_rows(key, [(12, 1)])):
                assert (await ask(nodes, 0, "/v1/tell", body))[0] == 400
            right = pack_needs([one_page(key)])
            for path, headers, expected in (
                ("/v1/pages", {"node": "nobody:1"}, 409),
                ("/v1/tell", {"node": "nobody:1"}, 409),
                ("/v1/tell?list=0&session=0", {}, 409),
                ("/v1/pages", {"protocol": "0"}, 403),
                ("/v1/pages", {"to": "nobody:1"}, 403),
                ("/v1/nothing", {}, 404),
                ("/v1/ping", {}, 405),
                ("/v1/pages", {}, 200),
                ("/v1/%70ages?held=1", {}, 200),
            ):
                status, _, text = await ask(nodes, 0, path, right, **headers)
                assert status == expected, (path, headers, text)
            too_much = b"\0" * ((64 << 20) + 1)
            assert (await ask(nodes, 0, "/v1/tell", too_much))[0] == 413
            assert source.requests == before
            await nodes.read_all()

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())
    assert "bug in megablend" not in caplog.text


def test_who_has_not_the_secret_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"0123456789abcdef")
        secret.chmod(0o600)
        async with NodesOf(tmp_path, source, 2, PATIENT, secret_file=str(secret)) as nodes:
            await nodes.start(0, 1)
            await nodes.read_all()
            key = await nodes.key("d/0")
            for path in ("/v1/pages", "/v1/tell", "/v1/due", "/v1/join", "/v1/check"):
                for more in ({}, {"signature": "0" * 64, "session": "x", "count": "1"}):
                    status, _, text = await ask(nodes, 0, path, pack_needs([one_page(key)]), **more)
                    assert status == (401 if more else 403)
                    assert b"secret_file" in text or more
            await nodes.read_all()

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())
    assert "not signed (all nodes need the same `secret_file`)" in caplog.text


def test_numbers_are_read_by_prometheus(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=2) as nodes:
            await nodes.start(0, 1)
            async with aiohttp.ClientSession() as session:

                async def read(i: int) -> dict[str, float]:
                    async with session.get(f"http://{nodes.names[i]}/metrics") as answer:
                        assert answer.content_type == "text/plain"
                        return parse_metrics(await answer.text())

                assert (await read(0))["formed"] == 0
                await nodes.start(2)
                await nodes.read_all()
                await nodes.settle()
                found = [await read(i) for i in range(3)]
                size = sum(map(len, source.files.values()))
                assert sum(each['bytes_total{from="source"}'] for each in found) == size
                got = sum(each['bytes_total{from="peers"}'] for each in found)
                assert got == sum(each['sent_bytes_total{to="nodes"}'] for each in found) > 0
                reads = 'source_requests_total{provider="http",status="ok"}'
                assert sum(each.get(reads, 0) for each in found) == 2 * 3
                for i, numbers in enumerate(found):
                    pages = sum(-(-len(data) // 4096) for data in source.files.values())
                    assert numbers["pages_held"] == pages
                    assert numbers["files_held"] == len(source.files)
                    assert numbers["evicted_bytes_total"] == 0
                    assert numbers["service"] == 1
                    assert numbers["formed"] == 1
                    assert numbers["nodes"] == 3
                    assert numbers["copies"] == 2
                    assert numbers["nodes_away"] == 0
                    assert numbers["debts_bytes"] == 0
                    status = await nodes.nodes[i].get_status()
                    assert numbers["start_time_seconds"] == pytest.approx(status["started"])
                await nodes.stop(2)
                source.files["d/9"] = b"9" * 70_000
                await nodes.read_all(0, 1)
                await until(lambda: nodes.cluster(0).as_json()["away"] == 1)
                assert (await read(0))["nodes_away"] == 1

    with FaultySource(make_files(2, 3 << 20)) as source:
        asyncio.run(run())


def test_a_node_sends_no_faster_than_it_may(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT, max_peer_rate=4_000_000) as nodes:
            await nodes.start(0, 1)
            await nodes.read(0, "d/0")
            await nodes.settle()
            held = (await nodes.nodes[1].get_status())["held_bytes"]
            begin = time.monotonic()
            await nodes.read(1, "d/0")
            # A second's worth may go at once
            sent = len(source.files["d/0"]) - held
            assert time.monotonic() - begin > sent / 4e6 - 1.1

    with FaultySource({"d/0": b"\5" * (24 << 20)}) as source:
        asyncio.run(run())


def test_a_node_ends_while_others_wait_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, 1)  # what they are asked waits for the third one
            key = await nodes.key("d/0")
            asking = asyncio.ensure_future(ask(nodes, 0, "/v1/pages", pack_needs([one_page(key)])))
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            await nodes.stop(0)
            assert time.monotonic() - begin < 50
            await asyncio.wait([asking])
            assert asking.exception() is not None or asking.result()[0] != 200

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


def test_no_bit_of_an_answer_can_be_another() -> None:
    key = FileKey("s3://b/f", "e", 3 << 20)
    asked = Pages(np.array([4, 5, 7], np.uint32), np.array([3, 3, 3], np.uint64))
    found = Pages(asked.blocks[[0, 2]], asked.masks[[0, 2]])
    answer = pack_pages(found, bytes(range(256)) * 64)
    pages, data = unpack_pages(answer, key, asked)
    assert np.array_equal(pages.blocks, [4, 7])
    assert data == bytes(range(256)) * 64
    for bit in range(8 * len(answer)):
        changed = bytearray(answer)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(
            ValueError,
            match=r"the checksum of the pages is wrong|cannot read the pages|found no pages",
        ):
            unpack_pages(bytes(changed), key, asked)


def test_many_reads_leave_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"0123456789abcdef")
        secret.chmod(0o600)
        async with NodesOf(tmp_path, source, 3, PATIENT, secret_file=str(secret)) as nodes:
            await nodes.start(0, 1, 2)
            await nodes.read_all()
            await nodes.settle()
            tasks = len(asyncio.all_tasks())
            key = await nodes.key("d/0")
            for count in range(2):
                wants = [
                    nodes.nodes[0].engine.obtain(
                        Want(key, one_page(key, i % 8).pages, time.monotonic(), Mode.FRESH)
                    )
                    for i in range(1000)
                ]
                await asyncio.gather(*wants)
                await nodes.stop(1 + count, empties=True)
                await nodes.read(0, "d/1")
                await nodes.start(1 + count)
                await nodes.read_all()
                await nodes.settle()
            clusters = [nodes.cluster(i) for i in range(3)]
            peers = [peer for cluster in clusters for peer in cluster._peers.values()]
            # Tells may be under way
            await until(
                lambda: not any(peer._num_pending or peer._away_signal._callbacks for peer in peers)
            )
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 6)
            for i in range(3):
                engine = nodes.nodes[i].engine
                assert not engine._flights
                await engine.call(bool)  # after what it was asked before
                assembly = nodes.assembly(i)
                assert len(assembly.holders._announced) <= len(source.files)
                assert not assembly.copies._to_copy
                assert not assembly.announcements.count_untold()

    with FaultySource(dict(FILES)) as source:
        asyncio.run(run())


@pytest.mark.skipif(MOST_FILES < 3000, reason="each needs two descriptors: raise `ulimit -Hn`")
def test_thousands_of_requests_at_once_are_all_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More than a server remembers that came: nobody's is taken for one that is sent again."""

    async def run() -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"0123456789abcdef")
        secret.chmod(0o600)
        async with NodesOf(tmp_path, source, 2, PATIENT, secret_file=str(secret)) as nodes:
            await nodes.start(0, 1)
            await nodes.settle()
            key = find_key(nodes, await nodes.key("d/0"), 1)
            source.files[key.location.removeprefix(f"{source.url}/")] = source.files["d/0"]
            pages = [
                Pages(np.array([i // 64], np.uint32), np.array([1 << i % 64], np.uint64))
                for i in range(1300)
            ]
            engine = nodes.nodes[0].engine
            await asyncio.gather(*(engine.obtain(Want(key, each, 0.0)) for each in pages))
            assert (await nodes.nodes[0].get_status())["source_bytes"] == 0
            assert source.bytes <= key.size + 50

    with FaultySource({"d/0": b"\7" * (8 << 20)}) as source:
        asyncio.run(run())
    assert "refused" not in caplog.text
