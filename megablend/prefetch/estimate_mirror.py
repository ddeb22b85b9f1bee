"""Estimates of the data that mirrors read from the source, from one another and from their disks,
made by planning the reads of a run's loaders and simulating the mirrors.

Reads that open files, repeated fetches after a failure or a restart, and evictions due to fetching
ahead are not included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import ConfigError
from megablend.mirror.disk.pages import BLOCK_BYTES, PAGE_BYTES, PIECE_BLOCKS, PORTION_BLOCKS
from megablend.mirror.members.homes import MAX_NODES, Homes
from megablend.prefetch.due_ranges import list_ranges
from megablend.prefetch.memory_budget import plan_budget
from megablend.prefetch.memory_need import Loaders, plan_loaders
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.simulate_mirrors import PageReads, simulate
from megablend.prefetch.windows import plan_windows
from megablend.run.run import Run
from megablend.storage.hints import DueRanges
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.mirror_values import ALL
from megablend.system.digest import hex_digest

MAX_PAGES = 1 << 20
"""Approximate maximum number of page reads that are simulated. For longer runs, only the reads of
one portion in n are simulated, with mirrors of an n-th of the size."""
_PORTION_PAGES = PORTION_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_PIECE_PAGES = PIECE_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_FILE_PAGES = 1 << 40
"""More pages than any file has: a page's number among the pages of all files is its file's number
times this, plus its number in the file."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: products with it scatter neighbouring numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorEpoch:
    """Bytes and requests of all nodes in an *epoch*: as many samples as all sources have in one
    pass."""

    number: int
    samples: int
    source_bytes: int
    source_requests: int
    network_bytes: int
    """Bytes that nodes send to one another."""
    network_requests: int
    disk_bytes: int
    """Bytes that ranks read from mirrors."""
    disk_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorEstimate:
    """The data that the mirrors of a job transfer when the split train is read."""

    nodes: int
    size: int | None
    """Bytes of each node's mirror; None for as many as are needed."""
    copies: int
    needed_bytes: int
    """Bytes of the pages that are read, each counted once; 0 if all files are local."""
    fits: bool
    """Whether all these pages fit into the mirrors together, with their copies."""
    is_exact: bool
    """Whether all reads were simulated, rather than those of some parts of the files."""
    epochs: tuple[MirrorEpoch, ...]


