"""find, show --step, diff and export as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from tests.inspect.test_find import make_run


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    config, _ = make_run(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, config


def run(*arguments: object, expect: int = 0) -> str:
    done = CliRunner().invoke(cli, [str(each) for each in arguments])
    assert done.exit_code == expect, done.output
    return done.output


def test_find(built: tuple[Path, dict[str, Any]]) -> None:
    path, config = built
    (expected,) = megablend.find(config, "source0/0.parquet", 3).to_dict()["found"]
    printed = run("find", path, "source0/0.parquet:3", "--batch", 8, "--limit", 2)
    assert "0.parquet row 3: 13 tokens in train, source 's0'" in printed
    assert "more samples follow; --all lists all (run 'demo')" in printed
    assert all(column in printed for column in ("sample", "step", "epoch", "offset"))
    assert json.loads(run("find", path, "source0/0.parquet:3", "--json"))["found"] == [expected]
    assert "more samples follow" not in run(
        "find", config["cache"], "source0/0.parquet:3", "--run", "demo", "--all"
    )
    empty = next(
        row
        for row in range(20)
        if not megablend.find(config, "source0/0.parquet", row).to_dict()["found"][0]["tokens"]
    )
    assert "no sample of run 'demo' reads it" in run("find", path, f"source0/0.parquet:{empty}")


def test_show_a_step(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path, config = built
    words = models.WordLevel({"end": 0, **{f"w{i}": i for i in range(1, 400)}}, unk_token="end")
    Tokenizer(words).save(str(tmp_path / "t.json"))
    batch = ("--rank", 1, "--micro-batch", 2, "--data-parallel", 3)
    printed = run("show", path, "--step", 4, *batch, "--tokenizer", tmp_path / "t.json")
    assert "run 'demo', train step 4, rank 1: 2 samples" in printed
    samples = json.loads(
        run("show", config["cache"], "--run", "demo", "--step", 4, *batch, "--json")
    )["samples"]
    assert [each["sample"] for each in samples] == [26, 27]
    assert all(f"{each['sample']}: " in printed for each in samples)
    assert "documents, or their continuations in other blocks, begin at tokens 0" in run(
        "show", path, "--step", 4, *batch, "--all"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --sample or --step"),
        (("--sample", 1, "--step", 1), "give either --sample or --step"),
        (
            ("--sample", 1, "--rank", 1),
            "--rank needs --step: a sample does not depend on the batch",
        ),
        (("--step", 1), "--step needs --micro-batch"),
    ],
)
def test_show_says_what_is_missing(
    built: tuple[Path, dict[str, Any]], arguments: tuple[object, ...], message: str
) -> None:
    assert message in run("show", built[0], *arguments, expect=2)


def test_diff(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, config = built
    assert "all 200 samples are the same" in run("diff", path, path)
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(config | {"seed": 8, "run": "other"}))
    printed = run("diff", path, other)
    found = json.loads(run("diff", path, other, "--json"))
    assert "seed: 7 | 8" in printed
    assert f"the same up to sample {found['parts_at']}, which differs" in printed
    other.write_text(yaml.safe_dump(config | {"samples": 250}))
    ledger = Path(config["cache"]) / "runs" / "demo.json"
    assert "the same up to sample 200, where one of them ends" in run("diff", ledger, other)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(megablend.open(config).state_dict(3)))
    assert "the plans are the same" in run("diff", state, path)
    other.write_text(yaml.safe_dump(config | {"seed": 8}))
    assert "the plans are known to be the same up to sample 0" in run("diff", state, other)


def test_export(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = built
    target = tmp_path / "order.parquet"
    assert "samples 3 to 9 of run 'demo'" in run("export", path, target, "--from", 3, "--to", 9)
    assert json.loads(run("export", path, target, "--json"))["stop"] == 200


def test_skip(built: tuple[Path, dict[str, Any]]) -> None:
    path, _ = built
    assert "run 'demo' skips no samples" in run("skip", path)
    printed = run("skip", path, "--from", 9, "--to", 17, "--batch", 8, "--dry-run")
    assert "run 'demo' would skip samples 8 to 24: 16 samples, 128 tokens" in printed
    assert (
        json.loads(run("skip", path, "--from", 9, "--to", 17, "--batch", 8, "--json"))["skips"][0][
            "stop"
        ]
        == 24
    )
    assert "samples 8 to 24 are skipped: 128 tokens are not read" in run("describe", path)
    assert "skips samples 8 to 24" in run("skip", path)
    assert "--to needs --from" in run("skip", path, "--to", 3, expect=2)
    assert "--from needs --to and --batch" in run("skip", path, "--from", 3, expect=2)
    assert "skips no samples" in run("skip", path, "--clear")
