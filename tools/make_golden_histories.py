"""Make the golden histories of tests/releases: runs that were amended, grown, skipped, renamed, as a release left them.

Run it with that release's code, never with a later one, in a folder that does not exist yet:

    git worktree add /tmp/release 71d913b
    PYTHONPATH=/tmp/release python tools/make_golden_histories.py tests/releases/h71d913b

Made once. For each history there is a folder with data, cache (with the plans that the release stored) and config.json, the
config at its end, with relative paths; and expected.json:

    ledger    digests of the run's stages at the end
    splits    for each split, of every field of every sample a digest: hex, 8 letters a sample
    states    taken before, in and after each change: the state, whether the run at its end accepts it, and digests as above of
              the samples that follow
    skips     ranges that are skipped

With `--bucket URL` (of an empty cache in an object store) it makes one history more, whose cache is there: `bucket/` then has its
objects, and `node/` the copy that the node which built it kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
FOLLOWING = 12
"""Samples after a state of which digests are kept."""


def write_file(path: str, seed: int, count: int, *, flat: bool = False) -> None:
    """A Parquet file of distinct tokens, in pages of some documents."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = [(seed * 7 + i * 5) % 23 for i in range(count)]
    first = 1 + seed * 5000
    rows = []
    for length in lengths:
        rows.append(list(range(first, first + length)))
        first += length
    flattened = [token for row in rows for token in row]
    column = pa.array(flattened, pa.int32()) if flat else pa.array(rows, pa.list_(pa.int32()))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    options = {
        "data_page_size": 160,
        "write_batch_size": 4,
        "use_dictionary": False,
        "write_page_index": True,
    }
    pq.write_table(pa.table({"ids": column}), path, **options)


def base(**changes: Any) -> Config:
    """The config that histories begin with: two sources of two files each."""
    if not Path("data/a").exists():
        for number, name in enumerate(("a", "b")):
            for part in range(2):
                write_file(f"data/{name}/{part}.parquet", 2 * number + part, 40)
    sources = [
        {
            "name": name,
            "path": f"data/{name}/*.parquet",
            "column": "ids",
            "weight": weight,
            "append_eod": 0,
        }
        for name, weight in (("a", 3), ("b", 1))
    ]
    config = {
        "cache": "cache",
        "run": "run",
        "sequence_length": 8,
        "samples": 160,
        "block_bytes": 64,
        "lanes": 4,
    }
    return (
        config | {"shuffle_window": 4, "seed": 11, "split": "85,15,0", "sources": sources} | changes
    )


class History:
    """A run on its way: what it was built from, and the states that were taken."""

    def __init__(self) -> None:
        self.config: Config = {}
        self.states: list[dict[str, Any]] = []

    def build(self, config: Config) -> None:
        """Build a config."""
        import megablend

        self.config = config
        Path("config.json").write_text(json.dumps(config, indent=1))
        megablend.build("config.json")

    def amend(self, config: Config, at: int, *, index: bool = False) -> int:
        """Amend the run, with states before, in and after the change; the first sample that may differ."""
        import megablend

        self.config = config
        Path("config.json").write_text(json.dumps(config, indent=1))
        if index:
            megablend.build_index("config.json")
        found = megablend.amend("config.json", at=at)
        for consumed in (
            found.at - 4,
            found.at,
            found.at + found.drain // 2,
            found.at + found.drain + 4,
        ):
            self.take_state(consumed)
        return int(found.at)

    def take_state(self, consumed: int) -> None:
        """Keep a state of a position."""
        import megablend

        self.states.append(megablend.open("config.json").state_dict(consumed))


def amended_twice(history: History) -> None:
    """Other shares, then other lanes and windows."""
    history.build(base())
    history.take_state(100)
    weights = {"sources": {"b": {"weight": 5}}}
    history.amend(base(samples=320, stages=[{"samples": 160}, weights]), 40)
    history.take_state(90)  # refused after the next amendment
    other = {"lanes": 8, "shuffle_window": 2}
    history.amend(
        base(
            stages=[{"samples": 160}, {"samples": 320} | weights, {"samples": 480} | other],
            samples=None,
        ),
        72,
    )


