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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megablend.config import Config
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, ChangedFileError, ConfigError
from megablend.index.build.build_report import Progress
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.storage.location import find_root
from megablend.system import count_cpus
from megablend.system.log import LOG
from megablend.text.engine import Engine, GigatokenEngine, find_version, without_threads
from megablend.text.estimate import Estimate, check_space, estimate
from megablend.text.parts import PART_BYTES, TextFile, plan_tasks
from megablend.text.pool import run_jobs
from megablend.text.prove import find_difference
from megablend.text.record import (
    Entry,
    check_bad,
    is_record,
    list_texts,
    load_record,
    make_setup,
    make_spec,
    parse_record,
    save_record,
)
from megablend.text.token_file import read_footer
from megablend.text.tokenizer import TokenizerFile, load_tokenizer
from megablend.text.work import Job, PartResult, Setup, TaskResult, load_result

MIN_PROVED_BYTES = 32 << 20
"""Less text is tokenised by `tokenizers` in the time that proving gigatoken takes."""
_ESTIMATED_BYTES = 256 << 20
"""What takes longer than some seconds is estimated beforehand."""
_POST_SECONDS = 0.5
_FACTOR = 30
"""How much faster gigatoken is, about (docs/text.md)."""


@dataclass(slots=True)
class _Found:
    """A source's text, as rank 0 finds it."""

    spec: SourceSpec
    setup: Setup
    files: list[TextFile]
    skipped: list[str]
    root: str
    entries: dict[str, Entry] = field(default_factory=dict)
    """Of the files that are tokenised."""
    listing: Mapping[str, int] = field(default_factory=dict)
    """The token files that exist; of a build."""

    @property
    def pending(self) -> list[TextFile]:
        """The files that are not known as they are now."""
        return [
            file
            for file in self.files
            if (entry := self.entries.get(file.name)) is None
            or (entry.size, entry.etag) != (file.size, file.etag)
            or (entry.unreadable and not self.setup.skips_unreadable)
        ]


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
    found: list[_Found] = []
    if launch.rank == 0:
        for spec in texts:
            each = find_text(config, spec, storage)
            _check_same_tokenizer(each.setup.tokenizer, (known or {}).get(spec.name, ()))
            found.append(each)
        _list_existing(found)
    notes: list[str] = []
    if launch.bcast(any(each.pending for each in found)):
        engine, notes = _choose_engine(found, launch)
        for each in found:
            each.setup = replace(each.setup, engine=engine)
        _tokenise_pending(found, launch, processes, progress)
    made: list[SourceSpec] = []
    if launch.rank == 0:
        for each in found:
            _check_unchanged(each, (known or {}).get(each.spec.name, ()))
            check_bad(config, each.spec.name, each.root, each.entries)
            made.append(_finish(each, notes))
    by_name = {each.name: each for each in launch.bcast(made)}
    return [by_name.get(spec.name, spec) for spec in specs]


def find_tokenised(
    config: Config, specs: Sequence[SourceSpec], storage: Storage
) -> list[SourceSpec]:
    """The sources of a config with the token files of those that are text; nothing is made.

    Raises: CacheError if some text is not tokenised; as `list_texts`.
    """
    found = list[SourceSpec]()
    for spec in specs:
        source = config.all_sources[spec.name]
        if source.text is None:
            found.append(spec)
            continue
        each = find_text(config, spec, storage)
        if pending := each.pending:
            raise CacheError(
                f"source {spec.name!r}: {len(pending):,} of {len(each.files):,} files of text are not tokenised, the first "
                f"{pending[0].path}; `megablend build CONFIG` tokenises them"
            )
        found.append(_finish(each, ()))
    return found


def find_text(config: Config, spec: SourceSpec, storage: Storage) -> _Found:
    """A source's text, and what is known of it. Raises: ConfigError, DataError."""
    assert config.tokenizer is not None
    tokenizer = load_tokenizer(config.tokenizer)
    setup = make_setup(config, spec.name, config.all_sources[spec.name], tokenizer, storage)
    return _find(spec, replace(setup, part_bytes=PART_BYTES), storage)


