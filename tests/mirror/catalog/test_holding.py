"""The process's side of wants, with a real engine whose source is held up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError, DataError, MissingFileError, RefusedFileError
from megablend.mirror.catalog import holding
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.catalog.share import Kept
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import Pages, count_bytes, pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.node import engine
from megablend.mirror.node.engine import AwayError, Engine, Keep, Origins
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader, make_key
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from tests.mirror.manifests import make_manifest
from tests.mirror.peers.clusters import until
from tests.storage.faulty import Faults, FaultySource

KEY = FileKey("s3://b/x", "e", 70_000)


class HeldUpReader:
    """Gives zeros, when the gate is open."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def read(self, want: engine.Want, keep: Keep) -> None:
        self.is_asked.set()
        await self.gate.wait()
        data = bytes(count_bytes(want.pages, want.key.size))
        await keep(want.pages, memoryview(data), Origins(source=len(data)))


class FailingReader:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def read(self, want: engine.Want, keep: Keep) -> None:
        self.num_asked += 1
        raise MissingFileError(want.key.location, "is gone")


class ScriptedReader(HeldUpReader):
    """Ends each read, in turn, with an error; further ones are held up."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def read(self, want: engine.Want, keep: Keep) -> None:
        if self.errors:
            raise self.errors.pop(0)
        await super().read(want, keep)


def make_catalog(store: PageStore, *datasets: str) -> Catalog:
    """Of datasets with the same file, which are wanted."""
    catalog = Catalog(store.folder)
    for dataset in datasets:
        add_dataset(catalog, dataset, KEY)
    return catalog


def add_dataset(catalog: Catalog, dataset: str, *keys: FileKey) -> None:
    """Add a dataset that is wanted."""
    files = make_manifest(sorted(DataFile(key.location.rpartition("/")[2], key) for key in keys))
    revision = Revision(
        dataset=dataset,
        digest=files.revision,
        num_files=len(keys),
        num_bytes=sum(key.size for key in keys),
        added=0.0,
        sources=(),
    )
    catalog.put_manifest(revision.digest, files.pack())
    catalog.put_revision(catalog.date(revision))
    catalog.put_want(catalog.date_want(Want(dataset=dataset, revision=LATEST, since=0.0)))


def test_what_comes_while_it_is_planned_is_seen_at_once(tmp_path: Path) -> None:
    """A fetch that was begun anew finds nothing to do, since what was on its way has come."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        reader = HeldUpReader()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)

        class LateNeeds(Needs):
            """When it is asked the second time, what is on its way comes."""

            num_asked = 0

            def list_needed(self) -> dict[FileKey, Pages]:
                self.num_asked += 1
                if self.num_asked == 2:
                    loop.call_soon_threadsafe(reader.gate.set)
                    while not store.is_complete(KEY):
                        time.sleep(0.01)
                return super().list_needed()

        catalog = make_catalog(store, "d")
        holding = Holding(pages, LateNeeds(pages), catalog)
        running = asyncio.ensure_future(holding.run())
        await reader.is_asked.wait()
        holding.change()
        await asyncio.wait_for(holding.wait_for(lambda: not holding.states[0].missing), 100)
        assert holding.states[0].as_json()["trouble"] == ""
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_a_manifest_that_is_damaged_ends_no_process(tmp_path: Path) -> None:
    """Nor is the revision taken for an empty one."""

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, FailingReader())
        catalog = make_catalog(store, "d")
        (manifest,) = (tmp_path / "m" / "manifests").iterdir()
        manifest.write_bytes(b"x" * 50)
        holding = Holding(pages, Needs(pages), catalog)
        running = asyncio.ensure_future(holding.run())
        await asyncio.wait_for(holding.wait_for(lambda: bool(holding.states)), 100)
        (state,) = holding.states
        assert f"{manifest}: is damaged: " in state.trouble
        assert state.missing == KEY.size
        manifest.write_bytes(make_manifest([DataFile("x", KEY)]).pack())
        holding.change()
        await asyncio.wait_for(
            holding.wait_for(lambda: "was deleted" in str(holding.states[0].error)), 100
        )
        assert not running.done()
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_a_manifest_that_is_lost_later_is_told_and_waited_for(tmp_path: Path) -> None:
    """Not by looking for it again and again without a pause, though the share is known."""

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, FailingReader())
        catalog = make_catalog(store, "d")
        holding = Holding(pages, Needs(pages), catalog)
        await holding._plan()
        (manifest,) = (tmp_path / "m" / "manifests").iterdir()
        manifest.unlink()
        catalog._recent.clear()  # as if those of other datasets had taken its place
        for _ in range(2):
            assert not await holding._fetch()
            assert f"{manifest}: is missing" in holding.states[0].trouble
            await holding._plan()
        await pages.close()

    asyncio.run(work())


