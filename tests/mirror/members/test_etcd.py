"""The client of etcd, with a real one."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megablend.errors import ConfigError, ResourceError
from megablend.mirror.members.etcd import Etcd, EtcdAwayError, StartOverError, _code
from megablend.mirror.members.followed import Followed
from megablend.mirror.node.frames import pack_error, unpack_error
from megablend.system.close_server import close_server
from tests.mirror.etcd import EtcdServer
from tests.storage.objects.servers.start import find_free_port


def call(etcd: EtcdServer, path: str, **about: Any) -> Any:
    """What the gateway answers, without the client."""
    request = urllib.request.Request(f"{etcd.url}/v3/{path}", json.dumps(about).encode())
    with urllib.request.urlopen(request, timeout=500, context=etcd.client) as answer:
        return json.load(answer)


def work(
    do: Callable[[Etcd], Awaitable[None]], *endpoints: str, patience: float = 5.0, **about: Any
) -> None:
    """Do something with a client."""

    async def run() -> None:
        client = Etcd(endpoints, patience=patience, **about)
        try:
            await asyncio.wait_for(do(client), 60)
        finally:
            await client.close()
            await asyncio.sleep(0.1)  # connections of TLS end after their session

    asyncio.run(run())


def test_keys_are_changed_together_or_not_at_all(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        first = await client.change({"p/a": 0}, {"p/a": b"1", "p/b": b"\0\xff", "q/c": b"3"})
        assert first is not None
        assert await client.change({"p/a": 0}, {"p/a": b"2"}) is None
        values, revision = await client.get("p/")
        assert {key: value.data for key, value in values.items()} == {"p/a": b"1", "p/b": b"\0\xff"}
        assert {value.revision for value in values.values()} == {first} == {revision}
        second = await client.change({"p/a": first, "p/x": 0}, {"p/a": b"2"}, ["p/b"])
        assert second == first + 1
        values, _ = await client.get("p/")
        assert {key: value.data for key, value in values.items()} == {"p/a": b"2"}

    work(do, etcd.url)


def test_what_a_lease_holds_ends_with_it(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        short = await client.grant(2)
        long = await client.grant(60)
        await client.change({}, {"p/short": b""}, lease=short)
        await client.change({}, {"p/long": b""}, lease=long)
        assert await client.keep(short)
        while "p/short" in (found := (await client.get("p/"))[0]):
            await asyncio.sleep(0.1)
        assert "p/long" in found
        assert not await client.keep(short)
        await client._ask("lease/revoke", {"ID": str(long)})
        assert (await client.get("p/"))[0] == {}

    work(do, etcd.url)


def test_a_watch_tells_all_that_changes_below_a_prefix(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        first = await client.change({}, {"p/a": b"1"})
        assert first is not None
        await client.change({}, {"q/b": b"1", "p/b": b"x" * 300_000})
        await client.change({}, {}, ["p/a"])
        found = []
        async for changes in client.watch("p/", first):
            found += changes
            if len(found) == 3:
                break
        names = [
            (key, value and len(value.data), revision - first) for key, value, revision in found
        ]
        assert names == [("p/a", 1, 0), ("p/b", 300_000, 1), ("p/a", None, 2)]

    work(do, etcd.url)


def test_what_was_compacted_is_to_be_read_again(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        for i in range(5):
            last = await client.change({}, {"p/a": b"%d" % i})
        call(etcd, "kv/compaction", revision=str(last))
        with pytest.raises(StartOverError):
            async for _ in client.watch("p/", 2):
                pass

    work(do, etcd.url)


def test_a_silent_watch_goes_on(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes twice, and nothing is lost, when it has begun anew."""
    monkeypatch.setattr("megablend.mirror.members.etcd._SILENT_SECONDS", 0.1)

    async def do(client: Etcd) -> None:
        found = []

        async def watch() -> None:
            async for changes in client.watch("p/", 1):
                found.extend([key for key, _, _ in changes])

        watching = asyncio.ensure_future(watch())
        for i in range(5):
            await client.change({}, {f"p/{i}": b""})
            while len(found) <= i:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.25)
        assert found == [f"p/{i}" for i in range(5)]
        watching.cancel()

    work(do, etcd.url)


