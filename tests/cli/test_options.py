"""Options that would have no effect are refused, with what to do; what cannot be refused is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.cli.commands import run
from tests.runs import make_config, write_blend

pytestmark = pytest.mark.long
WITHOUT_EFFECT: list[tuple[str, list[str], str]] = [
    # (a command, its arguments, what is said)
    (
        "skip CONFIG",
        ["--clear", "--dry-run"],
        "--dry-run needs --from; `megablend skip` lists what --clear removes",
    ),
    ("skip CONFIG", ["--dry-run"], "--dry-run needs --from"),
    ("skip CACHE", ["--run", "default", "--cache", "elsewhere"], "found two caches, "),
    (
        "show CACHE",
        ["-k", "1", "--run", "default", "--cache", "elsewhere"],
        "found two caches, ",
    ),
    ("find CACHE", ["m0", "--run", "default", "--cache", "elsewhere"], "found two caches, "),
    ("describe CACHE", ["--cache", "elsewhere"], "found two caches, "),
    (
        "describe CACHE",
        ["--micro-batch", "4"],
        "is a cache, but estimates need a config; give a config",
    ),
    (
        "check CONFIG",
        ["--ranks", "4"],
        "--ranks 4 needs --micro-batch: without it no steps are checked",
    ),
    ("find CONFIG", ["m0", "--all", "--limit", "3"], "give only one of --limit and --all"),
    (
        "verify CONFIG",
        ["--text", "3"],
        "found no text source whose documents `text` (3) could tokenise again; leave out `text`",
    ),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("options")
    config = make_config(folder, write_blend(folder, 2, 1), samples=320)
    megablend.build(config)
    megablend.skip(config, 48, 64, batch_size=4)
    (folder / "run.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("command", "options", "says"),
    WITHOUT_EFFECT,
    ids=[" ".join([a, *b]) for a, b, _ in WITHOUT_EFFECT],
)
def test_an_option_without_effect_is_refused(
    config: dict[str, Any], command: str, options: list[str], says: str
) -> None:
    name, what = command.split()
    given = config["cache"] if what == "CACHE" else Path(config["cache"]).parent / "run.json"
    refused = run(name, given, *options)
    assert refused.returncode == 2, refused.stdout
    assert says in " ".join(refused.stderr.split())
    assert megablend.open(config).skips.ranges == ((48, 64),)


def test_a_number_added_to_no_state_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        megablend.ConfigError, match="but none is given; give a `state`, or `at` alone"
    ):
        megablend.amend(config, at=100, after=5)


def test_a_dry_run_without_checksums_warns(config: dict[str, Any]) -> None:
    path = Path(config["cache"]).parent / "run.json"
    assert (
        "--checksums has no effect with --dry-run"
        in run("build", path, "--dry-run", "--checksums").stderr
    )
    assert run("build", path, "--dry-run").stderr == ""


MASKS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"reset_attention_mask": True, "eod_token": 0},
        ["reset_attention_mask: has no effect without `create_attention_mask: true`"],
    ),
    ({"reset_attention_mask": True, "create_attention_mask": True, "eod_token": 0}, []),
    (
        {
            "eod_token": 0,
            "stages": [
                {"samples": 160, "inter_document_masking": True},
                {"samples": 240, "reset_position_ids": True},
                {"samples": 320},
            ],
        },
        [
            "stages[1]: reset_position_ids: has no effect with inter_document_masking, where they restart at each document; "
            "leave it out"
        ],
    ),
    (
        {"eod_token": 7, "eod_mask_loss": True, "appended": 0},
        [
            "eod_token: eod_mask_loss act on token 7, but the sources append another one to documents (append_eod 0); "
            "leave out eod_token, or set it to the same"
        ],
    ),
    ({"eod_token": 0, "eod_mask_loss": True, "appended": 0}, []),
    ({"eod_token": 7, "eod_mask_loss": True}, []),  # the data may have it
]


@pytest.mark.parametrize(("settings", "expected"), MASKS)
def test_masks_without_effect_are_warned_of(
    config: dict[str, Any], tmp_path: Path, settings: dict[str, Any], expected: list[str]
) -> None:
    settings = dict(settings)
    appended = settings.pop("appended", None)
    sources = [each | {"append_eod": appended} for each in config["sources"]]
    edited = config | settings | {"sources": sources, "cache": str(tmp_path / "cache")}
    if "stages" in settings:
        del edited["samples"]
    built = [each for each in megablend.build(edited).warnings if "effect" in each or "eod" in each]
    described = megablend.describe(edited).to_dict()["warnings"]
    assert built == expected
    assert set(expected) <= set(described)
