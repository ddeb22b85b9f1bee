"""Messages of `megablend megatron-cache`, `prepare` and the plugin: what they say to do is done, and then a cache is built."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.cli.megatron_cache import megatron_cache
from megablend.distributed.base import SingleProcess
from megablend.distributed.fail_together import FailTogether
from megablend.distributed.folder_groups import ranks_sharing_folder
from megablend.errors import ChangedFileError, MegablendError
from megablend.megatron import MegablendDatasetBuilder, MegablendGPTDataset
from megablend.megatron.cache_builder.idx_copies import copy_path, make_copies
from megablend.megatron.exact.epochs import num_epochs
from megablend.megatron.exact.shuffle import Generator, document_index
from megablend.storage.by_scheme import make_storage
from megablend.testing.moved import MovedStorage
from tests.behaviour.remedies.driver import Bench, Step, fault, misuse, table
from tests.cli.commands import runner_with_stderr
from tests.megatron.exact.whole_index import sample_index
from tests.megatron.plugin_data import draw_documents, plugin_config, write_word
from tests.megatron.reference import process_group
from tests.pairs import write_pair

IDENTIFIERS = '{"class": "T", "tokenizer_path": []}'


class Call(Bench):
    """The flags of one call, each with its words; `_` stands for `-`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.patch = patch
        lengths = np.random.default_rng(0).integers(1, 60, (3, 1500))
        self.a, self.b, self.c = (
            write_pair(folder / f"{i}_text", each) for i, each in enumerate(lengths)
        )
        self.flags: dict[str, Any] = {
            "data_path": ["1", self.a, "2", self.b],
            "split": "8,1,1",
            "seq_length": 16,
            "train_samples": 300,
            "valid_samples": 30,
            "test_samples": 20,
            "tokenizer_identifiers": IDENTIFIERS,
            "data_cache_path": self.cache,
        }

    def change(self, settings: Mapping[str, Any]) -> None:
        """None leaves a flag out, True gives it no words."""
        self.flags |= settings

    def run(self) -> dict[str, Any]:
        words: list[str] = []
        for name, values in self.flags.items():
            if values is not None:
                words.append("--" + name.replace("_", "-"))
                words += (
                    []
                    if values is True
                    else map(str, values if isinstance(values, list) else [values])
                )
        done = runner_with_stderr().invoke(
            megatron_cache, [*words, "--json"], catch_exceptions=False, standalone_mode=False
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def use(self) -> str:
        found = self.run()
        assert found["splits"]
        return "\n".join(found["notes"])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A torch.distributed job of this process alone, which the other modules here must not be in."""
    with process_group(tmp_path_factory.mktemp("store")):
        yield


def give(**flags: Any) -> Step:
    return flags


def blends(text: str) -> Step:
    """Write `blends.json`, in which `{a}` and `{b}` are prefixes."""
    return lambda bench: (bench.folder / "blends.json").write_text(bench.fill(text)) and None


def write(lengths: Any, name: str = "0_text") -> Step:
    return lambda bench: write_pair(bench.folder / name, lengths) and None


def damage_array(bench: Call) -> None:
    bench.run()
    next(bench.cache.glob("*-GPTDataset-train-shuffle_index.npy")).write_bytes(b"x" * 300)


def legacy(bench: Call) -> None:
    (bench.folder / "0_text.idx").write_bytes(b"TNTIDX\0\0" + bytes(100))


def spoil_length(bench: Call) -> None:
    data = bytearray((bench.folder / "0_text.idx").read_bytes())
    data[34:38] = struct.pack("<i", -5)
    (bench.folder / "0_text.idx").write_bytes(data)


def take_earlier_identifiers(bench: Call) -> None:
    """Those in the description of an earlier run."""
    bench.change({"tokenizer_identifiers": IDENTIFIERS})
    bench.run()
    bench.change(
        {"tokenizer_identifiers": next(bench.cache.glob("*-GPTDataset-train-description.txt"))}
    )


def fill_disk(bench: Call) -> None:
    measure = shutil.disk_usage

    def measure_full(path: Path) -> Any:
        return measure(path) if "other" in str(path) else measure(path)._replace(free=7)

    bench.patch.setattr(shutil, "disk_usage", measure_full)


def without_locks(bench: Call) -> None:
    bench.patch.setattr("megablend.system.build_lock._try_lock", lambda _: 38)


def undo(bench: Call) -> None:
    bench.patch.undo()


BY_SPLIT = give(data_path=None, split=None, train_data_path=["1", "{a}"], valid_data_path=["{b}"])
BOTH = give(data_path=["1", "{a}", "2", "{b}"])

# fmt: off
test_cache = table(
    fault("no data", give(data_path=None),
          "data: found none; expected exactly one of --data-path; --data-args-path; --train-data-path, .*",
          give(data_path=["1", "{a}"])),
    fault("a flag without words", give(data_path=True), "--data-path has no value; give weights and prefixes, or omit it", BOTH,
          BY_SPLIT),
    fault("two kinds of data", give(train_data_path=["1", "{a}"]),
          "data: found --data-path and --train-data-path, .*; expected exactly one of",
          give(train_data_path=None), give(data_path=None, split=None)),
    fault("a prefix without a weight", give(data_path=["1", "{a}", "{b}", "{c}"]),
          "word 3 of 4 is .*; expected a weight before each prefix, as in 0.3 /data/a 0.7 /data/b, or prefixes alone",
          give(data_path=["0.3", "{a}", "0.7", "{b}"]), give(data_path=["{a}", "{b}", "{c}"])),
    fault("a suffix", give(data_path=["1", "{a}.bin"]),
          r"(/\S+)\.bin: Megatron adds .bin and .idx itself; give the path without its suffix", give(data_path=["1", "{1}"])),
    fault("an address of Parquet", give(data_path=["parquet:{a}?column=ids"]),
          r"parquet:/\S+\?column=ids: is not a \.bin/\.idx pair; use `parquet:` addresses only in training",
          give(data_path=["1", "{a}"])),
    fault("a wrong path, and no size", give(data_path=["1", "{a}-wrong"], valid_samples=None), r"-wrong\.bin: no such file$",
          give(data_path=["1", "{a}"], valid_samples=5)),
    fault("a pipe, and no size",
          (lambda bench: os.mkfifo(f"{bench.folder}/pipe.bin"), give(data_path=["1", "{folder}/pipe"], valid_samples=None)),
          r"pipe\.bin: is a pipe, a socket or a device, not a regular file; restore the file, or remove it from the config$",
          give(data_path=["1", "{a}"], valid_samples=5)),
    fault("an address of Parquet, and no size", give(data_path=["parquet:{a}"], valid_samples=None), r"not a \.bin/\.idx pair",
          give(data_path=["1", "{a}"], valid_samples=5)),
    fault("a weight of zero", give(data_path=["0", "{a}", "1", "{b}"]),
          "has weight 0.0; expected a number above 0, or leave the prefix out",
          give(data_path=["0.5", "{a}", "1", "{b}"]), give(data_path=["1", "{b}"])),
    fault("a split that is no numbers", give(split="x"), r"split 'x': .* such as (969,30,1)", give(split="{1}")),
    fault("a split with two points", give(split="9..6,1"),
          r"split '9\.\.6,1': .*; expected up to three numbers such as (969,30,1)$",
          give(split="{1}")),
    fault("a split with exponents", give(split="9e2,30,1"),
          "split '9e2,30,1': Megatron reads digits and decimal points only; write the proportions without signs or exponents",
          give(split="900,30,1")),
    fault("no cache folder", give(data_cache_path=""),
          r"no cache folder is set \(--data-cache-path, path_to_cache\); set the one that training will use$",
          give(data_cache_path="{cache}")),
    fault("no proportions", (blends("1 {a}"), give(data_path=None, split=None, data_args_path="{folder}/blends.json")),
          "--data-args-path needs --split, such as (969,30,1)", give(split="{1}")),
    fault("a split where each has its own", give(data_path=None, train_data_path=["1", "{a}"], valid_data_path=["1", "{b}"]),
          r"split '8,1,1' cannot be combined with a separate blend for each split \(.*\); leave out one of the two",
          give(split=None), give(train_data_path=None, valid_data_path=None, data_path=["{a}"])),
    fault("blends without a key",
          (blends('{"train": []}'), give(data_path=None, split=None, per_split_data_args_path="{folder}/blends.json")),
          r"expected an object with the keys train, valid and test \(null for a split without data\)",
          blends('{"train": ["1", "{a}"], "valid": ["{b}"], "test": null}')),
    fault("two sizes", give(train_iters=10, global_batch_size=4),
          "--train-samples and --train-iters are both given, .*; leave one out", give(train_iters=None),
          give(train_samples=None)),
    fault("no size of train", give(train_samples=None),
          "train: its size is unknown; give --train-samples, or --train-iters with --global-batch-size",
          give(train_samples=300), give(train_iters=10, global_batch_size=4)),
    fault("no batch", give(train_samples=None, train_iters=10),
          "train: the number of samples cannot be computed without --global-batch-size; add that flag, or --train-samples "
          "instead of --train-iters$",
          give(global_batch_size=4), give(train_iters=None, train_samples=300)),
    fault("no size of valid", give(valid_samples=None, global_batch_size=4),
          "valid: the number of samples cannot be computed without --eval-interval; add that flag, or --valid-samples",
          give(eval_interval=10),
          give(valid_samples=5)),
    fault("no batch of test", give(test_samples=None),
          "test: the number of samples cannot be computed without --global-batch-size; add that flag, or --test-samples",
          give(global_batch_size=1), give(test_samples=5)),
    fault("full validation of a number", (BY_SPLIT, give(full_validation=True)),
          "--full-validation takes whole epochs; leave out --valid-samples", give(valid_samples=None)),
    fault("full validation with weights",
          (BY_SPLIT, give(valid_samples=None, full_validation=True, valid_data_path=["1", "{b}"])),
          "valid: the number of samples is missing .* only for prefixes without weights; leave the weights out, or give a number",
          give(valid_data_path=["{b}"]), give(full_validation=None, valid_samples=5)),
    fault("no tokenizer", give(tokenizer_identifiers=None),
          r"expected exactly one of --tokenizer-identifiers \(such as an earlier run's (description.txt)\) and "
          r"--tokenizer-type",
          give(tokenizer_identifiers=IDENTIFIERS), take_earlier_identifiers),
    fault("identifiers without a class", give(tokenizer_identifiers="{}"),
          "expected an object with a `class`, as in an earlier run's description.txt", give(tokenizer_identifiers=IDENTIFIERS)),
    fault("a size of memory", give(max_memory="lots"), "--max-memory 'lots': expected bytes, or a size such as (64G) or (64GiB)",
          give(max_memory="{1}"), give(max_memory="{2}")),
    fault("too little memory", give(max_memory="1k"),
          r"need ([\d,]+) bytes of memory, but .*; raise --max-memory, free memory, or request fewer samples",
          lambda bench: bench.change({"max_memory": bench.said[1].replace(",", "")})),
    fault("a legacy file", legacy, "is in Megatron's legacy format; recreate it with Megatron's tools/preprocess_data.py",
          write([20] * 300)),
    fault("a negative length", spoil_length, "sequence 0 has -5 tokens; expected 0 or more: restore the file", write([20] * 300)),
    fault("a split without tokens", (write([40] * 9 + [0], "few"), give(data_path=["{folder}/few"], split="8,1,1")),
          r"contain no tokens, and Megatron would .*; give the split a larger part of the data, or none \(0 in --split\)",
          give(split="6,2,2"), give(split="1,0,0")),
    fault("a sequence length", give(seq_length=0), "the sequence length is 0; expected 1 or more", give(seq_length=1)),
    fault("a seed", give(seed=-1), r"the seed is -1; numpy's RandomState takes 0 to ([\d,]+)", give(seed=0),
          give(seed=2**32 - 1)),
    fault("a disk without room", fill_disk,
          r"cache: 7 bytes are free, but the files need [\d,]+; free disk space or choose another folder$",
          undo, give(data_cache_path="{folder}/other")),
    fault("a file system without locks", without_locks, "cache: .* does not support locks; run only one build at a time$", undo),
    fault("more epochs than Megatron counts",
          (write([3], "small"), give(data_path=["1", "{folder}/small"], split="1", dry_run=True),
                                               give(train_samples=600_000_000, valid_samples=None, test_samples=None)),
          "read its 3 tokens [0-9,]+ times, but Megatron supports at most 2,147,483,647 epochs; request fewer "
          "samples, or add data",
          give(train_samples=300, dry_run=None), give(data_path=["1", "{a}"])),
    fault("an array that is damaged", damage_array, "shuffle_index.npy", ()),  # it is built again
)

test_shared_file_system = table(
    *(misuse(lambda bench, take=take: take(bench, "maybe"), r"shared_fs is 'maybe'; choose one of (\w+), (\w+), (\w+)",
             *(lambda bench, take=take, i=i: take(bench, bench.said[i]) for i in (1, 2, 3)), name=name)
      for name, take in (
          ("of a builder", lambda bench, word: ranks_sharing_folder(FailTogether(0, 1, lambda value: [value]), None, word)),
          ("of the plugin", lambda bench, word: plugin_config(bench.folder, blend=(["a"], None), split="1", shared_fs=word)))),
)
# fmt: on


def test_an_idx_that_changes_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def index_of(documents: int) -> Any:
    return document_index(np.arange(documents), 1, Generator(1), separate_final_epoch=False)


def samples_of(documents: int) -> Step:
    lengths = np.array([5, 6], np.int32)

    def call(_: object) -> None:
        assert sample_index(lengths, index_of(documents), 4, 2, extra=1).shape == (3, 2)

    return call


def epochs(tokens: int, samples: int | None, expected: int) -> Step:
    def call(_: object) -> None:
        assert num_epochs(tokens, samples, 8, 1) == expected

    return call


test_exact_arrays = table(
    misuse(
        epochs(0, 10, 0),
        "expected at least one: give it a larger share of the data, or a share of 0",
        epochs(9, 10, 9),
        epochs(0, None, 1),
        name="a split without tokens",
    ),
    misuse(
        samples_of(3),
        "refers to documents 0 to 2, but lengths are given for only 2; rebuild the index for these documents",
        samples_of(2),
        name="an index of other documents",
    ),
)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("kind", "order", "says"),
    [
        ("parquet", "megatron", "when it was indexed"),
        ("arrow", "megatron", "when it was indexed"),
        ("parquet", "block", "when it was indexed"),
        ("megatron", "block", "when it was indexed"),
        ("megatron", "megatron", "was replaced while it was in use"),
    ],
)
@pytest.mark.usefixtures("distributed")
def test_a_file_that_changed_is_answered_with_what_a_user_of_megatron_can_do(
    tmp_path: Path, kind: str, order: str, says: str, at_once: bool
) -> None:
    """There is no config whose `run:` could be another."""
    word = write_word(tmp_path / "data", kind, draw_documents(1))
    config = plugin_config(
        tmp_path / "cache", blend=([word], None), split="1", order=order, max_open_files=1
    )

    def build() -> Any:
        return MegablendDatasetBuilder(
            MegablendGPTDataset, [60, 0, 0], lambda: True, config
        ).build()[0]

    dataset = build()
    if "in use" in says:
        assert [len(dataset[k]["tokens"]) for k in (0, 1)] == [16, 16]
    shutil.rmtree(tmp_path / "data")
    write_word(tmp_path / "data", kind, draw_documents(2))
    remedy = rf"{says}.*; restore the file, or remove the cache \((.*)\) and restart the job, which builds it again$"
    numbers = [[k, k + 1] if at_once else [k] for k in range(59)]
    with pytest.raises(ChangedFileError, match=remedy) as caught:
        [dataset.__getitems__(batch) for batch in numbers]
    assert "run:" not in str(caught.value)
    found = re.search(remedy, str(caught.value))
    assert found
    shutil.rmtree(found[1])
    assert len(build().__getitems__([*range(60)])) == 60
