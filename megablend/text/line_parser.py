"""Parse lines of JSON Lines into documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from importlib import import_module
from operator import attrgetter
from types import GenericAlias
from typing import Any

import numpy as np

from megablend.errors import ConfigError, did_you_mean
from megablend.text.documents import BadDocument, Document, Place, Portion, TextFields
from megablend.text.engine import MISSING
from megablend.text.lines import Lines

_Key = str | int | float | bool | None
_ONE_A_LINE = "; expected one object per line: `jq -c '.[]' FILE` converts an array, `jq -c . FILE` other JSON"
_BOM = b"\xef\xbb\xbf"
_OTHER_FILES = {
    b"\x1f\x8b": "the file is compressed: add `.gz` to its name",
    b"\x28\xb5\x2f\xfd": "the file is compressed: add `.zst` to its name",
    b"BZh": "the file is compressed with bzip2: compress it with gzip or zstd instead",
    b"\xfd7zXZ": "the file is compressed with xz: compress it with gzip or zstd instead",
    b"\xff\xfe\0\0": "the file is in UTF-32: convert it with `iconv -f UTF-32 -t UTF-8`",
    b"\0\0\xfe\xff": "the file is in UTF-32: convert it with `iconv -f UTF-32 -t UTF-8`",
    b"\xff\xfe": "the file is in UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "the file is in UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`",
}
"""The first bytes of files that are not JSON Lines, with an explanation for each."""
_NEWLINE = ord("\n")
_RETURN = ord("\r")
_OPEN = ord("{")
_CLOSE = ord("}")


class LineParser:
    """A parser that turns lines of JSON into documents. Raises: ConfigError if msgspec is not
    installed."""

    def __init__(self, fields: TextFields) -> None:
        try:
            msgspec = import_module("msgspec")
        except ImportError as error:
            raise ConfigError(MISSING) from error
        self._fields = fields
        self._get_text: Callable[[Any], str] = attrgetter("text")
        self._get_key: Callable[[Any], object] = attrgetter("key")
        names = {"text": fields.text, "key": fields.key or ""}
        # In msgspec's structs, keys must differ, and cannot have characters that JSON escapes
        is_plain = all(
            json.dumps(name, ensure_ascii=False)[1:-1] == name for name in names.values()
        )
        is_same = fields.text == fields.key
        if is_same or not is_plain or any("." in name for name in names.values()):
            # Values stay undecoded until they are needed: an error in another value does not matter
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
        """Return the documents of lines that are decoded all at once, which takes half the time;
        None unless each line is certain to be one JSON object with a valid text."""
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
        """Return the document of a line that msgspec refuses. Python's `json` accepts more than
        msgspec (NaN, large integers), and distinguishes between kinds of errors."""
        fields = self._fields
        try:
            record = json.loads(line.decode("utf-8"), parse_int=_read_integer)
        except UnicodeDecodeError as error:
            hints = [f"; {hint}" for begin, hint in _OTHER_FILES.items() if line.startswith(begin)]
            hint = hints[0] if hints and place.offset == 0 else ""
            reason = f"is not valid UTF-8 at byte {error.start} of the line{hint}"
            return BadDocument("invalid UTF-8", reason, place)
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
            type_name = "null" if text is None else type(text).__name__
            return BadDocument(
                "no text", f"has {type_name} in {fields.text!r}, not a string", place
            )
        if not _is_unicode(text):
            return BadDocument("lone surrogate", f"has a lone surrogate in {fields.text!r}", place)
        key = _find_key(record, fields.key)
        key = None if key is None else str(key)
        return Document(text, key if key is None or _is_unicode(key) else repr(key), place)


def _read_integer(digits: str) -> int | Decimal:
    """Convert a text of decimal digits to a number. Python's int refuses more than 4,300 digits, so
    longer numbers become Decimals."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _find_nested(record: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted name such as `meta.text`. A key that itself contains the dots
    takes precedence. Raises: KeyError with the name that is missing."""
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
    """Return the value at a dotted name of an object whose values are not decoded yet.

    Args:
        is_optional: whether to return None if the last name is missing.

    Raises: KeyError if a name is missing; errors of the decoders.
    """
    *above, last = [dotted] if dotted in record else dotted.split(".")
    for name in above:
        record = decode_object(record[name])
    if is_optional and last not in record:
        return None
    return decode_value(record[last])


def _find_key(record: Mapping[str, Any], dotted: str | None) -> Any:
    """Return the key at a dotted name; None if the source has no `key`, or the record lacks it."""
    try:
        return None if dotted is None else _find_nested(record, dotted)
    except KeyError:
        return None


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. It cannot if it has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
