"""Remedies in messages about arguments of functions: the call is made as the message says, and then it works."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from megablend.errors import MegablendError
from tests.runs import documents, make_config, write_source

Config = dict[str, Any]
Call = Callable[[Config], Any]


class Case(NamedTuple):
    call: Call
    says: str
    instead: list[Call]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of 80 samples, and 10 of validation."""
    folder = tmp_path_factory.mktemp("arguments")
    source = write_source(folder, 0, "arrow", documents(0, 150, 60, 5)) | {"weight": 1}
    given = make_config(folder, [source], samples=80, split="80,20,0", valid_samples=10)
    megablend.build(given)
    (folder / "run.json").write_text(json.dumps(given))
    return given


def opened(config: Config, **options: Any) -> megablend.Dataset:
    return megablend.open(config, **options)


def load(config: Config, **options: Any) -> list[Any]:
    dataset = options.pop("dataset", None) or opened(config)
    batches = list(megablend.Loader(dataset, **{"micro_batch_size": 4, **options}))
    assert batches
    return batches


def state_of(config: Config, split: str = "train") -> Config:
    state: Config = opened(config, split=split).state_dict()
    return state


def double(sample: Config) -> Config:
    return sample | {"tokens": sample["tokens"] * 2}


def skip(config: Config, batch: int) -> Config:
    """Skip two batches in a run of its own."""
    own = config | {"run": f"skips-{batch}"}
    megablend.build(own)
    if not megablend.list_skips(own)["skips"]:
        megablend.skip(own, 8, 16, batch_size=batch)
    return own


def open_validation(config: Config, split: str) -> Any:
    """One pass over the data of validation."""
    own = {key: value for key, value in config.items() if key != "valid_samples"}
    own |= {"split": split, "run": f"split-{split.replace(',', '-')}"}
    megablend.build(own)
    return opened(own, split="valid")[0]


def compare(config: Config, path: str) -> Any:
    """With the run's config; `path` begins in the folder of the config, or is a URL."""
    folder = Path(config["cache"]).parent
    (folder / "state.json").write_text(json.dumps(state_of(config)))
    shutil.copy(folder / "cache" / "runs" / "default.json", folder / "ledger.json")
    return megablend.diff(path if "://" in path else folder / path, folder / "run.json")


def rename(config: Config, run: str, new: str, *, remove: bool = False) -> None:
    """Rename a run of its own, beside which there is run `RUN-taken`."""
    for name, samples in ((run, 80), (f"{run}-taken", 40)):
        megablend.build(config | {"run": name, "samples": samples})
    if remove:
        megablend.remove_run(config, new)
    megablend.rename_run(config, run, new)


