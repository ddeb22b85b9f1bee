"""Nodes that find one another by a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from megablend.cli.node import _print_status
from megablend.errors import ConfigError, ResourceError
from megablend.mirror.members.etcd import _code
from megablend.mirror.members.etcd_members import EtcdMembers
from megablend.mirror.node.engine import AwayError
from tests.mirror.etcd import EtcdServer
from tests.mirror.members.test_etcd import call, make_users
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.mirror.peers.test_cluster import is_read_once, make_files
from tests.mirror.peers.test_views import is_in
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
LEASE = 3.0


def cluster_of(
    folder: Path, source: FaultySource, etcd: EtcdServer, count: int, expected: int, **settings: Any
) -> NodesOf:
    """So many nodes at most, of which some are expected at first."""
    about = {"endpoints": [etcd.url], "nodes_expected": expected, "lease": LEASE}
    nodes = NodesOf(folder, source, count, PATIENT, nodes="etcd", etcd=about, **settings)
    nodes.settings_of = {i: {"advertise": name} for i, name in enumerate(nodes.names)}
    return nodes


async def wait_for_view(nodes: NodesOf, *which: int) -> int:
    """Wait until these nodes, and no others, are in one view: its number."""
    names = sorted(nodes.names[i] for i in which)

    def is_there() -> bool:
        clusters = [nodes.cluster(i) for i in which]
        numbers = {each.as_json()["view"] for each in clusters}
        return (
            len(numbers) == 1
            and all(list(each.names) == names for each in clusters)
            and is_in(nodes, numbers.pop(), *which)
        )

    await until(is_there, 60)
    return int(nodes.cluster(which[0]).as_json()["view"])


async def is_home(nodes: NodesOf, i: int, name: str) -> bool:
    """Of a file's first piece."""
    placement = nodes.assembly(i).placement
    return placement.order(await nodes.key(name), 0, 1) == [nodes.names[i]]


def test_nodes_wait_for_those_that_are_expected_and_one_that_is_late_joins(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 4, 3) as nodes:
            await nodes.start(0, 1)
            reading = asyncio.ensure_future(nodes.read_all(0, 1))
            await asyncio.sleep(1.5)
            assert source.bytes < 50  # versions were asked for
            joined = f"2 of 3 nodes have joined: {nodes.names[0]}, {nodes.names[1]}"
            await until(lambda: nodes.cluster(0).as_json()["trouble"] == joined, 60)
            await nodes.start(2)
            await wait_for_view(nodes, 0, 1, 2)
            assert nodes.cluster(0).as_json()["trouble"] == ""
            await reading
            await nodes.start(3)
            assert await wait_for_view(nodes, 0, 1, 2, 3) == 2
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(3)) as source:
        asyncio.run(run())


def test_a_dead_node_is_left_out_and_an_empty_one_takes_its_place(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 4, 4, copies=2) as nodes:
            await nodes.start(0, 1, 2, 3)
            await nodes.read_all()
            await nodes.settle()
            await nodes.stop(1, empties=True)
            await wait_for_view(nodes, 0, 2, 3)
            await nodes.settle()
            # Now another one may die
            await nodes.stop(3, empties=True)
            await wait_for_view(nodes, 0, 2)
            await nodes.start(1, 3)
            await wait_for_view(nodes, 0, 1, 2, 3)
            await nodes.read_all(1, 3)
            assert is_read_once(source, 16)

    with FaultySource(make_files(4, 9 << 20)) as source:
        asyncio.run(run())


