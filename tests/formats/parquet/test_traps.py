"""What writers do, and what damage looks like: files made field by field."""

import functools
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import (
    ChangedFileError,
    ConfigError,
    CorruptFileError,
    DataError,
    UnsupportedFileError,
)
from megablend.formats.fetch import read_blocks
from megablend.formats.parquet.metadata.thrift import Kind
from tests.formats.parquet_files import (
    FLAT,
    LIST,
    LIST_NAMES,
    REQUIRED,
    Fields,
    Rows,
    data_page,
    data_page_v2,
    dictionary_page,
    element,
    hybrid,
    prefixed,
    write,
)
from tests.formats.parquet_files import (
    check as check_column,
)
from tests.formats.thrift_writer import write_struct
from tests.formats.writers import index, opened
from tests.pyarrow_versions import needs_pyarrow
from tests.storages import STORAGE

check = functools.partial(check_column, column="ids")

VALUES: Rows = [1, None, 3, 4, None, 6]
FLAT_LEVELS = [1, 0, 1, 1, 0, 1]


def int32s(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def flat_page(*, padding: int = 0, crc: int | None = None) -> bytes:
    return data_page(
        prefixed(hybrid(FLAT_LEVELS, 1)) + int32s(1, 3, 4, 6), 6, padding=padding, crc=crc
    )


def list_page(rep: list[int], definition: list[int], *values: int) -> bytes:
    return data_page(
        prefixed(hybrid(rep, 1)) + prefixed(hybrid(definition, 2)) + int32s(*values), len(rep)
    )


def dictionary_values(definition: list[int], width: int, indices: bytes) -> bytes:
    return prefixed(hybrid(definition, 1)) + bytes([width]) + indices


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.parquet"


def test_a_page(path: Path) -> None:
    check(write(path, [flat_page()], num_values=6, num_rows=6), VALUES)


@pytest.mark.parametrize("padding", [100, 127, 500, 5000, 70_000])
def test_a_header_longer_than_the_probe(path: Path, padding: int) -> None:
    check(
        write(path, [flat_page(padding=padding), flat_page()], num_values=12, num_rows=12),
        [*VALUES, *VALUES],
    )


@pytest.mark.parametrize(
    "meta", [[], [(11, Kind.I64, 0)], [(11, Kind.I64, 4)]], ids=["absent", "zero", "given"]
)
def test_the_place_of_a_dictionary(path: Path, meta: Fields) -> None:
    indices = dictionary_values([1, 0, 1, 1], 2, b"\x03\x24\x00")  # bit-packed 0, 1, 2
    pages = [dictionary_page([70, 80, 90]), data_page(indices, 4, encoding=8), flat_page()]
    data_offset = 4 + len(pages[0]) if meta and meta[0][2] else 4
    write(path, pages, num_values=10, num_rows=10, data_offset=data_offset, meta=meta)
    found = check(path, [70, None, 80, 90, *VALUES])
    assert found.blocks["encoding"].tolist() == [8, 0]
    assert found.chunks["dictionary_offset"].tolist() == [4]


def test_indices_of_no_bits(path: Path) -> None:
    pages = [
        dictionary_page([7]),
        data_page(dictionary_values([1, 0, 1, 1], 0, b"\x06"), 4, encoding=2),
    ]
    check(write(path, pages, num_values=4, num_rows=4), [7, None, 7, 7])


def test_offsets_above_4_gib(path: Path) -> None:
    hole = 5 << 30
    pages = [
        dictionary_page([7]),
        data_page(dictionary_values([1, 0, 1, 1], 0, b"\x06"), 4, encoding=8),
    ]
    found = check(
        write(path, pages, num_values=4, num_rows=4, hole=hole, data_offset=4 + hole),
        [7, None, 7, 7],
    )
    assert found.chunks["dictionary_offset"].tolist() == [4 + hole]
    assert found.blocks["offset"].tolist() == [4 + hole + len(pages[0])]


def test_v2_pages_without_values(path: Path) -> None:
    empty = data_page_v2(b"", b"", b"", 0, 0)
    nulls = data_page_v2(b"", hybrid([0] * 5, 1), b"", 5, 5)
    full = data_page_v2(b"", hybrid([1] * 2, 1), int32s(8, 9), 2, 2)
    found = check(
        write(path, [empty, nulls, full, empty], num_values=7, num_rows=7), [None] * 5 + [8, 9]
    )
    assert len(found.blocks) == 2


def test_v2_compresses_values_alone(path: Path) -> None:
    values = pa.Codec("snappy").compress(int32s(5, 6), asbytes=True)
    pages = [data_page_v2(b"", hybrid([1, 0, 1], 1), values, 3, 3, decoded_values=8)]
    pages.append(data_page_v2(b"", hybrid([0, 0], 1), b"\x00", 2, 2, decoded_values=0))
    check(write(path, pages, num_values=5, num_rows=5, codec=1), [5, None, 6, None, None])


def test_hadoop_lz4(path: Path) -> None:
    body = prefixed(hybrid(FLAT_LEVELS, 1)) + int32s(1, 3, 4, 6)
    block = pa.Codec("lz4_raw").compress(body, asbytes=True)
    stored = len(body).to_bytes(4, "big") + len(block).to_bytes(4, "big") + block
    check(
        write(path, [data_page(stored, 6, decoded=len(body))], num_values=6, num_rows=6, codec=5),
        VALUES,
    )


def test_rows_over_many_pages(path: Path) -> None:
    pages = [
        list_page([0, 1], [3, 3], 1, 2),
        list_page([1, 1], [2, 2]),  # nothing but nulls in the middle of the row: no block
        list_page([1], [3], 3),
        list_page([1], [2]),  # and at its end
        list_page([0, 0, 0, 1], [0, 1, 2, 2]),  # a row of nulls, open
        list_page([1, 0], [3, 3], 4, 5),
        list_page([1, 0], [2, 0]),
    ]
    rows: Rows = [[1, 2, None, None, 3, None], None, [], [None, None, 4], [5, None], None]
    found = check(
        write(path, pages, num_values=14, num_rows=6, schema=LIST, names=LIST_NAMES), rows
    )
    assert found.blocks["ends"].tolist() == [0, 1, 0, 1, 1]
    assert found.blocks["flags"].tolist() == [0, 1 | 2 | 4, 0, 1, 1 | 2 | 4]
    assert pq.read_table(path)["ids"].to_pylist() == list(rows)


def test_levels_in_an_old_encoding_are_refused(path: Path) -> None:
    write(path, [data_page(b"\x2c" + int32s(1, 3, 4, 6), 6, levels=4)], num_values=6, num_rows=6)
    with pytest.raises(
        UnsupportedFileError,
        match="its levels are encoded as BIT_PACKED, which readers interpret differently",
    ):
        index(path, "ids")


def test_writers_name_old_levels_where_there_are_none(path: Path) -> None:
    found = check(
        write(
            path, [data_page(int32s(1, 2), 2, levels=4)], num_values=2, num_rows=2, schema=REQUIRED
        ),
        [1, 2],
    )
    assert found.blocks["encoding"].tolist() == [0]


@pytest.mark.parametrize(
    ("pages", "options", "match"),
    [
        (
            [flat_page(crc=5)],
            {},
            "at byte 4: the page is damaged: its checksum is [0-9a-f]{8}, but the checksum in its header is 00000005",
        ),
        ([flat_page()], {"num_values": 7, "num_rows": 7}, "the page header"),
        ([flat_page()], {"num_values": 5, "num_rows": 5}, "1 more values than the 5"),
        ([flat_page()], {"file_rows": 5}, "num_rows is 5, but the row groups have 6"),
        ([flat_page()], {"num_rows": 5}, "6 values for 5 rows"),
        ([flat_page()], {"data_offset": 10**6}, "has bytes 1000000 to"),
        ([flat_page()], {"data_offset": 0}, "has bytes 0 to .*, but the footer begins"),
        ([flat_page()], {"num_values": 1 << 50}, "expected 0 to"),
        ([flat_page()], {"names": ("other",)}, "a different column instead of 'ids'"),
        (
            [data_page(prefixed(hybrid([1], 1)), 1)],
            {"num_values": 1, "num_rows": 1},
            "1 values need 4 bytes, but only 0 are left",
        ),
        ([data_page(prefixed(hybrid([1], 1)), 6)], {}, "has 1 levels, but its header states 6"),
        ([data_page(prefixed(b"\xff" * 9), 6)], {}, "has broken levels"),
        ([data_page(b"\xff\xff\x00\x00", 6)], {}, "levels need 65535 bytes, but only 0 are left"),
        ([data_page(b"", 6)], {}, "levels need 0 bytes, but only 0 are left"),
        ([data_page(b"", 6, decoded=7)], {}, "decompresses to 0 bytes, expected 7"),
        ([data_page(b"", 6, decoded=1 << 30)], {}, "0 bytes of UNCOMPRESSED cannot decompress to"),
        ([data_page(b"", 6, decoded=-1)], {}, "uncompressed_page_size is -1"),
        ([data_page(b"", 1 << 31)], {}, "larger than the limit"),
        ([data_page_v2(b"", hybrid([2] * 6, 2), b"", 6, 6)], {}, "level"),
        (
            [data_page_v2(b"", hybrid([1] * 6, 1), int32s(*range(6)), 6, 6, decoded_values=0)],
            {"codec": 1},
            "6 values need 24 bytes, but only 0 are left",
        ),
        (
            [data_page(dictionary_values([1] * 6, 1, b"\x06"), 6, encoding=8)],
            {},
            "are dictionary-encoded, but",
        ),
        ([flat_page()], {"footer": [(8, Kind.STRUCT, b"\0")]}, "its columns are encrypted"),
        ([flat_page()], {"chunk": [(8, Kind.STRUCT, b"\0")]}, "the column is encrypted"),
        (
            [flat_page()],
            {"chunk": [(8, Kind.STRUCT, b"\0"), (9, Kind.BINARY, b"\x03abc")]},
            "the column is encrypted",
        ),
        (
            [flat_page()],
            {"chunk": [(4, Kind.BINARY, b"")]},
            "offset_index_offset of row group 0 is of the wrong type",
        ),
        (
            [flat_page()],
            {"meta": [(11, Kind.BINARY, b"")]},
            "dictionary_page_offset of row group 0 is of the wrong type",
        ),
        (
            [flat_page()],
            {"meta": [(12, Kind.STRUCT, b"\x38\0\0")]},
            "null_count of row group 0 is of the wrong type",
        ),
        (
            [flat_page()],
            {"meta": [(16, Kind.I32, 3)]},
            "size_statistics of row group 0 is of the wrong type",
        ),
        (
            [flat_page()],
            {"chunk": [(1, Kind.BINARY, b"other.parquet")]},
            "is stored in another file .other.parquet.; specify the files that hold data",
        ),
        ([flat_page()], {"codec": 3}, "codec LZO"),
        (
            [data_page(prefixed(hybrid([0] * 6, 1)), 6, encoding=3)],
            {},
            "INT32 values with encoding RLE are not supported",
        ),
        ([flat_page()], {"codec": 77}, "codec unknown .77."),
    ],
)
def test_damaged_and_unsupported_files(
    path: Path, pages: list[bytes], options: dict[str, object], match: str
) -> None:
    write(path, pages, **({"num_values": 6, "num_rows": 6, "schema": FLAT} | options))  # type: ignore[arg-type]
    with pytest.raises((CorruptFileError, UnsupportedFileError), match=match) as caught:
        check(path, VALUES)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(("codec", "name"), [(0, None), (1, "snappy"), (6, "zstd"), (7, "lz4_raw")])
@pytest.mark.parametrize("version", [1, 2])
def test_values_that_end_before_the_levels_do(
    path: Path, codec: int, name: str | None, version: int
) -> None:
    """Such a page's memory is handed on as it is, unless this is seen."""
    levels = hybrid([1] * 6, 1)
    values = int32s(*range(5))

    def packed(data: bytes) -> bytes:
        return data if name is None else pa.Codec(name).compress(data, asbytes=True)

    if version == 1:
        body = prefixed(levels) + values
        short = data_page(packed(body), 6, decoded=len(body))
    else:
        short = data_page_v2(b"", levels, packed(values), 6, 6, decoded_values=len(values))
    write(path, [short], num_values=6, num_rows=6, schema=FLAT, codec=codec)
    with pytest.raises(
        CorruptFileError,
        match=r"byte 4: the page is damaged: 6 values need 24 bytes, but only 20 are left",
    ):
        check(path, VALUES)


@needs_pyarrow(20, "histograms of levels")
def test_levels_that_are_not_those_of_the_page_index(path: Path) -> None:
    """Where documents are asked for, and nulls make these unsure, pages' levels are read; and must agree page by page."""
    rows = [[1, None, 2]] * 40 + [[1, None, None]] * 40
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(
        table,
        path,
        use_dictionary=False,
        write_page_index=True,
        data_page_size=1,
        write_batch_size=40,
    )
    found = check(path, rows)
    tokens = found.blocks["tokens"].tolist()
    nulls = [
        3 * rows - tokens
        for rows, tokens in zip(found.blocks["rows"].tolist(), tokens, strict=True)
    ]
    histograms = [[0, 0, *page] for page in zip(nulls, tokens, strict=True)]

    def stored(pages: list[list[int]]) -> bytes:
        return bytes(2 * count for page in pages for count in page)  # varints of one byte, zigzag

    data = path.read_bytes()
    assert data.count(stored(histograms)) == 1
    assert (tokens[0], nulls[0]) == (nulls[3], tokens[3]) == (28, 14)
    swapped = [histograms[3], *histograms[1:3], histograms[0], *histograms[4:]]
    path.write_bytes(data.replace(stored(histograms), stored(swapped)))
    with pytest.raises(
        CorruptFileError, match="damaged: a page has 28 tokens, but its ColumnIndex states 14"
    ):
        index(path, "ids")
    # Of one page a level more
    more = [[*histograms[0][:-1], histograms[0][-1] + 1], *histograms[1:]]
    path.write_bytes(data.replace(stored(histograms), stored(more)))
    note = check(path, rows).note
    assert note is not None
    assert "1 of 1 row groups" in note


def test_a_level_above_the_column(path: Path) -> None:
    required = [*LIST[:3], element("element", 0, type=1)]  # levels up to 2, in 2 bits
    write(
        path, [list_page([0], [3], 1)], num_values=1, num_rows=1, schema=required, names=LIST_NAMES
    )
    with pytest.raises(CorruptFileError, match="it has level 3, above the column's maximum of 2"):
        check(path, [[1]])


def test_a_first_page_cannot_continue(path: Path) -> None:
    write(
        path,
        [list_page([1, 0], [3, 3], 1, 2)],
        num_values=2,
        num_rows=1,
        schema=LIST,
        names=LIST_NAMES,
    )
    with pytest.raises(CorruptFileError, match="its first page begins in the middle of a row"):
        check(path, [[1]])


def test_rows_must_agree(path: Path) -> None:
    write(
        path,
        [list_page([0, 0], [3, 3], 1, 2)],
        num_values=2,
        num_rows=3,
        schema=LIST,
        names=LIST_NAMES,
    )
    with pytest.raises(CorruptFileError, match="its pages have 2 rows, but its row group has 3"):
        check(path, [[1], [2]])


def test_tokens_must_agree(path: Path) -> None:
    sizes = write_struct([(3, Kind.LIST, (Kind.I64, [1, 5]))])
    write(path, [flat_page()], num_values=6, num_rows=6, meta=[(16, Kind.STRUCT, sizes)])
    with pytest.raises(
        CorruptFileError, match="its pages have 4 tokens, but its metadata states 5"
    ):
        check(path, VALUES)


@pytest.mark.parametrize("histogram", [[2, 5], [3, 4], [0, 0], [2, 2**62], [-1, 6]])
def test_a_histogram_that_does_not_add_up_is_not_believed(path: Path, histogram: list[int]) -> None:
    """ClickHouse counts pages twice that it encodes anew where a dictionary overflows."""
    sizes = write_struct([(3, Kind.LIST, (Kind.I64, histogram))])
    write(path, [flat_page()], num_values=6, num_rows=6, meta=[(16, Kind.STRUCT, sizes)])
    found = check(path, VALUES)
    assert found.note is not None
    assert (
        "the page indexes of 1 of 1 row groups (the first is 0) contradict the metadata of their column chunks"
        in found.note
    )


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"", CorruptFileError, "the file is empty"),
        (b"PAR1", CorruptFileError, "not a complete Parquet file"),
        (b"PAR1PAR1", CorruptFileError, "not a complete Parquet file"),
        (b"PAR1" + bytes(100), CorruptFileError, "ends with b'.x00.x00.x00.x00', not b'PAR1'"),
        (
            b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1",
            CorruptFileError,
            "length is 2147483647, but there are only 100",
        ),
        (b"PAR1" + bytes(100) + bytes(4) + b"PAR1", CorruptFileError, "footer's length is 0"),
        (b"PAR1" + bytes(100) + b"\x50\0\0\0PAR1", CorruptFileError, "the footer is damaged"),
        (b"PARE" + bytes(100) + b"PARE", UnsupportedFileError, "the footer is encrypted .PARE."),
    ],
)
def test_files_without_a_footer(
    path: Path, data: bytes, error: type[DataError], match: str
) -> None:
    path.write_bytes(data)
    with pytest.raises(error, match=match) as caught:
        index(path, "ids")
    assert caught.value.path == str(path)


