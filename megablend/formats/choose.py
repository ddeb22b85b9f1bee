"""Selecting the token column: the one that the config names, or the only plausible one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megablend.errors import ConfigError, did_you_mean

TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "tokenized", "tokenized_text", "input_tokens")
"""Usual names of token columns, the most certain first."""
OTHER_NAMES = (
    "labels",
    "position_ids",
    "token_type_ids",
    "segment_ids",
    "length",
    "lengths",
    "offsets",
)
"""Usual names of lists of integers that are not tokens; names that end in `mask` count, too."""


UINT64_REMEDY = "write it as int64 or uint32"
"""Torch does not compute with uint64."""
NESTED_REMEDY = "write one list per row"
"""For lists of lists of integers."""


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
        column: its name in the config. None selects, of the columns that are lists of integers, the
            only one, or the one with the most certain of TOKEN_NAMES (and no other one if a column
            of such a name cannot contain tokens); a column of single integers only if it has one of
            these names and the file has no other column, since next to text the same name may count
            tokens.
        problems: dotted path of each column and struct member -> None if it may contain tokens,
            else why it cannot.
        lists: those of them that are lists.
        numbers: numbers of any kind are accepted, not only integers.

    Raises: ConfigError if there is no such column, none or several to choose from, or it cannot
        contain tokens.
    """
    fit = [name for name, problem in problems.items() if problem is None]
    known = ", ".join(fit) or "none"
    kind = "numbers" if numbers else "integers"
    if column is None:
        found = _surest([name for name in fit if name in lists])
        if found is None and len(problems) == 1:
            found = _named(fit)
        if (found is None or _last(found) not in TOKEN_NAMES) and (unfit := _unfit(problems)):
            hint = (
                f"; if the tokens are in {found!r}, set `column: {found}` for this source"
                if found
                else ""
            )
            raise ConfigError(
                f"{path}: column {unfit!r}, whose name suggests that it contains the tokens, {problems[unfit]}{hint}"
            )
        if found is None:
            raise ConfigError(f"{path}: {_why_none(fit, lists, problems)}")
        return found
    if column not in problems:
        hint = did_you_mean(column, fit or list(problems), before="; ")
        raise ConfigError(f"{path}: no column {column!r}{hint or ';'} columns of {kind}: {known}")
    if problem := problems[column]:
        raise ConfigError(f"{path}: column {column!r} {problem}; columns of {kind}: {known}")
    return column


def _surest(lists: list[str]) -> str | None:
    """The token column among several list columns,
    by its name or because there is no other candidate."""
    possible = [name for name in lists if not _is_other(name)]
    return _named(possible) or (possible[0] if len(possible) == 1 else None)


def _named(columns: list[str]) -> str | None:
    """The column whose name most likely means tokens; None if several columns have that name."""
    for name in TOKEN_NAMES:
        found = [column for column in columns if _last(column) == name]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _last(column: str) -> str:
    return column.rpartition(".")[2].lower()


def _unfit(problems: Mapping[str, str | None]) -> str | None:
    """The column with the most certain name that cannot contain tokens; no other is selected
    then."""
    unfit = [
        name
        for name, problem in problems.items()
        if problem is not None and _last(name) in TOKEN_NAMES
    ]
    return min(unfit, key=lambda name: TOKEN_NAMES.index(_last(name)), default=None)


def _is_other(column: str) -> bool:
    return _last(column) in OTHER_NAMES or _last(column).endswith("mask")


def _describe_nearly_fit(lists: Collection[str], problems: Mapping[str, str | None]) -> str:
    """The first list that would be of integers if it were written
    in another way; "" if there is none."""
    for name, problem in problems.items():
        if (
            name in lists
            and problem
            and not _is_other(name)
            and problem.endswith((UINT64_REMEDY, NESTED_REMEDY))
        ):
            return f"column {name!r} {problem}"
    return ""


def _why_none(fit: list[str], lists: Collection[str], problems: Mapping[str, str | None]) -> str:
    nearly = _describe_nearly_fit(lists, problems)
    if not fit:
        if nearly:
            return f"no column contains the tokens as megablend reads them; {nearly}"
        return "no column contains integers or lists of integers; megablend reads token ids: tokenize the text first"
    listed = [name for name in fit if name in lists]
    single = [name for name in fit if name not in lists]
    seen = [
        f"lists of integers: {', '.join(listed)}" if listed else "",
        f"single integers, which may be counts or ids: {', '.join(single)}" if single else "",
    ]
    first = (listed or single)[0]
    return (
        f"cannot tell which column contains the tokens ({'; '.join(filter(None, seen))}); if it is {first!r}, set "
        f"`column: {first}` for this source (in a Megatron data path: `?column={first}`)"
        f"{f'; {nearly}' if nearly else ''}"
    )
