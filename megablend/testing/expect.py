"""Expect errors in contract suites, without pytest, which is not a dependency of the package."""

from __future__ import annotations

import re
from collections.abc import Callable


def raises(error: type[Exception], call: Callable[..., object], *arguments: object) -> bool:
    """Return whether a call raises an error of the given type."""
    try:
        call(*arguments)
    except error:
        return True
    return False


def expect_error(
    error: type[Exception], pattern: str, call: Callable[..., object], *arguments: object
) -> None:
    """Require that a call raises an error of the given type whose message contains a match of a
    regular expression.

    Raises: AssertionError if it does not; errors of other types are passed on.
    """
    try:
        found = call(*arguments)
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"expected {error.__name__}, but the call returned {found!r}")
    assert re.search(pattern, message), f"the message {message!r} does not match {pattern!r}"
