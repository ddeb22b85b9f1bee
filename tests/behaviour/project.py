"""A small project on disk, as a person has it: a config in a file, data and a cache; and ways to damage its files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

import megablend
from megablend.cli.main import cli
from megablend.errors import MegablendError
from tests.formats.writers import write_megatron
from tests.runs import read_samples

ROWS = [list(range(1, 1 + i % 40)) for i in range(200)]


class Project:
    """A config in a file, its data, and its cache."""

    def __init__(self, folder: Path, kind: str = "parquet", **settings: Any) -> None:
        self.folder = folder
        self.kind = kind
        self.path = folder / "run.json"
        self.cache = folder / "cache"
        given = {"cache": str(self.cache), "sequence_length": 8, "samples": 150, **settings}
        ending = {"parquet": "*.parquet", "bin": "*.bin"}[kind]
        self.given = {**given, "sources": [{"name": "a", "path": str(folder / "data" / ending)}]}
        folder.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.given))
        self.add(0)
        self.run("build CONFIG")
        self.tokens = self.read()

    def add(self, number: int) -> None:
        """Add a data file."""
        rows = [[token + number for token in row] for row in ROWS]
        path = self.folder / "data" / f"{number}.{self.kind}"
        path.parent.mkdir(exist_ok=True)
        if self.kind == "bin":
            write_megatron(path.with_suffix(""), rows)
        else:
            pq.write_table(
                pa.table({"ids": rows}),
                path,
                data_page_size=100,
                write_batch_size=10,
                row_group_size=40,
            )

    def run(self, command: str, *, code: int = 0) -> str:
        """Run a command of a message; CONFIG is the config's file."""
        words = [str(self.path) if word == "CONFIG" else word for word in shlex.split(command)]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == code, (command, done.output, done.exception)
        return done.output

    def read(self) -> list[list[int]]:
        return [each.tokens[:-1].tolist() for each in read_samples(megablend.open(str(self.path)))]

    def symptom(self) -> str:
        """What a person sees first: reading, then `verify`."""
        try:
            self.read()
        except MegablendError as error:
            return str(error)
        return "\n".join(megablend.verify(str(self.cache)).problems)

    @property
    def kept(self) -> Path:
        """The folder of the index that the run keeps."""
        index: str = json.loads((self.cache / "runs" / "default.json").read_text())["index"]
        return self.cache / "generations" / index


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 4, len(data), max(1, len(data) // 7)):
        data[at] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def commands_in(message: str) -> list[str]:
    """The commands that a message names."""
    return re.findall(r"`megablend ([^`]+)`", message)
