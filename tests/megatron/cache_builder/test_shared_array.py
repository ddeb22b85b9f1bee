"""An array that ranks write together."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from megablend.distributed.fail_together import FailTogether
from megablend.errors import UnsupportedFileError
from megablend.megatron.cache_builder import shared_array as module
from megablend.megatron.cache_builder.shared_array import shared_array
from megablend.system.atomic_write import open_part
from tests.megatron.meeting import on_ranks


def test_a_rank_that_fails_at_once_fails_them_all_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were about to open the file, which the failing rank removes."""
    first = threading.local()

    def open_late(path: Path) -> IO[bytes]:
        if not getattr(first, "is_first", False):
            time.sleep(0.3)
        return open_part(path)

    monkeypatch.setattr(module, "open_part", open_late)

    def work(launch: FailTogether) -> Any:
        first.is_first = launch.rank == 0
        try:
            with shared_array(tmp_path / "array.npy", 4, launch):
                if launch.rank == 0:
                    raise UnsupportedFileError("a.parquet", "is too long")
        except BaseException as error:
            launch.abort(error)

    assert [type(error) for error in on_ranks(3, work)] == [UnsupportedFileError] * 3
    assert not list(tmp_path.glob("*.npy"))
