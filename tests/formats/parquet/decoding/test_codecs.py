import gzip
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from megablend.formats.parquet.decoding.codecs import decompress
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError

NAMES = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
DATA = bytes(random.Random(1).choices(range(7), k=5000))


def stored(codec: int, data: bytes = DATA) -> bytes:
    return bytes(pa.Codec(NAMES[codec]).compress(data, asbytes=True)) if codec else data


@pytest.mark.parametrize("codec", [0, *NAMES])
@pytest.mark.parametrize("data", [DATA, b"", b"x", bytes(1 << 20)], ids=len)
def test_codecs(codec: int, data: bytes) -> None:
    assert bytes(decompress(codec, memoryview(stored(codec, data)), len(data))) == data


@pytest.mark.parametrize("codec", [0, *NAMES])
@pytest.mark.parametrize("size", [0, 1, 4999, 5001, 6000])
def test_another_length_is_an_error(codec: int, size: int) -> None:
    with pytest.raises(
        MalformedError, match=r"from the page's header|in the page's header|cannot be decompressed"
    ):
        decompress(codec, memoryview(stored(codec)), size)


@pytest.mark.parametrize("codec", [0, *NAMES])
def test_an_absurd_length_claims_no_memory(codec: int) -> None:
    with pytest.raises(MalformedError, match="cannot decompress to 1000000000000 bytes"):
        decompress(codec, memoryview(stored(codec, b"x" * 10)), 10**12)


@pytest.mark.parametrize("codec", NAMES)
def test_damaged_input_gives_an_error_or_as_many_bytes(codec: int) -> None:
    chance = random.Random(codec)
    for _ in range(200):
        data = bytearray(stored(codec))
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            assert len(decompress(codec, memoryview(data), len(DATA))) == len(DATA)
        except MalformedError:
            continue


def hadoop(*parts: bytes) -> bytes:
    blocks = [(len(part), stored(7, part)) for part in parts]
    return b"".join(
        size.to_bytes(4, "big") + len(block).to_bytes(4, "big") + block for size, block in blocks
    )


def test_hadoop_lz4_has_lengths_in_front_of_its_blocks() -> None:
    assert bytes(decompress(5, memoryview(hadoop(DATA)), len(DATA))) == DATA
    assert bytes(decompress(5, memoryview(hadoop(DATA[:999], DATA[999:])), len(DATA))) == DATA
    assert bytes(decompress(5, memoryview(stored(7)), len(DATA))) == DATA
    with pytest.raises(MalformedError):
        decompress(5, memoryview(hadoop(DATA)[:-3]), len(DATA))


def test_gzip_members_follow_each_other() -> None:
    assert (
        bytes(decompress(2, memoryview(gzip.compress(b"ab") + gzip.compress(b"cd")), 4)) == b"abcd"
    )


@pytest.mark.parametrize("codec", [3, 8, -1])
def test_unknown_codecs(codec: int) -> None:
    with pytest.raises(UnsupportedError, match="is not supported; write the file with zstd or lz4"):
        decompress(codec, memoryview(b""), 0)


PAGE = (np.arange(2_000_000) % 977).astype("<i4").tobytes()
EIGHTHS = [PAGE[i : i + 1_000_000] for i in range(0, len(PAGE), 1_000_000)]


@pytest.mark.parametrize(
    ("codec", "packed"),
    [(2, gzip.compress(PAGE, 1)), (5, hadoop(PAGE)), (5, hadoop(*EIGHTHS))],
    ids=["gzip", "hadoop", "hadoop-blocks"],
)
def test_a_page_takes_its_size_once(codec: int, packed: bytes) -> None:
    """What codecs and Python allocate meanwhile is little; the output itself is pyarrow's memory."""
    data = PAGE
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        out = decompress(codec, memoryview(packed), len(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(out) == data
    assert peak + pa.total_allocated_bytes() - before < len(data) * 1.25


def test_gzip_of_many_members_and_portions() -> None:
    parts = [bytes([i]) * (i * 40_000) for i in range(20)] + [
        np.random.default_rng(0).bytes(700_001)
    ]
    data = b"".join(parts)
    packed = b"".join(map(gzip.compress, parts))
    assert bytes(decompress(2, memoryview(packed), len(data))) == data
    for size in (len(data) - 1, len(data) + 1):
        with pytest.raises(MalformedError, match="its data decompresses to"):
            decompress(2, memoryview(packed), size)
    with pytest.raises(MalformedError, match="Truncated compressed stream"):
        decompress(2, memoryview(packed)[:-900], len(data))