def estimate_pending(
    config: Config, spec: SourceSpec, storage: Storage, processes: int | None = None
) -> tuple[list[TextFile], Estimate, int]:
    """A source's files; what tokenising those that are not tokenised yet takes, by how many
    processes.
    Raises: ConfigError, DataError."""
    found = find_text(config, spec, storage)
    tasks = [
        task for file in found.pending for task in plan_tasks(file, storage, found.setup.fields)
    ]
    total = sum(_cost_of(file) for file in found.files)
    is_fast = found.setup.tokenizer.is_listed and find_version("gigatoken")
    if is_fast and total >= MIN_PROVED_BYTES:
        found.setup = replace(found.setup, engine="gigatoken")
    number = processes or count_cpus()
    return found.files, estimate(found.setup, tasks), min(number, max(1, len(tasks)))


def _find(spec: SourceSpec, setup: Setup, storage: Storage) -> _Found:
    files, skipped = list_texts(spec, storage)
    root = find_root(spec.patterns)
    entries = load_record(setup, root)
    names = {file.name for file in files}
    kept = {name: each for name, each in entries.items() if name in names}
    return _Found(spec, setup, files, skipped, root, kept)


def _finish(found: _Found, notes: Sequence[str]) -> SourceSpec:
    names = [file.name for file in found.files if file.name in found.entries]
    spec = make_spec(
        found.spec, found.setup, [found.entries[name] for name in names], found.skipped
    )
    joined = "; ".join(filter(None, (*notes, spec.note)))
    return replace(spec, note=joined or None)


def _list_existing(found: Sequence[_Found]) -> None:
    """List the token files that exist, and forget text some of whose token files were removed."""
    setup = found[0].setup  # all have the same folder and tokenizer
    listing = setup.folder.list_files(setup.tokenizer.digest)
    for each in found:
        each.listing = listing
        each.entries = {
            name: entry
            for name, entry in each.entries.items()
            if all(part.name in listing for part in entry.parts)
        }


def _cost_of(file: TextFile) -> int:
    return file.size * (4 if file.codec else 1)


def _check_same_tokenizer(tokenizer: TokenizerFile, known: Sequence[str]) -> None:
    """Raises: ConfigError if the run has read tokens of another tokenizer."""
    other = next((name for name in known if not name.startswith(f"{tokenizer.digest}/")), None)
    if other is not None:
        raise ConfigError(
            f"tokenizer: {tokenizer.path} has the digest {tokenizer.digest}, but the run was begun with tokens of "
            f"{other.partition('/')[0]}; restore that tokenizer, or give the run another name (`run:`)"
        )


def _check_unchanged(found: _Found, known: Sequence[str]) -> None:
    """Raises: ChangedFileError if text that the run has read changed, or grew."""
    made = {part.name for entry in found.entries.values() for part in entry.parts}
    prefix = f"{found.setup.tokenizer.digest}/"
    paths = {file.name: file.path for file in found.files}
    for name in known:
        text = name.removeprefix(prefix).rpartition("/")[0]
        if name.startswith(prefix) and name not in made and text in paths:
            raise ChangedFileError(
                paths[text],
                f"its text changed since run began to read source {found.spec.name!r}; restore it, give new text a file of its "
                "own, or give the run another name (`run:`)",
            )


def _choose_engine(found: Sequence[_Found], launch: Communicator) -> tuple[str, list[str]]:
    """The engine for all of a config's text, and what users should know of it. It depends on the
    text and what is installed, not on what is done already. Called by all ranks."""
    setup, total = launch.bcast(
        (found[0].setup, sum(_cost_of(file) for each in found for file in each.files))
        if found
        else None
    ) or (None, 0)
    assert setup is not None
    tokenizer = setup.tokenizer
    version = find_version("gigatoken")
    slower = f"tokenising takes about {_FACTOR} times as long"
    if total < MIN_PROVED_BYTES:
        return "tokenizers", []
    if not tokenizer.is_listed:
        return "tokenizers", [
            f"{tokenizer.path}: gigatoken is not known to read this kind of tokenizer: {slower}"
        ]
    if not version:
        return "tokenizers", [
            f"gigatoken is not installed: {slower} (pip install 'megablend[text]')"
        ]
    difference = _find_outcome(setup, version, launch)
    if difference is None:
        return "gigatoken", []
    return "tokenizers", [
        f"{tokenizer.path}: gigatoken {version} gives other tokens than tokenizers {find_version('tokenizers')} "
        f"(for {difference[:80]!r}): {slower}"
    ]


