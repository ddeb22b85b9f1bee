"""Messages of `megablend megatron-cache` and `prepare`: what they say to do is done, and then the cache is built."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest

from megablend.cli.megatron_cache import megatron_cache
from megablend.distributed.base import SingleProcess
from megablend.distributed.fail_together import FailTogether
from megablend.distributed.folder_groups import ranks_sharing_folder
from megablend.errors import MegablendError
from megablend.megatron.cache_builder.idx_copies import copy_path, make_copies
from megablend.megatron.request.dataset_uri import parse_address
from megablend.storage.by_scheme import make_storage
from megablend.testing.moved import MovedStorage
from tests.cli.commands import runner_with_stderr
from tests.pairs import write_pair

IDENTIFIERS = '{"class": "T", "tokenizer_path": []}'


class Call:
    """The flags of one call; each with its words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lengths = np.random.default_rng(0).integers(1, 60, (3, 1500))
        self.a, self.b, self.c = (write_pair(folder / f"{i}_text", each) for i, each in enumerate(lengths))
        self.flags: dict[str, list[str]] = {
            "--data-path": ["1", self.a, "2", self.b],
            "--split": ["8,1,1"],
            "--seq-length": ["16"],
            "--train-samples": ["300"],
            "--valid-samples": ["30"],
            "--test-samples": ["20"],
            "--tokenizer-identifiers": [IDENTIFIERS],
            "--data-cache-path": [str(folder / "cache")],
        }

    def give(self, **flags: object) -> None:
        """Set flags, of which `_` stands for `-`; None leaves one out, True gives it no words."""
        for name, words in flags.items():
            flag = "--" + name.replace("_", "-")
            self.flags.pop(flag, None)
            if words is True:
                self.flags[flag] = []
            elif words is not None:
                self.flags[flag] = [str(word) for word in (words if isinstance(words, list) else [words])]

    def run(self) -> dict[str, Any]:
        words = [word for flag, values in self.flags.items() for word in (flag, *values)]
        done = runner_with_stderr().invoke(
            megatron_cache, [*words, "--json"], catch_exceptions=False, standalone_mode=False
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


Change = Callable[[Call], Any]
Remedy = Callable[[Call, "re.Match[str]"], Any]


class Fault(NamedTuple):
    make: Change
    says: str
    remedies: list[Remedy]
    """One for each way out that the message names."""


def give(**flags: object) -> Change:
    return lambda call: call.give(**flags)


def then_give(**flags: object) -> Remedy:
    return lambda call, _: call.give(**flags)


def write_blends(call: Call, text: str) -> str:
    path = call.folder / "blends.json"
    path.write_text(text)
    return str(path)


def damage_array(call: Call) -> None:
    call.run()
    next((call.folder / "cache").glob("*-GPTDataset-train-shuffle_index.npy")).write_bytes(b"x" * 300)


def legacy(call: Call) -> None:
    (call.folder / "0_text.idx").write_bytes(b"TNTIDX\0\0" + bytes(100))


def two_epochs_of_validation(call: Call) -> None:
    call.give(data_path=None, split=None, train_data_path=["1", call.a], valid_data_path=[call.b], full_validation=True)
    call.give(valid_samples=30)


FAULTS: dict[str, Fault] = {
    "no data": Fault(
        give(data_path=None),
        r"data: found none; expected one of --data-path; --data-args-path; --train-data-path, .*",
        [lambda call, _: call.give(data_path=["1", call.a])],
    ),
    "a flag without words": Fault(
        lambda call: call.give(data_path=True),
        "--data-path has no value; give weights and prefixes, or omit it",
        [
            lambda call, _: call.give(data_path=["1", call.a, "2", call.b]),
            lambda call, _: call.give(
                data_path=None, split=None, train_data_path=["1", call.a], valid_data_path=[call.b]
            ),
        ],
    ),
    "two kinds of data": Fault(
        lambda call: call.give(train_data_path=["1", call.a]),
        "data: found --data-path and --train-data-path, .*; expected one of",
        [then_give(train_data_path=None), lambda call, _: call.give(data_path=None, split=None)],
    ),
    "a prefix without a weight": Fault(
        lambda call: call.give(data_path=["1", call.a, call.b, call.c]),
        r"word 3 of 4 is .*; expected a weight before each prefix, as in 0.3 /data/a 0.7 /data/b, or prefixes alone",
        [
            lambda call, _: call.give(data_path=["0.3", call.a, "0.7", call.b]),
            lambda call, _: call.give(data_path=[call.a, call.b, call.c]),
        ],
    ),
    "a suffix": Fault(
        lambda call: call.give(data_path=["1", f"{call.a}.bin"]),
        r"(\S+)\.bin: Megatron adds .bin and .idx itself; give the path without its suffix",
        [lambda call, found: call.give(data_path=["1", found[1]])],
    ),
    "a weight of zero": Fault(
        lambda call: call.give(data_path=["0", call.a, "1", call.b]),
        "has weight 0.0; expected a number above 0, or leave the prefix out",
        [
            lambda call, _: call.give(data_path=["0.5", call.a, "1", call.b]),
            lambda call, _: call.give(data_path=["1", call.b]),
        ],
    ),
    "a split that is no numbers": Fault(
        give(split="x"),
        "split 'x': .* such as (969,30,1)",
        [lambda call, found: call.give(split=found[1])],
    ),
    "a split with two points": Fault(
        give(split="9..6,1"),
        r"split '9\.\.6,1': .*; expected up to three numbers such as (969,30,1)$",
        [lambda call, found: call.give(split=found[1])],
    ),
    "no cache folder": Fault(
        give(data_cache_path=""),
        r"no cache folder is set \(--data-cache-path, path_to_cache\); set the one that training will use$",
        [lambda call, _: call.give(data_cache_path=str(call.folder / "cache"))],
    ),
    "a split with exponents": Fault(
        give(split="9e2,30,1"),
        "split '9e2,30,1': Megatron reads digits and points only; write the proportions without signs or exponents",
        [then_give(split="900,30,1")],
    ),
    "no proportions": Fault(
        lambda call: call.give(data_path=None, split=None, data_args_path=write_blends(call, f"1 {call.a}")),
        "--data-args-path needs --split, such as (969,30,1)",
        [lambda call, found: call.give(split=found[1])],
    ),
    "a split where each has its own": Fault(
        lambda call: call.give(data_path=None, train_data_path=["1", call.a], valid_data_path=["1", call.b]),
        "split '8,1,1' contradicts blends by split, which are not divided; leave out one of them",
        [
            then_give(split=None),
            lambda call, _: call.give(train_data_path=None, valid_data_path=None, data_path=[call.a]),
        ],
    ),
    "blends without a key": Fault(
        lambda call: call.give(
            data_path=None, split=None, per_split_data_args_path=write_blends(call, '{"train": []}')
        ),
        r"expected an object with the keys train, valid and test \(null for a split without data\)",
        [lambda call, _: write_blends(call, json.dumps({"train": ["1", call.a], "valid": [call.b], "test": None}))],
    ),
    "two sizes": Fault(
        give(train_iters=10, global_batch_size=4),
        "--train-samples and --train-iters are both given; Megatron takes one of them",
        [then_give(train_iters=None), then_give(train_samples=None)],
    ),
    "no size of train": Fault(
        give(train_samples=None),
        "train: its size needs --train-samples or --train-iters, or set it directly by --train-samples",
        [then_give(train_samples=300), then_give(train_iters=10, global_batch_size=4)],
    ),
    "no batch": Fault(
        give(train_samples=None, train_iters=10),
        "train: its size needs --global-batch-size, or set it directly by --train-samples",
        [then_give(global_batch_size=4), then_give(train_iters=None, train_samples=300)],
    ),
    "no size of valid": Fault(
        give(valid_samples=None, global_batch_size=4),
        "valid: its size needs --eval-interval, or set it directly by --valid-samples",
        [then_give(eval_interval=10), then_give(valid_samples=5)],
    ),
    "no batch of test": Fault(
        give(test_samples=None),
        "test: its size needs --global-batch-size, or set it directly by --test-samples",
        [then_give(global_batch_size=1), then_give(test_samples=5)],
    ),
    "full validation of a number": Fault(
        two_epochs_of_validation,
        "--full-validation takes whole epochs; leave out --valid-samples",
        [then_give(valid_samples=None)],
    ),
    "full validation with weights": Fault(
        lambda call: call.give(
            data_path=None,
            split=None,
            valid_samples=None,
            full_validation=True,
            train_data_path=["1", call.a],
            valid_data_path=["1", call.b],
        ),
        "valid: the number of samples is missing .* for prefixes without weights only; leave the weights out, or give a number",
        [
            lambda call, _: call.give(valid_data_path=[call.b]),
            lambda call, _: call.give(full_validation=None, valid_samples=5),
        ],
    ),
    "no tokenizer": Fault(
        give(tokenizer_identifiers=None),
        r"expected either --tokenizer-identifiers \(such as an earlier run's (description.txt)\) or --tokenizer-type",
        [lambda call, _: call.give(tokenizer_identifiers=IDENTIFIERS), lambda call, found: earlier_run(call)],
    ),
    "identifiers without a class": Fault(
        give(tokenizer_identifiers="{}"),
        "expected an object with a `class`, as in an earlier run's description.txt",
        [then_give(tokenizer_identifiers=IDENTIFIERS)],
    ),
    "a size of memory": Fault(
        give(max_memory="lots"),
        "--max-memory 'lots': expected bytes, or a size such as (64G) or (64GiB)",
        [lambda call, found: call.give(max_memory=found[1]), lambda call, found: call.give(max_memory=found[2])],
    ),
    "too little memory": Fault(
        give(max_memory="1k"),
        r"take ([\d,]+) bytes of memory, but .*; allow that much, or request fewer samples",
        [lambda call, found: call.give(max_memory=found[1].replace(",", ""))],
    ),
    "an interleaving": Fault(
        give(blend="x"),
        "blend 'x' is unknown; choose (\\S+) or (\\S+)$",
        [lambda call, found: call.give(blend=found[1]), lambda call, found: call.give(blend=found[2])],
    ),
    "a legacy file": Fault(
        legacy,
        "is in Megatron's legacy format; recreate it with Megatron's tools/preprocess_data.py",
        [lambda call, _: write_pair(call.folder / "0_text", [20] * 300)],
    ),
    "a negative length": Fault(
        lambda call: spoil_length(call.folder / "0_text.idx"),
        r"sequence 0 has -5 tokens; expected 0 or more: restore the file",
        [lambda call, _: write_pair(call.folder / "0_text", [20] * 300)],
    ),
    "a split without tokens": Fault(
        lambda call: call.give(data_path=[write_pair(call.folder / "few", [40] * 9 + [0])], split="8,1,1"),
        r"contain no tokens, and Megatron would .*; give the split a larger part of the data, or none \(0 in --split\)",
        [then_give(split="6,2,2"), then_give(split="1,0,0")],
    ),
    "a sequence length": Fault(
        give(seq_length=0), "the sequence length is 0; expected 1 or more", [then_give(seq_length=1)]
    ),
    "a seed": Fault(
        give(seed=-1),
        r"the seed is -1; numpy's RandomState takes 0 to ([\d,]+)",
        [then_give(seed=0), then_give(seed=2**32 - 1)],
    ),
}


def earlier_run(call: Call) -> None:
    """Take the identifiers from the description of an earlier run."""
    call.give(tokenizer_identifiers=IDENTIFIERS)
    call.run()
    call.give(tokenizer_identifiers=next((call.folder / "cache").glob("*-GPTDataset-train-description.txt")))


def spoil_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[34:38] = struct.pack("<i", -5)
    path.write_bytes(data)


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    for number, remedy in enumerate(fault.remedies):
        folder = tmp_path / str(number)
        folder.mkdir()
        call = Call(folder)
        fault.make(call)
        with pytest.raises((MegablendError, click.UsageError)) as caught:
            call.run()
        found = re.search(fault.says, str(caught.value), re.DOTALL)
        assert found, str(caught.value)
        remedy(call, found)
        assert call.run()["splits"]


def test_an_array_that_is_damaged_is_built_again(tmp_path: Path) -> None:
    call = Call(tmp_path)
    damage_array(call)
    found = call.run()
    assert len(found["notes"]) == 1
    assert not call.run()["notes"]


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, measure = Call(tmp_path), shutil.disk_usage

    def measure_full(path: Path) -> Any:
        return measure(path)._replace(free=7) if "other" not in str(path) else measure(path)

    says = r"cache: 7 bytes are free, but the files need [\d,]+; free disk space or choose another folder$"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", measure_full)
        with pytest.raises(MegablendError, match=says):
            call.run()
        call.give(data_cache_path=str(tmp_path / "other"))
        assert call.run()["splits"]
        call.give(data_cache_path=str(tmp_path / "cache"))
    assert call.run()["splits"]


@pytest.mark.parametrize(
    ("query", "says"),
    [("column=a&column=b", "option 'column' has two values"), ("column=", "option 'column' has no value")],
)
def test_an_option_of_an_address(query: str, says: str) -> None:
    with pytest.raises(MegablendError, match=f"{says}; give one$"):
        parse_address(f"parquet:/data/*.parquet?{query}")
    assert parse_address("parquet:/data/*.parquet?column=a").column == "a"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(tmp_path)
    monkeypatch.setattr("megablend.fs.build_lock._try_lock", lambda _: 38)
    (note,) = call.run()["notes"]
    assert note == f"{tmp_path}/cache: the file system has no locks; run one build at a time"
    call.give(data_cache_path=str(tmp_path / "other"))
    assert call.run()["splits"], "one at a time"


def test_more_epochs_than_megatron_counts(tmp_path: Path) -> None:
    call = Call(tmp_path)
    small = write_pair(tmp_path / "small", [3])
    call.give(data_path=["1", small], split=["1"], train_samples=600_000_000, valid_samples=None, test_samples=None)
    says = "read its 3 tokens [0-9,]+ times, and Megatron counts epochs in 32 bits; request fewer, or add data"
    with pytest.raises(MegablendError, match=says):
        call.run()
    call.give(train_samples=300)
    assert call.run()["splits"]
    call.give(data_path=["1", call.a], train_samples=600_000_000, dry_run=True)
    assert call.run()["splits"]


def test_an_idx_that_changes_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.idx").write_bytes(b"0123")
    storage = MovedStorage(make_storage())
    read = storage.read

    def read_while_it_is_written(path: str, offset: int, size: int) -> bytes:
        found = read(path, offset, size)
        (tmp_path / "x.idx").write_bytes(b"012345")
        return found

    prefix = f"moved:/{tmp_path}/x"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", read_while_it_is_written)
        says = "x.idx: changed while it was being copied; build again when its writer has finished"
        with pytest.raises(MegablendError, match=says):
            make_copies([prefix], tmp_path / "copies", launch=SingleProcess(), storage=storage)
    make_copies([prefix], tmp_path / "copies", launch=SingleProcess(), storage=storage)
    assert copy_path(tmp_path / "copies", f"{prefix}.idx").read_bytes() == b"012345"


def test_a_shared_file_system_that_is_neither_yes_nor_no() -> None:
    says = r"shared_fs is 'maybe'; choose one of (\w+), (\w+), (\w+)"
    with pytest.raises(MegablendError, match=says) as caught:
        ranks_sharing_folder(FailTogether(0, 1, lambda value: [value]), None, "maybe")
    found = re.search(says, str(caught.value))
    assert found
    for word in found.groups():
        assert ranks_sharing_folder(FailTogether(0, 1, lambda value: [value]), None, word) == []
