"""The logger `megablend`: waits, rebuilds, repairs and evictions, one line each; silent unless logging is configured."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.prefetch.block_cache import BlockCache
from megablend.system.build_lock import build_lock
from tests.formats.writers import KINDS
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 30, 5)) | {"weight": 1}
    return make_config(tmp_path, [source], samples=20, run="demo")


def test_long_waits_are_logged_with_file_and_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megablend")
    with build_lock(tmp_path):
        pass
    assert caplog.messages == []  # a short wait
    held = threading.Event()
    awaited = threading.Event()

    def hold() -> None:
        with build_lock(tmp_path):
            held.set()
            awaited.wait(240)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(240)
    with build_lock(tmp_path, on_wait=lambda _: awaited.set()):  # it is called after a second
        pass
    thread.join()
    (line,) = caplog.messages
    assert re.fullmatch(rf"waited [1-9][0-9.]* ?s for the build lock {tmp_path / '.lock'}", line)


def test_builds_repairs_and_removals_are_logged(
    tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megablend")
    cache = Path(config["cache"])
    old = megablend.build(config).index.digest
    assert any(line.startswith(f"{cache}: indexed 2 files in ") for line in caplog.messages)
    KINDS["parquet"].write(tmp_path / "data" / "source0" / "9.parquet", [[900_001, 900_002]] * 9)
    assert megablend.build(config).pinned
    caplog.clear()
    (cache / "generations" / old / "blocks.arrow").write_bytes(b"damaged")
    megablend.build(config)
    assert any(
        line.startswith(f"repaired index {old} of run 'demo' in ") for line in caplog.messages
    )
    caplog.clear()
    megablend.remove_run(config, "demo")
    (removed,) = set(megablend.gc(config, older_than_days=0).removed)
    assert f"{cache}: removed index {removed}, which no run uses" in caplog.messages


def test_evictions_are_logged_for_debugging(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    megablend.build(config)
    store = megablend.open_index(config["cache"])
    cache = BlockCache(store, 1 << 20)
    cache.get(list(range(4)))
    with caplog.at_level(logging.INFO, "megablend"):
        cache.resize(1 << 20)
    caplog.set_level(logging.DEBUG, "megablend")
    cache.resize(0)
    (line,) = caplog.messages
    assert line.startswith(f"{store.snapshot.folder}: evicted 4 blocks (")
    assert np.array_equal(cache.get([0])[0].tokens, store.read([0])[0].tokens)


def test_a_warning_is_silent_by_default() -> None:
    program = (
        "import logging; from megablend.index.tables.row_checks import warn_unchecked; from pathlib import Path\n"
        "warn_unchecked(Path('hidden')); logging.warning('shown')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True
    )
    assert "hidden" not in done.stderr
    assert "shown" in done.stderr
