"""A file that another rank has written is waited for, and named where it does not come."""

from __future__ import annotations

from pathlib import Path

import pytest

from megablend.errors import CacheError
from megablend.system.waits import await_file


def test_a_file_that_rank_0_does_not_see_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        CacheError, match=r"missing: .* use a cache on a file system that all ranks share"
    ):
        await_file(tmp_path / "missing", 0.2)
    (tmp_path / "missing").touch()
    await_file(tmp_path / "missing", 0.0)
