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
    """The arguments, each flag of `names` put before each of the words that follow it.

    Raises: click.UsageError where none follows.
    """
    result: list[str] = []
    flag, num_words = None, 0
    for arg in [*args, "--"]:
        if arg.startswith("--"):
            if flag and not num_words:
                raise click.UsageError(f"{flag}: no word follows; expected weights and prefixes, or leave it out")
            flag, num_words = (arg if arg in names else None), 0
            result += [] if flag else [arg]
        elif flag:
            result += [flag, arg]
            num_words += 1
        else:
            result.append(arg)
    return result[:-1]
