"""Estimates of the costs of tokenising (number of tokens, disk space, time), from a sample of the
text."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megablend.config import Config
from megablend.errors import CacheError
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.system import count_cpus
from megablend.text.documents import Portion, count_bytes
from megablend.text.engine import Engine, GigatokenEngine
from megablend.text.prove import MIN_CHECKED, find_obstacle
from megablend.text.setup import Setup
from megablend.text.source import find_text
from megablend.text.tables import is_table
from megablend.text.tasks import Task, plan_tasks
from megablend.text.text_file import TextFile, measure_compression
from megablend.text.token_file import TokenFileWriter

_NUM_SAMPLED = 16
"""The number of tasks from which documents are sampled."""
_DOCUMENTS = 200
"""The maximum number of documents that are tokenised for each of these tasks."""
_SPARE = 1.05
"""The required free disk space, as a multiple of the estimate."""
_PART_BYTES = 1 << 20
"""The number of bytes of text that are read for each task."""
_MAX_TOKEN_BYTES = 4
"""The size of an int32 token, which stands for at least one byte of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated results and costs of tokenising the files that are not tokenised yet."""

    files: int
    bytes: int
    """The uncompressed size of the text."""
    tokens: int
    disk_bytes: int
    cpu_seconds: float

    def describe(self, num_processes: int) -> str:
        """Return a description of the estimate for users."""
        wait = self.cpu_seconds / num_processes
        return (
            f"{self.files:,} text files, about {self.bytes / 1e9:,.2f} GB, {self.tokens / 1e9:,.3f} billion tokens, "
            f"{self.disk_bytes / 1e9:,.2f} GB to write, {wait / 60:,.1f} min by {num_processes} processes"
        )


def estimate_pending(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None = None
) -> tuple[list[TextFile], Estimate, int]:
    """Estimate the costs of tokenising a text source.

    Returns: all files of the source, the estimate, and the number of processes that would do the
        work.
    Raises: ConfigError if the source's settings cannot be used; DataError if a file cannot be read.
    """
    source = find_text(config, spec, storage)
    setup = source.setup
    tasks = list[Task]()
    for file in source.pending:
        with contextlib.suppress(*setup.skipped_errors):
            tasks += plan_tasks(file, storage, setup.fields)
    if find_obstacle(setup.tokenizer, sum(file.cost for file in source.files)) is None:
        setup = replace(setup, engine="gigatoken")
    count = min(processes or count_cpus(), max(1, len(tasks)))
    return source.files, estimate(setup, tasks), count


def estimate(setup: Setup, tasks: Sequence[Task]) -> Estimate:
    """Estimate the costs of a source's tasks from the first documents of up to 16 tasks. Raises:
    DataError if a file cannot be read."""
    step = -(-len(tasks) // _NUM_SAMPLED) or 1
    trial = _Trial(setup)
    for task in tasks[::step]:
        with contextlib.suppress(*setup.skipped_errors):
            trial.add(task)
    num_bytes = trial.count_text_bytes(tasks)
    scale = num_bytes / max(1, trial.text_bytes)
    # A sample of a few bytes says little, since a token file of them is mostly its footer
    return Estimate(
        files=len({task.file.path for task in tasks}),
        bytes=num_bytes,
        tokens=min(int(trial.tokens * scale), num_bytes),
        disk_bytes=min(int(trial.disk_bytes * scale), _MAX_TOKEN_BYTES * num_bytes),
        cpu_seconds=trial.seconds * scale,
    )


class _Trial:
    """A trial run. It tokenises the first documents of a few tasks, and adds up their sizes and the
    time that this takes."""

    def __init__(self, setup: Setup) -> None:
        self._setup = replace(setup, part_bytes=_PART_BYTES)
        self._engine = Engine(setup.tokenizer)
        if setup.engine == "gigatoken":
            with contextlib.suppress(Exception):  # not proved yet, it may refuse the tokenizer
                self._engine = GigatokenEngine(setup.tokenizer)
        self.text_bytes = 0
        self.tokens = 0
        self.disk_bytes = 0
        self.seconds = 0.0
        self._compressed_bytes = 0
        """The number of bytes that were decompressed at the beginning of compressed files."""
        self._decompressed_bytes = 0
        """The size of these bytes after decompression."""

    def add(self, task: Task) -> None:
        """Tokenise the first documents of a task."""
        setup = self._setup
        if task.file.codec is not None:
            compressed, decompressed = measure_compression(task.file, setup.storage)
            self._compressed_bytes += compressed
            self._decompressed_bytes += decompressed
        portion = _read_portion(setup, task)
        if portion is None:
            return
        sample = portion.take_first(_DOCUMENTS)
        self._engine.encode(sample.texts[:MIN_CHECKED])  # fills caches
        start = time.process_time()
        tokens = self._engine.encode(sample.texts)
        # Not in the folder of tokens, since a dry run changes nothing there
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part")
            with TokenFileWriter(path, has_keys=setup.fields.key is not None) as writer:
                writer.write(sample, tokens)
            self.disk_bytes += path.stat().st_size
        self.seconds += time.process_time() - start
        self.tokens += len(tokens.ids)
        # The sample's share of the portion's bytes, which include keys and other values
        bytes_of_sample = count_bytes(sample.texts)
        bytes_of_portion = max(1, count_bytes(portion.texts))
        self.text_bytes += portion.num_bytes * bytes_of_sample // bytes_of_portion

    def count_text_bytes(self, tasks: Sequence[Task]) -> int:
        """Return the approximate number of bytes of text in the given tasks. For compressed files,
        it is estimated from the compression of the tasks that were added."""
        if not self._compressed_bytes:
            return sum(task.cost for task in tasks)
        compressed = sum(task.file.size for task in tasks if task.file.codec is not None)
        decompressed = compressed * self._decompressed_bytes // self._compressed_bytes
        return decompressed + sum(task.cost for task in tasks if task.file.codec is None)


def _read_portion(setup: Setup, task: Task) -> Portion | None:
    """Read the first portion of a task; return None if it has no documents."""
    if task.part is not None and not is_table(task.file.path):
        # Read the first part of a file of lines: with the small parts of a trial, the others
        # begin elsewhere
        task = replace(task, part=0)
    part = next(setup.open_parts(task))
    portion = next(part.portions, None)
    return portion if portion is not None and portion.texts else None


def check_space(setup: Setup, needed: int) -> None:
    """Check that the disk has room for the estimated bytes. Raises: CacheError if it does not."""
    free = setup.folder.count_free_bytes()
    if free is not None and free < _SPARE * needed:
        raise CacheError(
            f"{setup.folder.location}: has {free / 1e9:,.1f} GB of free space, but the tokens need "
            f"{_SPARE * needed / 1e9:,.1f} GB; free some space, or set `token_files` to a folder or bucket with room"
        )