def drained(history: History) -> None:
    """Longer samples from a sample on."""
    history.build(base())
    history.amend(base(samples=320, stages=[{"samples": 160}, {"sequence_length": 12}]), 48)


def grown(history: History) -> None:
    """Files come, go and are renamed."""
    history.build(base(order="document"))
    Path("data/a/1.parquet").rename("aside")
    Path("data/b/0.parquet").rename("data/b/9.parquet")
    write_file("data/b/5.parquet", 7, 30)
    stages = [{"samples": 160}, {"new_data": True, "sources": {"b": {"weight": 2}}}]
    history.amend(base(order="document", samples=480, stages=stages), 64, index=True)
    Path("aside").rename("data/a/1.parquet")  # samples before the amendment need it


def grown_at_the_end(history: History) -> None:
    """A file is gone when a stage is added at the end."""
    history.build(base())
    history.take_state(159)
    Path("data/a/0.parquet").rename("aside")
    history.build(base(samples=None, stages=[{"samples": 160}, {"samples": 320, "new_data": True}]))
    for consumed in (159, 160, 164):
        history.take_state(consumed)
    Path("aside").rename("data/a/0.parquet")


def withdrawn(history: History) -> None:
    """A source is withdrawn, and samples get longer."""
    history.build(base())
    stages = [{"samples": 160}, {"withdraw": ["b"], "sequence_length": 12}]
    history.amend(base(samples=320, stages=stages), 64, index=True)


def scheduled(history: History) -> None:
    """Shares that change over a stage, which is then cut."""
    change = {"schedule": "cosine", "steps": 4, "sources": {"b": {"weight": 6}}}
    history.build(base(samples=None, stages=[{"samples": 64}, {"samples": 320} | change]))
    stages = [
        {"samples": 64},
        {"samples": 320} | change,
        {"samples": 400, "sources": {"a": {"weight": 1}}},
    ]
    history.amend(base(samples=None, stages=stages), 160)


def redistributed(history: History) -> None:
    """A source is read up to its cap."""
    config = base(on_exhausted="redistribute", samples=200)
    config["sources"][0]["max_epochs"] = 1
    history.build(config)
    history.take_state(101)


def flat(history: History) -> None:
    """A column of tokens, each of which counts as a document."""
    write_file("data/f/0.parquet", 3, 60, flat=True)
    source = {
        "name": "f",
        "path": "data/f/*.parquet",
        "column": "ids",
        "weight": 1,
        "append_eod": 0,
    }
    history.build(base(sources=[source], order="document"))
    history.take_state(33)


def masked(history: History) -> None:
    """Masks by stage."""
    stages = [{"samples": 80}, {"samples": 160, "eod_mask_loss": True, "reset_position_ids": True}]
    stages.append({"samples": 240, "inter_document_masking": True, "reset_position_ids": False})
    history.build(base(samples=None, eod_token=0, stages=stages))
    history.take_state(80)


def off_lanes(history: History) -> None:
    """A last stage that ends off its lanes, and grows."""
    history.build(base(samples=None, stages=[{"samples": 83}]))
    history.take_state(82)
    history.build(base(samples=None, stages=[{"samples": 83}, {"samples": 161, "lanes": 8}]))
    history.take_state(83)


def skipped(history: History) -> None:
    """Ranges that are skipped, in a run that was lengthened and renamed."""
    import megablend

    history.build(base(run="first"))
    megablend.skip("config.json", 16, 24, batch_size=4)
    history.build(base(run="first", samples=240))
    megablend.skip("config.json", 200, 208, batch_size=4)
    megablend.rename_run("config.json", "first", "run")
    history.build(base(samples=240))
    history.take_state(24)


