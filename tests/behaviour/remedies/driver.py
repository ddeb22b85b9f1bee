"""Faults, what is said of them, and the remedies that the message names: each is done word for word, and then it works.

A table is a list of faults; `table(...)` makes one test of each remedy of each fault. Its steps act on a bench, the fixture of
that name in the table's module. What a step may be, besides a function of the bench:

- a dictionary: settings that the bench changes (None removes one);
- text: a command of `megablend`, as a person types it;
- a tuple: steps, one after the other; () does nothing.

In settings and commands, `{1}` stands for what the first group of the message's pattern found, and `{name}` for an attribute
of the bench.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import click
import pytest

from megablend.errors import MegablendError

Step = Any
"""See above. A function may return what is said without an error, such as a note."""
REFUSALS = (MegablendError, RuntimeWarning, click.UsageError, ValueError)


class Fault(NamedTuple):
    name: str
    make: Step
    says: str
    """A pattern, searched in the message."""
    remedies: tuple[Step, ...]
    """One for each way out that the message names."""
    fails: Step | None = None
    """What fails then; `bench.use` where absent."""
    works: Step | None = None
    """What works after a remedy; the same as what failed where absent."""
    marks: Collection[pytest.MarkDecorator] = ()


def fault(name: str, make: Step, says: str, *remedies: Step, **more: Any) -> Fault:
    """See `Fault`."""
    return Fault(name, make, says, remedies, **more)


def misuse(wrong: Step, says: str, *instead: Step, name: str = "", **more: Any) -> Fault:
    """What is refused as it is called, and calls that do what the message says."""
    return Fault(name or str(wrong), (), says, instead, fails=wrong, works=(), **more)


class Bench:
    """What a table's faults are made on."""

    said: re.Match[str]
    """What was found in the message."""

    def use(self) -> Any:
        """Fails with a fault, and works without."""
        raise NotImplementedError

    def change(self, settings: Mapping[str, Any]) -> None:
        """Change the settings; None removes one."""
        raise NotImplementedError

    def command(self, line: str) -> str:
        """Run a command of `megablend`; what it prints."""
        raise NotImplementedError

    def fill(self, value: Any) -> Any:
        """Settings or text in which `{1}` and `{name}` are replaced."""
        if isinstance(value, str):
            return re.sub(
                r"\{(\d)\}", lambda found: self.said[int(found[1])], self._fill_names(value)
            )
        if isinstance(value, Mapping):
            return {key: self.fill(each) for key, each in value.items()}
        return [self.fill(each) for each in value] if isinstance(value, list) else value

    def _fill_names(self, text: str) -> str:
        return re.sub(r"\{([a-z]\w*)\}", lambda found: str(getattr(self, found[1])), text)


def perform(bench: Bench, step: Step) -> Any:
    """Do a step; what it returns."""
    if callable(step):
        return step(bench)
    if isinstance(step, Mapping):
        return bench.change(bench.fill(step))
    if isinstance(step, str):
        return bench.command(bench.fill(step))
    return [perform(bench, each) for each in step]


def attempt(bench: Bench, step: Step) -> str:
    """What is said of a step: the message of its error or warning, or the text that it returns."""
    try:
        said = perform(bench, step)
    except REFUSALS as error:
        return str(error)
    return said if isinstance(said, str) else ""


def check(bench: Bench, case: Fault, remedy: Step) -> None:
    """Make the fault, compare what is said, follow the remedy, and see that it works."""
    fails = case.fails or type(bench).use
    perform(bench, case.make)
    said = attempt(bench, fails)
    found = re.search(case.says, said, re.DOTALL)
    assert found, f"{case.name}: expected {case.says!r}, found {said!r}"
    bench.said = found
    perform(bench, remedy)
    said = perform(bench, fails if case.works is None else case.works)
    assert not (isinstance(said, str) and re.search(case.says, said, re.DOTALL)), (
        f"still said: {said}"
    )


def table(*faults: Fault, bench: str = "bench") -> Callable[..., None]:
    """A test of each remedy of each fault, on the fixture of this name."""
    cases = [
        pytest.param(
            each,
            remedy,
            id=f"{each.name}-{number}" if len(each.remedies) > 1 else each.name,
            marks=each.marks,
        )
        for each in faults
        for number, remedy in enumerate(each.remedies)
    ]
    assert len({(case.id) for case in cases}) == len(cases), (
        "each fault has a name of its own, and a remedy"
    )
    assert all(each.remedies for each in faults), "each fault has a remedy"

    @pytest.mark.parametrize(("case", "remedy"), cases)
    def test(case: Fault, remedy: Step, request: pytest.FixtureRequest) -> None:
        check(request.getfixturevalue(bench), case, remedy)

    return test
