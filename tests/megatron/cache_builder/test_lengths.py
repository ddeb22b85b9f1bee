from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megablend.distributed.launch import detect
from megablend.errors import ChangedFileError, CorruptFileError, MissingFileError
from megablend.megatron.cache_builder import build_cache, worker
from megablend.megatron.cache_builder import lengths as module
from megablend.megatron.cache_builder.lengths import (
    LengthReader,
    counted_lengths,
    lengths_of,
    part_sizes,
    read_lengths,
    read_part,
)
from megablend.megatron.request.request import Blend, CacheRequest
from megablend.storage.by_scheme import make_storage
from tests.pairs import write_pair
from tests.storages import STORAGE


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "a", [3, 0, 1, 5, 7, 0, 2])


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_part_is_counted_and_read_in_pieces(
    prefix: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    stored = lengths_of(prefix, storage=STORAGE)
    part, rest = part_sizes(stored, [(0.2, 0.8), (0.8, 1.0)])
    assert (part.begin, part.end, part.tokens, part.num_sequences) == (1, 6, 13, 7)
    assert (rest.begin, rest.end, rest.tokens, rest.num_sequences) == (6, 7, 2, 7)
    assert counted_lengths(prefix, part.num_sequences, storage=STORAGE) == stored
    assert read_lengths(stored).tolist() == [3, 0, 1, 5, 7, 0, 2]
    lengths = read_part(stored, part)
    assert lengths.tolist() == [0, 0, 1, 5, 7, 0, 0]
    assert lengths.dtype == np.int32


def test_files_that_are_not_there_or_damaged(prefix: str) -> None:
    with pytest.raises(MissingFileError, match=r"b\.bin: "):
        lengths_of(prefix[:-1] + "b", storage=STORAGE)
    idx = Path(f"{prefix}.idx")
    whole = idx.read_bytes()
    idx.write_bytes(whole[:-1])
    with pytest.raises(CorruptFileError, match=r"a\.idx at byte 18: has 181 bytes"):
        lengths_of(prefix, storage=STORAGE)
    idx.write_bytes(whole[:38] + b"\xff\xff\xff\xff" + whole[42:])
    with pytest.raises(CorruptFileError, match=r"a\.idx at byte 38: sequence 1 has -1 tokens"):
        part_sizes(lengths_of(prefix, storage=STORAGE), [(0.0, 1.0)])


@pytest.mark.parametrize("cut", [1, 4, 36])
def test_a_bin_that_is_shorter_than_its_idx_says(prefix: str, cut: int) -> None:
    data = Path(f"{prefix}.bin")
    data.write_bytes(data.read_bytes()[:-cut])
    says = (
        rf"a\.idx at byte 58: sequence 6 \(2 tokens of 2 bytes at byte 32\) is outside the \.bin of {36 - cut} bytes: "
        "one of the two files is truncated or belongs to another pair"
    )
    with pytest.raises(CorruptFileError, match=says):
        lengths_of(prefix, storage=STORAGE)


def test_a_bin_that_is_longer_than_its_idx_says(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths_of(prefix, storage=STORAGE)
    assert not caplog.messages
    data = Path(f"{prefix}.bin")
    data.write_bytes(data.read_bytes() + bytes(10))
    lengths_of(prefix, storage=make_storage())
    assert caplog.messages == [
        f"{data}: has 46 bytes, of which {prefix}.idx describes the first 36; the rest is never read; check that the two files "
        "belong together"
    ]


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_last_sequence_that_is_not_stored_last(
    prefix: str,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is said of bytes that another sequence describes."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    idx = Path(f"{prefix}.idx")
    whole = bytearray(idx.read_bytes())
    pointers = np.frombuffer(whole, "<i8", 7, 34 + 4 * 7)
    pointers[[3, 6]] = 26, 8  # five tokens at the end, two of those before
    idx.write_bytes(whole)
    assert lengths_of(prefix, storage=STORAGE).num_sequences == 7
    assert not caplog.messages


def test_lengths_of_a_table(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.array([4, 0, 3], np.int32))
    prefix = "arrow:/data/*.arrow"
    request = replace(
        make_request(tmp_path, prefix), lengths_at={prefix: str(tmp_path / "table.npy")}
    )
    reader = LengthReader(request, STORAGE, keep_bytes=0)
    (size,) = reader.count(prefix, [(0.0, 1.0)])
    assert size.tokens == 7
    assert reader.find(prefix, size).read(1, 3).tolist() == [0, 3]


def test_counted_lengths_are_kept(tmp_path: Path) -> None:
    """They are read once, as long as there is room, and only if all of them are used."""
    first, second, third = (write_pair(tmp_path / name, [5, 0, 1, 2]) for name in "abc")
    reader = LengthReader(
        make_request(tmp_path, first, second, third), STORAGE, keep_bytes=4 * (4 + 4 + 1)
    )
    halves = [(0.0, 0.5), (0.5, 1.0)]
    sizes = reader.count(first, halves)
    assert [(size.begin, size.end, size.tokens) for size in sizes] == [(0, 2, 5), (2, 4, 3)]
    assert reader.count(second, halves[:1]) == sizes[:1]
    assert reader.count(third, halves) == sizes
    assert reader.count(second, halves) == sizes  # without room
    kept = [reader.find(prefix, sizes[0]).kept is not None for prefix in (first, second, third)]
    assert kept == [True, False, True]
    for prefix in (first, second, third):
        stored = reader.find(prefix, sizes[1])
        assert stored.read(2, 4).tolist() == read_part(stored, sizes[1])[2:].tolist() == [1, 2]
        assert stored.read(2, 4).flags.writeable  # a kernel would be compiled again for others


def make_request(folder: Path, *prefixes: str) -> CacheRequest:
    return CacheRequest(
        path_to_cache=str(folder / "cache"),
        random_seed=1,
        sequence_length=8,
        tokenizer={},
        sizes=(1, 0, 0),
        blend=Blend(prefixes=prefixes),
        split="1,1,0",
    )


def test_lengths_of_large_datasets_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 3)
    small, large = (write_pair(tmp_path / str(n), [1] * n) for n in (3, 4))
    reader = LengthReader(make_request(tmp_path, small, large), STORAGE, keep_bytes=1 << 20)
    sizes = {prefix: reader.count(prefix, [(0.0, 1.0)])[0] for prefix in (small, large)}
    assert [reader.find(prefix, sizes[prefix]).kept is not None for prefix in (small, large)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("changed", "tokens"), [([8] + 9 * [9], 44), ([8, 10] + 8 * [9], 45)])
def test_lengths_that_change_during_the_build_are_refused(
    changed: list[int],
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 0)
    prefix = write_pair(tmp_path / "a", [9] * 10)
    idx = Path(f"{prefix}.idx")
    whole = idx.read_bytes()

    def build_after_change(*args: Any) -> None:
        idx.write_bytes(whole[:34] + np.array(changed, "<i4").tobytes() + whole[74:])
        worker.build_share(*args)

    monkeypatch.setattr(build_cache, "build_share", build_after_change)
    request = make_request(tmp_path, prefix)
    says = (
        rf"a\.idx: the lengths of sequences 0 to 5 changed while this build ran \(45 tokens before, {tokens} now\): .*; build "
        "again when the file is "
    )
    with pytest.raises(ChangedFileError, match=says):
        build_cache.prepare_cache(request, launch=detect(), storage=STORAGE)
    monkeypatch.undo()
    build_cache.prepare_cache(request, launch=detect(), storage=STORAGE)


def test_damaged_lengths_are_not_kept(prefix: str, tmp_path: Path) -> None:
    idx = Path(f"{prefix}.idx")
    whole = idx.read_bytes()
    idx.write_bytes(whole[:38] + b"\xff\xff\xff\xff" + whole[42:])
    reader = LengthReader(make_request(tmp_path, prefix), STORAGE, keep_bytes=1 << 20)
    with pytest.raises(CorruptFileError, match=r"a\.idx at byte 38: sequence 1 has -1 tokens"):
        reader.count(prefix, [(0.0, 1.0)])
    idx.write_bytes(whole)
    (size,) = reader.count(prefix, [(0.0, 0.5)])
    assert reader.find(prefix, size).kept is None
