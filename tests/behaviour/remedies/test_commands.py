"""Commands and calls with arguments that are refused: they are made as the message says, and then they work."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.run.ledger_file import load_ledger, save_ledger
from tests.behaviour.remedies.driver import Bench, Step, fault, misuse, table
from tests.behaviour.remedies.projects import Run
from tests.runs import documents, make_config, write_source


class Calls(Bench):
    """A run of 80 samples, and 10 of validation, that all tests of the module share."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["cache"]).parent

    def own(self, name: str, **settings: Any) -> dict[str, Any]:
        """A run of its own; None removes a setting."""
        config = {
            key: value
            for key, value in (self.config | {"run": name} | settings).items()
            if value is not None
        }
        megablend.build(config)
        return config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arguments")
    source = write_source(folder, 0, "arrow", documents(0, 150, 60, 5)) | {"weight": 1}
    given = make_config(folder, [source], samples=80, split="80,20,0", valid_samples=10)
    megablend.build(given)
    (folder / "run.json").write_text(json.dumps(given))
    (folder / "state.json").write_text(json.dumps(megablend.open(given).state_dict()))
    shutil.copy(folder / "cache" / "runs" / "default.json", folder / "ledger.json")
    return given


@pytest.fixture
def calls(config: dict[str, Any]) -> Calls:
    return Calls(config)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def compare(path: str) -> Step:
    """With the run's config; `path` begins in the folder of the config, or is a URL."""
    return lambda bench: megablend.diff(
        path if "://" in path else bench.folder / path, bench.folder / "run.json"
    )


def opening(*, state: str | None = None, **options: Any) -> Step:
    """Open the run, with a state of this split, and read a sample."""

    def call(bench: Calls) -> None:
        given = megablend.open(bench.config, split=state).state_dict() if state else None
        assert megablend.open(bench.config, state=given, **options)[0]

    return call


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"tokens": sample["tokens"] * 2}


def load(config: dict[str, Any], *, consumed: int = 0, **options: Any) -> None:
    """Warnings that advise are errors here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        dataset = megablend.open(
            config, **({"transform": options.pop("first")} if "first" in options else {})
        )
        loader = megablend.Loader(dataset, **{"micro_batch_size": 4, **options})
        if consumed:
            loader.load_state_dict(dataset.state_dict() | {"consumed_samples": consumed})
        assert list(loader)


def loading(**options: Any) -> Step:
    return lambda bench: load(bench.config, **options)


def loading_after_a_skip(batch: int = 4, *, again: int | None = None, **options: Any) -> Step:
    """In a run of its own, of which a range is skipped; skipped `again` with batches of another size."""

    def call(bench: Calls) -> None:
        own = bench.own(f"skips-{batch}-{again}")
        if not megablend.list_skips(own).to_dict()["skips"]:
            megablend.skip(own, 8, 16, batch_size=batch)
            if again:
                megablend.skip(own, 6, 18, batch_size=again)
        load(own, **options)

    return call


def showing(sample: int, *, cache: bool = False, **options: Any) -> Step:
    return lambda bench: megablend.show(
        bench.config["cache"] if cache else bench.config, sample, **options
    )


def showing_unrecorded(*, config: bool = False, again: bool = False) -> Step:
    """Show a sample of validation of a run of which, as by earlier releases, only train is recorded; or built once more."""

    def show(bench: Calls) -> None:
        own = bench.own("old", seed=11)
        ledger = load_ledger(own["cache"], "old")
        assert ledger is not None
        save_ledger(own["cache"], dataclasses.replace(ledger, request=None), replaces=ledger)
        if again:
            megablend.build(own)
        megablend.show(own if config else own["cache"], 0, split="valid", run="old")

    return show


def validating(split: str) -> Step:
    """One pass over the data of validation."""
    return lambda bench: megablend.open(
        bench.own(f"split-{split.replace(',', '-')}", split=split, valid_samples=None),
        split="valid",
    )[0]


def renaming(run: str, new: str, *, remove: bool = False) -> Step:
    """Rename a run of its own, beside which there is run `RUN-taken`."""

    def call(bench: Calls) -> None:
        bench.own(run)
        bench.own(f"{run}-taken", samples=40)
        if remove:
            megablend.remove_run(bench.config, new)
        megablend.rename_run(bench.config, run, new)

    return call


def tokenizer(vocabulary: dict[str, int] | None) -> Callable[[Run], None]:
    """Write a tokenizer.json, or what is none."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
    content = {} if vocabulary is None else {"version": "1.0", "model": model}

    def write(bench: Run) -> None:
        (bench.folder / "tokenizer.json").write_text(json.dumps(content))

    return write


