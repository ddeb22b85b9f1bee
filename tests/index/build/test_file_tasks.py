from __future__ import annotations

import dataclasses
from pathlib import Path

from megablend.index.build.file_tasks import items_of, plan_work
from megablend.index.build.source_spec import list_columns
from megablend.index.build.sources import list_source
from megablend.system.atomic_write import list_committed
from tests.index.index_data import build, spec, write
from tests.storages import STORAGE


def test_the_plan_knows_new_kept_and_changed_files(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write(tmp_path / f"{name}.arrow", seed)
    build(tmp_path / "cache", spec(tmp_path))
    write(tmp_path / "b.arrow", 7)
    write(tmp_path / "c.arrow", 8)
    planned = plan_work(
        list_columns([list_source(spec(tmp_path), storage=STORAGE)]),
        list_committed(tmp_path / "cache" / "fragments"),
    )
    assert [(item.file.name, item.known, item.changed) for item in planned] == [
        ("a.arrow", True, False),
        ("b.arrow", False, True),
        ("c.arrow", False, False),
    ]
    kept, changed, _ = items_of(planned)
    assert kept.cost < changed.cost
    other = plan_work(
        list_columns([list_source(spec(tmp_path, name="other"), storage=STORAGE)]),
        list_committed(tmp_path / "cache" / "fragments"),
    )
    assert [(item.known, item.changed) for item in other] == [
        (True, False),
        (False, False),
        (False, False),
    ]


def test_files_keep_their_fragments_when_the_folder_moves_or_another_is_added(
    tmp_path: Path,
) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.arrow", 1)
    x = str(tmp_path / "x" / "*.arrow")
    y = str(tmp_path / "y" / "*.arrow")
    source = spec(tmp_path)
    build(tmp_path / "cache", dataclasses.replace(source, patterns=(x,)))
    both = build(tmp_path / "cache", dataclasses.replace(source, patterns=(x, y)))
    assert (both.read, both.reused) == (1, 1)
    (tmp_path / "x").rename(tmp_path / "z")
    moved = build(
        tmp_path / "cache", dataclasses.replace(source, patterns=(str(tmp_path / "z" / "*.arrow"),))
    )
    assert (moved.read, moved.reused) == (0, 1)