def test_who_follows_hears_of_it_when_etcd_is_back_and_when_its_data_are_lost(
    etcd: EtcdServer,
) -> None:
    async def do(client: Etcd) -> None:
        followed = Followed(client, "p/")
        running = asyncio.ensure_future(followed.run())
        for i in range(5):
            await client.change({}, {"p/a": b"%d" % i})
        await followed.wait_for(lambda: followed.values.get("p/a", (b"",))[0] == b"4")
        etcd.stop()
        while client.away_since is None:
            await asyncio.sleep(0.05)
        assert followed.values
        etcd.start()
        await client.change({}, {"p/b": b"5"})
        await followed.wait_for(lambda: sorted(followed.values) == ["p/a", "p/b"])
        assert client.away_since is None
        assert client.trouble == ""
        etcd.stop()
        etcd.lose_data()
        etcd.start()
        await followed.wait_for(lambda: not followed.values)
        running.cancel()

    work(do, etcd.url)


def test_the_next_endpoint_is_asked_where_one_is_away(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        assert await client.change({}, {"p/a": b""}) is not None
        assert list((await client.get("p/"))[0]) == ["p/a"]
        assert client.away_since is None

    work(do, f"http://127.0.0.1:{find_free_port()}", etcd.url)


def test_an_etcd_that_does_not_answer_is_away(etcd: EtcdServer) -> None:
    async def do(client: Etcd) -> None:
        etcd.send(signal.SIGSTOP)
        with pytest.raises(EtcdAwayError, match=f"{etcd.url}: no response for 0.5 s") as caught:
            await client.get("p/")
        # A command is told of it in these words, with exit code 3
        told = unpack_error(pack_error(caught.value))
        assert type(told) is ResourceError
        assert str(told) == str(caught.value)
        assert client.away_since is not None
        etcd.send(signal.SIGCONT)
        await client.get("p/")
        assert client.away_since is None

    work(do, etcd.url, patience=0.5)


def test_what_is_no_etcd_is_told(etcd: EtcdServer) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async def do(client: Etcd) -> None:
        port = find_free_port()
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        other = Etcd([f"http://127.0.0.1:{port}"])
        with pytest.raises(
            ConfigError, match=r"did not respond as etcd 3\.4 or later does: status 200, b'hello'"
        ):
            await other.get("p/")
        await other.close()
        await close_server(server)
        with pytest.raises(ConfigError, match=r"did not respond as etcd 3\.4"):
            await client.get("p/")

    work(do, f"{etcd.url}/elsewhere")


def make_users(etcd: EtcdServer, root: str) -> None:
    """One who may do all, and one who may read and write below a root, with one password."""
    for user in ("root", "node"):
        call(etcd, "auth/user/add", name=user, password="canary-8141")
    for role in ("root", "node"):
        call(etcd, "auth/role/add", name=role)
        call(etcd, "auth/user/grant", user=role, role=role)
    permission = {"permType": 2, "key": _code(f"{root}/"), "range_end": _code(f"{root}0")}
    call(etcd, "auth/role/grant", name="node", perm=permission)


def test_users_passwords_and_permissions(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    make_users(etcd, "p")
    # A client with a user may come before etcd asks for one
    work(_can_write, etcd.url, user="node", password="canary-8141")
    call(etcd, "auth/enable")

    async def lack_user(client: Etcd) -> None:
        with pytest.raises(
            ConfigError, match=r"refused a request without a user: .*user name is empty"
        ):
            await client.get("p/")

    async def mistake_password(client: Etcd) -> None:
        with pytest.raises(
            ConfigError, match=r"refused a request as user 'node': .*invalid user ID or password"
        ):
            await client.get("p/")

    async def go_on(client: Etcd) -> None:
        await _can_write(client)
        with pytest.raises(ConfigError, match=r"as user 'node': .*permission denied\nset `user`"):
            await client.get("q/")
        with pytest.raises(StartOverError):
            async for _ in client.watch("q/", 1):
                pass
        etcd.stop()
        etcd.start()  # it does not know its tokens any more
        await _can_write(client)
        async for changes in client.watch("p/", 1):
            assert changes[0][0] == "p/a"
            break

    work(lack_user, etcd.url)
    work(mistake_password, etcd.url, user="node", password="canary")
    work(go_on, etcd.url, user="node", password="canary-8141")
    assert "canary" not in caplog.text


async def _can_write(client: Etcd) -> None:
    revision = await client.change({}, {"p/a": b"1"})
    assert revision is not None
    assert (await client.get("p/"))[0]["p/a"].revision == revision
