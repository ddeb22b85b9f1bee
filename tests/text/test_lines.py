"""Lines of JSON: parts, compression, and documents that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megablend.errors import CorruptFileError
from megablend.storage.by_scheme import make_storage
from megablend.text import lines as lines_module
from megablend.text import text_file
from megablend.text.documents import Document, Place, Portion, TextFields
from megablend.text.line_parser import LineParser
from megablend.text.lines import Lines
from megablend.text.open_parts import open_parts
from megablend.text.tasks import Task, plan_tasks
from megablend.text.text_file import TextFile

pytest.importorskip("msgspec", reason="pip install 'megablend[text]'")

FIELDS = TextFields(text="text", key="id", max_bytes=1 << 20)
STORAGE = make_storage()


def find(path: Path) -> TextFile:
    stat = STORAGE.stat(str(path))
    return TextFile(path.name, str(path), stat.size, stat.etag)


def read(
    path: Path, part_bytes: int, fields: TextFields = FIELDS
) -> list[tuple[Any, list[Portion]]]:
    """Each part of a file, with its portions."""
    found = []
    for task in plan_tasks(find(path), STORAGE, fields, part_bytes):
        for part in open_parts(task, STORAGE, fields, part_bytes):
            portions = list(part.portions)
            found.append((part, portions))
    return found


def documents_of(portions: list[Portion]) -> list[Document]:
    found = list[Document]()
    for each in portions:
        places = map(Place, each.offsets.tolist(), each.lines.tolist())
        found += map(Document, each.texts, each.keys, places)
    return found


def texts_of(parts: list[tuple[Any, list[Portion]]]) -> list[str]:
    return [text for _, portions in parts for each in portions for text in each.texts]


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return pa.Codec("zstd").compress(data, asbytes=True) if suffix == ".zst" else data


def write_zst(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as out:
        out.write(data)


def write(path: Path, data: bytes) -> Path:
    if path.suffix == ".zst":
        write_zst(path, data)
    else:
        path.write_bytes(compress(data, path.suffix))
    return path


def make_lines(seed: int) -> tuple[bytes, list[str]]:
    """Lines of random lengths, some blank, some with other line ends; and their texts."""
    chosen = random.Random(seed)
    data = b"\xef\xbb\xbf" if seed % 2 else b""
    texts = []
    for i in range(chosen.randrange(60)):
        if chosen.random() < 0.1:
            data += b"  \r\n" if chosen.random() < 0.5 else b"\n"
        text = "".join(chosen.choice("ab é\n中🙂") for _ in range(chosen.randrange(50)))
        record = {"id": i, "text": text, "big": 10**30, "nan": float("nan")}
        line = json.dumps(record, ensure_ascii=chosen.random() < 0.5).encode()
        data += line + (b"\r\n" if chosen.random() < 0.2 else b"\n")
        texts.append(text)
    return (data[:-1] if chosen.random() < 0.5 and data.endswith(b"}\n") else data), texts


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_parts_of_any_size_have_all_documents_once(
    tmp_path: Path, seed: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, texts = make_lines(seed)
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    monkeypatch.setattr(lines_module, "BATCH_BYTES", 1 + seed * 13)
    monkeypatch.setattr(text_file, "PORTION_BYTES", 1 + seed * 7)
    for part_bytes in (1 + seed, 100, 1 << 20):
        parts = read(path, part_bytes)
        assert texts_of(parts) == texts
        assert sum(part.num_lines for part, _ in parts) == len(data.splitlines()) or b"\r" in data
        for part, portions in parts:
            for each in documents_of(portions):
                # The part of a line is where its first byte lies
                assert each.place.offset // part_bytes == part.number
                at = each.place.offset
                line = data[at:].split(b"\n")[0].removeprefix(b"\xef\xbb\xbf")
                assert json.loads(line)["text"] == each.text
                assert each.key == str(json.loads(line)["id"])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_has_the_parts_of_the_plain_one(tmp_path: Path, suffix: str) -> None:
    data, _ = make_lines(11)
    plain = read(write(tmp_path / "a.jsonl", data), 200)
    packed = read(write(tmp_path / f"a.jsonl{suffix}", data), 200)
    assert [part.digest for part, _ in packed] == [part.digest for part, _ in plain]


def test_batches_depend_on_the_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(json.dumps({"text": "x" * i}).encode() + b"\n" for i in range(300))
    path = write(tmp_path / "a.jsonl", data)
    monkeypatch.setattr(lines_module, "BATCH_BYTES", 1000)
    sizes = []
    for portion in (3, 999, 1 << 20):
        monkeypatch.setattr(text_file, "PORTION_BYTES", portion)
        sizes.append([[p.num_bytes for p in portions] for _, portions in read(path, 10_000)])
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(sizes[0]) > 1
    assert len(sizes[0][0]) > 5


FRAGMENTS = (
    *(b'{"text": "a"}', b'{"text": "b", "id": 3}', b'{"text": null}', b'{"x":', b'{"a": 1}, "text": "q"}'),
    *(b"\n", b"\r\n", b"\n", b" ", b"\n\n", b"[", b"{", b"}", b'{"text": "\\n}\\n{"}', b'{"text": "long enough"}'),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_are_decoded_together_are_what_each_one_is(seed: int) -> None:
    """msgspec takes objects from a line that has several, and from several lines that have one."""
    chosen = random.Random(seed)
    parser = LineParser(TextFields(text="text", key="id", max_bytes=20))
    num_together = 0
    for _ in range(2000):
        pieces = [chosen.choice(FRAGMENTS) for _ in range(chosen.randrange(1, 8))]
        if chosen.random() < 0.3:
            pieces = [piece for i in range(4) for piece in (FRAGMENTS[i % 2], b"\n", *pieces[:1])]
        data = b"".join(pieces)
        together = parser.parse(Lines(memoryview(data), 100, len(data)), 7)
        each = parser._parse_each(data, 100, 7)
        assert documents_of([together]) == documents_of([each]), data
        assert (together.bad, together.num_lines) == (each.bad, each.num_lines), data
        num_together += parser._parse_together(memoryview(data), 100, 7) is not None
    assert num_together > 10


BAD = {
    b'{"text": null}': ("no text", "has null in 'text'"),
    b'{"text": 5}': ("no text", "has int in 'text'"),
    b'{"txet": "a"}': ("no text", "has no key 'text'; did you mean 'txet'?"),
    b"[1, 2]": (
        "not JSON",
        "is of type list, not a JSON object; expected one object per line: `jq -c '.[]'",
    ),
    b"{": ("not JSON", "`jq -c . FILE`"),
    b'[{"text": "a"},': ("not JSON", "`jq -c '.[]' FILE`"),
    b'{"text": "a"': ("not JSON", "is not JSON"),
    b'{"text": "a\x01"}': ("not JSON", "Invalid control character"),
    b'{"text": "a\xff"}': ("invalid UTF-8", "is not valid UTF-8 at byte 11 of the line"),
    b'{"text": "\\ud800"}': ("lone surrogate", "a lone surrogate"),
    b'{"text": "' + b"a" * 300 + b'"}': (
        "too long",
        "is 312 bytes long, more than max_document (200)",
    ),
    b"[" * 5000: ("too long", "is 5,000 bytes long"),
}


@pytest.mark.parametrize("line", BAD)
def test_bad_documents_are_counted_with_their_place(tmp_path: Path, line: bytes) -> None:
    good = b'{"text": "a"}\n'
    path = write(tmp_path / "a.jsonl", good * 500 + line + b"\n" + good * 500)
    fields = TextFields(text="text", key=None, max_bytes=200)
    ((_, portions),) = read(path, 1 << 20, fields)
    (bad,) = (each for portion in portions for each in portion.bad)
    assert len(documents_of(portions)) == 1000
    assert (bad.kind, bad.place) == (BAD[line][0], (500 * len(good), 500))
    assert BAD[line][1] in bad.reason


@pytest.mark.parametrize(
    ("convert", "remedy"),
    [
        (
            gzip.compress,
            "is not valid UTF-8 at byte 1 of the line; the file is compressed: add `.gz` to",
        ),
        (bz2.compress, "is compressed with bzip2: compress it with gzip"),
        (lzma.compress, "is compressed with xz: compress it with gzip"),
        (lambda data: data.decode().encode("utf-16"), "is in UTF-16: convert it"),
        (lambda data: data.decode().encode("utf-32"), "is in UTF-32: convert it"),
        (
            lambda data: b"\0\0\xfe\xff" + data.decode().encode("utf-32-be"),
            "is in UTF-32: convert it",
        ),
    ],
)
def test_files_that_are_no_json_lines_are_told(
    tmp_path: Path, convert: Callable[[bytes], bytes], remedy: str
) -> None:
    path = write(tmp_path / "a.jsonl", convert(b'{"text": "a"}\n'))
    ((_, portions),) = read(path, 1 << 20)
    assert re.search(remedy, portions[0].bad[0].reason)


def test_what_is_not_bad(tmp_path: Path) -> None:
    rows = [
        b'\xef\xbb\xbf{"text": "bom"}\r',
        b"",
        b" \t",
        b'{"text": ""}',
        b'{"text": "big", "n": 123456789012345678901234567890}',
        b'{"text": "bigger", "n": ' + b"7" * 5000 + b', "m": NaN}',
        b'{"text": "nan", "n": NaN, "m": -Infinity}',
        b'{"text": "first", "text": "last"}',
        b'{"text": "pair \\ud83d\\ude42"}',
        b'{"text": "no newline"}',
    ]
    path = write(tmp_path / "a.jsonl", b"\n".join(rows))
    found = read(path, 1 << 20)
    assert texts_of(found) == ["bom", "", "big", "bigger", "nan", "last", "pair 🙂", "no newline"]
    assert found[0][0].num_lines == len(rows)


def test_nested_keys(tmp_path: Path) -> None:
    rows = [{"a": {"b": "x", "id": 1}}, {"a": {"b": "y"}}, {"a": {}}, {"a": 3}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    fields = TextFields(text="a.b", key="a.id", max_bytes=1000)
    ((_, (portion,)),) = read(path, 1 << 20, fields)
    assert (portion.texts, portion.keys) == (["x", "y"], ["1", None])
    assert [each.kind for each in portion.bad] == ["no text", "no text"]
    assert texts_of(read(path, 1 << 20, TextFields(text="a.b", key="a.b", max_bytes=9000))) == [
        "x",
        "y",
    ]
    # What other fields hold is not looked at, in however many parts a name is
    path.write_bytes(b'{"o": "\xff", "a": {"p": "\xff", "b": "x"}, "text": "y"}\n')
    for name, text in (("a.b", "x"), ("text", "y")):
        assert texts_of(read(path, 1 << 20, TextFields(text=name, key=None, max_bytes=999))) == [
            text
        ]
    # A key whose own name has dots is that key
    path.write_bytes(b'{"a.b": "x", "a.id": 7, "a": {"b": "y"}}\n{"a.b": "z", "a.id": NaN}\n')
    ((_, (portion,)),) = read(path, 1 << 20, fields)
    assert (portion.texts, portion.keys) == (["x", "z"], ["7", "nan"])
    # JSON escapes some characters of names; the text may be its own key
    for name in ("t", 't"', "t\\", "t\n"):
        path.write_text(json.dumps({name: "x"}))
        fields = TextFields(text=name, key=name, max_bytes=99)
        ((_, (portion,)),) = read(path, 1 << 20, fields)
        assert (portion.texts, portion.keys) == (["x"], ["x"])
    # What stands for a key is what `json` makes of it
    keys = ["1e2", "-0", "[1, 2.50]", '{"b": null}', "123456789012345678901234567890", "true", '""']
    lines = [f'{{"text": "t", "k": {key}, "a": {{"k": {key}}}}}' for key in keys]
    path.write_text("\n".join(lines))
    for name in ("k", "a.k"):
        ((_, (portion,)),) = read(path, 1 << 20, TextFields(text="text", key=name, max_bytes=1000))
        assert portion.keys == [str(json.loads(key)) for key in keys]


def test_a_line_that_is_too_long_is_passed_over_and_never_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(3 * lines_module.BATCH_BYTES >> 20):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "b"}\n')
    fields = TextFields(text="text", key=None, max_bytes=1 << 20)
    for part_bytes in (1 << 30, 5 << 20):
        parts = read(path, part_bytes, fields)
        assert texts_of(parts) == ["a", "b"]
        bad = [each for _, portions in parts for p in portions for each in p.bad]
        assert [(each.kind, each.place.offset) for each in bad] == [("too long", 14)]
    whole = TextFields(text="text", key=None, max_bytes=1 << 30)
    assert [len(text) for text in texts_of(read(path, 5 << 20, whole))] == [
        1,
        3 * lines_module.BATCH_BYTES,
        1,
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_a_truncated_file_is_an_error(tmp_path: Path, suffix: str, cut: int) -> None:
    chosen = random.Random(1)
    data = b"".join(b'{"text": "%x"}\n' % chosen.getrandbits(200) for _ in range(2000))
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptFileError, match=r"cannot be decompressed .*on_unreadable: skip"):
        read(path, 1 << 20)


def test_another_file_than_its_suffix_says_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b'{"text": "a"}\n' * 100)
    with pytest.raises(CorruptFileError, match="truncated, damaged, or not gzip"):
        read(path, 1 << 20)


@pytest.mark.parametrize("what", ["window", "dictionary"])
def test_a_frame_that_needs_more_than_pyarrow_gives_says_so(tmp_path: Path, what: str) -> None:
    # Headers of frames: a window of 1 GiB, the number of a dictionary; then an empty last block
    header = {"window": b"\x00\xa0", "dictionary": b"\x01\x58\x07"}[what]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + header + b"\x01\0\0")
    remedy = {"window": "zstd --long=27", "dictionary": "without one"}[what]
    with pytest.raises(CorruptFileError, match=f"{remedy}.*on_unreadable: skip") as caught:
        read(path, 1 << 20)
    assert "truncated" not in str(caught.value)


def test_members_and_frames_are_read_one_after_the_other(tmp_path: Path) -> None:
    one = b'{"text": "a"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(one) + gzip.compress(one))
    frame = tmp_path / "frame.zst"
    write_zst(frame, one)
    (tmp_path / "a.jsonl.zst").write_bytes(2 * frame.read_bytes())
    assert texts_of(read(tmp_path / "a.jsonl.gz", 1 << 20)) == ["a", "a"]
    assert texts_of(read(tmp_path / "a.jsonl.zst", 1 << 20)) == ["a", "a"]


def test_tasks_of_plain_files_are_parts() -> None:
    file = TextFile("a.jsonl", "/a.jsonl", 250, "")
    tasks = plan_tasks(file, STORAGE, FIELDS, 100)
    assert [(task.part, task.cost) for task in tasks] == [(0, 100), (1, 100), (2, 50)]
    empty = plan_tasks(file._replace(size=0), STORAGE, FIELDS, 100)
    assert empty == [Task(file=file._replace(size=0), part=0, cost=0)]