def test_a_node_that_starts_again_soon_changes_nothing(tmp_path: Path, etcd: EtcdServer) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 3, 3) as nodes:
            await nodes.start(0, 1, 2)
            await nodes.read_all()
            number = await wait_for_view(nodes, 0, 1, 2)
            await nodes.stop(0)
            await nodes.start(0)
            await nodes.read_all()
            await asyncio.sleep(2 * LEASE)
            assert await wait_for_view(nodes, 0, 1, 2) == number
            assert is_read_once(source, 8)

    with FaultySource(make_files(2)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("loses", [False, True])
def test_without_etcd_nodes_go_on_and_nobody_is_left_out(
    loses: bool, tmp_path: Path, etcd: EtcdServer
) -> None:
    """For several leases; then it is back, perhaps with a new disk."""

    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 4, 3) as nodes:
            await nodes.start(0, 1, 2)
            number = await wait_for_view(nodes, 0, 1, 2)
            etcd.stop()
            names = sorted(source.files)
            await asyncio.sleep(1.5 * LEASE)
            await nodes.read_all(names=names[:2])
            # One that starts again goes on with the view that it knows
            await nodes.stop(1)
            await nodes.start(1)
            await nodes.read_all(names=names[2:])
            assert await wait_for_view(nodes, 0, 1, 2) == number
            assert all(nodes.cluster(i).as_json()["etcd"]["trouble"] for i in range(3))
            if loses:
                etcd.lose_data()
            etcd.start()
            await until(lambda: not nodes.cluster(1).as_json()["etcd"]["trouble"])
            await asyncio.sleep(2 * LEASE)
            assert await wait_for_view(nodes, 0, 1, 2) in ({number + 1} if loses else {number})
            await nodes.start(3)
            assert await wait_for_view(nodes, 0, 1, 2, 3) > number
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files(3)) as source:
        asyncio.run(run())


def test_an_etcd_that_stops_for_a_while_costs_nobody_its_place(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """Meanwhile all leases have run out, and no node could keep its own."""

    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 3, 3) as nodes:
            await nodes.start(0, 1, 2)
            number = await wait_for_view(nodes, 0, 1, 2)
            etcd.send(signal.SIGSTOP)
            await asyncio.sleep(4 * LEASE)
            etcd.send(signal.SIGCONT)
            await asyncio.sleep(3 * LEASE)
            assert await wait_for_view(nodes, 0, 1, 2) == number
            await nodes.stop(2)
            assert await wait_for_view(nodes, 0, 1) == number + 1

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())


def test_the_name_of_a_live_node_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 2, 2) as nodes:
            await nodes.start(0)
            nodes.settings_of[1] = {"advertise": nodes.names[0]}
            nodes.names[1] = nodes.names[0]
            with pytest.raises(
                ConfigError,
                match=r"a running node with another folder has this name.*\n.*advertise",
            ):
                await nodes.start(1)

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())


def test_other_data_below_the_prefix_are_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 1, 1) as nodes:
            with pytest.raises(
                ConfigError, match=r"found 'megablend/of/others' below .*\n.*`mirror.etcd.prefix`"
            ):
                await nodes.start(0)

    call(etcd, "kv/put", key=_code("megablend/of/others"), value="")
    with FaultySource(make_files(1)) as source:
        asyncio.run(run())


def test_a_node_without_a_view_does_not_start_without_etcd(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 1, 1) as nodes:
            with pytest.raises(
                ResourceError, match=r"etcd is unreachable: .*\n.*`mirror.etcd.endpoints`"
            ):
                await nodes.start(0)

    etcd.stop()
    with FaultySource(make_files(1)) as source:
        asyncio.run(run())


def test_a_view_that_is_none_is_told_and_takes_nobody_its_place(
    tmp_path: Path,
    etcd: EtcdServer,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 2, 2) as nodes:
            await nodes.start(0, 1)
            number = await wait_for_view(nodes, 0, 1)
            place = _code("megablend/v1/shared/view")
            call(etcd, "kv/put", key=place, value=_code("{}"))
            await until(lambda: "at 'megablend/v1/shared/view', which is not a view" in caplog.text)
            await asyncio.sleep(2 * LEASE)
            await nodes.read_all()
            views = nodes.cluster(0)._members.views
            assert isinstance(views, EtcdMembers)
            lease = views.lease
            call(etcd, "lease/revoke", ID=str(lease))
            # Another one is taken, and known of
            await until(lambda: views.lease not in (0, lease))
            _print_status(await nodes.nodes[0].get_status())
            call(etcd, "kv/deleterange", key=place)
            await until(lambda: is_in(nodes, number + 1))
            assert await wait_for_view(nodes, 0, 1) == number + 1
            _print_status(await nodes.nodes[0].get_status())

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())
    assert capsys.readouterr().out.count("etcd: found b'{}' at 'megablend/v1/shared/view', ") == 1