CASES: dict[str, Case] = {
    "a difference to a folder": Case(
        lambda config: compare(config, "cache"),
        r"cache: is a folder; give a config, a run's ledger \(runs/NAME.json of a cache\) or a state$",
        [
            lambda config: compare(config, "run.json"),
            lambda config: compare(config, "cache/runs/default.json"),
            lambda config: compare(config, "state.json"),
        ],
    ),
    "a difference to a ledger elsewhere": Case(
        lambda config: compare(config, "ledger.json"),
        r"is a run's ledger, but not in its cache; give the ledger in the cache that has its index \(CACHE/runs/",
        [lambda config: compare(config, "cache/runs/default.json")],
    ),
    "a difference to a URL": Case(
        lambda config: compare(config, "s3://bucket/cache/runs/default.json"),
        "is in an object store; give the run's config, or the file of a state$",
        [lambda config: compare(config, "run.json"), lambda config: compare(config, "state.json")],
    ),
    "a name that is taken": Case(
        lambda config: rename(config, "a", "a-taken"),
        "there is a run 'a-taken' already; remove it first, or choose another name$",
        [lambda config: rename(config, "b", "b-taken", remove=True), lambda config: rename(config, "c", "c-another")],
    ),
    "a state and a number": Case(
        lambda config: opened(config, state=state_of(config), consumed_samples=4),
        "found both state and consumed_samples, expected one of them: the state holds the number",
        [
            lambda config: opened(config, state=state_of(config))[0],
            lambda config: opened(config, consumed_samples=4)[0],
        ],
    ),
    "a number for validation": Case(
        lambda config: opened(config, split="valid", consumed_samples=4),
        r"found consumed_samples=4 for valid: .*; give state=, from state_dict\(\)",
        [lambda config: opened(config, split="valid", state=state_of(config, "valid"))[0]],
    ),
    "a sample after the last": Case(
        lambda config: megablend.show(config, 80),
        "found sample 80, expected 0 to 79: train has 80 samples",
        [lambda config: megablend.show(config, 79), lambda config: megablend.show(config, 0)],
    ),
    "another split of a ledger": Case(
        lambda config: megablend.show(config["cache"], 0, split="valid", run="default"),
        "split valid: only train is in a run's ledger; give the run's own config for valid",
        [lambda config: megablend.show(config, 0, split="valid")],
    ),
    "two transforms": Case(
        lambda config: load(config, dataset=opened(config, transform=double), transform=double),
        "transform: both the dataset and the loader have one; pass it to only one of them",
        [
            lambda config: load(config, dataset=opened(config, transform=double)),
            lambda config: load(config, transform=double),
        ],
    ),
    "batches out of order": Case(
        lambda config: load(config, num_workers=1, in_order=False),
        "in_order: found False, expected True: a state counts batches in order",
        [lambda config: load(config, in_order=True)],
    ),
    "a batch that is too large": Case(
        lambda config: load(config, micro_batch_size=81),
        "train has 80 samples, fewer than the 81 of a step .*; use a smaller micro batch, or drop_last=False",
        [
            lambda config: load(config, micro_batch_size=80),
            lambda config: load(config, micro_batch_size=81, drop_last=False),
        ],
    ),
    "a step into what is skipped": Case(
        lambda config: load(skip(config, 4), micro_batch_size=3),
        "steps of 3 samples from sample 0 on would reach into samples 8 to 16, which are skipped: use a micro batch",
        [lambda config: load(skip(config, 4), micro_batch_size=2), lambda config: load(skip(config, 4))],
    ),
    "validation of no sample": Case(
        lambda config: open_validation(config, "9999,1,0"),
        "split 'valid' has fewer tokens than one sample of 8 tokens .*: give it a larger share in `split`",
        [lambda config: open_validation(config, "90,10,0")],
    ),
}


def call(act: Call, config: Config) -> None:
    """Warnings that advise are errors here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        act(config)


@pytest.mark.parametrize("name", CASES)
def test_an_argument(config: Config, name: str) -> None:
    case = CASES[name]
    with pytest.raises((MegablendError, RuntimeWarning)) as caught:
        call(case.call, config)
    assert re.search(case.says, str(caught.value)), str(caught.value)
    for instead in case.instead:
        call(instead, config)


def test_a_range_is_skipped_again_as_the_message_says(config: Config) -> None:
    own = config | {"run": "again"}
    path = Path(config["cache"]).parent / "again.json"
    path.write_text(json.dumps(own))
    megablend.build(own)
    megablend.skip(own, 8, 16, batch_size=4)
    with pytest.raises(MegablendError, match=r"steps of 4 samples from sample 2 on .* whose steps end at 8$"):
        megablend.Loader(opened(own), micro_batch_size=4).load_state_dict(
            state_of(own) | {"consumed_samples": 2}
        )  # no range of steps of 4 helps
    with pytest.raises(MegablendError, match=r"or `megablend skip` the range again with (--batch 3)") as caught:
        load(own, micro_batch_size=3)
    option = re.search("--batch 3", str(caught.value))
    assert option
    listed = CliRunner().invoke(cli, ["skip", str(path), "--from", "6", "--to", "18", *option[0].split()])
    assert listed.exit_code == 0, listed.output
    assert load(own, micro_batch_size=3)


def test_where_files_are_looked_for(tmp_path: Path) -> None:
    sources = [write_source(tmp_path, i, "parquet", documents(i, 60, 30, 5), num_files=1) for i in range(2)]
    given = make_config(tmp_path, [], samples=40)
    given["sources"] = {"train": [sources[0] | {"weight": 1}], "valid": [sources[1]]}
    megablend.build(given)
    with pytest.raises(MegablendError, match=r"2 files have this ending .*; give more of the path$"):
        megablend.find(given, "0.parquet")
    with pytest.raises(MegablendError, match=r"no source of train reads it; give the --split whose sources do$"):
        megablend.find(given, "source1/0.parquet")
    assert megablend.find(given, "source1/0.parquet", split="valid")["found"]
    with pytest.raises(MegablendError, match=r"does not know the rows .*; leave out the row to find the whole file$"):
        megablend.find(given, "source0/0.parquet", 3)
    assert megablend.find(given, "source0/0.parquet")["found"]
