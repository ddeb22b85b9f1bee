"""JSON Lines: reads the lines of a part of a file (`LineReader`) and parses them (`LineParser`)."""

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
"""The bytes of lines that are read, tokenised and written together. Token files depend on it."""
PORTION_BYTES = 4 << 20
"""The bytes that are requested from the storage at a time."""
Piece = bytes | memoryview
"""Consecutive bytes of a file, as they arrive."""
CODECS = {".gz": "gzip", ".zst": "zstd"}
_Key = str | int | float | bool | None
_ONE_A_LINE = "; expected one object per line: `jq -c '.[]' FILE` converts an array, `jq -c . FILE` other JSON"
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
    """None for a single line that is too long: it was passed over."""
    offset: int
    """The position of the first byte in the uncompressed file."""
    size: int
    """The number of bytes."""


class LineReader:
    """Reads consecutive lines of a file, in batches that depend on the file and on the first byte
    of the part, not on how the bytes arrive.

    Args:
        pieces: the file's bytes from `offset` on.
        max_bytes: longer lines are passed over.
    """

    def __init__(self, pieces: Iterator[Piece], offset: int, max_bytes: int) -> None:
        self.offset = offset
        """The position of the first byte that has not been returned."""
        self._pieces = pieces
        self._max_bytes = max_bytes
        self._buffer = b""
        self._start = 0
        """The index in `_buffer` of the byte at `offset`."""
        self._is_at_end = False

    def pass_line(self) -> None:
        """Pass over the rest of a line that belongs to the previous part."""
        self._pass_line(lambda _: None)

    def at_end(self) -> bool:
        """Whether the file has no more bytes."""
        return self._fill(1) == 0

    def read(self, stop: int, digest: blake2b) -> Lines | None:
        """Read lines that begin before `stop`, and add them to `digest`.

        Returns: at most BATCH_BYTES of lines, or one longer line; None if no line is left.
        """
        if self.offset >= stop:
            return None
        # One byte more than a batch shows whether the file ends within the batch
        num_buffered = self._fill(BATCH_BYTES + 1)
        if not num_buffered:
            return None
        offset = self.offset
        end = self._find_batch_end(stop, num_buffered) or self._find_long_end()
        if end is None:
            self._pass_line(digest.update)
            return Lines(None, offset, self.offset - offset)
        data = memoryview(self._buffer)[self._start : end]
        digest.update(data)
        self._start = end
        self.offset += len(data)
        return Lines(data, offset, len(data))

    def _find_batch_end(self, stop: int, num_buffered: int) -> int:
        """Return the end of the lines of a batch in the buffer; 0 if a batch does not hold the
        first line."""
        start = self._start
        batch_end = start + min(num_buffered, BATCH_BYTES)
        end = 0
        last = start + stop - 1 - self.offset  # in the last line that begins before `stop`
        if last < batch_end:
            end = self._buffer.find(b"\n", last, batch_end) + 1
        if not end and num_buffered <= BATCH_BYTES:  # the file ends here
            return batch_end
        return end or self._buffer.rfind(b"\n", start, batch_end) + 1

    def _find_long_end(self) -> int | None:
        """Return the end of the first line in the buffer; None if it is longer than `max_bytes`."""
        size = BATCH_BYTES
        while True:
            num_buffered = self._fill(size)
            end = self._buffer.find(b"\n", self._start) + 1
            if not end and num_buffered < size:  # the last line of the file
                end = len(self._buffer)
            if end:
                return end if end - self._start <= self._max_bytes else None
            if num_buffered > self._max_bytes:
                return None
            size *= 2

    def _pass_line(self, use: Callable[[Piece], object]) -> None:
        """Pass over the rest of a line of any length; `use` is called with its bytes."""
        while self._fill(1):
            end = self._buffer.find(b"\n", self._start) + 1
            data = memoryview(self._buffer)[self._start : end or None]
            use(data)
            self._start += len(data)
            self.offset += len(data)
            if end:
                return

    def _fill(self, size: int) -> int:
        """Read until `size` bytes are buffered, or the file ends. Returns: the bytes buffered."""
        num_buffered = len(self._buffer) - self._start
        if num_buffered >= size or self._is_at_end:
            return num_buffered
        pieces: list[Piece] = [memoryview(self._buffer)[self._start :]]
        while num_buffered < size:
            piece = next(self._pieces, b"")
            if not piece:
                self._is_at_end = True
                break
            pieces.append(piece)
            num_buffered += len(piece)
        self._buffer = b"".join(pieces)
        self._start = 0
        return num_buffered


