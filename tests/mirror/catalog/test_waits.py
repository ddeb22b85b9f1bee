"""Waits for wants end where only a person can change what keeps them from coming; reports of other nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ResourceError
from megablend.mirror.catalog import goal_state, reports
from megablend.mirror.catalog.datasets import Datasets
from megablend.mirror.catalog.goal_state import Patience, shorten
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.members.etcd import EtcdAwayError
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from megablend.system.limited_json import parse_json
from tests.mirror.catalog.test_datasets import keys as keys
from tests.mirror.catalog.test_datasets import machine, make_files
from tests.mirror.catalog.test_etcd_catalog import NAMES, SIZES, Cluster, LocalMates, until, work
from tests.mirror.etcd import EtcdServer
from tests.storage.faulty import Faults, FaultySource


def test_a_wait_ends_when_nothing_has_come_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("megablend.mirror.catalog.goal_state.time.monotonic", lambda: now)
    patience = Patience()
    for seconds, missing, obstacle, is_over in (
        (0, 100, "denied", False),
        (59, 100, "denied", False),
        (2, 50, "denied", False),  # something has come
        (59, 50, "denied", False),
        (0, 50, "", False),  # it is no obstacle any longer
        (2, 50, "denied", False),
        (57, 50, "denied", False),
        (2, 50, "denied", True),
    ):
        now += seconds
        assert bool(patience.look(missing, obstacle)) == is_over
    assert patience.obstacle == "denied"


def test_a_long_trouble_is_cut_at_a_word() -> None:
    assert shorten("s3://b/x: was deleted", 21) == "s3://b/x: was deleted"
    assert shorten("s3://b/x: was deleted", 20) == "s3://b/x: was ..."
    assert shorten("x" * 30, 20) == "x" * 20 + " ..."


@pytest.mark.usefixtures("obstore")
def test_a_wait_for_what_is_denied_ends_and_the_want_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goal_state, "STUCK_SECONDS", 1.0)
    with FaultySource({"e/x": bytes(70_000)}) as source:

        async def do() -> None:
            options = parse_mirror(
                {"folder": str(tmp_path / "m"), "prefixes": [source.url], "reserve": 0}
            )
            reader = SourceReader(options, ObjectOptions())
            store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
            engine = Engine(store, reader)
            datasets = await Datasets.open(engine, reader, Needs(engine))
            running = asyncio.ensure_future(datasets.run())
            url = f"{source.url}/e/x"
            await datasets.answer({"verb": "add", "dataset": "e", "sources": [url]})
            source.faults = Faults(status={403: 1.0})
            await datasets.answer({"verb": "want", "target": "e"})
            with pytest.raises(ResourceError) as raised:
                await datasets.answer({"verb": "wait", "target": "e"})
            cause, outcome = str(raised.value).splitlines()
            assert cause.startswith(f"{url}: cannot be read: access is denied")
            assert "grant these credentials read access" in cause
            assert outcome == (
                "nothing was fetched for 1 s; e@latest stays wanted, and is fetched once this is fixed"
            )
            source.faults = Faults()
            waited = await datasets.answer({"verb": "wait", "target": "e"})
            assert waited["missing"] == 0
            running.cancel()
            await engine.close()

        work(do)


@pytest.mark.slow
@pytest.mark.usefixtures("obstore", "keys")
def test_the_command_ends_after_a_minute_with_one_json_object(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", {"a": 300_000})) as node:
        node.add("corpus", "d")
        node.source.faults = Faults(status={403: 1.0})
        begin = time.monotonic()
        code, message = node.fail("want", "corpus", "--wait")
        assert code == 3
        assert time.monotonic() - begin >= goal_state.STUCK_SECONDS
        assert message.startswith("s3://b/d/a: cannot be read: access is denied")
        assert node.ask("list")["wants"] == ["corpus@latest"]
        (goal,) = node.goals().values()
        assert goal["stuck"]


def refuse(node: LocalMates) -> None:
    """Let a node's settings allow no source."""
    node.source._options = node.source._options.model_copy(update={"prefixes": ("s3://other/",)})


def test_a_wait_ends_for_what_keeps_another_node(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goal_state, "STUCK_SECONDS", 1.0)
    cluster = Cluster(tmp_path, etcd, *NAMES)
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.all() as (a, b, c):
            await a.add("corpus", "d")
            refuse(c)
            await a.ask("want", target="corpus", whole=True)
            for node in (a, b, c):
                with pytest.raises(ResourceError) as raised:
                    await node.ask("wait", target="corpus")
                assert "is outside the prefixes" in str(raised.value)
                assert "corpus@latest stays wanted" in str(raised.value)
            assert (await a.ask("status"))["wants"][0]["owing"]["c:1"]["stuck"]
            assert await a.targets() == ["corpus@latest"]

    work(do)


@pytest.mark.parametrize("others", [("a:1",), ("a:1", "b:1")])
def test_a_wait_ends_for_a_manifest_that_no_node_has(
    others: tuple[str, ...], tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a node that may have it is away."""
    monkeypatch.setattr(goal_state, "STUCK_SECONDS", 1.0)
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.node("b:1") as b:
            await b.add("corpus", "d")
            await b.ask("want", target="corpus", whole=True)
        cluster.names = others
        async with cluster.node("a:1") as a:
            await until(lambda: _is_wanted(a))
            waiting = asyncio.ensure_future(a.ask("wait", target="corpus"))
            if "b:1" in others:
                await asyncio.sleep(3.0)
                assert not waiting.done()
                waiting.cancel()
            else:
                with pytest.raises(
                    ResourceError, match="no node has sent the manifest of this revision yet"
                ):
                    await waiting

    work(do)


async def _is_wanted(node: LocalMates) -> bool:
    return await node.targets() == ["corpus@latest"]


def test_a_report_that_comes_late_replaces_no_later_one(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that the node has given up reaches etcd after the next one."""
    monkeypatch.setattr(reports, "_INCOMPLETE_SECONDS", 0.0)
    cluster = Cluster(tmp_path, etcd, "a:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        late = list[tuple[Any, ...]]()
        async with cluster.node("a:1") as a:
            key = f"{a.prefix}held/a:1"
            change = a.etcd.change

            async def change_late(
                expected: Mapping[str, int],
                puts: Mapping[str, bytes],
                deletes: Sequence[str] = (),
                lease: int = 0,
            ) -> int | None:
                if key in puts and not late:
                    late.append((expected, puts, deletes, lease))
                    raise EtcdAwayError("no response for 1 s")
                return await change(expected, puts, deletes, lease)

            async def read() -> dict[str, Any] | None:
                values, _ = await a.etcd.get(key)
                return parse_json(values[key].data) if key in values else None

            monkeypatch.setattr(a.etcd, "change", change_late)
            await a.add("corpus", "d")
            await a.ask("want", target="corpus", whole=True)
            await a.ask("wait", target="corpus")
            assert late
            last = await read()
            assert last is not None
            assert not last["owed"]
            assert await change(*late[0]) is None
            assert await read() == last

    work(do)