def data_of_splits(bench: Run) -> None:
    """Each split has a file of its own, with the same name."""
    sources = {
        split: [write_source(bench.folder, i, "parquet", documents(i, 60, 30, 5), num_files=1)]
        for i, split in enumerate(("train", "valid", "test"))
    }
    bench.change(
        {"run": "splits", "sources": sources, "samples": 20, "valid_samples": 4, "test_samples": 4}
    )
    bench.build()


# fmt: off
test_arguments = table(
    misuse(compare("cache"), r"cache: is a folder; give a config, a run's ledger \(runs/NAME.json of a cache\) or a state$",
           compare("run.json"), compare("cache/runs/default.json"), compare("state.json"), name="a difference to a folder"),
    misuse(compare("ledger.json"),
           r"is a run's ledger, but outside its cache; give the one inside the cache that holds its index \(CACHE/runs/",
           compare("cache/runs/default.json"), name="a difference to a ledger elsewhere"),
    misuse(compare("s3://bucket/cache/runs/default.json"),
           "is in an object store; give the run's config, or a state file$",
           compare("run.json"), compare("state.json"), name="a difference to a URL"),
    misuse(renaming("a", "a-taken"), "a run 'a-taken' already exists; remove it first, or choose another name$",
           renaming("b", "b-taken", remove=True), renaming("c", "c-another"), name="a name that is taken"),
    misuse(opening(state="train", consumed_samples=4),
           "found both state and consumed_samples; pass only the state, which contains consumed_samples",
           opening(state="train"), opening(consumed_samples=4), name="a state and a number"),
    misuse(opening(split="valid", consumed_samples=4),
           r"found consumed_samples=4 for valid, .*; pass the saved state, from state_dict\(\), as state=$",
           opening(split="valid", state="valid"), name="a number for validation"),
    misuse(showing(80), "found sample 80, expected 0 to 79: train has 80 samples", showing(79), showing(0),
           name="a sample after the last"),
    misuse(showing_unrecorded(),
           "split valid: the cache has no valid split of run 'old'; if the run's config has one, pass the config instead of "
           "the cache$",
           showing_unrecorded(config=True), showing_unrecorded(again=True), name="another split of a ledger"),
    misuse(loading(first=double, transform=double),
           "transform: both the dataset and the loader have one; pass it to only one of them",
           loading(first=double), loading(transform=double), name="two transforms"),
    misuse(loading(num_workers=1, in_order=False),
        "in_order: found False, expected True: a saved state only counts the samples consumed so far, so batches "
        "must arrive in order",
           loading(in_order=True), name="batches out of order"),
    misuse(loading(micro_batch_size=81),
           "train has 80 samples, fewer than the 81 in one step .*; use a smaller micro batch, or drop_last=False",
           loading(micro_batch_size=80), loading(micro_batch_size=81, drop_last=False), name="a batch that is too large"),
    misuse(loading_after_a_skip(micro_batch_size=3),
           "steps of 3 samples from sample 0 on would reach into samples 8 to 16, which are skipped: choose a micro batch.*"
           r"or `megablend skip` the range again with --batch 3",
           loading_after_a_skip(micro_batch_size=2), loading_after_a_skip(), loading_after_a_skip(again=3, micro_batch_size=3),
           name="a step into what is skipped"),
    misuse(loading_after_a_skip(consumed=2), r"steps of 4 samples from sample 2 on .* whose steps end at sample 8$",
           loading_after_a_skip(consumed=4), name="a step that begins elsewhere"),  # no range of steps of 4 helps
    misuse(validating("9999,1,0"),
           "split 'valid' has fewer tokens than one sample of 8 tokens .*: give it a larger share in `split`",
           validating("90,10,0"), name="validation of no sample"),
    bench="calls",
)