def _find_outcome(setup: Setup, version: str, launch: Communicator) -> str | None:
    """What proving a tokenizer has found, which is done once: None if all tokens were equal.
    Called by all ranks."""
    tokenizer = setup.tokenizer
    versions = f"{version}-{find_version('tokenizers')}"
    name = f"{tokenizer.digest}/.proof-{versions}.json"
    outcome: Any = None
    if launch.rank == 0 and (data := setup.folder.read(name)) is not None:
        with contextlib.suppress(ValueError):
            outcome = json.loads(data)
    outcome = launch.bcast(outcome)
    if isinstance(outcome, dict) and "difference" in outcome:
        return None if outcome["difference"] is None else str(outcome["difference"])
    shares = launch.allgather(_prove(tokenizer, launch))
    difference = next((each for each in shares if each is not None), None)
    if launch.rank == 0:
        setup.folder.replace(name, json.dumps({"difference": difference}).encode())
    return difference


def _prove(tokenizer: TokenizerFile, launch: Communicator) -> str | None:
    """What is wrong with gigatoken in this rank's share of the probes; None if nothing is."""
    if launch.rank == 0:
        LOG.info("%s: proving that gigatoken gives the same tokens, once", tokenizer.path)
    try:
        fast = GigatokenEngine(tokenizer)
    except Exception as error:  # of the library: whatever it is, it refuses the tokenizer
        return f"it refuses it: {error}"
    with without_threads():
        return find_difference(fast, Engine(tokenizer), tokenizer, launch.rank, launch.size)


