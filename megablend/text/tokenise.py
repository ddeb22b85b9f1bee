"""Tokenising the text sources of a config.

    rank 0      finds and stats the text, reads what is known of it   -> all ranks
    each rank   its share of the tasks, each in one of its worker processes
    rank 0      gathers results, writes the record of each source     -> all ranks

What has its final name is done: a killed build goes on from the parts that exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from megablend.config import Config
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import ChangedFileError, ConfigError, DataError
from megablend.index.build.build_report import Progress
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.system.log import LOG
from megablend.text.estimate import check_space, estimate
from megablend.text.parts import Entry, Part, Task, TextFile, plan_tasks
from megablend.text.pool import run_tasks
from megablend.text.prove import choose_engine
from megablend.text.source import OPTIONS, TextSource, find_text, is_record, parse_record
from megablend.text.token_file import read_footer
from megablend.text.tokenizer import TokenizerFile
from megablend.text.work import Setup, load_part

_ESTIMATED_BYTES = 256 << 20
"""What takes longer than some seconds is estimated beforehand."""
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
    """Tokenise what is not tokenised yet of a config's text. Called by all ranks.

    Args:
        specs: of all sources; those of tokens are returned as they are.
        known: by source, the token files that the run reads already, relative to where they are.
        processes: of each rank; by default the cores that it may use.
        progress: called on rank 0 at intervals.

    Raises: ConfigError, DataError, CacheError.
    """
    texts = [spec for spec in specs if config.all_sources[spec.name].text is not None]
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
        # All have the same folder and tokenizer
        engine, note = choose_engine(setups[0].tokenizer, setups[0].folder, total, launch)
        setups = [replace(setup, engine=engine) for setup in setups]
        _tokenise_pending(sources, setups, existing, launch, processes, progress)
    made: list[SourceSpec] = []
    if launch.rank == 0:
        for source in sources:
            _check_unchanged(source, known.get(source.spec.name, ()))
            source.check_bad(config)
            made.append(source.make_spec([note]))
    by_name = {each.name: each for each in launch.bcast(made)}
    return [by_name.get(spec.name, spec) for spec in specs]


def _list_existing(sources: Sequence[TextSource]) -> Collection[str]:
    """The token files that exist. Text some of whose token files were removed is forgotten."""
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
    """Raises: ConfigError if the run has read tokens of another tokenizer."""
    other = next((name for name in known if not name.startswith(f"{tokenizer.digest}/")), None)
    if other is not None:
        raise ConfigError(
            f"tokenizer: {tokenizer.path} has digest {tokenizer.digest}, but the run was started with tokens made by "
            f"tokenizer {other.partition('/')[0]}; restore that tokenizer, or give the run another name (`run:`)"
        )


def _check_unchanged(source: TextSource, known: Sequence[str]) -> None:
    """Raises: ChangedFileError if text that the run has read changed, or grew."""
    made = {part.name for part in source.parts}
    paths = {file.name: file.path for file in source.files}
    for name in known:
        text = name.partition("/")[2].rpartition("/")[0]  # between the tokenizer and the part
        if name not in made and text in paths:
            _check_same_options(source, name)
            raise ChangedFileError(
                paths[text],
                f"its text changed after the run began to read source {source.spec.name!r}; restore it, give new "
                "text a file of its own, or give the run another name (`run:`)",
            )


def _check_same_options(source: TextSource, name: str) -> None:
    """Raises: ConfigError if a token file that the run has read was made with other settings."""
    setup = source.setup
    made_with = setup.options
    with contextlib.suppress(DataError):  # of a file that is gone or damaged nothing is known
        made_with = read_footer(setup.storage, setup.folder.path(name))["options"]
    pairs = zip(OPTIONS, json.loads(made_with), json.loads(setup.options), strict=True)
    for key, before, now in pairs:
        if before != now:
            raise ConfigError(
                f"source {source.spec.name!r}: `{key}` is {now!r}, but the run was started with tokens made with {before!r}; "
                "restore it, or give the run another name (`run:`)"
            )


def _tokenise_pending(
    sources: Sequence[TextSource],
    setups: Sequence[Setup],
    existing: Collection[str],
    launch: Communicator,
    processes: int | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Fills `entries` on rank 0."""
    tasks = launch.bcast(_plan(sources, existing) if launch.rank == 0 else [])
    count = _count_processes(launch) if processes is None else processes
    if launch.rank == 0 and sum(task.cost for task in tasks) >= _ESTIMATED_BYTES:
        _tell_estimate(sources, setups, tasks, count * launch.size, progress)
    launch.barrier()  # no rank begins what rank 0 refuses
    assigned = assign_longest_first([task.cost for task in tasks], launch.size)[launch.rank]
    tally = _Tally(tasks, launch, progress)
    results = run_tasks(setups, [tasks[i] for i in assigned], count, tally.add)
    tally.post()
    launch.barrier(tally.show)
    gathered = launch.gather(dict(zip(assigned, results, strict=True)))
    if launch.rank == 0:
        tally.show()
        merged = {number: entry for rank in gathered for number, entry in rank.items()}
        _keep(sources, tasks, [merged[number] for number in range(len(tasks))])


