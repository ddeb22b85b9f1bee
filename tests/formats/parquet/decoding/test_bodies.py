"""Bodies decompressed many by one call, by the system's libraries or without them, against pyarrow's codecs one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import CorruptFileError
from megablend.formats.parquet.decoding import codecs
from megablend.formats.parquet.decoding.bodies import decompress_pages
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.intrinsics import library_function
from megablend.kernels.parquet.bodies import expand_lz4, lz4_decompress, zstd_decompress
from tests.examples import examples
from tests.storages import STORAGE

NAMES = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
Parts = list[tuple[int, bytes]]


def stored(codec: int, data: bytes) -> bytes:
    return bytes(pa.Codec(NAMES[codec]).compress(data, asbytes=True)) if codec else data


def expanded(parts: list[tuple[int, bytes, int]]) -> list[bytes]:
    """What `expand` makes of (codec, stored bytes, announced length), which lie one after the other in one buffer."""
    source = FileBytes("x.parquet", STORAGE, 1 << 40)
    data = pa.py_buffer(b"".join(part for _, part, _ in parts) + b"\0")
    sizes = np.array([len(part) for _, part, _ in parts], np.int64)
    begins = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
    kinds, lengths = (np.array([part[i] for part in parts], np.int64) for i in (0, 2))
    owners, found = decompress_pages(
        source, 1000 * np.arange(len(parts)), kinds, data.address + begins, sizes, lengths
    )
    held = [data if owner is None else owner for owner in owners]
    return [
        bytes(memoryview(owner)[at - owner.address :][:length])
        for owner, at, length in zip(held, found.tolist(), lengths.tolist(), strict=True)
    ]


BODIES = st.lists(
    st.tuples(
        st.sampled_from(list(NAMES)),
        st.binary(max_size=200) | st.builds(bytes, st.integers(0, 9999)),
    ),
    max_size=12,
)


@examples(150)
@given(BODIES)
def test_bodies_come_back_whatever_their_codecs(parts: Parts) -> None:
    assert expanded([(codec, stored(codec, data), len(data)) for codec, data in parts]) == [
        data for _, data in parts
    ]


@pytest.mark.parametrize("codec", [6, 7])
def test_bodies_come_back_without_the_systems_libraries(
    codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(codec)
    data = [chance.integers(0, 9, size).astype(np.uint8).tobytes() for size in (0, 1, 100, 65_536)]
    parts = [(codec, stored(codec, each), len(each)) for each in data]
    assert expanded(parts) == data
    monkeypatch.setattr(codecs, "zstd_decompress", None)
    monkeypatch.setattr(codecs, "lz4_decompress", None)
    monkeypatch.setattr(codecs, "_THREAD_CODECS", codecs._ThreadCodecs())
    assert codecs.decompress_many(6) is None
    assert codecs.decompress_many(7) is None
    assert expanded(parts) == data


@pytest.mark.parametrize("codec", [0, 1, 2, 4, 6, 7])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_length_is_blamed_on_its_page(codec: int, wrong: int) -> None:
    parts = [(codec, stored(codec, b"tokens" * 99), 594)] * 3
    assert expanded(parts) == [b"tokens" * 99] * 3
    parts[1] = (*parts[1][:2], 594 + wrong)
    with pytest.raises(CorruptFileError, match=r"x\.parquet.*byte 1000.*the page is damaged"):
        expanded(parts)


@pytest.mark.parametrize("codec", [6, 7])
def test_damage_is_blamed_on_its_page(codec: int) -> None:
    data = np.random.default_rng(codec).integers(0, 5, 3000).astype(np.uint8).tobytes()
    good = stored(codec, data)
    with pytest.raises(
        CorruptFileError,
        match=r"byte 2000.*the page is damaged: .* (cannot be|does not) decompress",
    ):
        expanded(
            [
                (codec, good, 3000),
                (codec, good, 3000),
                (codec, good[:-9], 3000),
                (codec, good, 3000),
            ]
        )


def test_an_absurd_length_claims_no_memory() -> None:
    with pytest.raises(CorruptFileError, match="cannot decompress to 1000000000000 bytes"):
        expanded([(6, stored(6, b"x"), 1), (6, stored(6, b"x"), 10**12)])


@pytest.mark.skipif(lz4_decompress is None, reason="this system has no liblz4.so.1")
def test_lz4_writes_nowhere_else() -> None:
    block = pa.py_buffer(stored(7, b"abc" * 100))
    for room, expected in ((300, -1), (299, 0), (301, 0)):
        out = bytearray(b"#" * (room + 64))
        held = pa.py_buffer(out)
        fields = (
            np.array([value], np.int64) for value in (block.address, block.size, held.address, room)
        )
        assert expand_lz4(*fields) == expected
        assert out[room:] == b"#" * 64
        assert expected == 0 or out[:room] == b"abc" * 100


def test_what_a_system_does_not_have_is_none() -> None:
    assert library_function("libthere-is-no-such-thing.so.1", "f", "intc") is None
    assert library_function("libc.so.6", "there_is_no_such_function", "intc") is None


@pytest.mark.long
def test_every_thread_has_a_context_of_its_own() -> None:
    if zstd_decompress is None:
        pytest.skip("this system has no libzstd.so.1")
    from concurrent.futures import ThreadPoolExecutor

    data = [
        np.random.default_rng(i).integers(0, 3, 50_000).astype(np.uint8).tobytes()
        for i in range(16)
    ]
    parts = [(6, stored(6, each), len(each)) for each in data]

    def work(first: int) -> bool:
        return expanded(parts[first:] + parts[:first]) == data[first:] + data[:first]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, [i % 16 for i in range(200)]))
