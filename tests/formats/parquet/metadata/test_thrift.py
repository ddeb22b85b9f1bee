import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.parquet.metadata.thrift import (
    Kind,
    MalformedError,
    Struct,
    TruncatedError,
    read_struct,
)
from tests.examples import examples
from tests.formats.thrift_writer import write_struct

INTEGER = st.integers(-(2**63), 2**63 - 1)


@examples(100)
@given(
    st.lists(INTEGER, max_size=20),
    st.binary(max_size=300),
    INTEGER,
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 40),
)
def test_structs_come_back(
    numbers: list[int], data: bytes, long: int, short: int, before: int
) -> None:
    inner = write_struct([(1, Kind.BINARY, data), (15, Kind.I64, long)])
    written = write_struct(
        [
            (1, Kind.I32, short),
            (2, Kind.LIST, (Kind.I64, numbers)),
            (3, Kind.STRUCT, inner),
            (4, Kind.LIST, (Kind.STRUCT, [inner] * 3)),
        ]
    )
    found, end = read_struct(bytes(before) + written + b"rest", before)
    assert end == before + len(written)
    assert found.integer(1, "short") == short
    assert found._fields[2] == numbers
    for each in [found.struct(3, "inner"), *found.structs(4, "inners")]:
        assert each.integer(15, "long") == long
        assert each.text(1, "data") == data.decode("utf-8", "replace")


def test_kinds_that_are_only_skipped() -> None:
    fields = [
        [0x11, 0x12],  # 1 and 2: true, false
        [0x13, 0xFE],  # 3: a byte, -2
        [0x17, *bytes(8)],  # 4: a double
        [0x1A, 0x21, 1, 2],  # 5: a set of two booleans
        [0x1B, 0x01, 0x85, 1, ord("a"), 9],  # 6: a map of one binary to an i32
        [0x1B, 0x00],  # 7: an empty map
        [0x1D, *bytes(16)],  # 8: a UUID
        [0x05, 0x64, 0x08],  # 50, its id in full: an i32
        [0x00],
    ]
    data = b"".join(map(bytes, fields))
    found, end = read_struct(data)
    assert end == len(data)
    assert found.boolean(1, "a", False)
    assert not found.boolean(2, "b", True)
    assert found.boolean(99, "absent", True)
    assert found.integer(3, "c") == -2
    assert found.integer(50, "d") == 4
    assert 8 in found
    assert 9 not in found


@pytest.mark.parametrize("size", [0, 1, 5, 20])
def test_a_struct_cut_short_is_truncated(size: int) -> None:
    data = write_struct([(1, Kind.BINARY, bytes(30)), (2, Kind.LIST, (Kind.I64, [1, 2, 3]))])
    with pytest.raises(TruncatedError):
        read_struct(data[:size])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x18\xff\xff\xff\xff\x0f", "4294967295 bytes are declared"),
        (b"\x19\xf5\xff\xff\xff\xff\x0f", "4294967295 elements are declared"),
        (b"\x1b\xff\xff\xff\xff\x0f\x55", "4294967295 elements are declared"),
        (b"\x16" + b"\xff" * 12, "longer than 10 bytes"),
        (b"\x1e", "unknown wire type 14"),
        (b"\x1c" * 100, "nested deeper"),
        (b"\x19" + b"\x19" * 100, "nested deeper"),
        (b"\x1b" + b"\x01\xbb" * 100, "nested deeper"),
    ],
)
def test_lies(data: bytes, match: str) -> None:
    with pytest.raises(MalformedError, match=match):
        read_struct(data)


def test_fields_of_the_wrong_type() -> None:
    found = Struct({1: b"text", 2: 5, 3: [1, b"x"], 4: -1, 5: 1 << 60, 6: True})
    with pytest.raises(MalformedError, match="rows is not an integer"):
        found.integer(1, "rows")
    with pytest.raises(MalformedError, match="rows is not an integer"):
        found.integer(6, "rows")
    assert found.integer(6, "rows", Kind.I64) == 6
    assert found.integer(9, "rows", Kind.I64) == 6
    with pytest.raises(MalformedError, match="rows is missing"):
        found.integer(9, "rows")
    with pytest.raises(MalformedError, match="name is of the wrong type"):
        found.text(2, "name")
    with pytest.raises(MalformedError, match="places is missing"):
        found.structs(9, "places")
    with pytest.raises(MalformedError, match="sizes contains elements of the wrong type"):
        found.structs(3, "sizes")
    for field in (4, 5):
        with pytest.raises(MalformedError, match=r"rows is -?\d+, expected 0 to"):
            found.count(field, "rows")


def test_random_bytes_give_structs_or_clear_errors() -> None:
    chance = random.Random(11)
    for _ in range(3000):
        data = chance.randbytes(chance.randrange(60))
        try:
            _, end = read_struct(data)
        except MalformedError:
            continue
        assert end <= len(data)
