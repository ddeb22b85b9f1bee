"""What loaders tell, through a real node process: it fetches all of it before it is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import megablend
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.pages import pages_of_ranges
from megablend.mirror.node.source_reads import make_key
from megablend.prefetch.due_ranges import plan_due
from megablend.prefetch.read_schedule import StepSequence
from megablend.storage.base import Storage
from megablend.storage.hints import DueRanges
from tests.formats.writers import KINDS
from tests.mirror.nodes import mirror
from tests.mirror.test_runs import digest_batches, digest_fields, list_paths, make_configs
from tests.runs import documents
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
BATCH = 4


def wait_held(folder: Path, storage: Storage, told: Sequence[DueRanges]) -> None:
    """Until the mirror holds all ranges."""
    mirror_folder = MirrorFolder.attach(folder)
    end = time.monotonic() + 60
    for each in told:
        key = make_key(each.path, storage.stat(each.path))
        pages = pages_of_ranges(each.offsets, each.sizes)
        while True:
            held = MirroredFile.open(mirror_folder, key)
            if held is not None and not len(held.find_missing(pages).blocks):
                break
            assert time.monotonic() < end, each
            time.sleep(0.05)


def test_an_amended_run_is_fetched_before_it_is_read(tmp_path: Path) -> None:
    with FaultySource({}) as source, mirror(tmp_path / "mirror", source.url) as settings:
        stages = [{"samples": 400}]
        plain, remote = make_configs(
            tmp_path, source, {"mirror": settings}, samples=None, stages=stages
        )
        for config in (plain, remote):
            megablend.build(config)
        for d, kind in enumerate(("parquet", "arrow", "megatron")):
            path = tmp_path / f"data/source{d}/00{KINDS[kind].suffix}"
            KINDS[kind].write(path, documents(d, 3000, 200, seed=d + 7))
            for file in path.parent.glob("00.*"):
                source.files[f"d/source{d}/{file.name}"] = file.read_bytes()
        stages = [*stages, {"samples": 8000, "new_data": True}]
        plain |= {"stages": stages}
        urls = [
            each
            | {
                "path": [
                    path.replace(str(tmp_path / "data"), f"{source.url}/d")
                    for path in list_paths(local)
                ]
            }
            for each, local in zip(remote["sources"], plain["sources"], strict=True)
        ]
        remote |= {"stages": stages, "sources": urls}
        for config in (plain, remote):
            megablend.build_index(config)
            megablend.amend(config, at=400)
        expected = digest_batches(plain)
        dataset = megablend.open(remote)
        loader = megablend.Loader(dataset, micro_batch_size=BATCH)
        batches = iter(loader)
        read = [digest_fields(next(batches))]
        future = StepSequence(
            first=0, micro_batch_size=BATCH, stride=BATCH, stop=dataset.run.num_samples
        )
        told = plan_due(dataset.run, future, 0, 0.1, len(expected))
        assert max(map(len, source.files.values())) > 500_000
        assert (
            len(
                {each.path.rpartition("/")[2] for each in told}
                & {"00.parquet", "00.arrow", "00.bin", "00.idx"}
            )
            == 4
        )
        # What opening a file reads is not told
        store = dataset.run.store
        firsts = np.unique(store.snapshot.files.first_block[:-1])
        store.begin_read(firsts, store.snapshot.blocks(firsts))
        wait_held(tmp_path / "mirror", store.storage, told)
        source.is_down = True
        read += [digest_fields(batch) for batch in batches]
        assert read == expected
