"""Tokenise the text sources of a config.

    rank 0      finds the text, loads records, plans the tasks        -> all ranks
    each rank   runs its share of the tasks in its worker processes
    rank 0      gathers results, writes the record of each source     -> all ranks

A token file under its final name is complete: after a build was killed, the next build continues
from the token files that exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megablend.config import Config
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, ChangedFileError, ConfigError, DataError
from megablend.index.build.build_report import Progress
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.storage.local import without_inodes
from megablend.system.log import LOG
from megablend.text.estimate import check_space, estimate
from megablend.text.parts import Entry, Part
from megablend.text.pool import run_tasks
from megablend.text.prove import choose_engine
from megablend.text.setup import Setup, load_part
from megablend.text.source import OPTIONS, TextSource, find_text, is_record, parse_record
from megablend.text.tasks import Task, plan_tasks
from megablend.text.text_file import TextFile
from megablend.text.token_file import read_footer
from megablend.text.token_folder import TokenFolder
from megablend.text.token_names import TokenName, read_tokenizer_digest
from megablend.text.tokenizer import TokenizerFile

_ESTIMATED_BYTES = 256 << 20
"""The minimum size of the text for which the costs are estimated first, which takes a few
seconds."""
_POST_SECONDS = 0.5


def tokenise(
    config: Config,
    specs: Sequence[SourceSpec],
    *,
    launch: Communicator,
    storage: Storage,
    known: Mapping[str, Sequence[str]] | None = None,
    processes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[SourceSpec]:
    """Tokenise all text of a config that is not tokenised yet. Called by all ranks.

    Args:
        specs: all sources of the config.
        known: for each source, the names of the files in the token folder that the run reads.
        processes: the number of processes of each rank; by default, the number of cores that the
            rank may use.
        progress: called on rank 0 from time to time.

    Returns: the sources, with each text source replaced by a source whose files are its token
        files.
    Raises: ConfigError if the settings of a source cannot be used; DataError if text has changed or
        cannot be read; CacheError if token files cannot be written.
    """
    configured = config.all_sources
    texts = [spec for spec in specs if configured[spec.name].text is not None]
    if not texts:
        return list(specs)
    known = known or {}
    sources: list[TextSource] = []
    existing: Collection[str] = ()
    if launch.rank == 0:
        for spec in texts:
            source = find_text(config, spec, storage)
            _check_same_tokenizer(source.setup.tokenizer, known.get(spec.name, ()))
            sources.append(source)
        existing = _list_existing(sources)
    note = ""
    if launch.bcast(any(source.pending for source in sources)):
        total = sum(file.cost for source in sources for file in source.files)
        setups, total = launch.bcast(([source.setup for source in sources], total))
        # All sources have the same token folder and tokenizer
        engine, note = choose_engine(setups[0].tokenizer, setups[0].folder, total, launch)
        setups = [replace(setup, engine=engine) for setup in setups]
        _tokenise_pending(sources, setups, existing, launch, processes, progress)
    made: list[SourceSpec] = []
    if launch.rank == 0:
        for source in sources:
            _check_unchanged(source, known.get(source.spec.name, ()))
            source.check_bad(config)
            made.append(source.make_spec([note, *source.list_doubts()]))
    by_name = {spec.name: spec for spec in launch.bcast(made)}
    return [by_name.get(spec.name, spec) for spec in specs]


def check_kept(config: Config, specs: Sequence[SourceSpec]) -> None:
    """Check that no token file was removed while the index was being built. Called after the index
    is written.

    Args:
        specs: the sources that `tokenise` returned.

    Raises: CacheError if a token file was removed.
    """
    texts = {name: source for name, source in config.all_sources.items() if source.text is not None}
    folder = TokenFolder(next(iter(texts.values())).token_folder, config.storage)
    existing = {folder.path(name) for name in folder.list_files()}
    for path in (path for spec in specs if spec.name in texts for path in spec.paths):
        if path not in existing:
            raise CacheError(
                f"{path}: another command (such as `megablend gc --tokens`) removed this token file before the build had "
                "finished; build again"
            )


def _list_existing(sources: Sequence[TextSource]) -> Collection[str]:
    """Return the names of existing token files, and remove the entries of text files whose token
    files no longer exist."""
    setup = sources[0].setup
    existing = setup.folder.list_files(setup.tokenizer.digest).keys()
    for source in sources:
        source.entries = {
            name: entry
            for name, entry in source.entries.items()
            if all(part.name in existing for part in entry.parts)
        }
    return existing


def _check_same_tokenizer(tokenizer: TokenizerFile, known: Sequence[str]) -> None:
    """Check that the run has read only tokens of this tokenizer. Raises: ConfigError.

    Args:
        known: the names of the token files that the run reads.
    """
    for name in known:
        digest = read_tokenizer_digest(name)
        if digest != tokenizer.digest:
            raise ConfigError(
                f"tokenizer: {tokenizer.path} has digest {tokenizer.digest}, but the run was started with tokens made by "
                f"tokenizer {digest}; restore the earlier tokenizer, or give the run another name (`run:`)"
            )


def _check_unchanged(source: TextSource, known: Sequence[str]) -> None:
    """Check that the text that the run has read has not changed or grown. Raises:
    ChangedFileError."""
    made = {part.name for part in source.parts}
    paths = {file.name: file.path for file in source.files}
    for name in known:
        text = TokenName.parse(name).text
        if name not in made and text in paths:
            _check_same_options(source, name)
            raise ChangedFileError(
                paths[text],
                f"changed after the run began to read source {source.spec.name!r}; restore it and put new text "
                "into another file, or give the run another name (`run:`)",
            )


def _check_same_options(source: TextSource, name: str) -> None:
    """Check that a token file of the run was made with the present settings. Raises:
    ConfigError."""
    setup = source.setup
    made_with = setup.options
    with contextlib.suppress(DataError):  # the settings of a removed or damaged file are unknown
        made_with = read_footer(setup.storage, setup.folder.path(name))["options"]
    pairs = zip(OPTIONS, json.loads(made_with), json.loads(setup.options), strict=True)
    for key, before, now in pairs:
        if before != now:
            raise ConfigError(
                f"source {source.spec.name!r}: `{key}` is {now!r}, but the run's tokens were made with {before!r}; "
                "set it back, or give the run another name (`run:`)"
            )


def _tokenise_pending(
    sources: Sequence[TextSource],
    setups: Sequence[Setup],
    existing: Collection[str],
    launch: Communicator,
    processes: int | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Tokenise the pending files of all sources, and update their entries on rank 0."""
    tasks = launch.bcast(_plan(sources, existing) if launch.rank == 0 else [])
    count = _count_processes(launch) if processes is None else processes
    if launch.rank == 0 and sum(task.cost for task in tasks) >= _ESTIMATED_BYTES:
        _report_estimate(sources, setups, tasks, count * launch.size, progress)
    launch.barrier()  # no rank begins if rank 0 finds the disk too small
    assigned = assign_longest_first([task.cost for task in tasks], launch.size)[launch.rank]
    tally = _Tally(tasks, launch, progress)
    results = run_tasks(setups, [tasks[i] for i in assigned], count, tally.add)
    tally.post()
    launch.barrier(tally.show)
    gathered = launch.gather(dict(zip(assigned, results, strict=True)))
    if launch.rank == 0:
        tally.show()
        entries = {number: entry for of_rank in gathered for number, entry in of_rank.items()}
        _save_records(sources, tasks, [entries[number] for number in range(len(tasks))])


