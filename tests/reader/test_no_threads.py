"""Where the system starts no more threads, the error says so, and the loader can go on once it does."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import ResourceError
from megablend.storage.local import LocalStorage
from tests.runs import documents, make_config, write_source

LOCAL = LocalStorage()


@pytest.mark.parametrize("kind", ["megablend-read", "megablend-fetch", "megablend-decode"])
def test_the_error_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "megablend-read":  # separate threads fetch and decode
        monkeypatch.setattr("megablend.reader.batch_dataset.MAX_DECODING", 1)
        monkeypatch.setattr(
            "megablend.storage.local.LIMITS", replace(LOCAL.limits(""), max_reads=2)
        )
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config: dict[str, Any] = make_config(tmp_path, [source], samples=40, file_checks_per_second=0)
    megablend.build(config)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(kind):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(
            ResourceError, match=r"refuses to start more threads; raise the limit \(`ulimit -u`\)"
        ):
            list(loader)
    assert len(list(loader)) == 10
