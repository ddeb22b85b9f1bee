"""JSON Lines: the lines of a part of a file, and the text of each."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from types import GenericAlias
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megablend.errors import REWRITE_REMEDY, ConfigError, CorruptFileError, did_you_mean
from megablend.storage.base import Storage
from megablend.storage.portions import read_portions
from megablend.text.documents import BadDocument, Document, Place, Portion, TextFields
from megablend.text.engine import MISSING

BATCH_BYTES = 16 << 20
"""Lines that are read, tokenised and written together. Token files depend on it."""
PORTION_BYTES = 4 << 20
Piece = bytes | memoryview
CODECS = {".gz": "gzip", ".zst": "zstd"}
_Key = str | int | float | bool | None
_ONE_A_LINE = ", which is not one object a line: `jq -c '.[]' FILE` writes those of an array so, `jq -c . FILE` others"
_ZSTD_REMEDIES = {
    "too much memory": "its window is longer than 128 MiB; compress it again, by `zstd --long=27` at most",
    "Dictionary mismatch": "it needs a dictionary; compress it again without one",
}
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
_RETURN = ord("\r")
_OPEN = ord("{")
_CLOSE = ord("}")


class Lines(NamedTuple):
    """Consecutive lines."""

    data: memoryview | None
    """None for a single line that is too long, which was passed over."""
    offset: int
    """Of the first byte."""
    size: int


class LineReader:
    """Reads consecutive lines of a file, in batches that depend on the file and on where the part
    begins, not on how its bytes arrive.

    Args:
        pieces: the file's bytes from `offset` on.
        max_bytes: longer lines are passed over.
    """

    def __init__(self, pieces: Iterator[Piece], offset: int, max_bytes: int) -> None:
        self.offset = offset
        """Of the first byte that was not returned yet."""
        self._pieces = pieces
        self._max_bytes = max_bytes
        self._buffer = b""
        self._at = 0
        self._ended = False

    def pass_line(self) -> None:
        """Pass over the rest of a line, which belongs to the part before."""
        self._pass_long(lambda _: None)

    def at_end(self) -> bool:
        """Whether the file has no more bytes."""
        return self._fill(1) == 0

    def read(self, stop: int, digest: blake2b) -> Lines | None:
        """Lines that begin before `stop`, at most BATCH_BYTES of them or one; None without any.
        They are added to `digest`."""
        if self.offset >= stop:
            return None
        # One more, so that it is known whether the file ends here
        held = self._fill(BATCH_BYTES + 1)
        is_rest = held <= BATCH_BYTES
        held = min(held, BATCH_BYTES)
        if not held:
            return None
        at = self._at
        end = 0
        if stop - self.offset <= held:
            end = self._buffer.find(b"\n", at + stop - 1 - self.offset, at + held) + 1
        if not end and is_rest:
            end = at + held
        end = end or self._buffer.rfind(b"\n", at, at + held) + 1
        start = self.offset
        if not end:  # a line that is longer than a batch
            end = self._find_long_end()
            at = self._at
            if end - at > self._max_bytes or end < 0:
                self._pass_long(digest.update)
                return Lines(None, start, self.offset - start)
        data = memoryview(self._buffer)[at:end]
        digest.update(data)
        self._at = end
        self.offset += len(data)
        return Lines(data, start, len(data))

    def _find_long_end(self) -> int:
        """Where the line ends that begins the buffer; -1 if it is too long."""
        size = BATCH_BYTES
        while True:
            held = self._fill(size)
            end = self._buffer.find(b"\n", self._at)
            if end >= 0:
                return end + 1
            if held < size:
                return len(self._buffer)
            if held > self._max_bytes:
                return -1
            size *= 2

    def _pass_long(self, use: Callable[[Piece], object]) -> None:
        while self._fill(1):
            end = self._buffer.find(b"\n", self._at) + 1
            data = memoryview(self._buffer)[self._at : end or None]
            use(data)
            self._at += len(data)
            self.offset += len(data)
            if end:
                return

    def _fill(self, size: int) -> int:
        """Read until `size` bytes are held, or the file ends. Returns: how many are."""
        held = len(self._buffer) - self._at
        if held >= size or self._ended:
            return held
        parts: list[Piece] = [memoryview(self._buffer)[self._at :]]
        while held < size:
            piece = next(self._pieces, b"")
            if not piece:
                self._ended = True
                break
            parts.append(piece)
            held += len(piece)
        self._buffer = b"".join(parts)
        self._at = 0
        return held


def open_plain(storage: Storage, path: str, size: int, start: int) -> Iterator[Piece]:
    """The bytes of a file from `start` on."""
    for _, data in read_portions(storage, path, size, PORTION_BYTES, start):
        yield data


def open_compressed(storage: Storage, path: str, size: int, codec: str) -> Iterator[Piece]:
    """The bytes of a compressed file, decompressed. Raises: CorruptFileError if it is truncated or
    damaged."""
    return _decompress(_Pieces(open_plain(storage, path, size, 0)), path, codec)


def _decompress(raw: _Pieces, path: str, codec: str) -> Iterator[Piece]:
    try:
        with pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec) as stream:
            while data := stream.read(PORTION_BYTES):
                yield data
    except OSError as error:
        if isinstance(error, ValueError):  # of the storage
            raise
        reason = str(error).strip().splitlines()[0]
        remedy = next(
            (remedy for cause, remedy in _ZSTD_REMEDIES.items() if cause in reason),
            f"truncated, damaged, or not {codec}; {REWRITE_REMEDY}",
        )
        raise CorruptFileError(
            path,
            f"cannot be decompressed ({reason}): {remedy}, or set `on_unreadable: skip`",
            offset=raw.position,
        ) from error


def measure_compression(storage: Storage, path: str, size: int, codec: str) -> tuple[int, int]:
    """Bytes at the beginning of a compressed file, and bytes of text that they are. Raises: as
    `open_compressed`."""
    raw = _Pieces(open_plain(storage, path, size, 0))
    num_bytes = 0
    for data in _decompress(raw, path, codec):
        num_bytes += len(data)
        if num_bytes >= BATCH_BYTES:
            break
    return raw.position, num_bytes


class _Pieces(io.RawIOBase):
    """Pieces of a file as a file object."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._rest: Piece = b""
        self.position = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        data = bytes(self._rest if size < 0 else self._rest[:size])
        self._rest = self._rest[len(data) :]
        self.position += len(data)
        return data


