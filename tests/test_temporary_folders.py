"""Where the tests' own temporary folders are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import temporary_folders
from tests.temporary_folders import ROOT, is_suitable, use_memory

SUITABLE = is_suitable(temporary_folders.IN_MEMORY, 0)


@pytest.mark.skipif(not SUITABLE, reason="files in memory are not as those on a disk here")
def test_memory_is_taken_where_there_is_enough() -> None:
    chosen = dict[str, str]()
    use_memory(chosen, free_bytes=0)
    assert chosen == {ROOT: str(temporary_folders.IN_MEMORY)}


@pytest.mark.parametrize("set_by_user", [{"TMPDIR": "/elsewhere"}, {ROOT: "/elsewhere"}])
def test_the_users_choice_stays(set_by_user: dict[str, str]) -> None:
    chosen = dict(set_by_user)
    use_memory(chosen, free_bytes=0)
    assert chosen == set_by_user


def test_too_little_memory_or_none(tmp_path: Path) -> None:
    for folder, free_bytes in ((temporary_folders.IN_MEMORY, 1 << 60), (tmp_path / "missing", 0)):
        chosen = dict[str, str]()
        use_memory(chosen, folder, free_bytes)
        assert chosen == {}