def open_plain(storage: Storage, path: str, size: int, start: int) -> Iterator[Piece]:
    """Read the bytes of a file from `start` on."""
    for _, data in read_portions(storage, path, size, PORTION_BYTES, start):
        yield data


def open_compressed(storage: Storage, path: str, size: int, codec: str) -> Iterator[Piece]:
    """Read and decompress a file. Raises: CorruptFileError if it is truncated or damaged."""
    return _decompress(_Pieces(open_plain(storage, path, size, 0)), path, codec)


def _decompress(raw: _Pieces, path: str, codec: str) -> Iterator[Piece]:
    try:
        with pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec) as stream:
            while data := stream.read(PORTION_BYTES):
                yield data
    except OSError as error:
        if isinstance(error, ValueError):  # raised by the storage; pyarrow's is a plain OSError
            raise
        reason = str(error).strip().splitlines()[0]
        remedy = f"truncated, damaged, or not {codec}; {REWRITE_REMEDY}"
        for cause, zstd_remedy in _ZSTD_REMEDIES.items():
            if cause in reason:
                remedy = zstd_remedy
        raise CorruptFileError(
            path,
            f"cannot be decompressed ({reason}): {remedy}, or set `on_unreadable: skip`",
            offset=raw.position,
        ) from error


def measure_compression(storage: Storage, path: str, size: int, codec: str) -> tuple[int, int]:
    """Decompress the beginning of a file. Returns: the number of its bytes in the file, and in the
    text. Raises: the same errors as `open_compressed`."""
    raw = _Pieces(open_plain(storage, path, size, 0))
    num_bytes = 0
    for data in _decompress(raw, path, codec):
        num_bytes += len(data)
        if num_bytes >= BATCH_BYTES:
            break
    return raw.position, num_bytes


