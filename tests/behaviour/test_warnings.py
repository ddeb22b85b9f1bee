"""Numbers that deserve a second look are said, by thresholds; and which sources are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.cli.describe import print_summary, print_tables
from megablend.inspect.description import RunDescription
from megablend.inspect.select import select_sources
from tests.runs import make_config, write_blend, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    listed = [[[1, 2, 3]], [list(range(1, 400))] * 2, [list(range(1, 90))] * 2]
    sources = [
        write_source(tmp_path, d, "arrow", documents, num_files=1) | {"weight": weight}
        for d, (documents, weight) in enumerate(zip(listed, (1, 8, 1), strict=True))
    ]
    return make_config(tmp_path, sources, samples=1000, lanes=8)


def warnings(config: dict[str, Any], **sizes: Any) -> list[str]:
    found: list[str] = megablend.describe(config, **sizes).to_dict()["warnings"]
    return found


def test_small_and_often_read_sources_are_said(config: dict[str, Any]) -> None:
    built = megablend.build(config)
    small, often = warnings(config)
    assert small.startswith(
        "train: 1 source holds fewer than 1 sample of 8 tokens; the smallest is 's0' with 3 tokens"
    )
    assert often.startswith(
        "train: 1 source is read more than 16 times; most often 's0', 267.0 times (3 tokens, 100 samples)"
    )
    assert built.warnings == (small, often)
    assert warnings(config | {"warnings": {"max_epochs": None, "min_source_samples": None}}) == []
    many = warnings(config | {"warnings": {"max_epochs": 2, "min_source_samples": 23}})
    assert "2 sources hold fewer than 23 samples" in many[0]
    assert "3 sources are read more than 2 times" in many[1]
    config["sources"][0]["max_epochs"] = 300  # somebody has thought about it
    assert warnings(config | {"warnings": {"min_source_samples": None}}) == []


def test_many_warnings_do_not_fill_the_screen(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    megablend.build(config)
    description = megablend.describe(config)
    assert isinstance(description, RunDescription)
    names = [f"stages[{number}] is odd" for number in range(9)]
    description = replace(description, warnings=tuple(names))
    print_summary(description)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:6] == [f"warning: {name}" for name in names[:6]]
    assert shown[6] == "warning: 3 more; `--all` prints them"
    print_tables(description)
    assert capsys.readouterr().out.count("is odd") == 9


def test_a_source_whose_cap_allows_no_sample_is_said(config: dict[str, Any]) -> None:
    config |= {"on_exhausted": "redistribute", "warnings": {"max_epochs": None}}
    config["sources"][0]["max_epochs"] = 2  # 6 tokens, and a sample has 8
    (unread,) = warnings_before_and_after(config, "capped")
    assert unread.startswith(
        "train: 1 source has a share, but caps that allow no sample of it: 's0'"
    )
    config["sources"][0]["max_epochs"] = 3
    assert "caps that allow no sample" not in str(warnings_before_and_after(config, "fits"))


def is_refused(config: dict[str, Any]) -> bool:
    try:
        megablend.describe(config)
    except megablend.PlanError:
        return True
    return False


def test_the_least_length_that_gives_each_source_a_sample(tmp_path: Path) -> None:
    """Where caps are redistributed, shares depend on the length."""
    sources = [
        write_source(tmp_path, number, "arrow", [list(range(1, 400))], num_files=1)
        | {"weight": weight}
        for number, weight in enumerate((1, 0.001, 0.01))
    ]
    sources[0]["max_epochs"] = 1
    config = make_config(tmp_path, sources, samples=45) | {"on_exhausted": "redistribute"}
    megablend.build(config | {"samples": 100})
    config["run"] = "short"
    with pytest.raises(megablend.PlanError, match="gets none of the 45 samples") as refused:
        megablend.build(config)
    found = re.search(r"A run of (\d+) samples or more has at least one", str(refused.value))
    assert found is not None, refused.value
    needed = int(found[1])
    shortest = next(n for n in range(45, 1200) if not is_refused(config | {"samples": n}))
    assert shortest <= needed <= shortest + 10  # rounding may give one to less than a whole sample
    assert not any(is_refused(config | {"samples": n}) for n in range(needed, needed + 20))


def test_a_run_that_its_last_share_shortens_is_said(config: dict[str, Any]) -> None:
    quiet = config | {"warnings": {"max_epochs": None, "min_source_samples": None}}
    parts = quiet | {"stages": [{"share": 0.3}, {"share": 0.7}]}
    (shorter,) = warnings_before_and_after(parts, "parts")
    assert shorter.startswith(
        "stages[1]: `share: 0.7` ends the last stage before the end of the run (shares are counted from the run's start), so "
        "train has only 700 samples; leave out `share` in the last stage"
    )
    whole: list[list[dict[str, Any]]] = [[{"share": 0.3}, {}], [{"share": 0.3}, {"share": 1}], []]
    for i, stages in enumerate(whole):
        assert warnings_before_and_after(quiet | {"stages": stages}, f"whole{i}") == []
    ends = quiet | {"samples": None, "stages": [{"samples": 296}, {"samples": 700}]}
    assert warnings_before_and_after(ends, "ends") == []
    assert megablend.open(ends | {"run": "ends"}).run.num_samples == 700


def warnings_before_and_after(config: dict[str, Any], run: str) -> list[str]:
    """What `describe` warns of before the run is built and after it, and `build`, too."""
    megablend.build_index(config)
    before = warnings(config | {"run": run})
    built = megablend.build(config | {"run": run})
    assert before == list(built.warnings) == warnings(config | {"run": run})
    return before


def test_read_amplification_and_lanes_are_said(config: dict[str, Any]) -> None:
    megablend.build(config)
    quiet = {"max_epochs": None, "min_source_samples": None}
    fitting: dict[str, Any] = {"micro_batch_size": 2, "data_parallel_size": 4}
    assert warnings(config | {"warnings": quiet | {"max_read_amplification": 100}}, **fitting) == []
    (read,) = warnings(config | {"warnings": quiet | {"max_read_amplification": 0.001}}, **fitting)
    assert (
        "times the bytes that they use, more than 0.001 times (warnings.max_read_amplification)"
        in read
    )
    unfit: dict[str, Any] = {"micro_batch_size": 3, "data_parallel_size": 4}
    found = megablend.describe(
        config | {"warnings": quiet | {"max_read_amplification": None}}, **unfit
    )
    lanes, last = found.to_dict()["warnings"]
    assert re.match(
        r"train: the last \d+ samples do not fill a step of 12; loaders drop them", last
    )
    assert "lanes: 8 is not a multiple of micro batch 3 x 4 ranks" in lanes
    assert "lanes: 12 fits" in lanes
    assert (found.to_dict()["lanes"], found.to_dict()["fitting_lanes"]) == (8, 12)
    assert megablend.build(config | {"lanes": 12, "run": "twelve"}).ledger.blend.lanes == 12


@pytest.mark.parametrize(
    ("given", "message"), [({"max_epoch": 3}, "max_epoch"), ({"max_epochs": 0}, "more than 0")]
)
def test_thresholds_are_checked(
    config: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(megablend.ConfigError, match=message):
        megablend.load_config(config | {"warnings": given})


def test_sources_are_sorted_matched_and_cut(config: dict[str, Any]) -> None:
    megablend.build(config)

    def shown(**how: Any) -> list[str]:
        described = megablend.describe(config)
        assert isinstance(described, RunDescription)
        found = select_sources(described, **how).to_dict()
        train = found["splits"]["train"]
        index = found["index"]
        assert index["tokens"] == 979  # sums stay of all
        assert len(train["sources"]) + train.get("sources_left_out", 0) == 3
        assert len(index["sources"]) == len(train["sources"])
        return [source["name"] for source in train["sources"]]

    assert shown() == shown(top=0) == shown(sort="name") == ["s0", "s1", "s2"]
    assert shown(sort="tokens") == ["s1", "s2", "s0"]
    assert shown(sort="epochs") == ["s0", "s1", "s2"]
    assert shown(sort="tokens", top=2) == ["s1", "s2"]
    assert shown(match="*[02]") == ["s0", "s2"]
    assert shown(match="s2", top=5) == ["s2"]
    with pytest.raises(
        megablend.ConfigError,
        match=r"found sort 'toknes', expected one of name, .* did you mean 'tokens'",
    ):
        shown(sort="toknes")
    with pytest.raises(megablend.ConfigError, match=r"match 'x\*' matches no source"):
        shown(match="x*")
    with pytest.raises(
        megablend.ConfigError, match="found top -1, expected a whole number, 0 or more"
    ):
        shown(top=-1)


@pytest.mark.parametrize("is_set", [False, True], ids=["split", "validation set"])
def test_a_source_that_gives_validation_no_sample(tmp_path: Path, is_set: bool) -> None:
    """`build` warns of what `open` refuses, and each remedy of the message is followed."""
    sources = write_blend(tmp_path, 1000, 10)
    config = make_config(
        tmp_path, sources, samples=200, valid_samples=10, split=None if is_set else "60,40,0"
    )
    if is_set:
        config |= {"sources": {"train": [sources[0] | {"name": "t"}], "valid": sources}}
    says = (
        "source 's1' gets none of the 10 samples: its share is 0.0099. A run of 101 samples or more has at least one of each "
        "source: set `valid_samples: 101` or more; or give the source a larger share, or a share of 0"
    )
    assert f"valid: cannot be opened: {says}" in megablend.build(config).warnings
    assert megablend.describe(config).to_dict()["splits"]["valid"]["problem"] == says
    with pytest.raises(megablend.PlanError, match="source 's1' gets none of the 10 samples"):
        megablend.open(config, split="valid")
    assert len(megablend.open(config)) == 200
    for number, (weight, samples) in enumerate([(10, 101), (500, 10), (0, 10)]):
        sources[1]["weight"] = weight
        mended = config | {"valid_samples": samples, "run": f"r{number}"}
        assert not [each for each in megablend.build(mended).warnings if "cannot be opened" in each]
        assert len(megablend.open(mended, split="valid")) == samples