def _tokenise_pending(
    found: Sequence[_Found],
    launch: Communicator,
    processes: int | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Fills `entries` on rank 0."""
    jobs = launch.bcast(_plan(found) if launch.rank == 0 else [])
    count = _count_processes(launch) if processes is None else processes
    if launch.rank == 0 and sum(job.task.cost for job in jobs) >= _ESTIMATED_BYTES:
        _tell_estimate(found, jobs, count * launch.size, progress)
    launch.barrier()  # no rank begins what rank 0 refuses
    assigned = assign_longest_first([job.task.cost for job in jobs], launch.size)[launch.rank]
    tally = _Tally(jobs, launch, progress)
    setups = launch.bcast([each.setup for each in found])
    results = run_jobs(setups, [jobs[i] for i in assigned], count, tally.add, tally.post)
    tally.post(is_last=True)
    launch.barrier(tally.show)
    gathered = launch.gather(dict(zip(assigned, results, strict=True)))
    if launch.rank == 0:
        tally.show()
        merged = {number: result for rank in gathered for number, result in rank.items()}
        _keep(found, jobs, merged)


def _plan(found: Sequence[_Found]) -> list[Job]:
    """The jobs of all sources, with what can be known of their parts without reading text."""
    jobs = list[Job]()
    found[0].setup.folder.remove_leftovers(found[0].setup.tokenizer.digest)
    for number, each in enumerate(found):
        setup = each.setup
        folder = setup.folder
        listing = each.listing
        records = [parse_record(folder.read(name)) for name in listing if is_record(name)]
        by_size = dict[int, list[str]]()
        for entry in (entry for record in records for entry in record.values()):
            by_size.setdefault(entry.size, []).extend(part.name for part in entry.parts)
        by_folder = dict[str, list[str]]()
        for name in listing:
            if name.endswith(".parquet"):
                by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        for file in each.pending:
            own = by_folder.get(setup.folder_of(file.name), [])
            done = _find_done(setup, file, own)
            copies = [name for name in by_size.get(file.size, []) if name in listing]
            twins = () if done else tuple(dict.fromkeys((*own, *copies)))
            for task in plan_tasks(file, setup.storage, setup.fields, setup.part_bytes):
                mine = [part for part in done if task.part in (None, part.number)]
                jobs.append(Job(setup=number, task=task, done=tuple(mine), twins=twins))
    return jobs


def _find_done(setup: Setup, file: TextFile, names: Sequence[str]) -> list[PartResult]:
    """The parts that were made from this version of a text file, as their footers say."""
    found = dict[int, PartResult]()
    for name in names:
        footer = read_footer(setup.storage, setup.folder.path(name))
        made_from = footer["etag"], footer["text"], footer["options"]
        if made_from == (file.etag, file.path, setup.options):
            part = load_result(setup, name, footer)
            found[part.number] = part
    return list(found.values())


def _keep(found: Sequence[_Found], jobs: Sequence[Job], results: Mapping[int, TaskResult]) -> None:
    """Write the records of what was tokenised."""
    parts = dict[tuple[int, str], list[PartResult]]()
    files = dict[tuple[int, str], TextFile]()
    unreadable = dict[tuple[int, str], str]()
    for number, job in enumerate(jobs):
        key = job.setup, job.task.file.name
        result = results[number]
        if result.unreadable:
            unreadable[key] = result.unreadable
        parts.setdefault(key, []).extend(result.parts)
        files[key] = job.task.file
    for (number, name), made in parts.items():
        file = files[number, name]
        made.sort(key=lambda part: part.number)
        reason = unreadable.get((number, name), "")
        # A file is left out as a whole
        kept = () if reason else tuple(made)
        entry = Entry(size=file.size, etag=file.etag, parts=kept, unreadable=reason)
        found[number].entries[name] = entry
    for each in found:
        reasons = [entry.unreadable for entry in each.entries.values()]
        if all(reasons):
            raise each.spec.complaint(f"none of its files can be read: {reasons[0]}")
        save_record(each.setup, each.root, each.entries)


def _tell_estimate(
    found: Sequence[_Found],
    jobs: Sequence[Job],
    num_processes: int,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Say what tokenising will take. Raises: CacheError if the disk is too small."""
    needed = 0
    for number, each in enumerate(found):
        tasks = [job.task for job in jobs if job.setup == number and not job.done]
        if tasks:
            expected = estimate(each.setup, tasks)
            needed += expected.disk_bytes
            told = expected.describe(min(num_processes, len(jobs)))
            told = f"source {each.spec.name!r}: tokenising {told}"
            LOG.info("%s", told)
            if progress is not None:
                progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, told=told))
    check_space(found[0].setup, needed)


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
        jobs: Sequence[Job],
        launch: Communicator,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._launch = launch
        self._progress = progress
        self._num_bytes = sum(job.task.cost for job in jobs)
        self._num_files = len(jobs)
        self._lock = threading.Lock()
        self._own = [0, 0, 0]
        self._all = [0, 0, 0]
        self._start = time.monotonic()
        self._posted = self._start

    def add(self, *counts: int) -> None:
        """Add bytes, documents and tokens of this rank; from any thread."""
        with self._lock:
            self._own = [a + b for a, b in zip(self._own, counts, strict=True)]

    def post(self, *, is_last: bool = False) -> None:
        """Tell rank 0, unless it has just been told."""
        now = time.monotonic()
        if is_last or now > self._posted + _POST_SECONDS:
            self._posted = now
            with self._lock:
                counts = self._own
                self._own = [0, 0, 0]
            self._launch.post(counts)
            self.show()

    def show(self) -> None:
        """On rank 0, report what ranks have told."""
        posts = self._launch.posts()
        for _, counts in posts:
            self._all = [a + b for a, b in zip(self._all, counts, strict=True)]
        if posts and self._progress is not None:
            num_bytes, documents, tokens = self._all
            seconds = max(time.monotonic() - self._start, 1e-3)
            self._progress(
                Progress(
                    files=0,
                    num_files=self._num_files,
                    bytes=min(num_bytes, self._num_bytes),
                    num_bytes=self._num_bytes,
                    tokenised=f"{documents:,} documents, {tokens / seconds / 1e6:,.2f} M tokens/s",
                )
            )
