"""A forked child reads on, whatever other threads did at that moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

import megablend
from tests.runs import documents, make_config, write_source

SECONDS = 240


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}]
    config = make_config(tmp_path, sources, samples=240)
    megablend.build(config)
    return config


def run_in_child(work: Callable[[], bool]) -> int:
    """The wait status of a forked child that does some work."""
    child = os.fork()
    if child == 0:  # no assertion leaves it
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


def test_while_other_threads_hold_the_locks(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    expected = dataset[5]["tokens"].tolist()
    loader = megablend.Loader(dataset, micro_batch_size=4)
    next(iter(loader))
    loader.close()
    assert loader._steps is not None

    def read() -> bool:
        same = dataset[5]["tokens"].tolist() == expected and dataset[200]["tokens"].shape == (8,)
        return same and len(list(loader)) == 59

    with dataset.block_cache._lock, loader._steps.meter._lock:
        assert run_in_child(read) == 0


def test_a_block_that_another_thread_stores_is_counted(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    dataset[5]
    # forked after it was stored and before it was counted
    size = dataset.block_cache._bytes
    dataset.block_cache._bytes = 0
    assert size > 0
    assert run_in_child(lambda: dataset.block_cache._bytes == size) == 0


def test_while_another_thread_imports_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is Python's own."""
    begun = tmp_path / "begun"
    text = (
        f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(0.5); DONE = True"
    )
    (tmp_path / "slow_one.py").write_text(text)
    monkeypatch.setattr(megablend, "__path__", [*megablend.__path__, str(tmp_path)])

    def is_done() -> bool:
        return bool(import_module("megablend.slow_one").DONE)

    thread = Thread(target=is_done)
    thread.start()
    while not begun.exists():
        time.sleep(0.01)
    monkeypatch.setattr("tests.reader.test_forks.SECONDS", 20)
    assert run_in_child(is_done) == 0
    thread.join()


def test_a_fork_does_not_look_at_modules_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be imported when an attribute of theirs is asked for."""
    asked = []

    class LazyModule(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "some_lazy_module", LazyModule("some_lazy_module"))
    assert run_in_child(lambda: True) == 0
    assert asked == []
