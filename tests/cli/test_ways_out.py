"""Situations in which a message once misled: what it has to say now, and after how long at most.

Each row is {situation | commands before | the command | what its output contains | what it does not}; all take a moment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import megablend
from megablend.errors import StateError
from megablend.run.state import State
from tests.cli.commands import run
from tests.runs import documents, write_source

pytestmark = pytest.mark.long
MOST_SECONDS = 200
"""Of the last command; what tries again goes on for ten minutes."""
BLEND = {"a": 3, "b": 1}
CHANGED: dict[str, Any] = {"sources": {"a": {"weight": 1}}}


class Situation(NamedTuple):
    """What a person has in the config, and did; the last command is the one that is looked at."""

    name: str
    config: dict[str, Any]
    commands: list[str]
    says: list[str]
    says_not: tuple[str, ...] = ()
    most_characters: int = 1_000_000
    """Of standard error: an error in two lines."""


BUILT = {"samples": 320, "split": "80,20,0"}
LISTED = {"samples": 480, "stages": [{"samples": 320}, CHANGED]}
SITUATIONS = [
    Situation(
        "verify before a build",
        BUILT,
        ["verify CONFIG"],
        ["its cache ", " does not exist yet; `megablend build "],
    ),
    Situation(
        "a split for which nobody asked",
        BUILT,
        ["build CONFIG", "describe CONFIG --match a"],
        ["valid: ", "one unblended pass"],
    ),
    Situation(
        "a stage listed for an amendment, built",
        {"samples": None, "stages": [{"samples": 320}, {"samples": 320, **CHANGED}]},
        ["build BEFORE", "build CONFIG"],
        [
            "stages[1]: ends at sample 320, but begins at sample 320; let it end later",
            "`megablend amend CONFIG --at SAMPLE`",
        ],
        most_characters=240,
    ),
    Situation(
        "weights edited in place",
        {"samples": 320, "sources": CHANGED["sources"]},
        ["build BEFORE", "build CONFIG"],
        [
            "share of source 'a' was 3/4 and is now 1/2",
            "add `stages: [{samples: 320}, ",
            "`megablend amend CONFIG --at SAMPLE`",
        ],
        most_characters=450,
    ),
    Situation(
        "a third change of a run, by a config without stages",
        {"samples": 480},
        ["build BEFORE", "amend LISTED --at 112", "amend CONFIG --at 240"],
        [
            "has 2 before sample 240: list these stages (`megablend runs show` prints them), then add one with `from: 240`"
        ],
    ),
    Situation(
        "a third stage after one without an end",
        {"samples": 480, "stages": [{"samples": 320}, CHANGED, {"lanes": 8}]},
        ["build BEFORE", "amend LISTED --at 112", "amend CONFIG --at 240"],
        [
            "stages[1]: has no end, and weights do not say where it ends; add samples, tokens or share"
        ],
    ),
    Situation(
        "an amendment taken back",
        {"samples": 480, "stages": [{"samples": 320}, {"from": 112}]},
        ["build BEFORE", "amend LISTED --at 112", "amend CONFIG --at 112", "build CONFIG"],
        ["run 'default' is unchanged: 480 samples"],
    ),
    Situation(
        "stages in build and describe",
        LISTED,
        ["build BEFORE", "build CONFIG", "describe CONFIG --all"],
        ["train, stage 0: samples 0 to 320", "train, stage 1: samples 320 to 480", "epoch 0 ends"],
        ("stage 2",),
    ),
    Situation(
        "an appended stage",
        LISTED,
        ["build BEFORE", "build CONFIG"],
        ["was extended: stage 1 appended"],
    ),
    Situation(
        "a file that is gone",
        BUILT,
        ["build CONFIG", "remove a", "check CONFIG"],
        ["no such file", "amend the run (`new_data` or `withdraw` of a stage"],
    ),
    Situation(
        "text in place of tokens",
        {"paths": "*.jsonl"},
        ["build CONFIG"],
        ["text, not tokens; for JSON Lines, set `text` to the key that holds the text"],
    ),
    Situation(
        "a folder of text in place of tokens",
        {"paths": "texts"},
        ["build CONFIG"],
        ["it contains text, not tokens: set `text` to the key that holds the text"],
    ),
    Situation(
        "a length with a unit",
        {"samples": None, "tokens": "50B"},
        ["build CONFIG"],
        ["such as 50e9 or 1_000"],
    ),
]


def write_config(folder: Path, name: str, settings: dict[str, Any]) -> str:
    """A config of two sources; `sources` in the settings changes weights, `paths` is of the first one."""
    weights = BLEND | {key: change["weight"] for key, change in settings.get("sources", {}).items()}
    listed = [
        {"name": key, "path": f"{folder}/{key}/*.parquet", "weight": weight}
        for key, weight in weights.items()
    ]
    listed[0]["path"] = (
        f"{folder}/{settings['paths']}" if "paths" in settings else listed[0]["path"]
    )
    given = {
        "cache": "cache",
        "sequence_length": 8,
        "samples": 320,
        "lanes": 4,
        "shuffle_window": 4,
        "sources": listed,
    }
    given |= {key: value for key, value in settings.items() if key not in ("sources", "paths")}
    path = folder / name
    path.write_text(
        yaml.safe_dump({key: value for key, value in given.items() if value is not None})
    )
    return str(path)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_a_message_leads_out(tmp_path: Path, situation: Situation) -> None:
    for number, key in enumerate(BLEND):
        written = write_source(tmp_path / "made", number, "parquet", documents(number, 90, 40, 3))
        (tmp_path / key).mkdir()
        for path in Path(written["path"]).parent.glob("*"):
            path.rename(tmp_path / key / path.name)
    (tmp_path / "texts").mkdir()
    for folder in (tmp_path, tmp_path / "texts"):
        (folder / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    configs = {
        "CONFIG": write_config(tmp_path, "config.yaml", situation.config),
        "BEFORE": write_config(tmp_path, "before.yaml", {}),
        "LISTED": write_config(tmp_path, "listed.yaml", LISTED),
    }
    for number, command in enumerate(situation.commands):
        words = [configs.get(word, word) for word in command.split()]
        if words[0] == "remove":
            os.unlink(next((tmp_path / words[1]).iterdir()))  # noqa: PTH108
            continue
        started = time.monotonic()
        done = run(*words)
        if number < len(situation.commands) - 1:
            assert done.returncode == 0, (command, done.stderr)
    assert time.monotonic() - started < MOST_SECONDS
    printed = done.stdout + done.stderr
    for text in situation.says:
        assert text in printed
    for text in situation.says_not:
        assert text not in printed
    assert len(done.stderr) <= situation.most_characters


def test_shares_of_a_split_for_which_nobody_asked_are_not_called_requested(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 90, 40, 3)) | {"weight": 1}
    given = {
        "cache": "cache",
        "sequence_length": 8,
        "samples": 320,
        "sources": [source],
        "split": "80,20,0",
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    assert run("build", path).returncode == 0
    train, _, valid = run("describe", path, "--all").stdout.partition("valid: ")
    assert "requested share" in train
    assert "actual share" in valid
    assert "requested" not in valid
    assert "requested" not in run("describe", path).stdout


def test_planned_shares_are_those_of_the_samples_so_far(tmp_path: Path) -> None:
    sources = [
        write_source(tmp_path, i, "parquet", documents(i, 90, 40, 3)) | {"weight": w}
        for i, w in ((0, 3), (1, 1))
    ]
    stages = [{"samples": 160}, {"sources": {sources[0]["name"]: {"weight": 0}}}]
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 8,
        "samples": 480,
        "lanes": 4,
        "shuffle_window": 4,
        "stages": stages,
        "sources": sources,
    }
    megablend.build(config)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=4)
    expected = {0: 0.75, 80: 0.75, 160: 0.75, 240: 0.5, 480: 0.25}
    for consumed, share in expected.items():
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": consumed})
        first, second = loader.stats()["sources"]
        assert first["planned_share"] == pytest.approx(share)
        assert second["planned_share"] == pytest.approx(1 - share)
        assert consumed == 0 or first["share"] == pytest.approx(share, abs=2 / max(1, consumed))


def test_a_state_past_the_end_of_its_own_plan_is_told_apart_from_another_plan(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 90, 40, 3)) | {"weight": 1}
    config = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 8,
        "samples": 40,
        "sources": [source],
    }
    megablend.build(config)
    dataset = megablend.open(config)
    changed = State.from_dict(dataset.state_dict()).to_dict() | {"consumed_samples": 41}
    with pytest.raises(
        StateError,
        match="the state is at sample 41, but run 'default' ends at sample 40:",
    ):
        dataset.load_state_dict(changed)