def _plan(sources: Sequence[TextSource], existing: Collection[str]) -> list[Task]:
    """Return the tasks of all pending files, with the existing token files that they may use. This
    reads records, footers and tables, but no lines of text."""
    setup = sources[0].setup
    folder = setup.folder
    folder.remove_leftovers(setup.tokenizer.digest)
    by_size = dict[int, list[str]]()
    """The size of a text file -> the token files of text files with this size, since copies of a
    text have the same size."""
    by_folder = dict[str, list[str]]()
    for name in existing:
        if name.endswith(".parquet"):
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        elif is_record(name):
            for entry in parse_record(folder.read(name)).values():
                parts = [part.name for part in entry.parts if part.name in existing]
                by_size.setdefault(entry.size, []).extend(parts)
    tasks = list[Task]()
    for number, source in enumerate(sources):
        setup = source.setup
        for file in source.pending:
            own = by_folder.get(setup.folder_of(file.name), [])
            done = _find_done(setup, file, own)
            twins = () if done else tuple(dict.fromkeys(own + by_size.get(file.size, [])))
            try:
                planned = plan_tasks(file, setup.storage, setup.fields, setup.part_bytes)
            except setup.skipped_errors as error:
                source.entries[file.name] = Entry(
                    size=file.size, etag=file.etag, unreadable=str(error)
                )
                continue
            for task in planned:
                done_of_task = tuple(part for part in done if task.part in (None, part.number))
                tasks.append(replace(task, source=number, done=done_of_task, twins=twins))
    return tasks


