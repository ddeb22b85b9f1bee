"""gc as users call it: runs and Megatron's datasets keep what they were promised."""

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.distributed.base import SingleProcess
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.megatron.cache_builder.document_tables import build_table, open_table
from megablend.megatron.request.address import parse_address
from tests.runs import documents, make_config, write_source
from tests.storages import STORAGE


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 30, 5))
    return make_config(tmp_path, [source | {"weight": 1}], samples=40, run="demo")


def grow(config: dict[str, Any], seed: int) -> None:
    """A file more for the config's source."""
    source = config["sources"][0]
    folder = Path(source["path"]).parent
    more = write_source(folder / f"more{seed}", seed, "parquet", documents(seed, 60, 30, 5))
    for path in Path(more["path"]).parent.glob(Path(more["path"]).name):
        path.rename(folder / f"{seed}-{path.name}")


def test_a_run_keeps_its_index(config: dict[str, Any]) -> None:
    cache = config["cache"]
    first = megablend.build(config).index.digest
    dataset = megablend.open(config)
    kept = [dataset[k]["tokens"].tolist() for k in range(40)]
    for seed in (1, 2):
        config["sources"][0]["path"] = str(Path(config["sources"][0]["path"]).parent / "*.parquet")
        grow(config, seed)
        assert megablend.build(config).pinned
    _, second, third = list_snapshots(cache)
    found = megablend.gc(cache, older_than_days=0)
    assert (found.removed, found.kept) == ((second,), (first, third))
    dataset = megablend.open(config)
    assert [dataset[k]["tokens"].tolist() for k in range(40)] == kept
    assert megablend.verify(cache, data=True).problems == ()
    assert megablend.build(config).index.read == 0
    (Path(cache) / "runs" / "demo.json").unlink()
    assert megablend.gc(cache, older_than_days=0).removed == (first,)


def test_files_of_killed_writes_are_removed(config: dict[str, Any]) -> None:
    megablend.build(config)
    megablend.skip(config, 8, 16, batch_size=8)
    skips = Path(config["cache"]) / "runs" / "skips"
    (skips / ".tmp-demo.json-1-ab").write_text("half")
    megablend.gc(config)
    assert [path.name for path in skips.iterdir()] == ["demo.json"]


def test_a_damaged_ledger_and_nonsense_are_refused(config: dict[str, Any]) -> None:
    megablend.build(config)
    with pytest.raises(megablend.ConfigError, match=r"older_than_days=-1, expected 0 or more"):
        megablend.gc(config["cache"], older_than_days=-1)
    ledger = Path(config["cache"]) / "runs" / "demo.json"
    ledger.write_text(ledger.read_text().replace("40", "41"))
    with pytest.raises(megablend.CacheError, match="does not match its checksum"):
        megablend.gc(config["cache"], older_than_days=0)


def test_megatrons_datasets_keep_their_index(config: dict[str, Any], tmp_path: Path) -> None:
    address = parse_address(f"parquet:{config['sources'][0]['path']}")
    built = build_table(
        str(tmp_path / "megatron"), address, launch=SingleProcess(), storage=STORAGE
    )
    cache = tmp_path / "megatron" / "megablend"
    megablend.build(config, cache=str(cache))
    (cache / "runs" / "demo.json").unlink()
    other = config | {"sources": [config["sources"][0] | {"name": "other"}], "run": "other"}
    megablend.build(other, cache=str(cache))
    found = megablend.gc(cache, older_than_days=0)
    assert built.index in found.kept
    assert len(found.removed) == 1
    assert len(open_table(str(tmp_path / "megatron"), built, STORAGE)[1]) == 60
    pin = next((tmp_path / "megatron" / "megablend-documents").glob("*.json"))
    chunks = cache / "generations" / str(built.index) / "chunks.arrow"
    chunks.write_bytes(chunks.read_bytes()[:-1] + b"\xff")
    (problem,) = megablend.verify(cache).problems
    assert problem.endswith(
        f"; remove {pin}, and open the dataset in Megatron again, which indexes it again"
    )
    pin.unlink()
    assert (
        build_table(str(tmp_path / "megatron"), address, launch=SingleProcess(), storage=STORAGE)
        == built
    )
    assert megablend.verify(cache).problems == ()
    megablend.build(other, cache=str(cache))
    for text in ("[1", "[1]", "{}", '{"index": 5}'):
        pin.write_text(text)
        with pytest.raises(
            megablend.CacheError,
            match="so the index that it refers to is not known; remove the file",
        ):
            megablend.gc(cache, older_than_days=0)
        assert megablend.verify(cache).problems[0].startswith(f"{pin}: cannot be read")
    pin.unlink()
    assert megablend.gc(cache, older_than_days=0).removed == (built.index,)
