"""The files of `.bin/.idx` pairs, which may change while a job builds its datasets."""

from __future__ import annotations

import pytest

from megablend.errors import ChangedFileError
from megablend.megatron.pair_files import check_etags

OLD = "18a0b1c2d3e4f506-18a0b1c2d3e4f507-1b2c"
"""The etag of a local file as earlier releases store it: with its inode."""
STORED = OLD.rpartition("-")[0]


@pytest.mark.parametrize("now", [OLD, STORED, f"{STORED}-99"])
def test_inodes_do_not_count(now: str) -> None:
    check_etags("x", (OLD, None), (now, None))
    check_etags("x", (STORED, "object"), (now, "object"))


@pytest.mark.parametrize("now", ["object", None, f"{STORED[:-1]}8", f"{STORED[:-1]}8-1b2c"])
def test_a_file_that_was_replaced_is_named(now: str | None) -> None:
    with pytest.raises(ChangedFileError, match=r"^x\.bin: was replaced .*: restart the job"):
        check_etags("x", (None, OLD), (None, now))
