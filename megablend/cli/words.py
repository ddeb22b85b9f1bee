"""Options that take all arguments up to the next flag, like argparse's nargs="*", which click lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import click


class WordsCommand(click.Command):
    """A command whose `multiple` options accept several arguments at once: --data-path 0.3 a 0.7 b."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with the flag repeated before each of its values."""
        options = [param for param in self.params if isinstance(param, click.Option) and param.multiple]
        return super().parse_args(ctx, spread(args, {name for option in options for name in option.opts}))


def spread(args: Iterable[str], names: Collection[str]) -> list[str]:
    """Repeat each flag of `names` before each of the values that follow it; if a flag occurs twice, its last values count.

    Raises: click.UsageError for a flag without a value.
    """
    words: dict[str, list[str]] = {}
    others: list[str] = []
    flag = None
    for arg in args:
        if arg.startswith("--"):
            name, equals, word = arg.partition("=")
            flag = name if name in names and not equals else None
            if name in names:
                words[name] = [word] if equals else []
            else:
                others.append(arg)
        elif flag:
            words[flag].append(arg)
        else:
            others.append(arg)
    for name, values in words.items():
        if not values:
            raise click.UsageError(f"{name} has no value; give weights and prefixes, or omit it")
    return [each for name, values in words.items() for word in values for each in (name, word)] + others
