"""The types of the values in a config, and their parsers. Numbers are exact: 0.1 is 1/10."""

from __future__ import annotations

import os
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticKnownError

from megablend.config.read_spec import OptionValue
from megablend.order.registry import ORDERS, current_name, find_order
from megablend.storage.object_options import ObjectOptions
from megablend.storage.store_options import parse_options

SIZE: Literal["size"] = "size"
"""A weight that stands for the source's number of tokens in the split."""
MAX_COUNT = 1 << 62
MAX_EXPONENT = 100
"""Maximum power of ten in a number. Without a limit, a typing error such as 1e999999999 would be
stored exactly, digit by digit."""


def _parse_number(value: object, *, expected: str = "0 or more") -> Fraction:
    """Parse a finite number, 0 or more, exactly.

    Args:
        expected: the expected value that the message about a negative number names.
    """
    # The common case: a config may have thousands of these
    if type(value) is int and 0 <= value < 10**MAX_EXPONENT:
        return Fraction(value)
    try:
        if isinstance(value, (bool, type(None), dict, list)):
            raise InvalidOperation
        if isinstance(value, Fraction):
            number = value
        else:
            written = Decimal(str(value).strip().replace("_", ""))
            if written and abs(written.adjusted()) > MAX_EXPONENT:
                raise OverflowError
            number = Fraction(written or 0)
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(
            f"found {value!r}, expected a finite number such as 50e9 or 1_000 (0, or from 1e-{MAX_EXPONENT} to 1e{MAX_EXPONENT})"
        ) from None
    if number < 0:
        raise ValueError(f"found {value!r}, expected {expected}")
    return number


def _parse_positive(value: object) -> Fraction:
    """Parse a finite number above 0, exactly."""
    number = _parse_number(value, expected="more than 0")
    if number == 0:
        raise ValueError(f"found {value!r}, expected more than 0")
    return number


def _parse_weight(value: object) -> Fraction | Literal["size"]:
    """Parse a weight: a number, 0 or more, or `size`."""
    if value == SIZE:
        return SIZE
    try:
        return _parse_number(value)
    except ValueError as error:
        hint = f", or `{SIZE}` (the source's number of tokens)" if isinstance(value, str) else ""
        raise ValueError(f"{error}{hint}") from None


def _parse_temperature(value: object) -> Fraction:
    """Parse a temperature: a number, 0.1 or more."""
    number = _parse_number(value, expected="0.1 or more")
    if number < Fraction(1, 10):  # powers of small weights would have thousands of digits
        raise ValueError(
            f"found {value!r}, expected 0.1 or more: above 1 evens weights out, below 1 sharpens them"
        )
    return number


def _parse_count(value: object) -> int:
    """Parse a whole number above 0, also written as 1e9 or 1_000."""
    number = _parse_positive(value)
    if number.denominator != 1:
        raise ValueError(f"found {value!r}, expected a whole number")
    if number > MAX_COUNT:
        raise ValueError(f"found {value!r}, expected at most 2^62")
    return int(number)


def _parse_token(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"found {value!r}, expected a token id (0 to 4294967295)")
    return value


def _parse_vocab_size(value: object) -> int | str:
    """Parse a vocabulary size (a number, which may be written as text), or the path of a
    tokenizer.json."""
    if isinstance(value, (str, os.PathLike)) and not re.fullmatch(
        r"\s*[+-]?[0-9.][0-9.e+_]*\s*", os.fspath(value)
    ):
        return os.fspath(value)
    number = _parse_count(value)
    if number > 2**32:
        raise ValueError(f"found {value!r}, expected at most {2**32} token ids")
    return number


def _parse_option(value: object) -> object:
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"found {value!r}, expected text, a number, true, false or null")
    return value


def _parse_documents(value: object) -> str | int:
    """Parse the extent of a document; see `Source.documents`."""
    if value in ("file", "row_group"):
        return str(value)
    if isinstance(value, dict) and list(value) == ["eod_token"]:
        return _parse_token(value["eod_token"])
    raise ValueError(f"found {value!r}, expected file, row_group or {{eod_token: ID}}")


def parse_path(value: object) -> object:
    """Convert a path object to text; other values are returned unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _parse_split(value: object) -> tuple[Fraction, Fraction, Fraction]:
    """Parse up to three numbers, and return the shares of train, valid and test, which sum to 1."""
    if isinstance(value, str):
        parts: list[object] = [*value.split(",")]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = [value]
    try:
        numbers = list(map(_parse_number, parts))
    except ValueError as error:
        raise ValueError(f"{error} for each of train,valid,test, as in 95,5,0") from None
    if not 1 <= len(numbers) <= 3 or sum(numbers) == 0:
        raise ValueError(
            f"found {value!r}, expected up to three numbers train,valid,test, not all 0, such as 95,5,0"
        )
    numbers += [Fraction(0)] * (3 - len(numbers))
    total = sum(numbers)
    return (numbers[0] / total, numbers[1] / total, numbers[2] / total)


def _parse_order(value: object) -> object:
    """Parse the name of an order of megablend.order.registry. Names of release 0.1.0 are also
    accepted.

    Returns: the current name.
    """
    try:
        find_order(str(value))
    except ValueError:
        *names, last = map(repr, ORDERS)
        raise PydanticKnownError(
            "literal_error", {"expected": f"{', '.join(names)} or {last}"}
        ) from None
    return current_name(str(value))


Number = Annotated[Fraction, BeforeValidator(_parse_number)]
Weight = Annotated[Fraction | Literal["size"], BeforeValidator(_parse_weight)]
Temperature = Annotated[Fraction, BeforeValidator(_parse_temperature)]
Positive = Annotated[Fraction, BeforeValidator(_parse_positive)]
Count = Annotated[int, BeforeValidator(_parse_count)]
Token = Annotated[int, BeforeValidator(_parse_token)]
Option = Annotated[OptionValue, BeforeValidator(_parse_option)]
Documents = Annotated[str | int, BeforeValidator(_parse_documents)]
VocabSize = Annotated[int | str, BeforeValidator(_parse_vocab_size)]
PathText = Annotated[str, BeforeValidator(parse_path)]
OrderName = Annotated[str, BeforeValidator(_parse_order)]
Objects = Annotated[ObjectOptions, BeforeValidator(parse_options)]
Split = Annotated[tuple[Fraction, Fraction, Fraction], BeforeValidator(_parse_split)]