def test_a_file_that_changed_is_named(path: Path) -> None:
    write(path, [flat_page()], num_values=6, num_rows=6)
    found = index(path, "ids")
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    with pytest.raises(
        ChangedFileError,
        match=rf"has {len(whole) + 1} bytes, but had {len(whole)} when it was indexed",
    ):
        opened(path, None, found, size=len(whole))
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(
        ChangedFileError,
        match=rf"footer's digest is [0-9a-f]{{32}}, but was {found.structure} when",
    ):
        opened(path, None, found)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(
        ChangedFileError, match="changed since it was indexed: not a complete Parquet file"
    ):
        opened(path, None, found)


def test_an_index_that_does_not_fit_the_page(path: Path) -> None:
    write(path, [flat_page()], num_values=6, num_rows=6)
    found = index(path, "ids")
    reader = opened(path, None, found)
    for field, value, match in [
        ("tokens", 5, "4 tokens, but the index records 5"),
        ("rows", 5, "6 rows begin in it, but according to the index it begins with a row, and 5"),
        ("stored_bytes", int(found.blocks["stored_bytes"][0]) - 1, "its body has"),
        ("offset", 5, "the page is damaged"),
        ("offset", 10**12, "but the file has only"),
    ]:
        blocks = found.blocks.copy()
        blocks[field] = value
        with pytest.raises(CorruptFileError, match=match):
            read_blocks(reader, blocks, found.chunks, STORAGE)


