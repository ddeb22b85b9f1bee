"""show: which tokens of a sample are in no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.cli.inspect import print_sample
from tests.inspect.test_find import make_run
from tests.runs import EOD


def show_all(config: dict[str, Any]) -> tuple[Any, ...]:
    return megablend.show_step(config, 0, micro_batch_size=200).samples


@pytest.mark.parametrize("order", ["block", "document"])
def test_appended_tokens_are_told(tmp_path: Path, order: str) -> None:
    config, listed = make_run(tmp_path, order=order)
    samples = show_all(config)
    for sample in samples:
        ends = [i for i, token in enumerate(sample.tokens) if token == EOD]
        assert list(sample.appended) == ends
    assert any(sample.appended for sample in samples)
    known = next(document for document in listed[0] if document)[0]
    for source in config["sources"]:
        source["append_eod"] = known
    config["run"] = "other"
    megablend.build(config)
    assert [sample.appended for sample in show_all(config)] == [
        sample.appended for sample in samples
    ]


def test_none_are_told_where_none_are_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = make_run(tmp_path, eod=False, split="100,0,0")
    sample = megablend.show(config, 3)
    assert sample.appended == ()
    assert "appended" not in sample.to_dict()
    print_sample(sample)
    assert "*" not in capsys.readouterr().out


def test_they_are_marked_in_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = make_run(tmp_path)
    sample = next(each for each in show_all(config) if each.appended)
    print_sample(sample, whole=True)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens: "))
    printed = line.removeprefix("tokens: ").removesuffix("  (*: appended, not in any file)").split()
    assert [i for i, token in enumerate(printed) if token == f"{EOD}*"] == list(sample.appended)
    assert [int(token.rstrip("*")) for token in printed] == list(sample.tokens)
