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
    """Check that a call raises an error of the given type, whose message contains a match of
    `pattern`, a regular expression.

    Raises: AssertionError if no error is raised, or the message does not match; errors of other
        types are passed on.
    """
    try:
        result = call(*arguments)
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"expected {error.__name__}, but the call returned {result!r}")
    assert re.search(pattern, message), f"the message {message!r} does not match {pattern!r}"
