"""The kernels that read Thrift against the slow reader, which names what is wrong: where a kernel reads, both say the same."""

import os
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.parquet.metadata.page_header import parse_page_header
from megablend.formats.parquet.metadata.thrift import (
    Kind,
    MalformedError,
    read_struct,
)
from megablend.kernels.parquet.page_headers import (
    HEADER_DTYPE,
    parse_headers,
    read_headers,
    walk_headers,
)
from megablend.kernels.parquet.thrift import TRUNCATED, skip_structs
from tests.examples import examples
from tests.formats.thrift_writer import write_struct

SETTINGS = examples(150)
COUNT = st.integers(0, 2**31 - 2**25)
STATISTICS = write_struct([(3, Kind.I64, 5), (5, Kind.BINARY, b"\xff" * 9), (6, Kind.BINARY, b"")])

Fields = list[tuple[int, Kind, object]]


@st.composite
def page_headers(draw: st.DrawFn) -> bytes:
    """All kinds, with and without what may be left out; some of them nothing that can be a page."""
    kind = draw(st.sampled_from([0, 2, 3, 1]))
    sizes = draw(COUNT), draw(COUNT)
    fields: Fields = [(1, Kind.I32, kind), (2, Kind.I32, sizes[0]), (3, Kind.I32, sizes[1])]
    if draw(st.booleans()):
        fields.append((4, Kind.I32, draw(st.integers(-(2**31), 2**31 - 1))))
    values = draw(COUNT)
    encoding = draw(st.sampled_from([0, 2, 3, 5, 8, 9, 77]))
    statistics: Fields = (
        [(5 if kind == 0 else 8, Kind.STRUCT, STATISTICS)] if draw(st.booleans()) else []
    )
    counts: dict[int, Fields] = {
        0: [
            (1, Kind.I32, values),
            (2, Kind.I32, encoding),
            (3, Kind.I32, 3),
            (4, Kind.I32, draw(st.integers(3, 4))),
        ],
        1: [],
        2: [(1, Kind.I32, values), (2, Kind.I32, encoding)],
        3: [
            *[(1, Kind.I32, values), (2, Kind.I32, 1), (3, Kind.I32, 2), (4, Kind.I32, encoding)],
            *[
                (5, Kind.I32, min(sizes) // draw(st.integers(1, 9))),
                (6, Kind.I32, draw(st.integers(0, 99))),
            ],
        ],
    }
    fields.append(
        ({0: 5, 1: 6, 2: 7, 3: 8}[kind], Kind.STRUCT, write_struct(counts[kind] + statistics))
    )
    if draw(st.booleans()):
        fields.append((15, Kind.BINARY, bytes(draw(st.integers(0, 300)))))
    return write_struct(fields)


def parse(data: bytes) -> tuple[bool, tuple[object, ...]]:
    """Whether the kernel took the header, and what it read."""
    buffer = pa.py_buffer(data)
    header = np.zeros(1, HEADER_DTYPE)
    taken = (
        parse_headers(np.array([buffer.address], np.uint64), np.array([buffer.size]), header) == 1
    )
    return taken, header[0].item()


def agree(data: bytes) -> bool:
    """The kernel leaves a header alone, or reads what the slow reader reads. Whether it took it."""
    taken, found = parse(data)
    if taken:
        assert found == parse_page_header(data).item()
    return taken


@SETTINGS
@given(page_headers())
def test_headers_are_read_alike(data: bytes) -> None:
    taken = agree(data + b"body")
    try:
        slow = parse_page_header(data)
    except MalformedError:
        assert not taken
    else:
        assert taken == (slow["type"] != 1)
    assert not parse(data[:-1])[0]


@SETTINGS
@given(page_headers(), st.randoms(use_true_random=False))
def test_damaged_headers_are_left_alone_or_read_alike(data: bytes, chance: random.Random) -> None:
    for _ in range(20):
        changed = bytearray(data)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        agree(bytes(changed))


def test_random_bytes_are_left_alone_or_read_alike() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        agree(chance.randbytes(chance.randrange(60)))


def header(values: int, size: int, padding: int = 0) -> bytes:
    counts = write_struct(
        [(1, Kind.I32, values), (2, Kind.I32, 0), (3, Kind.I32, 3), (4, Kind.I32, 3)]
    )
    fields: Fields = [
        (1, Kind.I32, 0),
        (2, Kind.I32, size),
        (3, Kind.I32, size),
        (5, Kind.STRUCT, counts),
    ]
    return write_struct([*fields, (9, Kind.BINARY, bytes(padding))] if padding else fields)


@pytest.fixture
def pages() -> tuple[bytes, list[int]]:
    """A file of pages of 1 to 40 values, and where they begin."""
    data = b"PAR1"
    offsets = []
    for i in range(1, 41):
        offsets.append(len(data))
        data += header(i, i * 30, padding=i % 3 * 40) + bytes(i * 30)
    return data, offsets


def walk(
    pages: bytes, fd: int, probe_bytes: int, room: int, values: int, limit: int | None = None
) -> tuple[list[int], int, int]:
    limit = len(pages) if limit is None else limit
    probe = np.zeros(probe_bytes, np.uint8)
    if fd < 0:
        probe = np.frombuffer(pages[4 : 4 + probe_bytes], np.uint8).copy()
    headers = np.zeros(room, HEADER_DTYPE)
    offsets = np.array([4])
    left = np.array([values])
    counts = np.array([0])
    filled, _ = walk_headers(
        fd, probe, 4 if fd < 0 else limit, 0, offsets, limit, left, counts, headers
    )
    assert counts.tolist() == [filled]
    return headers["offset"][:filled].tolist(), int(offsets[0]), int(left[0])


@pytest.mark.parametrize("probe_bytes", [32, 128, 4096])
@pytest.mark.parametrize("descriptor", [False, True])
def test_a_walk_ends_where_values_room_or_bytes_do(
    tmp_path: Path, pages: tuple[bytes, list[int]], probe_bytes: int, descriptor: bool
) -> None:
    data, offsets = pages
    path = tmp_path / "x"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY) if descriptor else -1
    try:
        ends = [*offsets[1:], len(data)]
        needed = [end - offset for offset, end in zip(offsets, ends, strict=True)]
        longest = next((i for i in range(40) if needed[i] - (i + 1) * 30 > probe_bytes), 40)
        in_probe = sum(end - 30 * (i + 1) <= 4 + probe_bytes for i, end in enumerate(ends))
        reach = longest if descriptor else min(longest, in_probe)
        found, offset, left = walk(data, fd, probe_bytes, 100, 820)
        assert (found, offset) == (offsets[:reach], offsets[reach] if reach < 40 else len(data))
        assert left == 820 - sum(range(1, reach + 1))
        stop = min(reach, 3)
        assert walk(data, fd, probe_bytes, 3, 820)[0] == offsets[:stop]
        assert walk(data, fd, probe_bytes, 100, 3)[0] == offsets[: min(reach, 2)]
        assert (
            walk(data, fd, probe_bytes, 100, 820, limit=offsets[1] + 5)[0]
            == offsets[: min(reach, 1)]
        )
    finally:
        if descriptor:
            os.close(fd)


