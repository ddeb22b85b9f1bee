import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.parquet.decoding.codecs import decompress
from megablend.formats.parquet.metadata.names import CodecId
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.kernels.parquet.lz4 import lz4_size
from tests.examples import examples


def decode(block: bytes, size: int) -> bytes | None:
    """The decoded bytes; None if the block is damaged or decodes to another size."""
    try:
        return bytes(decompress(CodecId.LZ4_RAW, memoryview(block), size))
    except MalformedError:
        return None


def counted(block: bytes) -> int:
    stored = pa.py_buffer(block)
    return lz4_size(stored.address, stored.size)


def naive(block: bytes) -> bytes:
    """As the format's text says it, byte by byte."""
    out = bytearray()
    stream = list(block)[::-1]

    def length(bits: int) -> int:
        if bits == 15:
            while (more := stream.pop()) == 255:
                bits += more
            bits += more
        return bits

    while stream:
        token = stream.pop()
        for _ in range(length(token >> 4)):
            out.append(stream.pop())
        if stream:
            distance = stream.pop() + 256 * stream.pop()
            for _ in range(4 + length(token & 15)):
                out.append(out[-distance])
    return bytes(out)


@pytest.mark.parametrize("size", [0, 1, 4, 14, 15, 16, 269, 270, 271, 5000, 70_000])
@pytest.mark.parametrize("kinds", [1, 2, 256])
@pytest.mark.parametrize("width", [1, 3, 4, 8])
def test_blocks_come_back(size: int, kinds: int, width: int) -> None:
    chance = random.Random(size)
    data = b"".join(bytes([chance.randrange(kinds)]) * width for _ in range(size // width + 1))[
        :size
    ]
    block = pa.Codec("lz4_raw").compress(data, asbytes=True)
    assert naive(block) == data
    assert counted(block) == size
    assert decode(block, size) == data
    for wrong in {size + 1, size + 100, abs(size - 1)}:
        assert decode(block, wrong) is None
    for cut in range(1, min(len(block), 5)):
        assert decode(block[:-cut], size) != data


@examples(200)
@given(
    st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 20), st.integers(4, 60)), max_size=8),
    st.binary(max_size=300),
)
def test_matches_near_and_far(parts: list[tuple[bytes, int, int]], last: bytes) -> None:
    def extended(length: int) -> bytes:
        return (
            b"" if length < 15 else b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])
        )

    block = b""
    size = 0
    for literals, distance, match in [(b"start", 1, 4), *parts]:
        size += len(literals)
        token = min(15, len(literals)) << 4 | min(15, match - 4)
        block += bytes([token]) + extended(len(literals)) + literals
        block += min(distance, size).to_bytes(2, "little") + extended(match - 4)
        size += match
    block += bytes([min(15, len(last)) << 4]) + extended(len(last)) + last
    expected = naive(block)
    assert counted(block) == len(expected) == size + len(last)
    # Libraries refuse blocks whose last match is near the end
    assert decode(block, len(expected)) in ((expected,) if len(last) >= 12 else (expected, None))


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\xf0",
        b"\xf0\xff\xff",
        b"\x10",
        b"\x10a\x01",
        b"\x10a\x00\x00\x00",
        b"\x10a\x02\x00\x00",
        b"\x1fa\x01\x00",
        b"\x10a\x01\x00",
    ],
)
def test_broken_blocks(block: bytes) -> None:
    assert counted(block) == -1 or block == b"\x10a\x02\x00\x00"  # a distance that is too far
    assert all(decode(block, size) is None for size in range(60))


def test_random_blocks_are_never_taken_for_others() -> None:
    """What is decoded has been written by the codec, down to its last byte."""
    chance = random.Random(4)
    for _ in range(3000):
        kinds = [0, 1, 15, 16, 31, 240, 255, chance.randrange(256)]
        block = bytes(chance.choices(kinds, k=chance.randrange(60)))
        size = counted(block)
        if 0 <= size <= 1 << 20 and (decoded := decode(block, size)) is not None:
            assert decoded == naive(block)