def reset(history: History) -> None:
    """A run that was reset and planned again; a state of the plan before opens."""
    import megablend

    history.build(base())
    history.take_state(40)
    megablend.reset_run("config.json", "run")
    history.build(base(samples=200, seed=12))
    history.take_state(44)


def in_a_bucket(history: History, url: str) -> None:
    """A cache in an object store, of which the node that built it keeps a copy."""
    from megablend.storage.object_options import ObjectOptions
    from megablend.storage.objects.prefix import ObjectPrefix

    os.environ["MEGABLEND_LOCAL_CACHE"] = str(Path("nodes").absolute())
    history.build(base(cache=url))
    history.take_state(100)
    history.amend(
        base(cache=url, samples=320, stages=[{"samples": 160}, {"sources": {"b": {"weight": 5}}}]),
        40,
    )
    prefix = ObjectPrefix(url, ObjectOptions())
    for entry in prefix.list_objects():
        path = Path("bucket") / entry.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(prefix.read(entry.key) or b"")
    (node,) = Path("nodes").iterdir()
    node.rename("node")


HISTORIES: list[Callable[[History], None]] = [
    *(amended_twice, drained, grown, grown_at_the_end, withdrawn, scheduled, redistributed),
    *(flat, masked, off_lanes, skipped, reset),
]


def digest_samples(dataset: Any, ks: range) -> dict[str, str]:
    """Of each field of each sample a digest, 8 letters a sample; "--------" for a field that a sample does not have."""
    samples = [dataset[k] for k in ks]
    names = sorted({name for sample in samples for name in sample})
    return {name: "".join(_digest(sample.get(name)) for sample in samples) for name in names}


def _digest(value: Any) -> str:
    if value is None:
        return "-" * 8
    array = np.asarray(value)
    kind = "f8" if array.dtype.kind == "f" else "i8"
    text = f"{array.shape}".encode() + np.ascontiguousarray(array, f"<{kind}").tobytes()
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def describe_history(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What the run of config.json reads at its end, and what it does with the states."""
    import megablend
    from megablend.errors import StateError

    run = json.loads(Path("config.json").read_text())["run"]
    train = megablend.open("config.json")
    splits = {"train": train, "valid": megablend.open("config.json", "valid")}
    kept = []
    for state in states:
        try:
            dataset = megablend.open("config.json", state=state)
        except StateError:
            kept.append({"state": state, "following": None})
            continue
        first = state["consumed_samples"]
        following = digest_samples(dataset, range(first, min(first + FOLLOWING, len(dataset))))
        kept.append({"state": state, "following": following})
    return {
        "ledger": list(train.run.ledger.digests),
        "splits": {
            name: digest_samples(dataset, range(len(dataset))) for name, dataset in splits.items()
        },
        "states": kept,
        "skips": [list(each) for each in train.skips.ranges],
        "run": run,
    }


def make_all(folder: Path, bucket: str | None) -> Iterator[str]:
    """Make all histories, and name each."""
    here = Path.cwd()
    histories = HISTORIES
    if bucket is not None:
        histories = [*HISTORIES, update_wrapper(partial(in_a_bucket, url=bucket), in_a_bucket)]
    for make in histories:
        place = folder / make.__name__
        place.mkdir(parents=True)
        os.chdir(place)
        history = History()
        make(history)
        expected = describe_history(history.states)
        Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        shutil.rmtree("nodes", ignore_errors=True)
        for path in Path().rglob(".lock"):
            path.unlink()  # it names this machine; the next build makes it
        os.chdir(here)
        yield make.__name__


def main() -> None:
    """Make the folder, with the code that is imported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--bucket", metavar="URL")
    arguments = parser.parse_args()
    folder = arguments.out.absolute()
    if folder.exists():
        parser.error(f"{folder} exists; what a release wrote is never changed")
    try:
        for name in make_all(folder, arguments.bucket):
            print(name, flush=True)
    except BaseException:
        shutil.rmtree(folder)
        raise


if __name__ == "__main__":
    main()