def test_headers_at_known_places(tmp_path: Path, pages: tuple[bytes, list[int]]) -> None:
    data, offsets = pages
    path = tmp_path / "x"
    path.write_bytes(data)
    with open(path, "rb") as file:
        places = np.array(offsets[::-1])
        headers = np.zeros(40, HEADER_DTYPE)
        probe = np.zeros(128, np.uint8)
        whole = np.full(40, len(data))
        assert read_headers(file.fileno(), places, whole, probe, headers) == 40
        assert headers["num_values"].tolist() == list(range(40, 0, -1))
        assert headers["offset"].tolist() == offsets[::-1]
        assert read_headers(file.fileno(), places, whole - 1, probe, headers) == 0
        assert (
            read_headers(file.fileno(), places, np.append(len(data), places[:-1]), probe, headers)
            == 40
        )
        assert read_headers(file.fileno(), places[::-1].copy(), whole - 1, probe, headers) == 39
        assert read_headers(file.fileno(), np.array([len(data), 4]), whole, probe, headers) == 0


@pytest.mark.parametrize("room", [1, 3, 100])
@pytest.mark.parametrize("descriptor", [False, True])
def test_a_walk_through_chunks(
    tmp_path: Path, pages: tuple[bytes, list[int]], room: int, descriptor: bool
) -> None:
    """The pages are of 1 to 40 values: chunks of the first 3, of none, and of the 5th to the 9th."""
    data, places = pages
    path = tmp_path / "x"
    path.write_bytes(data)
    with open(path, "rb") as file:
        fd = file.fileno() if descriptor else -1
        offsets = np.array([4, 0, places[4]])
        left = np.array([6, 0, 35])
        counts = np.zeros(3, np.int64)
        probe = np.frombuffer(data, np.uint8).copy()
        found = []
        chunk = 0
        while chunk < 3:
            headers = np.zeros(room, HEADER_DTYPE)
            filled, chunk = walk_headers(
                fd, probe, 0, chunk, offsets, len(data), left, counts, headers
            )
            found += headers["num_values"][:filled].tolist()
            assert filled == room or chunk == 3
        assert found == [1, 2, 3, 5, 6, 7, 8, 9]
        assert (counts.tolist(), left.tolist(), offsets.tolist()) == (
            [3, 0, 5],
            [0, 0, 0],
            [places[3], 0, places[9]],
        )


def skipped(data: bytes, count: int = 1) -> int:
    array: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    return skip_structs(array, 0, count)


def test_structs_are_skipped_as_they_are_read() -> None:
    inner = write_struct([(1, Kind.BINARY, b"abc"), (15, Kind.LIST, (Kind.I32, [1, 2, 300]))])
    middle = write_struct([(1, Kind.LIST, (Kind.STRUCT, [inner] * 40)), (2, Kind.STRUCT, inner)])
    # Two booleans, a byte, a double, a set of booleans
    flags = b"\x11\x12\x13\xfe\x17" + bytes(8) + b"\x1a\x21\x01\x02\x00"
    for struct in (inner, middle, flags, b"\0"):
        assert skipped(struct * 3 + b"rest", 3) == 3 * len(struct)
        assert read_struct(struct)[1] == len(struct)
        assert skipped(struct[:-1]) == TRUNCATED
    assert skipped(b"\x1c" * 99) < 0
    assert skipped(b"\x1b\0\0") < 0  # a map
    assert skipped(b"\x19\xf5\xff\xff\xff\xff\x0f") == TRUNCATED


def test_random_structs_are_skipped_as_they_are_read() -> None:
    chance = random.Random(9)
    for _ in range(3000):
        data = chance.randbytes(chance.randrange(40))
        end = skipped(data)
        try:
            expected = read_struct(data)[1]
        except MalformedError:
            assert end < 0
        else:
            assert end in (expected, -2)
