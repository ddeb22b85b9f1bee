"""A loader in a reference cycle is collected by whichever thread allocates at that moment, also by one of its own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.prefetch.reads import Read
from tests.reader.loader_threads import LoaderThreads
from tests.runs import documents, make_config, write_source

SECONDS = 240


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}]
    config = make_config(tmp_path, sources, samples=240, file_checks_per_second=1000)
    megablend.build(config)
    return config


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    """But for those that a test asks for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Trainer:
    """Refers to itself."""

    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        self.loader = megablend.Loader(megablend.open(config), micro_batch_size=4, **options)
        self.batches = iter(self.loader)
        next(self.batches)
        self.me = self

    @property
    def pipeline(self) -> Any:
        steps = self.loader._steps
        assert steps is not None
        assert steps._ahead is not None
        return steps._ahead._pipeline


@pytest.mark.parametrize("pool", ["_fetching", "_decoding"])
def test_in_a_thread_that_reads(config: dict[str, Any], pool: str, threads: LoaderThreads) -> None:
    trainer = Trainer(config)
    executor = getattr(trainer.pipeline, pool)
    collected = weakref.ref(trainer)
    del trainer
    assert executor.submit(gc.collect).result(SECONDS) > 0
    assert collected() is None
    del executor
    threads.await_end()


def test_in_a_thread_that_transforms(config: dict[str, Any], threads: LoaderThreads) -> None:
    trainer = Trainer(config, transform=dict)
    executor = trainer.loader._threads._pool
    collected = weakref.ref(trainer)
    assert executor is not None
    del trainer
    assert executor.submit(gc.collect).result(SECONDS) > 0
    assert collected() is None
    del executor
    threads.await_end()


def test_while_the_locks_of_reading_ahead_are_held(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    trainer = Trainer(config)
    pipeline = trainer.pipeline
    collected = weakref.ref(trainer)
    del trainer

    def collect(pipeline: Any) -> None:
        with pipeline._lock, pipeline._requests._claiming, pipeline._fetching._shutdown_lock:
            gc.collect()

    thread = threading.Thread(target=collect, args=[pipeline], daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert collected() is None
    del pipeline, thread
    threads.await_end()


def test_in_the_thread_that_checks_files_while_it_waits(
    config: dict[str, Any], threads: LoaderThreads
) -> None:
    armed = threading.Event()
    done = threading.Event()

    def collect(frame: FrameType, event: str, _: object) -> None:
        if (
            event == "c_call"
            and frame.f_code.co_name == "is_requested"
            and not done.is_set()
            and armed.wait(SECONDS)
        ):
            gc.collect()
            done.set()

    trainer = Trainer(config)
    trainer.loader._watch.close()
    watch = trainer.loader._watch
    collected = weakref.ref(trainer)
    threading.setprofile(collect)
    try:
        watch.start()
    finally:
        threading.setprofile(None)
    del trainer, watch
    armed.set()
    assert done.wait(SECONDS)
    assert collected() is None
    threads.await_end()


def test_reading_stops_when_the_loader_is_collected(config: dict[str, Any]) -> None:
    trainer = Trainer(config)
    pipeline = trainer.pipeline
    del trainer
    gc.collect()
    with pipeline._lock:
        pipeline._waiting.clear()
    ids = np.array([0])
    rows = pipeline._store.snapshot.blocks(ids)
    read = Read(indices=ids, ids=ids, rows=rows, size=1, reading=1, first_use=0, file=0)
    pipeline.submit(read)
    assert not read.blocks.done()
    assert len(pipeline._waiting) == 1  # it starts nothing more


def test_a_dataset_that_nobody_has_closes_its_files_at_once(tmp_path: Path) -> None:
    """Without the garbage collector: nothing refers to it in a cycle."""
    # So many blocks that their table is mapped
    source = write_source(tmp_path, 0, "megatron", documents(0, 4000, 60, seed=4)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=240)
    megablend.build(config)
    index = str(Path(config["cache"]) / "generations")
    megablend.open(config)[0]  # numba keeps the frames in which it compiles
    gc.collect()
    assert not list_open(index)
    dataset = megablend.open(config)
    for k in range(0, len(dataset), 7):
        assert dataset[k]["tokens"].shape == (8,)
    kept = weakref.ref(dataset.run.store)
    assert list_open(index)
    del dataset
    assert kept() is None
    assert not list_open(index)


def list_open(folder: str) -> list[str]:
    """The files of a folder that this process has open or mapped."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = [str(each.resolve()) for each in Path("/proc/self/fd").iterdir()]
    return [each for each in [*mapped, *opened] if folder in each]
