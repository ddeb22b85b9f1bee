"""Which column holds the tokens: the one named, or the one that cannot be mistaken."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from megablend.errors import ConfigError

TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "tokenized", "tokenized_text", "input_tokens")
"""What columns of tokens are called, the surest first."""
OTHER_NAMES = ("labels", "position_ids", "token_type_ids", "segment_ids", "length", "lengths", "offsets")
"""What lists of integers beside the tokens are called; and all that end in `mask`."""


UINT64_REMEDY = "write it as int64 or uint32"
"""Torch computes with no such numbers."""


def choose_column(
    path: str,
    column: str | None,
    problems: Mapping[str, str | None],
    lists: Collection[str],
    *,
    numbers: bool = False,
) -> str:
    """The dotted path of a file's token column.

    Args:
        column: as the config names it. None takes, of the columns that are lists of integers, the only one, or the one of the
            surest of TOKEN_NAMES (and no other one where a column of such a name cannot hold tokens); a column of single
            integers only if it has one of these names and the file has no other column, since beside text the same name may
            count tokens.
        problems: dotted path of each column and struct member -> None where it may hold tokens, else why it cannot.
        lists: those of them that are lists.
        numbers: what is looked for are numbers of any kind, not only integers.

    Raises: ConfigError where there is no such column, none or several to choose from, or it cannot hold tokens.
    """
    fit = [name for name, problem in problems.items() if problem is None]
    known, kind = ", ".join(fit) or "none", "numbers" if numbers else "integers"
    if column is None:
        found = _surest([name for name in fit if name in lists])
        if found is None and len(problems) == 1:
            found = _named(fit)
        if (found is None or _last(found) not in TOKEN_NAMES) and (unfit := _unfit(problems)):
            hint = f"; if the tokens are in {found!r}, set `column: {found}` for this source" if found else ""
            raise ConfigError(f"{path}: column {unfit!r}, by its name that of the tokens, {problems[unfit]}{hint}")
        if found is None:
            raise ConfigError(f"{path}: {_why_none(fit, lists)}")
        return found
    if column not in problems:
        close = difflib.get_close_matches(column, fit or list(problems), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"{path}: no column {column!r}; {hint}columns of {kind}: {known}")
    if problem := problems[column]:
        raise ConfigError(f"{path}: column {column!r} {problem}; columns of {kind}: {known}")
    return column


def _surest(lists: list[str]) -> str | None:
    """The column of tokens among several of lists, by its name or because no other can be meant."""
    possible = [name for name in lists if not _is_other(name)]
    return _named(possible) or (possible[0] if len(possible) == 1 else None)


def _named(columns: list[str]) -> str | None:
    """The only column of the surest name that one has."""
    for name in TOKEN_NAMES:
        found = [column for column in columns if _last(column) == name]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _last(column: str) -> str:
    return column.rpartition(".")[2].lower()


def _unfit(problems: Mapping[str, str | None]) -> str | None:
    """The column of the surest name that cannot hold tokens. They may be in it all the same, so that no other is taken."""
    unfit = [name for name, problem in problems.items() if problem is not None and _last(name) in TOKEN_NAMES]
    return min(unfit, key=lambda name: TOKEN_NAMES.index(_last(name)), default=None)


def _is_other(column: str) -> bool:
    return _last(column) in OTHER_NAMES or _last(column).endswith("mask")


def _why_none(fit: list[str], lists: Collection[str]) -> str:
    if not fit:
        return "no column holds integers or lists of integers; megablend reads token ids: tokenize the text first"
    listed, single = [name for name in fit if name in lists], [name for name in fit if name not in lists]
    seen = [
        f"lists of integers: {', '.join(listed)}" if listed else "",
        f"single integers, which may be counts or ids: {', '.join(single)}" if single else "",
    ]
    first = (listed or single)[0]
    return (
        f"cannot tell which column holds the tokens ({'; '.join(filter(None, seen))}); if it is {first!r}, set `column: {first}` "
        f"for this source (in a data path of Megatron: `?column={first}`)"
    )
