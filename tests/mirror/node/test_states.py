"""States of source files that are known without asking the source: those of listings, too."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from megablend.errors import ChangedFileError
from megablend.mirror.catalog.catalog import Catalog, Revision
from megablend.mirror.catalog.catalog import Want as DatasetWant
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.disk.database import SourceState
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.node.engine import Engine, Keep, Want
from megablend.mirror.node.source_reads import SourceReader
from megablend.mirror.node.states import States
from megablend.storage.base import FileStat
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from tests.mirror.manifests import make_manifest

KEY = FileKey("s3://b/d/x", "listed", 70_000)


class ChangedSource(SourceReader):
    """Has another version of each file now."""

    num_asked = 0

    async def stat(self, location: str) -> FileStat:
        self.num_asked += 1
        return FileStat(size=5, etag="asked")

    async def read(self, want: Want, keep: Keep) -> None:
        raise ChangedFileError(want.key.location, "was replaced")


def add(catalog: Catalog, dataset: str, key: FileKey, source: str = "s3://b/d/") -> Path:
    """Add a revision of one file. Returns: the path of its manifest."""
    files = make_manifest([DataFile("x", key)])
    revision = Revision(
        dataset=dataset,
        digest=files.revision,
        num_files=1,
        num_bytes=key.size,
        added=time.time(),
        sources=(source,),
        is_plain=True,
    )
    catalog.put_manifest(revision.digest, files.pack())
    catalog.put_revision(catalog.date(revision))
    return catalog._path(files.revision)


def test_a_listed_file_is_not_asked_for_until_it_is_found_to_have_changed(tmp_path: Path) -> None:
    async def work() -> None:
        folder = MirrorFolder.create(tmp_path / "m")
        store = PageStore(folder, size=None, reserve=0)
        options = parse_mirror({"folder": str(tmp_path / "m"), "prefixes": ["s3://"]})
        source = ChangedSource(options, ObjectOptions())
        pages = Engine(store, source)
        catalog = Catalog(folder)

        async def find_listed(location: str) -> SourceState | None:
            return catalog.find_state(location)

        states = States(pages, source, find_listed)
        add(catalog, "d", KEY)
        assert (await states.get(KEY.location)).etag == "listed"
        assert source.num_asked == 0
        with pytest.raises(ChangedFileError):
            await pages.obtain(Want(KEY, pages_of_file(KEY.size)))
        assert (await states.get(KEY.location)).etag == "asked"
        assert (await states.get(KEY.location)).etag == "asked"
        assert source.num_asked == 1
        # What was listed after the source was asked is news
        manifest = add(catalog, "d", KEY._replace(etag="listed again"))
        os.utime(manifest, (time.time() + 1,) * 2)
        assert (await states.get(KEY.location)).etag == "asked"
        os.utime(manifest, (time.time() - 1,) * 2)
        await pages.close()

    asyncio.run(work())


class SilentSource(ChangedSource):
    """Never responds, but for files below a prefix."""

    responds_to = "none"

    async def stat(self, location: str) -> FileStat:
        if not location.startswith(self.responds_to):
            self.num_asked += 1
            await asyncio.Event().wait()
        return await super().stat(location)


def test_a_silent_source_is_waited_for_once(tmp_path: Path) -> None:
    async def work() -> None:
        folder = MirrorFolder.create(tmp_path / "m")
        options = parse_mirror({"folder": str(tmp_path / "m"), "prefixes": ["s3://"]})
        source = SilentSource(options, ObjectOptions())
        engine = Engine(PageStore(folder, size=None, reserve=0), source)

        async def find_listed(location: str) -> SourceState:
            return SourceState(70_000, location, 0.0)

        states = States(engine, source, find_listed, wait_seconds=0.01)
        assert (await states.get("s3://b/x")).etag == "s3://b/x"
        # Another source, which responds, makes no difference
        source.responds_to = "s3://other/"
        assert (await states.get("s3://other/x")).etag == "asked"
        states.wait_seconds = 1e6
        for i in range(100):
            assert (await states.get(f"s3://b/{i}")).etag == f"s3://b/{i}"
        assert source.num_asked == 2
        await engine.close()

    asyncio.run(work())


def test_the_last_listing_counts(tmp_path: Path) -> None:
    catalog = Catalog(MirrorFolder.create(tmp_path / "m"))
    assert catalog.find_state(KEY.location) is None
    first = add(catalog, "d", KEY)
    second = add(catalog, "e", KEY._replace(etag="other"))
    for times in ((1, 2), (4, 3)):
        for path, seconds in zip((first, second), times, strict=True):
            os.utime(path, (seconds, seconds))
        expected = (70_000, "other", 2.0) if times == (1, 2) else (70_000, "listed", 4.0)
        assert catalog.find_state(KEY.location) == expected
    assert catalog.find_state("s3://b/d/y") is None
    # A revision is that of its latest listing, and says nothing of what is not below its sources
    add(catalog, "d", KEY._replace(location="s3://b/d/z"))
    assert catalog.find_state(KEY.location) == (70_000, "other", 3.0)
    second.unlink()
    again = Catalog(MirrorFolder.create(tmp_path / "m"))
    assert again.find_state(KEY.location) is None
    # An earlier revision that is wanted has a state that has to be asked for
    (earlier,) = [name for name in again.revisions if name == f"d@{first.stem}"]
    again.put_want(DatasetWant(dataset="d", revision=earlier.partition("@")[2], since=0.0))
    assert again.find_state(KEY.location) == (70_000, "listed", 0.0)
    # Of several, the latest one
    later = add(again, "d", KEY._replace(etag="later"))
    again.put_want(DatasetWant(dataset="d", revision=later.stem, since=0.0))
    add(again, "d", KEY._replace(location="s3://b/d/y"))
    assert again.find_state(KEY.location) == (70_000, "later", 0.0)
    mounted = KEY._replace(location="/mnt/x")
    add(catalog, "f", mounted, "/mnt/")
    assert catalog.find_state("/mnt/x") is None