class LineParser:
    """The documents of lines. Raises: ConfigError without msgspec."""

    def __init__(self, fields: TextFields) -> None:
        try:
            msgspec = import_module("msgspec")
        except ImportError as error:
            raise ConfigError(MISSING) from error
        self._fields = fields
        self._get_text: Callable[[Any], str] = attrgetter("text")
        self._get_key: Callable[[Any], object] = attrgetter("key")
        names = {"text": fields.text, "key": fields.key or ""}
        if fields.text == fields.key or any("." in name for name in names.values()):
            # Values stay undecoded until they are asked for: what the others hold does not matter
            decoder = msgspec.json.Decoder(GenericAlias(dict, (str, msgspec.Raw)))
            of_text = msgspec.json.Decoder(str).decode
            of_key = msgspec.json.Decoder(_Key).decode
            self._get_text = partial(_decode_nested, fields.text, decoder.decode, of_text)
            self._get_key = partial(
                _decode_nested, names["key"], decoder.decode, of_key, is_optional=True
            )
        else:
            kinds = [("text", str), ("key", _Key, None)][: 1 if fields.key is None else 2]
            line = msgspec.defstruct("Line", kinds, rename=names, kw_only=True, gc=False)
            decoder = msgspec.json.Decoder(line)
        if fields.key is None:
            self._get_key = lambda _: None
        self._decode = decoder.decode
        self._decode_lines = decoder.decode_lines

    def parse(self, lines: Lines, line: int) -> Portion:
        """The documents of consecutive lines.

        Args:
            line: number of the first one within its part.
        """
        if lines.data is None:
            bad = self._fields.refuse_long(lines.size, Place(lines.offset, line))
            return Portion.gather([bad], lines.size, 1)
        return self._parse_together(lines.data, lines.offset, line) or self._parse_each(
            bytes(lines.data), lines.offset, line
        )

    def _parse_together(self, data: memoryview, offset: int, line: int) -> Portion | None:
        """The documents of lines, decoded at once, which takes half the time; None unless each
        line is a document that is surely read right."""
        codes = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(codes == _NEWLINE)
        if codes[-1] != _NEWLINE:
            ends = np.append(ends, len(codes))
        starts = np.append(0, ends[:-1] + 1)
        # Where a } ends a line and a { begins the next one, no JSON object goes on: as many objects
        # as lines are then one each
        lasts = ends - 1
        lasts -= codes[lasts] == _RETURN
        is_apart = (codes[starts] == _OPEN).all() and (codes[lasts] == _CLOSE).all()
        if not is_apart or (ends - starts).max() > self._fields.max_bytes:
            return None
        try:
            found = self._decode_lines(data)
            texts = list(map(self._get_text, found))
            given = map(self._get_key, found)
            keys = [None if key is None else str(key) for key in given]
        except Exception:  # of msgspec: whatever it is, lines are looked at one by one
            return None
        if len(texts) != len(ends):
            return None
        numbers = np.arange(line, line + len(texts))
        return Portion(texts, keys, offset + starts, numbers, [], len(data), len(texts))

    def _parse_each(self, data: bytes, offset: int, line: int) -> Portion:
        rows = data.split(b"\n")
        if not rows[-1]:
            rows.pop()
        found = list[Document | BadDocument]()
        for number, row in enumerate(rows, line):
            each = self._parse_line(row, Place(offset, number))
            if each is not None:
                found.append(each)
            offset += len(row) + 1
        return Portion.gather(found, len(data), len(rows))

    def _parse_line(self, row: bytes, place: Place) -> Document | BadDocument | None:
        if place.offset == 0 and row.startswith(_BOM):
            row = row[len(_BOM) :]
        if len(row) > self._fields.max_bytes:
            return self._fields.refuse_long(len(row), place)
        try:
            found = self._decode(row)
            key = self._get_key(found)
            return Document(self._get_text(found), None if key is None else str(key), place)
        except Exception:  # of msgspec: whatever it is, json decides
            if not row.strip(b" \t\r"):
                return None
            return self._read_exactly(row, place)

    def _read_exactly(self, row: bytes, place: Place) -> Document | BadDocument:
        fields = self._fields
        try:
            record = json.loads(row.decode("utf-8"), parse_int=_read_integer)
        except UnicodeDecodeError as error:
            return BadDocument("invalid UTF-8", f"is not UTF-8 at its byte {error.start}", place)
        except (ValueError, RecursionError) as error:
            hint = _ONE_A_LINE if row.strip() in (b"{", b"[") or row.startswith(b"[{") else ""
            return BadDocument("not JSON", f"is not JSON ({error}){hint}", place)
        if not isinstance(record, dict):
            hint = _ONE_A_LINE if isinstance(record, list) else ""
            reason = f"is a {type(record).__name__}, no JSON object{hint}"
            return BadDocument("not JSON", reason, place)
        try:
            text = _find_nested(record, fields.text)
        except KeyError as error:
            hint = did_you_mean(str(error.args[0]), record, before="; ")
            return BadDocument("no text", f"has no key {fields.text!r}{hint}", place)
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            return BadDocument("no text", f"has {kind} in {fields.text!r}, no text", place)
        if not _is_unicode(text):
            return BadDocument(
                "lone surrogate", f"has half a surrogate pair in {fields.text!r}", place
            )
        key = _find_key(record, fields.key)
        key = None if key is None else str(key)
        return Document(text, key if key is None or _is_unicode(key) else repr(key), place)


def _read_integer(digits: str) -> int | Decimal:
    """Python refuses to convert an int of more than some 4,300 digits, which JSON may have."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _find_nested(record: Mapping[str, Any], dotted: str) -> Any:
    """A value by its dotted name, which may be that of a key itself. Raises: KeyError, with the name
    that is missing."""
    if dotted in record:
        return record[dotted]
    value: Any = record
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(name)
        value = value[name]
    return value


def _decode_nested(
    dotted: str,
    decode_object: Callable[[Any], Mapping[str, Any]],
    decode_value: Callable[[Any], Any],
    record: Mapping[str, Any],
    *,
    is_optional: bool = False,
) -> Any:
    """A value by its dotted name, where the values of objects are undecoded; None if it is optional
    and the last name is missing. Raises: KeyError if another name is; what the decoders raise."""
    *above, last = [dotted] if dotted in record else dotted.split(".")
    for name in above:
        record = decode_object(record[name])
    if is_optional and last not in record:
        return None
    return decode_value(record[last])


def _find_key(record: Mapping[str, Any], dotted: str | None) -> Any:
    """None if there is none."""
    try:
        return None if dotted is None else _find_nested(record, dotted)
    except KeyError:
        return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
