"""Expecting errors, for contract suites: without pytest, which is not a dependency of the
package."""

from __future__ import annotations

import re
from collections.abc import Callable


def raises(error: type[Exception], call: Callable[..., object], *arguments: object) -> bool:
    """Whether a call raises an error of that type."""
    try:
        call(*arguments)
    except error:
        return True
    return False


def expect_error(
    error: type[Exception], pattern: str, call: Callable[..., object], *arguments: object
) -> None:
    """Require that a call raises an error of that type whose message contains a match of the
    regular expression.

    Raises: AssertionError otherwise; other errors of the call as they are.
    """
    try:
        found = call(*arguments)
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"expected {error.__name__}, but the call returned {found!r}")
    assert re.search(pattern, message), f"the message {message!r} does not match {pattern!r}"
