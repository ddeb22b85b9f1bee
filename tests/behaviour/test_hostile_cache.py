"""Files of a cache that somebody has made, checksums and all: refused by name, and what lists the cache goes on with the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import CacheError
from megablend.index.tables.manifest import dump_with_checksum
from megablend.system.digest import digest_json
from tests.preloaded import python
from tests.runs import documents, make_config, write_source

DEEP = "[" * 100_000
NESTED = "[" * 500 + "]" * 500


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("built")
    source = write_source(folder, 0, "parquet", documents(0, 20, 30, 1)) | {"weight": 1}
    config = make_config(folder, [source], samples=20, run="demo")
    megablend.build(config)
    megablend.build(config | {"run": "other"})
    return config


@pytest.fixture
def config(tmp_path: Path, built: dict[str, Any]) -> dict[str, Any]:
    """A run with a copy of the cache."""
    return built | {"cache": str(shutil.copytree(built["cache"], tmp_path / "cache"))}


def write_ledger(config: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the run's ledger, and make its digests right again where that can be done."""
    path = Path(config["cache"]) / "runs" / "demo.json"
    record = json.loads(path.read_text())
    change(record)
    link = digest_json([1, record.get("index"), record.get("blend")])
    record["digests"] = []
    for end in record.get("ends", []):
        link = digest_json([link, end])
        record["digests"].append(link)
    path.write_text(json.dumps(record))
    return path


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no run": lambda record: record.pop("run"),
    "no index": lambda record: record.pop("index"),
    "no blend": lambda record: record.pop("blend"),
    "no ends": lambda record: record.pop("ends"),
    "no end": lambda record: record.update(ends=[]),
    "ends that fall": lambda record: record.update(ends=[5, 3]),
    "an end of 0": lambda record: record.update(ends=[0, 3]),
    "a list for a blend": lambda record: record.update(blend=[]),
    "no sources": lambda record: record["blend"].pop("sources"),
    "a source without a name": lambda record: record["blend"]["sources"][0].pop("name"),
    "no cycles": lambda record: record["blend"]["sources"][0].update(cycles=0),
    "cycles of no plan": lambda record: record["blend"]["sources"][0].update(cycles=10**30),
    "more cycles than memory": lambda record: record["blend"]["sources"][0].update(
        cycles=(1 << 63) - 1
    ),
    "a number for an index": lambda record: record.update(index=3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_with_right_digests_and_a_missing_field(
    config: dict[str, Any], change: str
) -> None:
    path = write_ledger(config, CHANGES[change])
    check_ledger_is_named(config, path, "does not match its own digest|it was edited or damaged")


@pytest.mark.parametrize(
    "text", [DEEP, NESTED, '{"version": 1, "blend": ' + NESTED + "}", "", "[1]", "\xff"]
)
def test_a_ledger_that_is_nested_or_no_json(config: dict[str, Any], text: str) -> None:
    path = Path(config["cache"]) / "runs" / "demo.json"
    path.write_text(text, encoding="latin-1")
    check_ledger_is_named(config, path, "cannot read the run's ledger|found ledger version")


def check_ledger_is_named(config: dict[str, Any], path: Path, says: str) -> None:
    cache = config["cache"]
    for refused in (megablend.open, megablend.build, megablend.describe):
        with pytest.raises(CacheError, match=rf"{path}: .*({says})"):
            refused(config)
    (problem,) = megablend.verify(cache).problems
    assert problem.startswith(f"{path}: ")
    demo, other = megablend.describe(cache).to_dict()["runs"]
    assert demo["problem"] == problem
    assert other["run"] == "other"
    assert len(megablend.open(config | {"run": "other"})) == 20
    before = sorted(Path(cache).rglob("*"))
    with pytest.raises(CacheError, match=rf"^{path}: "):
        megablend.gc(cache, older_than_days=0)
    assert sorted(Path(cache).rglob("*")) == before


def manifest_of(config: dict[str, Any]) -> Path:
    return next((Path(config["cache"]) / "generations").glob("*/manifest.json"))


FIELDS = ("sources", "tables", "num_files", "num_blocks", "num_chunks", "format_version")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, -1, [], {}, "x"])
def test_a_manifest_with_a_right_checksum_and_a_wrong_field(
    config: dict[str, Any], field: str, value: object
) -> None:
    path = manifest_of(config)
    manifest = json.loads(path.read_text())
    manifest.pop("checksum")
    manifest.pop(field)
    if value is not None:
        manifest[field] = value
    path.write_bytes(dump_with_checksum(manifest))
    check_index_is_named(config, path.parent)