test_commands = table(
    misuse("show CONFIG", "give either --sample or --step", "show CONFIG --sample 0", "show CONFIG --step 0 --micro-batch 2"),
    misuse("show CONFIG --step 0", "--step needs --micro-batch", "show CONFIG --step 0 --micro-batch 2"),
    misuse("show CONFIG --sample 0 --rank 1", "--rank needs --step",
           "show CONFIG --step 0 --micro-batch 2 --data-parallel 2 --rank 1"),
    misuse("show CONFIG --sample 150", "expected 0 to (149)", "show CONFIG --sample {1}"),
    misuse("show CONFIG --step 75 --micro-batch 2", "expected 0 to (74)", "show CONFIG --step {1} --micro-batch 2"),
    misuse("show CONFIG --step 0 --micro-batch 2 --global-batch 3", "expected a multiple of micro batch 2 x 1 ranks = 2",
           "show CONFIG --step 0 --micro-batch 2 --global-batch 4"),
    misuse("describe CONFIG --ranks 4", "needs --micro-batch", "describe CONFIG --ranks 4 --micro-batch 2"),
    misuse("describe CONFIG --sort share --match x", r"patterns may contain \* and \?, such as", "describe CONFIG --match a*"),
    misuse("describe CONFIG --sort shares", "did you mean '(share)'", "describe CONFIG --sort {1}"),
    misuse("describe CACHE --top 2", "is a cache; give a config", "describe CONFIG --top 2"),
    misuse("skip CONFIG --to 4", "--to needs --from", "skip CONFIG --from 0 --to 4 --batch 2"),
    misuse("skip CONFIG --from 0", "--from needs --to and --batch", "skip CONFIG --from 0 --to 4 --batch 2"),
    misuse("runs reset CACHE", "is a cache, which can hold several runs; give the name of a run as well .`megablend (runs list) ",
           "{1} CACHE", "runs reset CACHE default"),
    misuse("runs remove CACHE x", r"contains no run 'x'; its runs: '(default)'", "runs remove CACHE {1}"),
    misuse("find CONFIG 1.parquet:1", "`megablend describe` lists the sources", "describe CONFIG", "find CONFIG 0.parquet"),
    misuse("find CONFIG 0.parquet:1", "has no row counts .*; omit the row to search the whole file$",
           "find CONFIG 0.parquet"),
    *(fault(f"a file of {split}", data_of_splits, r"is read by no source of train; give the .* \(`(--split)`\)$",
            f"find CONFIG source{i}/0.parquet {{1}} {split}", fails=f"find CONFIG source{i}/0.parquet", works=())
      for i, split in ((1, "valid"), (2, "test"))),
    fault("a file of several splits", data_of_splits, r"3 files have this ending .*; give more of the path$",
          "find CONFIG source0/0.parquet",
          fails="find CONFIG 0.parquet", works=()),
    fault("a tokenizer that is none", tokenizer(None), "tokenizer.json: cannot be loaded as a tokenizer.json",
          tokenizer({str(i): i for i in range(50)}), fails="show CONFIG --sample 0 --tokenizer {folder}/tokenizer.json"),
    *(misuse(lambda bench, days=days: megablend.gc(bench.cache, older_than_days=days),
             rf"found older_than_days={days}, expected (0) or more days",
             lambda bench: megablend.gc(bench.cache, older_than_days=float(bench.said[1])), name=f"{days} days")
      for days in (-1, float("nan"))),
    bench="project",
)
# fmt: on