def _plan(sources: Sequence[TextSource], existing: Collection[str]) -> list[Task]:
    """The tasks of all sources, with what can be known of their parts without reading text."""
    setup = sources[0].setup
    folder = setup.folder
    folder.remove_leftovers(setup.tokenizer.digest)
    by_size = dict[int, list[str]]()
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
            except setup.left_out as error:
                source.entries[file.name] = Entry(
                    size=file.size, etag=file.etag, unreadable=str(error)
                )
                continue
            for task in planned:
                mine = tuple(part for part in done if task.part in (None, part.number))
                tasks.append(replace(task, source=number, done=mine, twins=twins))
    return tasks


def _find_done(setup: Setup, file: TextFile, names: Sequence[str]) -> list[Part]:
    """The parts that were made from this version of a text file, as their footers say."""
    found = dict[int, Part]()
    for name in names:
        footer = read_footer(setup.storage, setup.folder.path(name))
        made_from = footer["etag"], footer["text"], footer["options"]
        if made_from == (file.etag, file.path, setup.options):
            part = load_part(setup, name, footer)
            found[part.number] = part
    return list(found.values())


def _keep(sources: Sequence[TextSource], tasks: Sequence[Task], results: Sequence[Entry]) -> None:
    """Write the records of what was tokenised."""
    made = dict[tuple[int, str], list[Entry]]()
    for task, entry in zip(tasks, results, strict=True):
        made.setdefault((task.source, task.file.name), []).append(entry)
    for (number, name), entries in made.items():
        # A file is left out as a whole
        unreadable = next((each.unreadable for each in entries if each.unreadable), "")
        parts = () if unreadable else tuple(part for each in entries for part in each.parts)
        joined = replace(entries[0], parts=parts, unreadable=unreadable)
        sources[number].entries[name] = joined
    for source in sources:
        reasons = [entry.unreadable for entry in source.entries.values()]
        if all(reasons):
            raise source.spec.complaint(f"none of its files can be read: {reasons[0]}")
        source.save()


def _tell_estimate(
    sources: Sequence[TextSource],
    setups: Sequence[Setup],
    tasks: Sequence[Task],
    num_processes: int,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Say what tokenising will take. Raises: CacheError if the disk is too small."""
    needed = 0
    for number, source in enumerate(sources):
        own = [task for task in tasks if task.source == number and not task.done]
        if own:
            expected = estimate(setups[number], own)
            needed += expected.disk_bytes
            told = expected.describe(min(num_processes, len(tasks)))
            told = f"source {source.spec.name!r}: tokenising {told}"
            LOG.info("%s", told)
            if progress is not None:
                progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, told=told))
    check_space(setups[0], needed)


def _count_processes(launch: Communicator) -> int:
    """How many processes each rank may use: the cores that it and the other ranks of its node may
    run on, shared. Called by all ranks."""
    own = socket.gethostname(), frozenset(os.sched_getaffinity(0))
    ranks = [cores for host, cores in launch.allgather(own) if host == own[0]]
    return max(1, len(frozenset().union(*ranks)) // len(ranks))


class _Tally:
    """Counts what is done, over all ranks."""

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
        self._own = [0, 0, 0]
        self._all = [0, 0, 0]
        self._start = time.monotonic()
        self._posted = self._start

    def add(self, *counts: int) -> None:
        """Add bytes, documents and tokens of this rank, and tell rank 0 unless it has just been
        told."""
        self._own = _add(self._own, counts)
        if time.monotonic() > self._posted + _POST_SECONDS:
            self.post()

    def post(self) -> None:
        """Tell rank 0."""
        self._posted = time.monotonic()
        self._launch.post(self._own)
        self._own = [0, 0, 0]
        self.show()

    def show(self) -> None:
        """On rank 0, report what ranks have told."""
        posts = self._launch.posts()
        for _, counts in posts:
            self._all = _add(self._all, counts)
        if posts and self._progress is not None:
            num_bytes, documents, tokens = self._all
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


def _add(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
