"""Estimates of the tokens, disk space and time of tokenising, from a sample of the text."""

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
from megablend.text.documents import Portion, count_bytes
from megablend.text.engine import Engine, GigatokenEngine
from megablend.text.lines import measure_compression
from megablend.text.parts import Task, TextFile, plan_tasks
from megablend.text.prove import MIN_CHECKED, find_obstacle
from megablend.text.source import find_text
from megablend.text.tables import is_table
from megablend.text.token_file import TokenFileWriter
from megablend.text.work import Setup

_NUM_SAMPLED = 16
"""The number of tasks whose beginning is tokenised."""
_DOCUMENTS = 200
"""The most documents of each task that are tokenised."""
_SPARE = 1.05
"""The free space that is required, as a multiple of the estimate."""
_PART_BYTES = 1 << 20
"""The bytes of text that are read for each task."""
_MAX_TOKEN_BYTES = 4
"""The bytes of an int32 token, which stands for at least one byte of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated results and costs of tokenising the files that are not tokenised yet."""

    files: int
    bytes: int
    """The uncompressed bytes of their text."""
    tokens: int
    disk_bytes: int
    cpu_seconds: float

    def describe(self, num_processes: int) -> str:
        """Return the estimate in words."""
        wait = self.cpu_seconds / num_processes
        return (
            f"{self.files:,} files of text, about {self.bytes / 1e9:,.2f} GB, {self.tokens / 1e9:,.3f} billion tokens, "
            f"{self.disk_bytes / 1e9:,.2f} GB to write, {wait / 60:,.1f} min by {num_processes} processes"
        )


def estimate_pending(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None = None
) -> tuple[list[TextFile], Estimate, int]:
    """Estimate the tokenising of a source of text.

    Returns: all of its files, the estimate, and the number of processes that would do the work.
    Raises: ConfigError, DataError.
    """
    source = find_text(config, spec, storage)
    setup = source.setup
    tasks = list[Task]()
    for file in source.pending:
        with contextlib.suppress(*setup.left_out):
            tasks += plan_tasks(file, storage, setup.fields)
    if find_obstacle(setup.tokenizer, sum(file.cost for file in source.files)) is None:
        setup = replace(setup, engine="gigatoken")
    count = min(processes or count_cpus(), max(1, len(tasks)))
    return source.files, estimate(setup, tasks), count


def estimate(setup: Setup, tasks: Sequence[Task]) -> Estimate:
    """Estimate tasks of one source from the first documents of up to 16 of them. Raises: DataError
    if a file cannot be read."""
    step = -(-len(tasks) // _NUM_SAMPLED) or 1
    setup = replace(setup, part_bytes=_PART_BYTES)
    engine = Engine(setup.tokenizer)
    if setup.engine == "gigatoken":
        with contextlib.suppress(Exception):  # it is not proved yet, and may refuse the tokenizer
            engine = GigatokenEngine(setup.tokenizer)
    read = tokens = written = 0
    stored_bytes = text_bytes = 0  # sizes of the beginnings of compressed files
    seconds = 0.0
    for task in islice(tasks, 0, None, step):
        with contextlib.suppress(*setup.left_out):
            file = task.file
            if file.codec is not None:
                stored, text = measure_compression(setup.storage, file.path, file.size, file.codec)
                stored_bytes += stored
                text_bytes += text
            portion = _read_portion(setup, task)
            if portion is None:
                continue
            sample = portion.take_first(_DOCUMENTS)
            size = count_bytes(sample.texts)
            engine.encode(sample.texts[:MIN_CHECKED])  # fills caches
            start = time.process_time()
            encoded = engine.encode(sample.texts)
            # Not in the folder of tokens: a dry run changes nothing
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "part")
                with TokenFileWriter(path, has_keys=setup.fields.key is not None) as writer:
                    writer.write(sample, encoded)
                written += path.stat().st_size
            seconds += time.process_time() - start
            read += portion.num_bytes * size // max(1, count_bytes(portion.texts))
            tokens += len(encoded.ids)
    num_bytes = sum(task.cost for task in tasks)
    if stored_bytes:
        compressed = [task for task in tasks if task.file.codec is not None]
        num_bytes -= sum(task.cost for task in compressed)
        num_bytes += sum(task.file.size for task in compressed) * text_bytes // stored_bytes
    scale = num_bytes / max(1, read)
    # A sample of a few bytes says little, since a token file of them is mostly its footer
    return Estimate(
        files=len({task.file.path for task in tasks}),
        bytes=num_bytes,
        tokens=min(int(tokens * scale), num_bytes),
        disk_bytes=min(int(written * scale), _MAX_TOKEN_BYTES * num_bytes),
        cpu_seconds=seconds * scale,
    )


def _read_portion(setup: Setup, task: Task) -> Portion | None:
    """Read the first portion of a task; None if it has no documents."""
    if task.part is not None and not is_table(task.file.path):
        # Read the first part of a file of lines: with the small parts of an estimate, the others
        # begin elsewhere
        task = replace(task, part=0)
    part = next(setup.open_parts(task))
    portion = next(part.portions, None)
    return portion if portion is not None and portion.texts else None


def check_space(setup: Setup, needed: int) -> None:
    """Check that the disk has room for the estimated bytes. Raises: CacheError if it has not."""
    free = setup.folder.count_free_bytes()
    if free is not None and free < _SPARE * needed:
        raise CacheError(
            f"{setup.folder.location}: has {free / 1e9:,.1f} GB free, expected {_SPARE * needed / 1e9:,.1f} GB for "
            "the tokens; free some space, or set `token_files` to a folder or bucket with room"
        )
