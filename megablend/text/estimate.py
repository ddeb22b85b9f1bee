"""Beforehand: how much text there is, and what its tokens will take, from a sample of its files."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from megablend.config import Config
from megablend.errors import CacheError
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.system import count_cpus
from megablend.text.documents import count_bytes
from megablend.text.engine import Engine, GigatokenEngine, find_version
from megablend.text.lines import measure_compression
from megablend.text.parts import Task, TextFile, plan_tasks
from megablend.text.prove import MIN_CHECKED, MIN_PROVED_BYTES
from megablend.text.source import find_text
from megablend.text.tables import is_table
from megablend.text.token_file import TokenFileWriter
from megablend.text.work import Setup

_FILES = 16
_DOCUMENTS = 200
"""Of each file that is sampled."""
_SPARE = 1.05
_PART = 1 << 20
_MAX_TOKEN_BYTES = 4
"""Of a token file, for a byte of text: a token stands for a byte at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What tokenising takes, roughly."""

    files: int
    bytes: int
    """Of the files that are not tokenised yet; uncompressed."""
    tokens: int
    disk_bytes: int
    cpu_seconds: float

    def describe(self, num_processes: int) -> str:
        """In words."""
        wait = self.cpu_seconds / num_processes
        return (
            f"{self.files:,} files of text, about {self.bytes / 1e9:,.2f} GB, {self.tokens / 1e9:,.3f} billion tokens, "
            f"{self.disk_bytes / 1e9:,.2f} GB to write, {wait / 60:,.1f} min by {num_processes} processes"
        )


def estimate_pending(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None = None
) -> tuple[list[TextFile], Estimate, int]:
    """A source's files; what tokenising those that are not tokenised yet takes, by how many
    processes. Raises: ConfigError, DataError."""
    source = find_text(config, spec, storage)
    setup = source.setup
    tasks = list[Task]()
    for file in source.pending:
        with contextlib.suppress(*setup.left_out):
            tasks += plan_tasks(file, storage, setup.fields)
    is_fast = setup.tokenizer.is_listed and find_version("gigatoken")
    if is_fast and sum(file.cost for file in source.files) >= MIN_PROVED_BYTES:
        setup = replace(setup, engine="gigatoken")
    count = min(processes or count_cpus(), max(1, len(tasks)))
    return source.files, estimate(setup, tasks), count


def estimate(setup: Setup, tasks: Sequence[Task]) -> Estimate:
    """What tasks of one source take: the beginnings of up to 16 files are tokenised.
    Raises: DataError if one cannot be read."""
    step = -(-len(tasks) // _FILES) or 1
    setup = replace(setup, part_bytes=_PART)
    engine = Engine(setup.tokenizer)
    if setup.engine == "gigatoken":
        with contextlib.suppress(Exception):  # it is not proved yet, and may refuse the tokenizer
            engine = GigatokenEngine(setup.tokenizer)
    read = tokens = written = 0
    stored = unpacked = 0  # of compressed files
    seconds = 0.0
    for task in islice(tasks, 0, None, step):
        # Of lines, the first part: parts are smaller here
        first = task if is_table(task.file.path) else replace(task, part=task.part and 0)
        with contextlib.suppress(*setup.left_out):
            if (codec := task.file.codec) is not None:
                file = task.file
                pair = measure_compression(setup.storage, file.path, file.size, codec)
                stored += pair[0]
                unpacked += pair[1]
            for part in islice(setup.open_parts(first), 1):
                for portion in islice(part.portions, 1):
                    chosen = portion.take_first(_DOCUMENTS)
                    if not chosen.texts:
                        continue
                    size = count_bytes(chosen.texts)
                    engine.encode(chosen.texts[:MIN_CHECKED])  # fills caches
                    start = time.process_time()
                    found = engine.encode(chosen.texts)
                    # Not in the folder of tokens: a dry run changes nothing
                    with tempfile.TemporaryDirectory() as folder:
                        path = Path(folder, "part")
                        with TokenFileWriter(path, has_keys=setup.fields.key is not None) as writer:
                            writer.write(chosen, found)
                        written += path.stat().st_size
                    seconds += time.process_time() - start
                    read += portion.num_bytes * size // max(1, count_bytes(portion.texts))
                    tokens += len(found.ids)
    packed = sum(task.file.size for task in tasks if task.file.codec is not None)
    num_bytes = sum(task.cost for task in tasks if task.file.codec is None)
    num_bytes += packed * unpacked // max(1, stored)
    scale = num_bytes / max(1, read)
    # A sample of a few bytes says little, since a token file of them is mostly its footer
    return Estimate(
        files=len({task.file.path for task in tasks}),
        bytes=num_bytes,
        tokens=min(int(tokens * scale), num_bytes),
        disk_bytes=min(int(written * scale), _MAX_TOKEN_BYTES * num_bytes),
        cpu_seconds=seconds * scale,
    )


def check_space(setup: Setup, needed: int) -> None:
    """Raises: CacheError if the disk has less than the estimated bytes."""
    free = setup.folder.count_free_bytes()
    if free is not None and free < _SPARE * needed:
        raise CacheError(
            f"{setup.folder.location}: has {free / 1e9:,.1f} GB free, expected {_SPARE * needed / 1e9:,.1f} GB for "
            "the tokens; free some space, or set `token_files` to a folder or bucket with room"
        )