class _Pieces(io.RawIOBase):
    """The pieces of a file as a file object."""

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
    """Parses lines into documents. Raises: ConfigError if msgspec is not installed."""

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
            # Values stay undecoded until they are needed: a fault in another value does not matter
            decoder = msgspec.json.Decoder(GenericAlias(dict, (str, msgspec.Raw)))
            decode_text = msgspec.json.Decoder(str).decode
            decode_key = msgspec.json.Decoder(_Key).decode
            self._get_text = partial(_decode_nested, fields.text, decoder.decode, decode_text)
            self._get_key = partial(
                _decode_nested, names["key"], decoder.decode, decode_key, is_optional=True
            )
        else:
            types: list[tuple[Any, ...]] = [("text", str)]
            if fields.key is not None:
                types.append(("key", _Key, None))
            line = msgspec.defstruct("Line", types, rename=names, kw_only=True, gc=False)
            decoder = msgspec.json.Decoder(line)
        if fields.key is None:
            self._get_key = lambda _: None
        self._decode = decoder.decode
        self._decode_lines = decoder.decode_lines

    def parse(self, lines: Lines, line: int) -> Portion:
        """Return the documents of consecutive lines.

        Args:
            line: the number of the first line within its part.
        """
        if lines.data is None:
            bad = self._fields.refuse_long(lines.size, Place(lines.offset, line))
            return Portion.gather([bad], lines.size, 1)
        return self._parse_together(lines.data, lines.offset, line) or self._parse_each(
            bytes(lines.data), lines.offset, line
        )

    def _parse_together(self, data: memoryview, offset: int, line: int) -> Portion | None:
        """Return the documents of lines, decoded at once, which takes half the time; None unless
        each line is certainly one document."""
        codes = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(codes == _NEWLINE)
        if codes[-1] != _NEWLINE:
            ends = np.append(ends, len(codes))
        starts = np.append(0, ends[:-1] + 1)
        # No JSON object extends over a line break between } and {: if there are as many objects as
        # lines, each line is one object
        last_places = ends - 1
        last_places -= codes[last_places] == _RETURN
        is_separate = (codes[starts] == _OPEN).all() and (codes[last_places] == _CLOSE).all()
        if not is_separate or (ends - starts).max() > self._fields.max_bytes:
            return None
        try:
            records = self._decode_lines(data)
            texts = list(map(self._get_text, records))
            keys = [None if key is None else str(key) for key in map(self._get_key, records)]
        except Exception:  # raised by msgspec: whatever it is, parse the lines one by one
            return None
        if len(texts) != len(ends):
            return None
        numbers = np.arange(line, line + len(texts))
        return Portion(texts, keys, offset + starts, numbers, [], len(data), len(texts))

    def _parse_each(self, data: bytes, offset: int, first_line: int) -> Portion:
        """Return the documents of lines, parsed one by one."""
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        results = list[Document | BadDocument]()
        for number, line in enumerate(lines, first_line):
            result = self._parse_line(line, Place(offset, number))
            if result is not None:
                results.append(result)
            offset += len(line) + 1
        return Portion.gather(results, len(data), len(lines))

    def _parse_line(self, line: bytes, place: Place) -> Document | BadDocument | None:
        """Return the document of a line; None if the line is blank."""
        if place.offset == 0 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        if len(line) > self._fields.max_bytes:
            return self._fields.refuse_long(len(line), place)
        try:
            record = self._decode(line)
            key = self._get_key(record)
            return Document(self._get_text(record), None if key is None else str(key), place)
        except Exception:  # raised by msgspec: whatever it is, let json decide
            if not line.strip(b" \t\r"):
                return None
            return self._parse_by_json(line, place)

    def _parse_by_json(self, line: bytes, place: Place) -> Document | BadDocument:
        """Return the document of a line that msgspec refuses: `json` reads more (NaN, large
        integers), and each fault gets its reason."""
        fields = self._fields
        try:
            record = json.loads(line.decode("utf-8"), parse_int=_read_integer)
        except UnicodeDecodeError as error:
            return BadDocument("invalid UTF-8", f"is not UTF-8 at its byte {error.start}", place)
        except (ValueError, RecursionError) as error:
            hint = _ONE_A_LINE if line.strip() in (b"{", b"[") or line.startswith(b"[{") else ""
            return BadDocument("not JSON", f"is not JSON ({error}){hint}", place)
        if not isinstance(record, dict):
            hint = _ONE_A_LINE if isinstance(record, list) else ""
            reason = f"is of type {type(record).__name__}, not a JSON object{hint}"
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
    """Return a number of any length: Python converts no int of more than some 4,300 digits."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _find_nested(record: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted name; a key that itself has dots goes first. Raises: KeyError
    with the name that is missing."""
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
    """Return the value at a dotted name of an object whose values are undecoded; None if it is
    optional and the last name is missing. Raises: KeyError if another name is missing; whatever the
    decoders raise."""
    *above, last = [dotted] if dotted in record else dotted.split(".")
    for name in above:
        record = decode_object(record[name])
    if is_optional and last not in record:
        return None
    return decode_value(record[last])


def _find_key(record: Mapping[str, Any], dotted: str | None) -> Any:
    """Return the key at a dotted name; None if the source names none, or the record lacks it."""
    try:
        return None if dotted is None else _find_nested(record, dotted)
    except KeyError:
        return None


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