def test_a_node_does_not_start_with_a_view_that_is_none(tmp_path: Path, etcd: EtcdServer) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 1, 1) as nodes:
            call(etcd, "kv/put", key=_code("megablend/v1/shared/view"), value=_code("not json"))
            with pytest.raises(
                ConfigError, match=r"found b'not json' at .*not a view\ndelete that"
            ):
                await nodes.start(0)

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())


def test_users_and_passwords_are_those_of_settings_or_the_environment(
    tmp_path: Path,
    etcd: EtcdServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_users(etcd, "megablend")
    call(etcd, "auth/enable")
    password = tmp_path / "password"
    password.write_text("canary-8141\n")
    password.chmod(0o644)

    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 2, 2) as nodes:
            about = nodes.settings["etcd"]
            with pytest.raises(ConfigError, match=r"without a user: .*user name is empty"):
                await nodes.start(0)
            nodes.settings_of[0]["etcd"] = about | {"user": "node", "password_file": str(password)}
            with pytest.raises(ConfigError, match=r"etcd: password_file: .*: found mode 0644"):
                await nodes.start(0)
            password.chmod(0o600)
            await nodes.start(0)
            monkeypatch.setenv("MEGABLEND_ETCD_USER", "node")
            monkeypatch.setenv("MEGABLEND_ETCD_PASSWORD", "canary-8142")
            with pytest.raises(ConfigError, match=r"as user 'node': .*invalid user ID or password"):
                await nodes.start(1)
            monkeypatch.setenv("MEGABLEND_ETCD_PASSWORD", "canary-8141")
            await nodes.start(1)
            await wait_for_view(nodes, 0, 1)
            assert "canary" not in str([nodes.cluster(i).as_json() for i in range(2)])

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())
    assert "canary" not in caplog.text


def test_who_may_have_been_left_out_reads_only_what_is_due(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """Cut off from etcd and from most of the nodes, it leaves the rest to those who may be homes now."""

    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 3, 3) as nodes:
            await nodes.start(0, 1, 2)
            await wait_for_view(nodes, 0, 1, 2)
            own = [name for name in source.files if await is_home(nodes, 0, name)]
            etcd.stop()
            await nodes.read(0, own[0], due=math.inf)
            await nodes.stop(1)
            await nodes.stop(2)
            views = nodes.cluster(0)._members.views
            assert views is not None
            await until(lambda: views.find_doubt(1) not in (None, math.inf))
            with pytest.raises(AwayError, match="may have removed this node"):
                await nodes.read(0, own[1], due=math.inf)
            await nodes.read(0, own[2])
            # Most of the nodes are there, so that the others make no view
            await nodes.start(1)
            while not await can_read(nodes, own[1]):
                await asyncio.sleep(0.1)
            assert 3 * 5000 <= source.bytes <= 3 * 5000 + 8 * len(source.files)

    async def can_read(nodes: NodesOf, name: str) -> bool:
        with contextlib.suppress(AwayError):
            await nodes.read(0, name, due=math.inf)
            return True
        return False

    with FaultySource({f"d/{i}": bytes([i]) * 5000 for i in range(80)}) as source:
        asyncio.run(run())


def test_who_was_left_out_reads_only_what_is_due_until_it_is_back(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, source, etcd, 3, 3) as nodes:
            await nodes.start(0, 1, 2)
            await wait_for_view(nodes, 0, 1, 2)
            views = nodes.cluster(0)._members.views
            assert isinstance(views, EtcdMembers)
            assert views.find_doubt(1) is None
            # As if it had been stopped for so long
            views._renewed_at -= LEASE
            assert views.find_doubt(1) == math.inf
            await until(lambda: views.find_doubt(1) is None)
            # Its lease has ended, and the others have made a view without it
            await views.etcd._ask("lease/revoke", {"ID": str(views.lease)})
            left = {"number": 7, "nodes": sorted(nodes.names[1:]), "earlier": []}
            await views.etcd.change({}, {views._view_key: json.dumps(left).encode()})
            await until(lambda: views.find_doubt(1) == math.inf and views._least_number >= 7)
            number = await wait_for_view(nodes, 0, 1, 2)
            assert views.find_doubt(number) is None
            assert number > 7

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())