def estimate_mirror(
    run: Run, loaders: Loaders, *, num_nodes: int, size: int | None
) -> MirrorEstimate:
    """Estimate the data that a split's loaders read through mirrors, from its first sample to its
    last.

    Args:
        num_nodes: number of nodes, among which consecutive ranks are divided evenly.
        size: bytes of each node's mirror; None for that of the run's `mirror` setting, or no limit.

    Raises: ConfigError if memory is too small, or if there are too many nodes.
    """
    if num_nodes > MAX_NODES:
        raise ConfigError(f"num_nodes: found {num_nodes}, expected at most {MAX_NODES}")
    options = run.runtime.objects.mirror or MirrorOptions.model_construct(folder="")
    size = options.size if size is None else size
    copies = num_nodes if options.copies == ALL else min(int(options.copies), num_nodes)
    token_bytes = run.num_samples * run.sequence_length * 4
    one_in = max(1, token_bytes // PAGE_BYTES // MAX_PAGES)
    future, num_batches = plan_loaders(run, loaders)
    num_ranks = loaders.data_parallel_size
    files: dict[str, int] = {}
    parts = list[PageReads]()
    for i, begin in enumerate(future.begins):
        node = i % num_ranks * num_nodes // num_ranks
        for pages, times in _list_pages(run, future, begin, num_batches, options, files):
            some = _choose_portions(pages, one_in)
            parts.append(PageReads(pages[some], times[some], np.full(len(some), node)))
    reads = _join_reads(parts)
    room = None if size is None else size // PAGE_BYTES // one_in
    homes = _find_homes(reads.pages, files, num_nodes, copies)
    source, network = simulate(reads, homes, num_nodes, room)
    sent = {"source": source, "network": network, "disk": np.ones_like(reads.pages)}
    needed = len(np.unique(reads.pages)) * PAGE_BYTES * one_in
    return MirrorEstimate(
        nodes=num_nodes,
        size=size,
        copies=copies,
        needed_bytes=needed,
        fits=size is None or needed * copies <= num_nodes * size,
        is_exact=one_in == 1,
        epochs=tuple(_count_epochs(run, future.stop, reads, sent, one_in)) if needed else (),
    )


def _list_pages(
    run: Run,
    future: StepSequence,
    begin: int,
    num_batches: int,
    options: MirrorOptions,
    files: dict[str, int],
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the pages that a process reads of files that mirrors keep, and the times, as in
    PageReads.

    Args:
        begin: the process's first sample.
        files: numbers of the files, to which new files are added.
    """
    for section in run.sections:
        view = run.view(section)
        coming = future.within(section, begin)
        first = coming.first
        budget = plan_budget(
            view, micro_batch_size=future.micro_batch_size, num_batches=num_batches
        )
        for window in plan_windows(view, coming, budget):
            reads = np.sort(window.reads)
            times = first + future.stride * window.schedule.first_use[reads].astype(np.float64)
            # The time that is due here is a sample's number
            for ranges in list_ranges(view, window.schedule.ids[reads], times):
                if options.covers(ranges.path):
                    number = files.setdefault(ranges.path, len(files))
                    pages, owners = _pages_of_ranges(ranges)
                    yield number * _FILE_PAGES + pages, ranges.due[owners].astype(np.int64)
            first += future.stride * window.schedule.num_steps


def _pages_of_ranges(ranges: DueRanges) -> tuple[Int64s, Int64s]:
    """List the pages of ranges by their numbers in the file, and the range that each belongs to:
    arrays of int64 [n]."""
    first_pages = ranges.offsets // PAGE_BYTES
    counts = -(-(ranges.offsets + ranges.sizes) // PAGE_BYTES) - first_pages
    counts *= ranges.sizes > 0
    owners = np.repeat(np.arange(len(counts)), counts)
    pages_before = np.cumsum(counts) - counts
    return first_pages[owners] + np.arange(len(owners)) - pages_before[owners], owners


def _choose_portions(pages: Int64s, one_in: int) -> Int64s:
    """Choose one portion in `one_in`, as if at random: the indices of its pages, int64 [...]."""
    portions = (pages // _PORTION_PAGES).astype(np.uint64)
    hashes = portions * _HASH_FACTOR >> np.uint64(40)
    return np.flatnonzero(hashes % np.uint64(one_in) == 0)


def _join_reads(parts: list[PageReads]) -> PageReads:
    """Join reads, sorted by time and without duplicates: neighbouring ranges may share a page."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return PageReads(nothing, nothing, nothing)
    reads = PageReads(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.lexsort((reads.pages, reads.nodes, reads.times))
    reads = PageReads(*(column[order] for column in reads))
    changes = _find_changes(reads)
    return PageReads(*(column[changes] for column in reads))


def _find_changes(reads: PageReads) -> Int64s:
    """Find the reads that differ from the read before them: int64 [...]."""
    differs = [np.diff(column, prepend=-1) != 0 for column in reads]
    return np.flatnonzero(np.any(differs, axis=0))


def _find_homes(pages: Int64s, files: dict[str, int], num_nodes: int, copies: int) -> Int64s:
    """Find the homes of pages, int64 [n, copies], among nodes whose names are their numbers."""
    found = np.zeros((len(pages), copies), np.int64)
    if num_nodes == 1:
        return found
    homes = Homes([str(i) for i in range(num_nodes)])
    page_files = pages // _FILE_PAGES
    page_pieces = pages % _FILE_PAGES // _PIECE_PAGES
    for path, number in files.items():
        in_file = np.flatnonzero(page_files == number)
        pieces, which = np.unique(page_pieces[in_file], return_inverse=True)
        found[in_file] = homes.order(hex_digest(path), pieces, copies)[which]
    return found


def _count_epochs(
    run: Run, num_samples: int, reads: PageReads, sent: dict[str, Int64s], one_in: int
) -> Iterator[MirrorEpoch]:
    """Count the data that all nodes transfer in each epoch, if one portion in `one_in` was
    simulated.

    Args:
        sent: for each read, how often its page is sent from the source, over the network, and from
            a disk: int64 [n] each.
    """
    epoch_samples = int(run.data.parts["tokens"].sum()) // run.sequence_length + 1
    # Pages of a portion that a step reads are requested together
    first_reads = _find_changes(reads._replace(pages=reads.pages // _PORTION_PAGES))
    requests = {name: np.maximum.reduceat(each, first_reads) for name, each in sent.items()}
    for number, first in enumerate(range(0, num_samples, epoch_samples)):
        last = min(num_samples, first + epoch_samples)
        edges = np.searchsorted(reads.times, [first, last])
        in_epoch = slice(*edges)
        requests_in_epoch = slice(*np.searchsorted(first_reads, edges))
        figures = dict[str, int]()
        for name, of_reads in sent.items():
            num_pages = int(of_reads[in_epoch].sum())
            num_requests = int(requests[name][requests_in_epoch].sum())
            figures[f"{name}_bytes"] = num_pages * PAGE_BYTES * one_in
            figures[f"{name}_requests"] = num_requests * one_in
        yield MirrorEpoch(number=number, samples=last - first, **figures)