def _find_done(setup: Setup, file: TextFile, names: Sequence[str]) -> list[Part]:
    """Return the parts whose token files were made from this version of a text file, according to
    their footers."""
    parts = dict[int, Part]()
    for name in names:
        footer = read_footer(setup.storage, setup.folder.path(name))
        made_from = without_inodes(footer["etag"]), footer["text"], footer["options"]
        if made_from == (without_inodes(file.etag), file.path, setup.options):
            part = load_part(setup, name, footer)
            parts[part.number] = part
    return list(parts.values())


def _save_records(
    sources: Sequence[TextSource], tasks: Sequence[Task], results: Sequence[Entry]
) -> None:
    """Combine the results for each text file, and save the record of each source."""
    results_of_file = dict[tuple[int, str], list[Entry]]()
    for task, entry in zip(tasks, results, strict=True):
        results_of_file.setdefault((task.source, task.file.name), []).append(entry)
    for (number, name), entries in results_of_file.items():
        parts = tuple(part for entry in entries for part in entry.parts)
        unreadable = [entry for entry in entries if entry.unreadable]
        # One unreadable part leaves out the whole file
        joined = unreadable[0] if unreadable else replace(entries[0], parts=parts)
        sources[number].entries[name] = joined
    for source in sources:
        reasons = [entry.unreadable for entry in source.entries.values()]
        if all(reasons):
            raise source.spec.complaint(f"none of its files can be read: {reasons[0]}")
        source.save()


def _report_estimate(
    sources: Sequence[TextSource],
    setups: Sequence[Setup],
    tasks: Sequence[Task],
    num_processes: int,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Report the estimated costs of tokenising. Raises: CacheError if the disk is too small."""
    needed_bytes = 0
    for number, source in enumerate(sources):
        own = [task for task in tasks if task.source == number and not task.done]
        if own:
            expected = estimate(setups[number], own)
            needed_bytes += expected.disk_bytes
            description = expected.describe(min(num_processes, len(tasks)))
            message = f"source {source.spec.name!r}: tokenising {description}"
            LOG.info("%s", message)
            if progress is not None:
                progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, message=message))
    check_space(setups[0], needed_bytes)


def _count_processes(launch: Communicator) -> int:
    """Return the number of worker processes for each rank: its share of the cores that the ranks on
    its node may use. Called by all ranks."""
    node = socket.gethostname()
    nodes = launch.allgather((node, frozenset(os.sched_getaffinity(0))))
    ranks = [cores for other, cores in nodes if other == node]
    return max(1, len(frozenset().union(*ranks)) // len(ranks))


class _Tally:
    """The number of bytes, documents and tokens that all ranks have processed so far. Each rank
    posts its own numbers to rank 0, which reports the sums."""

    def __init__(
        self,
        tasks: Sequence[Task],
        launch: Communicator,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._launch = launch
        self._progress = progress
        self._num_bytes = sum(task.cost for task in tasks)
        self._num_tasks = len(tasks)
        self._unposted = np.zeros(3, np.int64)
        self._total = np.zeros(3, np.int64)
        self._start = time.monotonic()
        self._posted_at = self._start

    def add(self, *counts: int) -> None:
        """Add numbers of bytes, documents and tokens of this rank, and post them unless the last
        post was very recent."""
        self._unposted += counts
        if time.monotonic() > self._posted_at + _POST_SECONDS:
            self.post()

    def post(self) -> None:
        """Post the numbers that this rank has added since its last post."""
        self._posted_at = time.monotonic()
        self._launch.post(self._unposted)
        self._unposted = np.zeros(3, np.int64)
        self.show()

    def show(self) -> None:
        """On rank 0, report the sums if any posts have arrived."""
        posts = self._launch.posts()
        for _, counts in posts:
            self._total += counts
        if posts and self._progress is not None:
            num_bytes, documents, tokens = self._total.tolist()
            seconds = max(time.monotonic() - self._start, 1e-3)
            self._progress(
                Progress(
                    files=0,
                    num_files=self._num_tasks,
                    bytes=min(num_bytes, self._num_bytes),
                    num_bytes=self._num_bytes,
                    tokenised=f"{documents:,} documents, {tokens / seconds / 1e6:,.2f} M tokens/s",
                )
            )
