"""find, against the tokens that the samples hold: each token occurs once in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.cli.inspect import split_place
from megablend.errors import CacheError, ConfigError
from tests.runs import EOD, documents, make_config, read_samples, write_source

KINDS = ("parquet", "megatron", "arrow")


def make_run(
    folder: Path, *, eod: bool = True, **settings: Any
) -> tuple[dict[str, Any], list[list[list[int] | None]]]:
    """A built run whose sources are read a few times, and the documents of its sources."""
    listed = [documents(d, 40, 20, 5) for d in range(len(KINDS))]
    sources = [write_source(folder, d, kind, listed[d]) for d, kind in enumerate(KINDS)]
    for d, source in enumerate(sources):
        source |= {"weight": 4 - d} | ({"append_eod": EOD} if eod else {})
    config = make_config(
        folder, sources, **{"samples": 200, "run": "demo", "split": "80,20,0"} | settings
    )
    megablend.build(config)
    return config, listed


def read_split(config: dict[str, Any], split: str) -> list[np.ndarray[Any, Any]]:
    """The tokens of each sample."""
    dataset = megablend.open(config, split)
    return [each.tokens for each in read_samples(dataset)]


def occurrences(samples: list[np.ndarray[Any, Any]], wanted: set[int]) -> dict[int, list[int]]:
    """For each sample that has some of the tokens, the places at which it has them."""
    found = {
        k: np.flatnonzero(np.isin(tokens, list(wanted))).tolist()
        for k, tokens in enumerate(samples)
    }
    return {k: places for k, places in found.items() if places}


def found_places(listed: dict[str, Any], tokens: list[int], *, eod: bool) -> dict[int, list[int]]:
    """The same out of what `find` gave, without the places of end-of-document tokens."""
    places: dict[int, list[int]] = {}
    ends = {len(tokens)} if eod else set()
    for sample in listed["samples"]:
        for piece in sample["pieces"]:
            for i in range(piece["stop_token"] - piece["first_token"]):
                if piece["offset"] + i not in ends:
                    places.setdefault(sample["sample"], []).append(piece["first_token"] + i)
    return {sample: sorted(each) for sample, each in places.items()}


@pytest.mark.parametrize("order", ["page", "row", "sequential"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_every_row_is_where_its_tokens_are(tmp_path: Path, order: str, split: str) -> None:
    config, listed = make_run(tmp_path, order=order, valid_samples=60)
    samples = read_split(config, split)
    seen = 0
    for d, rows in enumerate(listed):
        for document in (0, 7, 19, 20, 31, 33, 39):
            tokens = rows[document] or []
            file, row = divmod(document, 20)
            path = next((tmp_path / f"source{d}").glob(f"{file}.*[!x]"))
            (found,) = megablend.find(config, str(path), row, split=split).to_dict()["found"]
            assert found["complete"]
            assert found_places(found, tokens, eod=True) == occurrences(samples, set(tokens))
            assert found["tokens"] in (0, len(tokens) + bool(tokens))
            seen += len(found["samples"])
    assert seen > 10


def test_a_whole_file_and_steps(tmp_path: Path) -> None:
    config, listed = make_run(tmp_path, eod=False, split="100,0,0")
    samples = read_split(config, "train")
    for d, rows in enumerate(listed):
        tokens = [token for row in rows[20:] for token in row or []]
        (found,) = megablend.find(
            config, f"source{d}/1.{('parquet', 'bin', 'arrow')[d]}", batch_size=8
        ).to_dict()["found"]
        assert found_places(found, tokens, eod=False) == occurrences(samples, set(tokens))
        assert found["tokens"] == len(tokens)
        assert all(sample["step"] == sample["sample"] // 8 for sample in found["samples"])
        epochs = [sample["epoch"] for sample in found["samples"]]
        assert epochs == sorted(epochs)


def test_a_limit_says_that_more_follow(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    (everything,) = megablend.find(config, "source0/0.parquet").to_dict()["found"]
    (few,) = megablend.find(config, "source0/0.parquet", limit=3).to_dict()["found"]
    assert (few["samples"], few["complete"]) == (everything["samples"][:3], False)
    (just,) = megablend.find(
        config, "source0/0.parquet", limit=len(everything["samples"])
    ).to_dict()["found"]
    assert (just, just["complete"]) == (everything, True)
    (most,) = megablend.find(config, "source0/0.parquet", limit=1 << 63).to_dict()["found"]
    assert most == everything


def test_the_ledger_alone_says_it(tmp_path: Path) -> None:
    """The cache without the config, and with a config that was edited since."""
    config, _ = make_run(tmp_path)
    expected = megablend.find(config, "source0/0.parquet", 3)
    assert megablend.find(config["cache"], "source0/0.parquet", 3, run="demo") == expected
    edited = config | {"samples": 50, "seed": 99, "sources": config["sources"][:2]}
    assert megablend.find(edited, "source0/0.parquet", 3) == expected


@pytest.mark.parametrize("split", [None, "2,1,0"])
def test_the_ledger_alone_of_other_configs(tmp_path: Path, split: str | None) -> None:
    config, _ = make_run(
        tmp_path, split=split, order="row", add_extra_token_to_sequence=False, eod=split is not None
    )
    whole = megablend.find(config, "source1/0.bin")
    assert megablend.find(config["cache"], "source1/0.idx", run="demo") == whole
    by_split = {"train": config["sources"][:2], "valid": config["sources"][2:]}
    listed = config | {"sources": by_split, "run": "listed", "split": None}
    megablend.build(listed)
    by_ledger = megablend.find(config["cache"], "source1/0", run="listed")
    assert by_ledger == megablend.find(listed, "source1/0.bin")
    assert by_ledger.to_dict()["found"][0]["samples"]


def test_what_cannot_be_found(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, eod=False, split=None)
    for arguments, message in (
        (("",), "found an empty path, expected a data file of the index"),
        (("nothing.parquet",), "has no file with this path, or with a path that ends in it"),
        (("ource0/0.parquet",), "has no file with this path, or with a path that ends in it"),
        (("source0/0.parquet", 3), "has no row counts for source 's0'.*omit the row"),
    ):
        with pytest.raises(ConfigError, match=message):
            megablend.find(config, *arguments)
    with pytest.raises(
        CacheError,
        match=r"contains no run 'other'; run `megablend build CONFIG` first, or choose one of the runs",
    ):
        megablend.find(config["cache"], "source0/0.parquet", run="other")
    with pytest.raises(
        ConfigError, match="split valid: the cache has no valid split of run 'demo'"
    ):
        megablend.find(config["cache"], "source0/0.parquet", run="demo", split="valid")
    counted = tmp_path / "counted"
    config, _ = make_run(counted)
    for row in (20, -1):
        with pytest.raises(ConfigError, match=f"found row {row}, expected 0 to 19"):
            megablend.find(config, "source0/0.parquet", row)
    twin = config["sources"][0] | {"name": "twin", "path": str(tmp_path / "source0" / "*.parquet")}
    more = config | {"sources": [*config["sources"], twin], "run": "more"}
    megablend.build(more)
    with pytest.raises(
        ConfigError, match=r"2 files have this ending \(.*\); give more of the path"
    ):
        megablend.find(more, "source0/0.parquet")


def test_a_path_is_found_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cfg").mkdir()
    listed = [documents(d, 40, 20, 5) for d in range(2)]
    sources = [
        write_source(tmp_path, d, kind, listed[d]) for d, kind in enumerate(("parquet", "megatron"))
    ]
    for source in sources:
        source |= {"path": source["path"].replace(str(tmp_path), f"{tmp_path}/cfg/.."), "weight": 1}
    config = make_config(tmp_path, sources, samples=50)
    megablend.build(config)
    stored = f"{tmp_path}/cfg/../source0/1.parquet"
    expected = megablend.find(config, stored)
    assert expected.to_dict()["found"][0]["file"] == stored
    (tmp_path / "here").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path / "cfg")
    for path in (
        f"{tmp_path}/source0/1.parquet",
        f"{tmp_path}/source1/.././source0//1.parquet",
        f"{tmp_path}/here/source0/1.parquet",
        "../source0/1.parquet",
        f"./{tmp_path.name}/source0/1.parquet",
    ):
        assert megablend.find(config, path) == expected, path
    pair = megablend.find(config, f"{tmp_path}/cfg/../source1/0.bin")
    for path in ("0.bin", "0.idx", "0"):
        assert megablend.find(config, f"{tmp_path}/source1/{path}") == pair
    with pytest.raises(
        ConfigError, match="has no file with this path, or with a path that ends in it"
    ):
        megablend.find(config, f"{tmp_path}/cfg/source0/1.parquet")


def test_a_link_is_found_by_its_own_path(tmp_path: Path) -> None:
    written = write_source(tmp_path, 0, "parquet", documents(0, 40, 20, 5), num_files=1)
    sources = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.parquet").symlink_to(tmp_path / "source0" / "0.parquet")
        sources.append(
            written | {"name": name, "path": f"{tmp_path}/{name}/0.parquet", "weight": 1}
        )
    config = make_config(tmp_path, sources, samples=9)
    megablend.build(config)
    for path, names in (
        ("a/0.parquet", ["a"]),
        ("b/0.parquet", ["b"]),
        ("source0/0.parquet", ["a", "b"]),
    ):
        found = megablend.find(config, f"{tmp_path}/{path}").to_dict()["found"]
        assert [each["source"] for each in found] == names


def test_a_file_of_several_sources(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    twin = config["sources"][0] | {"name": "twin"}
    more = config | {"sources": [*config["sources"], twin], "run": "more"}
    megablend.build(more)
    found = megablend.find(more, "source0/0.parquet", 1).to_dict()["found"]
    assert [each["source"] for each in found] == ["s0", "twin"]
    samples = [{sample["sample"] for sample in each["samples"]} for each in found]
    assert samples[0]
    assert samples[1]
    assert not samples[0] & samples[1]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("a.parquet", ("a.parquet", None)),
        ("a.parquet:12", ("a.parquet", 12)),
        ("s3://b/a.parquet", ("s3://b/a.parquet", None)),
        ("s3://b/a.parquet:0", ("s3://b/a.parquet", 0)),
        ("a:b", ("a:b", None)),
    ],
)
def test_rows_behind_a_colon(place: str, expected: tuple[str, int | None]) -> None:
    assert split_place(place) == expected
