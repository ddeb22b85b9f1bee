"""Options that take all words up to the next flag, as argparse's nargs="*" does; click has none."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import click


class WordsCommand(click.Command):
    """A command whose `multiple` options may be given several words at once: --data-path 0.3 a 0.7 b."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments with the flag put in front of each of its words."""
        options = [param for param in self.params if isinstance(param, click.Option) and param.multiple]
        return super().parse_args(ctx, spread(args, {name for option in options for name in option.opts}))


def spread(args: Iterable[str], names: Collection[str]) -> list[str]:
    """The arguments, each flag of `names` put before each of the words that follow it; of a flag given twice, the last words.

    Raises: click.UsageError where none follows.
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
    for name, found in words.items():
        if not found:
            raise click.UsageError(f"{name}: no word follows; expected weights and prefixes, or leave it out")
    return [each for name, found in words.items() for word in found for each in (name, word)] + others