def test_any_change_of_a_body_with_a_checksum_is_noticed(path: Path) -> None:
    chance = random.Random(2)
    rows = [[chance.randrange(500) for _ in range(30)] for _ in range(60)]
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))})
    for version, dictionary in [("1.0", False), ("1.0", True), ("2.0", False), ("2.0", True)]:
        pq.write_table(
            table,
            path,
            data_page_version=version,
            use_dictionary=dictionary,
            data_page_size=400,
            write_page_checksum=True,
            compression="lz4",
        )
        found = index(path, "ids")
        whole = path.read_bytes()
        column = pq.ParquetFile(path).metadata.row_group(0).column(0)
        start = column.dictionary_page_offset or column.data_page_offset
        for _ in range(40):
            data = bytearray(whole)
            data[start + 60 + chance.randrange(column.total_compressed_size - 60)] ^= (
                1 << chance.randrange(8)
            )
            path.write_bytes(data)
            try:
                read = read_blocks(opened(path, None, found), found.blocks, found.chunks, STORAGE)
            except CorruptFileError:
                continue
            # A flip of a header's statistics, or of a bit that the format does not use, changes nothing.
            assert [t for block in read for t in block.tokens.tolist()] == [
                t for row in rows for t in row
            ]


def test_checksums_of_dictionaries(path: Path) -> None:
    pages = [
        dictionary_page([7]),
        data_page(dictionary_values([1, 0, 1, 1], 0, b"\x06"), 4, encoding=8),
    ]
    write(path, pages, num_values=4, num_rows=4)
    found = index(path, "ids")
    data = bytearray(path.read_bytes())
    data[4 + len(pages[0]) - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CorruptFileError, match="at byte 4: the dictionary page is damaged: its checksum is"
    ):
        read_blocks(opened(path, None, found), found.blocks, found.chunks, STORAGE)


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_index", [False, True])
def test_mutated_files_give_clear_errors(tmp_path: Path, version: str, page_index: bool) -> None:
    chance = random.Random(version + str(page_index))
    rows: Rows = [None if i % 9 == 4 else [None, *range(i % 30)] for i in range(80)]
    whole = tmp_path / "whole.parquet"
    pq.write_table(
        pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))}),
        whole,
        data_page_version=version,
        write_page_index=page_index,
        data_page_size=200,
        write_batch_size=8,
        compression="snappy",
    )
    path = tmp_path / "x.parquet"
    data = whole.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    messages = []
    for i in range(300):
        mutated = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = (
                chance.randrange(len(data) - footer, len(data))
                if i % 2
                else chance.randrange(len(data))
            )
            mutated[place] = chance.choice([0, 255, mutated[place] ^ 1 << chance.randrange(8)])
        if i % 10 == 0:
            del mutated[chance.randrange(len(data)) :]
        path.write_bytes(mutated)
        try:
            found = index(path, "ids")
            read_blocks(opened(path, "ids", found), found.blocks, found.chunks, STORAGE)
        except (DataError, ConfigError) as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message for message in messages)
    shutil.copy(whole, path)
    check(path, rows)


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_flipped_bit_of_a_page_header_never_gives_other_tokens(path: Path, version: str) -> None:
    tokens = np.arange(64, dtype=np.int32) * 1001
    options = {"use_dictionary": False, "compression": "none", "data_page_version": version}
    schema = pa.schema([pa.field("tokens", pa.int32(), nullable=False)])
    pq.write_table(pa.table({"tokens": tokens}, schema), path, write_statistics=False, **options)
    found = index(path, "tokens")
    whole = path.read_bytes()
    begin = int(found.blocks["offset"][0])
    end = whole.index(tokens.tobytes())
    messages = []
    for bit in range(8 * begin, 8 * end):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            (block,) = read_blocks(opened(path, None, found), found.blocks, found.chunks, STORAGE)
            assert block.tokens.tolist() == tokens.tolist(), f"bit {bit - 8 * begin} of the header"
        except DataError as error:
            messages.append(error.problem)
    path.write_bytes(whole)
    other = found.blocks.copy()
    other["encoding"] = 9
    with pytest.raises(
        CorruptFileError,
        match="its values have encoding PLAIN, but the index records BYTE_STREAM_SPLIT",
    ):
        read_blocks(opened(path, None, found), other, found.chunks, STORAGE)
    assert any("the index records PLAIN" in message for message in messages)
