"""Remedies in messages about configs: the change that a message asks for is made, and then the config loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megablend.config import load_config
from megablend.errors import ConfigError

WEB: dict[str, Any] = {"name": "web", "path": "/w.arrow", "weight": 3}
CODE: dict[str, Any] = {"name": "code", "path": "/c.arrow", "weight": 1}
BOOKS: dict[str, Any] = {"name": "books", "path": "/b.arrow", "weight": 0}
BASE: dict[str, Any] = {"cache": "c", "sequence_length": 8, "samples": 192, "sources": [WEB, CODE]}
STAGES: list[dict[str, Any]] = [{"samples": 64}, {"samples": 128, "withdraw": ["books"]}, {"lanes": 4}]
BY_SPLIT = {"train": [WEB], "valid": [CODE]}
Settings = dict[str, Any]


def with_stage(**settings: Any) -> list[Settings]:
    """Stages of which the second one also has these settings; None removes one."""
    second = {key: value for key, value in {**STAGES[1], **settings}.items() if value is not None}
    return [STAGES[0], second, STAGES[2]]


REMEDIES: list[tuple[Settings, str, list[Settings]]] = [
    # (settings that are refused, what is said, changes that do what it says; None removes a setting)
    ({"memory": "lots"}, r"memory: found 'lots', expected a size such as 512MiB$", [{"memory": "512MiB"}]),
    (
        {"local_cache": ""},
        r"local_cache: found '', expected a path; use `\.` for the current folder",
        [{"local_cache": "."}],
    ),
    (
        {"sources": BY_SPLIT, "split": "80,20,0"},
        "split: sources are already listed for each split; remove one of the two",
        [{"split": None}, {"sources": [WEB, CODE]}],
    ),
    (
        {"sources": [WEB | {"path": []}]},
        r"path: found \[\], expected a path, a glob or a list of them",
        [{"sources": [WEB | {"path": path}]} for path in ("/w.arrow", "/*.arrow", ["/v.arrow", "/w.arrow"])],
    ),
    (
        {"stages": STAGES},
        r"stages\[1\]: withdraw: train has no source 'books'; keep it in `sources`, since the stages before read it",
        [{"sources": [WEB, CODE, BOOKS | {"weight": 1}]}],
    ),
    (
        {"sources": [WEB, CODE, BOOKS], "stages": with_stage(sources={"books": {"weight": 1}})},
        r"stages\[1\]: source 'books' is withdrawn, and changed in `sources`; keep one of them",
        [
            {"stages": STAGES, "sources": [WEB, CODE, BOOKS | {"weight": 1}]},
            {"stages": with_stage(withdraw=None, sources={"books": {"weight": 1}})},
        ],
    ),
    (
        {"sources": [WEB | {"path": "file:///w.arrow"}]},
        r"found 'file:///w\.arrow'; write it as a plain path: `/w\.arrow`",
        [{"sources": [WEB]}],
    ),
]


@pytest.mark.parametrize(("settings", "says", "changes"), REMEDIES, ids=[says[:40] for _, says, _ in REMEDIES])
def test_a_setting(settings: Settings, says: str, changes: list[Settings]) -> None:
    given = BASE | settings
    with pytest.raises(ConfigError, match=says):
        load_config({key: value for key, value in given.items() if value is not None})
    for change in changes:
        load_config({key: value for key, value in {**given, **change}.items() if value is not None})


def test_a_duplicate_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = ["cache: c", "sequence_length: 8", "samples: 9", "samples: 8", "sources: [{name: a, path: /a.arrow}]"]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"run\.yaml:4: samples: duplicate key; keep one$") as caught:
        load_config(path)
    line = re.search(r"yaml:(\d+):", str(caught.value))
    assert line
    del lines[int(line[1]) - 1]
    path.write_text("\n".join(lines))
    assert load_config(path).samples == 9
