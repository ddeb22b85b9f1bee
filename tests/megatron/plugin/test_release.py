"""The plugin's cache of an earlier release, in page order: opened with the same samples where its data was moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_golden_release import plugin_datasets, read_plugin

from tests.golden_releases import RELEASES, copy_release, load_expected

pytestmark = [
    pytest.mark.usefixtures("distributed"),
]


@pytest.mark.parametrize("release", RELEASES)
def test_a_cache_of_the_release_gives_the_same_samples(tmp_path: Path, release: str) -> None:
    folder = copy_release(release, tmp_path)
    ledger = folder / "plugin" / "megablend" / "runs" / "default.json"
    before = ledger.read_bytes()
    assert (
        read_plugin(plugin_datasets(folder / "plugin", folder)) == load_expected(release)["plugin"]
    )
    assert ledger.read_bytes() == before