SOURCE_FIELDS = ("name", "format", "column", "documents", "first_file", "num_files", "rows")
PLAUSIBLE: set[tuple[str, object]] = {("name", "x"), ("column", "x"), ("rows", 7)}
"""Of the right type, and compared with no other table."""
WRONG = [
    (field, value)
    for field in SOURCE_FIELDS
    for value in (None, 7, -1, "x")
    if (field, value) not in PLAUSIBLE
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_source_with_a_wrong_field(config: dict[str, Any], field: str, value: object) -> None:
    path = manifest_of(config)
    manifest = json.loads(path.read_text())
    manifest.pop("checksum")
    source = manifest["sources"][0]
    source.pop(field)
    if value is not None:
        source[field] = value
    path.write_bytes(dump_with_checksum(manifest))
    check_index_is_named(config, path.parent)


@pytest.mark.parametrize("field", ["name", "rows"])
def test_the_second_of_two_sources_lacks_a_field(tmp_path: Path, field: str) -> None:
    sources = [
        write_source(tmp_path, i, "parquet", documents(i, 20, 30, 1)) | {"weight": 1}
        for i in range(2)
    ]
    config = make_config(tmp_path, sources, samples=20, run="demo")
    megablend.build(config)
    path = manifest_of(config)
    manifest = json.loads(path.read_text())
    manifest.pop("checksum")
    manifest["sources"][1].pop(field)
    path.write_bytes(dump_with_checksum(manifest))
    with pytest.raises(CacheError, match=f"damaged \\(it lacks {field}\\)"):
        megablend.open(config)


def change_table(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of an index, and make its checksum right again."""
    record = json.loads(path.read_text())
    record.pop("checksum")
    change(record)
    path.write_bytes(dump_with_checksum(record))


SHAPES: dict[str, list[Any]] = {
    "arrival": [None, "x", True, 1.5, -1],
    "roots": [
        None,
        [],
        3,
        "x",
        {"s0": None},
        {"s0": 3},
        {"s0": []},
        {"s0": "\ud800"},
        {"s0": "a\0b"},
    ],
    "columns": [None, [], 3, "x", {"s0": 3}, {"s0": []}],
    "skipped": [
        None,
        [],
        3,
        "x",
        {"s0": 3},
        {"s0": None},
        {"s0": "x"},
        {"s0": [3]},
        {"s0": [["x"]]},
    ],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in SHAPES.items() for value in values]
)
def test_roots_with_a_right_checksum_and_a_wrong_shape(
    config: dict[str, Any], field: str, value: object
) -> None:
    path = manifest_of(config).with_name("roots.json")
    change_table(path, lambda record: record.update({field: value}))
    says = f"{path}: damaged (it has {field} {json.dumps(value)}, expected a"
    with pytest.raises(CacheError, match=f"^{re.escape(says)}"):
        megablend.describe(config)
    with pytest.raises(CacheError, match=f"^{re.escape(says)}"):
        megablend.gc(config["cache"], older_than_days=0)
    check_index_is_named(config, path.parent)


def test_a_late_arrival_is_followed_by_a_later_one(config: dict[str, Any]) -> None:
    path = manifest_of(config).with_name("roots.json")
    change_table(path, lambda record: record.update(arrival=(1 << 63) - 1))
    megablend.build(config)
    assert megablend.verify(config["cache"]).problems == ()
    assert len(megablend.open(config)) == 20


@pytest.mark.parametrize("field", ["num_files", "num_blocks", "num_chunks"])
@pytest.mark.parametrize("value", [10**30, 1 << 63, (1 << 63) - 1, 1 << 40, -1, -(10**30)])
def test_a_count_that_the_table_cannot_have(config: dict[str, Any], field: str, value: int) -> None:
    path = manifest_of(config)
    change_table(path, lambda record: record.update({field: value}))
    says = rf"^{path}: damaged \(it has {field} {value}, expected 0 to \d+, since \w+\.arrow has \d+ bytes\); build again"
    with pytest.raises(CacheError, match=says):
        megablend.describe(config)
    check_index_is_named(config, path.parent)


@pytest.mark.parametrize("value", [[], {}, 3, True])
def test_an_extra_column_of_no_name(config: dict[str, Any], value: object) -> None:
    path = manifest_of(config)
    change_table(path, lambda record: record["sources"][0].update(extra_of=value))
    check_index_is_named(config, path.parent)


@pytest.mark.parametrize(
    "table", ["blocks.arrow", "chunks.arrow", "files.arrow", "blocks.check.arrow"]
)
@pytest.mark.parametrize("value", [10**30, -1])
def test_a_size_that_the_table_does_not_have(
    config: dict[str, Any], table: str, value: int
) -> None:
    path = manifest_of(config)
    change_table(path, lambda record: record["tables"][table].update(bytes=value))
    check_index_is_named(config, path.parent)


@pytest.mark.parametrize("value", [10**30, -1])
@pytest.mark.parametrize("field", ["first_file", "num_files", "rows"])
def test_a_number_of_a_source_that_is_none(config: dict[str, Any], field: str, value: int) -> None:
    path = manifest_of(config)
    change_table(path, lambda record: record["sources"][0].update({field: value}))
    check_index_is_named(config, path.parent)


@pytest.mark.parametrize("text", [DEEP, NESTED, "{}", "[]", ""])
@pytest.mark.parametrize("name", ["manifest.json", "roots.json"])
def test_files_of_an_index_that_are_nested_or_empty(
    config: dict[str, Any], name: str, text: str
) -> None:
    path = manifest_of(config).with_name(name)
    path.write_text(text)
    check_index_is_named(config, path.parent)


def check_index_is_named(config: dict[str, Any], folder: Path) -> None:
    cache = config["cache"]
    with pytest.raises(CacheError, match=rf"{folder}.*build again"):
        megablend.open(config)
    problems = megablend.verify(cache).problems
    assert problems
    assert all(str(folder) in problem for problem in problems)
    described = megablend.describe(cache)
    assert str(folder) in described.to_dict()["indices"][0]["problem"]
    assert [run["run"] for run in described.to_dict()["runs"]] == ["demo", "other"]
    megablend.build(config)
    assert megablend.verify(cache).problems == ()
    assert len(megablend.open(config)) == 20


def test_the_command_prints_what_can_be_read(config: dict[str, Any]) -> None:
    cache = config["cache"]
    (Path(cache) / "runs" / "demo.json").write_text(DEEP)
    folder = manifest_of(config).parent
    (folder / "roots.json").write_text(NESTED)
    command = [*python(), "-m", "megablend", "describe", cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0
    assert "other" in done.stdout
    assert f"damaged: {folder}/roots.json: " in " ".join(done.stdout.split())
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *(
            (field, None, f"lacks {field}")
            for field in ("rows", "meta", "num_blocks", "num_chunks", "body", "structure")
        ),
        *(
            (field, value, f"has {value} {field}")
            for field in ("rows", "tokens", "scanned_bytes")
            for value in (-1, 10**30)
        ),
        *((field, [], f"lacks {field}") for field in ("structure", "body")),
    ],
)
def test_a_fragment_with_a_right_digest_and_a_wrong_field(
    config: dict[str, Any], field: str, value: object, says: str
) -> None:
    import hashlib
    import struct

    path = next((Path(config["cache"]) / "fragments").iterdir())
    data = path.read_bytes()[:-16]
    start = len(b"megablend fragment\n") + 4
    (length,) = struct.unpack_from("<I", data, start - 4)
    header = json.loads(data[start : start + length])
    header.pop(field)
    if value is not None:
        header[field] = value
    text = json.dumps(header).encode()
    data = data[: start - 4] + struct.pack("<I", len(text)) + text + data[start + length :]
    path.write_bytes(data + hashlib.blake2b(data, digest_size=16).digest())
    (problem,) = megablend.verify(config["cache"]).problems
    assert f"{path}: damaged fragment (its header {says})" in problem
    megablend.gc(config["cache"], older_than_days=0, dry_run=True)
    assert megablend.build(config).index.read == 1
    assert megablend.verify(config["cache"]).problems == ()
