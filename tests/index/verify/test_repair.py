"""What a damaged index still says about its files."""

from __future__ import annotations

from pathlib import Path

import pytest

import megablend
from megablend.caches.find import find_store
from megablend.index.verify.repair import list_indexed_files
from tests.runs import documents, make_config, write_source


def test_names_of_files_are_taken_from_an_undamaged_table_only(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, [write_source(tmp_path, 0, "arrow", documents(0, 20, 30, seed=1))], samples=5
    )
    digest = megablend.build(config).index.digest
    cache = find_store(config["cache"])
    (listing,) = list_indexed_files(cache, digest, roots={}, block_bytes=1 << 20)
    name = Path(listing.paths[0]).name.encode()
    table = Path(config["cache"]) / "generations" / digest / "files.arrow"
    data = table.read_bytes()
    assert data.count(name) > 0
    table.write_bytes(data.replace(name, b"x" + name[1:]))  # Arrow reads it without an error
    with pytest.raises(
        megablend.CacheError, match=r"files\.arrow: damaged table: its checksum is wrong"
    ):
        list_indexed_files(cache, digest, roots={}, block_bytes=1 << 20)