def test_a_manifest_that_no_node_has_is_told_and_waited_for(tmp_path: Path) -> None:
    """Not by looking for it again and again without a pause, in a cluster with etcd."""

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, FailingReader())
        catalog = make_catalog(store, "d")
        catalog.own = "a:1"
        (manifest,) = (tmp_path / "m" / "manifests").iterdir()
        manifest.unlink()
        holding = Holding(pages, Needs(pages), catalog)
        await holding._plan()
        assert not await holding._fetch()
        assert "no node has sent the manifest of this revision yet" in holding.states[0].trouble
        await pages.close()

    asyncio.run(work())


def test_a_manifest_that_has_come_is_no_trouble_any_longer(tmp_path: Path) -> None:
    """Also while the source is silent, so that no round of fetching ends by itself."""

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, HeldUpReader())
        catalog = make_catalog(store, "d")
        catalog.own = "a:1"
        (manifest,) = (tmp_path / "m" / "manifests").iterdir()
        data = manifest.read_bytes()
        manifest.unlink()
        holding = Holding(pages, Needs(pages), catalog)
        running = asyncio.ensure_future(holding.run())
        await asyncio.wait_for(holding.wait_for(lambda: bool(holding.states)), 30)
        assert "no node has sent the manifest of this revision yet" in holding.states[0].trouble
        assert holding.states[0].is_stuck
        manifest.write_bytes(data)
        holding.change()
        await asyncio.wait_for(holding.wait_for(lambda: not holding.states[0].trouble), 30)
        assert not holding.states[0].is_stuck
        running.cancel()
        await pages.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("error", "is_stuck"),
    [
        (AwayError("a:1 is unreachable"), False),
        (DataError("s3://b/x", "cannot be read: the server is busy; tried 9 times"), False),
        (RefusedFileError("s3://b/x", "cannot be read: access is denied"), True),
        (ConfigError("s3://b/x: is outside the prefixes"), True),
    ],
)
def test_a_trouble_ends_with_the_round_that_does_not_find_it(
    error: Exception, is_stuck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node was away, say; it is back, and the source does not respond."""
    monkeypatch.setattr(holding, "_RETRY_SECONDS", 0.01)

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, ScriptedReader(error))
        held = Holding(pages, Needs(pages), make_catalog(store, "d"))
        running = asyncio.ensure_future(held.run())
        await asyncio.wait_for(
            held.wait_for(lambda: bool(held.states) and held.states[0].trouble == str(error)), 30
        )
        assert held.states[0].as_json()["stuck"] == is_stuck
        monkeypatch.setattr(holding, "_PERIOD_SECONDS", 0.05)
        monkeypatch.setattr(holding, "_LOOK_SECONDS", 0.01)
        held.change()
        await asyncio.wait_for(held.wait_for(lambda: not held.states[0].trouble), 30)
        assert not held.states[0].is_stuck
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_an_error_that_comes_after_the_round_that_asked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tries a request again for ten minutes, a round ends after half a minute."""
    monkeypatch.setattr(holding, "_PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(holding, "_LOOK_SECONDS", 0.01)
    again = asyncio.Event()

    class LateReader(HeldUpReader):
        async def read(self, want: engine.Want, keep: Keep) -> None:
            await self.gate.wait()
            self.gate.clear()
            raise DataError(KEY.location, "cannot be read: the server is busy")

    class CountingEngine(Engine):
        """Tells when the second round waits for the request of the first one."""

        num_rounds = 0

        def _find_flights(self, key: FileKey, pages: Pages) -> Any:
            self.num_rounds += 1
            monkeypatch.setattr(holding, "_PERIOD_SECONDS", 30.0)
            if self.num_rounds == 2:
                again.set()
            return super()._find_flights(key, pages)

    async def work() -> None:
        reader = LateReader()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = CountingEngine(store, reader)
        held = Holding(pages, Needs(pages), make_catalog(store, "d"))
        running = asyncio.ensure_future(held.run())
        await asyncio.wait_for(again.wait(), 30)
        reader.gate.set()
        await asyncio.wait_for(
            held.wait_for(lambda: "the server is busy" in held.states[0].trouble), 25
        )
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_many_files_that_are_denied_hold_up_no_other_dataset(tmp_path: Path) -> None:
    async def work() -> None:
        asked = list[str]()

        class DenyingReader(HeldUpReader):
            async def read(self, want: engine.Want, keep: Keep) -> None:
                asked.append(want.key.location)
                if "/denied/" in want.key.location:
                    raise RefusedFileError(want.key.location, "cannot be read: access is denied")
                await super().read(want, keep)

        reader = DenyingReader()
        reader.gate.set()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        catalog = Catalog(store.folder)
        add_dataset(catalog, "a", *(FileKey(f"s3://b/denied/{i}", "e", 70) for i in range(1000)))
        add_dataset(catalog, "b", *(FileKey(f"s3://b/open/{i}", "e", 70) for i in range(100)))
        held = Holding(pages, Needs(pages), catalog)
        for most_before in (3 * holding._NUM_FETCHERS, 1):
            asked.clear()
            await held._plan()
            await held._fetch()
            of_b = [place for place, each in enumerate(asked) if "/open/" in each]
            assert len(asked) == 1100
            # In the first round, a's trouble is not known; in the second one it is
            assert of_b[0] <= most_before
            assert of_b[-1] < of_b[0] + 100 + 2 * holding._NUM_FETCHERS
            for i in range(100):
                await pages.call(
                    store.drop, FileKey(f"s3://b/open/{i}", "e", 70), pages_of_file(70)
                )
        await pages.close()

    asyncio.run(work())


def test_a_source_that_fails_is_told_while_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstore: None
) -> None:
    """Long before a request is given up."""
    monkeypatch.setattr(holding, "_FAULT_SECONDS", 1.0)
    with FaultySource({"b/x": bytes(KEY.size)}) as source:
        location = f"{source.url}/b/x"

        async def work() -> None:
            options = parse_mirror(
                {"folder": str(tmp_path / "m"), "prefixes": [source.url], "reserve": 0}
            )
            reader = SourceReader(options, ObjectOptions())
            store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
            pages = Engine(store, reader)
            key = make_key(location, await reader.stat(location))
            source.faults = Faults(status={503: 1.0})
            catalog = Catalog(store.folder)
            add_dataset(catalog, "d", key)
            held = Holding(pages, Needs(pages), catalog)
            running = asyncio.ensure_future(held.run())
            await until(lambda: bool(held.states) and bool(held.states[0].trouble))
            trouble = held.states[0].trouble
            assert trouble.startswith(f"{source.url}: no request has succeeded since ")
            assert trouble.endswith("check the source and the network; requests are being retried")
            assert not held.states[0].is_stuck
            source.faults = Faults()
            await until(lambda: not held.states[0].missing)
            await until(lambda: not held.states[0].trouble)
            running.cancel()
            await pages.close()

        asyncio.run(work())


def test_a_file_that_is_gone_is_told_of_all_that_have_it_and_not_asked_for_again_at_once(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        reader = FailingReader()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        holding = Holding(pages, Needs(pages), make_catalog(store, "d", "e"))
        running = asyncio.ensure_future(holding.run())
        await asyncio.wait_for(
            holding.wait_for(
                lambda: len(holding.states) == 2 and all(each.error for each in holding.states)
            ),
            100,
        )
        assert [each.trouble for each in holding.states] == [
            "s3://b/x: was deleted at the source after it was listed\n"
            f"make a revision of the files that exist now: `megablend datasets add {name} SOURCE...`"
            for name in ("d", "e")
        ]
        num_asked = reader.num_asked
        assert num_asked <= 2
        await asyncio.sleep(0.5)
        assert reader.num_asked == num_asked
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_a_dataset_that_is_removed_while_it_is_fetched_ends_no_process(tmp_path: Path) -> None:
    async def work() -> None:
        reader = HeldUpReader()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        catalog = make_catalog(store, "d")

        class RemovingNeeds(Needs):
            """While it is asked what jobs need, the dataset is removed."""

            def list_needed(self) -> dict[FileKey, Pages]:
                for want in catalog.wants.values():
                    catalog.remove_want(want)
                for revision in catalog.revisions.values():
                    catalog.remove_revision(revision)
                return super().list_needed()

        holding = Holding(pages, RemovingNeeds(pages), catalog)
        running = asyncio.ensure_future(holding.run())
        # It is fetched as it was planned, and is not there at the next look
        await asyncio.wait_for(reader.is_asked.wait(), 100)
        holding.change()
        await asyncio.wait_for(holding.wait_for(lambda: not holding.states), 100)
        assert not running.done()
        running.cancel()
        await pages.close()

    asyncio.run(work())


def test_what_is_wanted_later_comes_later_whatever_clocks_say(tmp_path: Path) -> None:
    with MirrorFolder.create(tmp_path / "m").lock():
        catalog = Catalog(MirrorFolder.attach(tmp_path / "m"))
        first = Want(dataset="a", revision=LATEST, since=1e9)
        catalog.put_want(first)
        assert catalog.date_want(Want(dataset="b", revision=LATEST, since=5.0)).since > 1e9
        assert catalog.date_want(Want(dataset="b", revision=LATEST, since=2e9)).since == 2e9
        assert catalog.date_want(Want(dataset="a", revision=LATEST, since=2e9)) == first


def test_what_takes_long_where_files_are_many_holds_up_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done in other threads than the event loop's."""
    on_loop = Counter[str]()
    elsewhere = Counter[str]()
    for name in ("make_share", "Kept", "find_short"):
        function = getattr(holding, name)

        def note(*arguments: Any, name: str = name, function: Any = function) -> Any:
            try:
                asyncio.get_running_loop()
                on_loop[name] += 1
            except RuntimeError:
                elsewhere[name] += 1
            return function(*arguments)

        monkeypatch.setattr(holding, name, note)

    async def work() -> None:
        reader = HeldUpReader()
        reader.gate.set()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        held = Holding(pages, Needs(pages), make_catalog(store, "a"))
        running = asyncio.ensure_future(held.run())
        await held.wait_for(lambda: bool(held.states) and not held.states[0].missing)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pages.close()

    asyncio.run(work())
    assert not on_loop
    assert set(elsewhere) == {"make_share", "Kept", "find_short"}


def test_what_jobs_need_is_being_fetched_until_it_has_come(tmp_path: Path) -> None:
    """Also when all of it is on its way: what is wanted waits for it."""

    async def work() -> None:
        reader = HeldUpReader()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        needs = Needs(pages)
        running = asyncio.ensure_future(needs.run())
        needs.set("job", [Need.of(KEY, pages_of_file(KEY.size), time.monotonic() + 5)])
        await reader.is_asked.wait()
        await asyncio.sleep(0.1)
        assert needs.is_fetching
        reader.gate.set()
        while needs.is_fetching:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pages.close()

    asyncio.run(work())


def add_revisions(catalog: Catalog, number: int) -> None:
    """Add revisions of the dataset `d`, of a file each."""
    for i in range(number):
        add_dataset(catalog, "d", FileKey(f"s3://b/new{i}", "e", 70_000))


@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_complete_revision_is_held_however_many_are_added_before_one_is_complete(
    tmp_path: Path, restarts: bool
) -> None:
    async def work() -> None:
        reader = HeldUpReader()
        reader.gate.set()
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, reader)
        catalog = make_catalog(store, "d")
        (first,) = catalog.list_revisions("d")
        held = Holding(pages, Needs(pages), catalog)
        await held._plan()
        await held._fetch()
        await held._plan()
        held._num_planned = 0
        add_revisions(catalog, 2 * holding._MAX_REVISIONS)
        if restarts:
            held = Holding(pages, Needs(pages), catalog)
        for _ in range(2):
            await held._plan()
            held._num_planned = 0
            goals = [state.goal.revision for state in held.states]
            assert goals == [first, catalog.list_revisions("d")[-1]]
        await pages.close()

    asyncio.run(work())


def test_earlier_revisions_are_kept_until_it_is_known_which_one_is_complete(tmp_path: Path) -> None:
    """As when a node starts while others, or etcd, are away."""

    async def work() -> None:
        store = PageStore(MirrorFolder.create(tmp_path / "m"), size=None, reserve=0)
        pages = Engine(store, FailingReader())
        catalog = make_catalog(store, "d")
        kept = list[Kept]()
        set_kept = store.set_kept

        def spy(pages: Kept) -> None:
            kept.append(pages)
            set_kept(pages)

        store.set_kept = spy  # type: ignore[method-assign,assignment]
        add_revisions(catalog, 1)
        Holding(pages, Needs(pages), catalog).keep_all()
        assert KEY.digest in kept[0]
        assert FileKey("s3://b/new0", "e", 70_000).digest in kept[0]
        await pages.close()

    asyncio.run(work())
