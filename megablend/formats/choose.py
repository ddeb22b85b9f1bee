"""Which column holds the tokens: the one named, or the only one that could."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from megablend.errors import ConfigError


def choose_column(path: str, column: str | None, problems: Mapping[str, str | None], *, numbers: bool = False) -> str:
    """The dotted path of a file's token column.

    Args:
        column: as the config names it; None takes the only column of integers or lists of integers.
        numbers: what is looked for are numbers of any kind, not only integers.
        problems: dotted path of each column and struct member -> None where it may hold tokens, else why it cannot.

    Raises: ConfigError where there is no such column, none or several to choose from, or it cannot hold tokens.
    """
    fit = [name for name, problem in problems.items() if problem is None]
    known, kind = ", ".join(fit) or "none", "numbers" if numbers else "integers"
    if column is None:
        if len(fit) != 1:
            raise ConfigError(f"{path}: name the token column by `column:`; columns of {kind}: {known}")
        return fit[0]
    if column not in problems:
        close = difflib.get_close_matches(column, fit or list(problems), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{path}: no column {column!r}; {hint}columns of {kind}: {known}")
    if problem := problems[column]:
        raise ConfigError(f"{path}: column {column!r} {problem}; columns of {kind}: {known}")
    return column
