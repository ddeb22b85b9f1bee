"""Select the token column: the one that the config names, or the only plausible one."""

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
"""Usual names of lists of integers that are not tokens, besides all names that end in `mask`."""

UINT64_REMEDY = "write it as int64 or uint32"
"""Remedy for a column of uint64, which torch hardly supports."""
NESTED_REMEDY = "write one list per row"
"""Remedy for a column of lists of lists of integers."""


def choose_column(
    path: str,
    column: str | None,
    problems: Mapping[str, str | None],
    lists: Collection[str],
    *,
    numbers: bool = False,
) -> str:
    """Choose the token column of a file, and return its dotted path.

    If the config names no column, the only column of lists of integers is chosen. If there are
    several, the one with the most certain of TOKEN_NAMES is chosen, unless another column with such
    a name cannot contain tokens. A column of single integers is chosen only if it has one of these
    names and the file has no other column, since next to a column of text it may hold token counts.

    Args:
        column: the name of the column in the config, or None.
        problems: dotted path of each column and struct member -> None if it may contain tokens,
            otherwise the reason why it cannot.
        lists: dotted paths of the columns that are lists.
        numbers: whether numbers of any kind are accepted, not only integers.

    Raises: ConfigError if there is no such column, if there are none or several to choose from, or
        if the column cannot contain tokens.
    """
    fit = [name for name, problem in problems.items() if problem is None]
    known = ", ".join(fit) or "none"
    kind = "numbers" if numbers else "integers"
    if column is None:
        chosen = _choose_list([name for name in fit if name in lists])
        if chosen is None and len(problems) == 1:
            chosen = _find_named(fit)
        has_token_name = chosen is not None and _last_part(chosen) in TOKEN_NAMES
        unfit = _find_unfit(problems)
        if not has_token_name and unfit is not None:
            hint = ""
            if chosen:
                hint = f"; if the tokens are in {chosen!r}, set `column: {chosen}` for this source"
            raise ConfigError(
                f"{path}: column {unfit!r} has the name of a column of tokens, but {problems[unfit]}{hint}"
            )
        if chosen is None:
            raise ConfigError(f"{path}: {_why_none(fit, lists, problems)}")
        return chosen
    if column not in problems:
        hint = did_you_mean(column, fit or list(problems), before="; ")
        raise ConfigError(f"{path}: no column {column!r}{hint or ';'} columns of {kind}: {known}")
    problem = problems[column]
    if problem:
        raise ConfigError(f"{path}: column {column!r} {problem}; columns of {kind}: {known}")
    return column


def _choose_list(lists: list[str]) -> str | None:
    """Choose the token column among columns of lists, by its name or because there is no other
    candidate; return None if it is not certain."""
    candidates = [name for name in lists if not _is_other(name)]
    named = _find_named(candidates)
    if named is not None:
        return named
    return candidates[0] if len(candidates) == 1 else None


def _find_named(columns: list[str]) -> str | None:
    """Return the column with the most certain of TOKEN_NAMES, or None if several have that name."""
    for name in TOKEN_NAMES:
        columns_of_name = [column for column in columns if _last_part(column) == name]
        if columns_of_name:
            return columns_of_name[0] if len(columns_of_name) == 1 else None
    return None


def _last_part(column: str) -> str:
    return column.rpartition(".")[2].lower()


def _find_unfit(problems: Mapping[str, str | None]) -> str | None:
    """Return the column with the most certain of TOKEN_NAMES that cannot contain tokens."""
    unfit = [
        name
        for name, problem in problems.items()
        if problem is not None and _last_part(name) in TOKEN_NAMES
    ]
    return min(unfit, key=lambda name: TOKEN_NAMES.index(_last_part(name)), default=None)


def _is_other(column: str) -> bool:
    """Return whether the name of a column shows that its integers are not tokens."""
    return _last_part(column) in OTHER_NAMES or _last_part(column).endswith("mask")


def _describe_nearly_fit(lists: Collection[str], problems: Mapping[str, str | None]) -> str:
    """Describe the first list column that could hold tokens if it were written differently; return
    "" if there is none."""
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
    """Describe why no column was chosen, and the remedy."""
    nearly = _describe_nearly_fit(lists, problems)
    if not fit:
        if nearly:
            return f"no column contains tokens in a form that megablend can read; {nearly}"
        return "no column contains integers or lists of integers; megablend reads token ids: tokenize the text first"
    fit_lists = [name for name in fit if name in lists]
    single = [name for name in fit if name not in lists]
    candidates = [
        f"lists of integers: {', '.join(fit_lists)}" if fit_lists else "",
        f"single integers, which may be counts or ids: {', '.join(single)}" if single else "",
    ]
    first = (fit_lists or single)[0]
    return (
        f"cannot tell which column contains the tokens ({'; '.join(filter(None, candidates))}); if it is {first!r}, set "
        f"`column: {first}` for this source (in a Megatron data path: `?column={first}`)"
        f"{f'; {nearly}' if nearly else ''}"
    )
