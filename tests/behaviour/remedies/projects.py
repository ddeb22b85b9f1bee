"""The bench of most tables: a project whose config, data and cache are changed, and steps that many faults share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from tests.behaviour.project import Project, commands_in
from tests.behaviour.remedies.driver import Bench, Step


class Run(Project, Bench):
    """A project; the settings that change are those of its config, in the file."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.patch = patch

    @property
    def config(self) -> dict[str, Any]:
        """As it is in the file now."""
        config: dict[str, Any] = json.loads(self.path.read_text())
        return config

    def change(self, settings: Mapping[str, Any]) -> None:
        given = {**self.config, **settings}
        self.path.write_text(
            json.dumps({key: value for key, value in given.items() if value is not None})
        )

    def command(self, line: str) -> str:
        """CONFIG is the config's file, CACHE the cache."""
        words = {"CONFIG": str(self.path), "CACHE": str(self.cache)}
        done = CliRunner().invoke(cli, [words.get(word, word) for word in line.split()])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            raise click.UsageError(done.output)
        return done.output

    def use(self) -> None:
        """Read the whole run."""
        dataset = megablend.open(str(self.path))
        assert all(len(dataset[k]["tokens"]) for k in range(len(dataset)))

    def build(self) -> None:
        megablend.build(str(self.path))


def build_and_use(bench: Run) -> None:
    bench.build()
    bench.use()


def run_named(bench: Run) -> None:
    """Run the commands that the message names."""
    commands = commands_in(bench.said.string)
    assert commands
    for command in commands:
        bench.run(command)


def restore_config(bench: Run) -> None:
    bench.path.write_text(json.dumps(bench.given))


def back_up(bench: Run) -> None:
    """Copy the cache and the data."""
    for folder in (bench.cache, bench.folder / "data"):
        shutil.copytree(folder, bench.folder / "backup" / folder.name)


def restore(name: str) -> Step:
    """Put a file or folder of the backup in its place."""

    def put_back(bench: Run) -> None:
        kept = bench.folder / "backup" / name
        target = bench.folder / name
        if kept.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(kept, target)
        else:
            shutil.copy(kept, target)

    return put_back
