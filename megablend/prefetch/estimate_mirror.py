"""Estimate how much data mirrors read from the source, from one another and from their disks, by
planning the reads of a run's loaders and simulating the mirrors.

The estimates do not include reads that open files, fetches that are repeated after a failure or a
restart, and evictions that are due to fetching ahead.
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
from megablend.prefetch.memory_need import Loaders, plan_loaders
from megablend.prefetch.plan_process import plan_process
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.simulate_mirrors import PageReads, simulate
from megablend.run.run import Run
from megablend.storage.hints import DueRanges
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.mirror_values import ALL
from megablend.system.digest import hex_digest

MAX_PAGES = 1 << 20
"""Approximate maximum number of page reads that are simulated. For longer runs, only one in n
portions of pages is simulated, with mirrors of 1/n of the size."""
_PORTION_PAGES = PORTION_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_PIECE_PAGES = PIECE_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_FILE_PAGES = 1 << 40
"""Greater than the number of pages of any file. A page has a number that is unique over all files:
the number of its file times _FILE_PAGES, plus its number in the file."""
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: multiplying by it scatters neighbouring numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorEpoch:
    """Bytes and requests of all nodes in one *epoch*; here an epoch is the number of samples in one
    pass over all sources."""

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
    """Size in bytes of each node's mirror; None if each mirror is as large as needed."""
    copies: int
    needed_bytes: int
    """Total size in bytes of the pages that are read, each counted once; 0 if all files are
    local."""
    fits: bool
    """Whether all these pages, with their copies, fit into the mirrors of all nodes together."""
    is_exact: bool
    """Whether all reads were simulated; False if only those of a sample of pages were."""
    epochs: tuple[MirrorEpoch, ...]


def estimate_mirror(
    run: Run, loaders: Loaders, *, num_nodes: int, size: int | None
) -> MirrorEstimate:
    """Estimate the data that a split's loaders read through mirrors, over all samples of the split.

    Args:
        num_nodes: number of nodes, among which consecutive ranks are divided evenly.
        size: size in bytes of each node's mirror; None for the size in the run's `mirror` setting,
            or no limit without such a setting.

    Raises: ConfigError if memory is too small, or if there are too many nodes.
    """
    if num_nodes > MAX_NODES:
        raise ConfigError(f"num_nodes: found {num_nodes}, expected at most {MAX_NODES}")
    options = run.runtime.objects.mirror or MirrorOptions.model_construct(folder="")
    size = options.size if size is None else size
    copies = num_nodes if options.copies == ALL else min(int(options.copies), num_nodes)
    token_bytes = run.num_samples * run.sequence_length * 4
    one_in = max(1, token_bytes // PAGE_BYTES // MAX_PAGES)
    sequence, num_batches = plan_loaders(run, loaders)
    num_ranks = loaders.data_parallel_size
    files: dict[str, int] = {}
    parts = list[PageReads]()
    for i, begin in enumerate(sequence.begins):
        node = i % num_ranks * num_nodes // num_ranks
        for pages, times in _list_pages(run, sequence, begin, num_batches, options, files):
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
        epochs=tuple(_count_epochs(run, sequence.stop, reads, sent, one_in)) if needed else (),
    )


def _list_pages(
    run: Run,
    sequence: StepSequence,
    begin: int,
    num_batches: int,
    options: MirrorOptions,
    files: dict[str, int],
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the pages that a process reads from files that mirrors keep, and the time of each read;
    see PageReads.

    Args:
        begin: the process's first sample.
        files: numbers of the files by path; new files are added.
    """
    for view, window, _ in plan_process(run, sequence, begin, num_batches):
        schedule = window.schedule
        reads = np.sort(window.reads)
        # Here the number of a sample is used as the time at which ranges are due
        times = schedule.samples[schedule.step_offsets[schedule.first_use[reads]]]
        for ranges in list_ranges(view, schedule.ids[reads], times.astype(np.float64)):
            if options.covers(ranges.path):
                number = files.setdefault(ranges.path, len(files))
                pages, owners = _pages_of_ranges(ranges)
                yield number * _FILE_PAGES + pages, ranges.due[owners].astype(np.int64)


def _pages_of_ranges(ranges: DueRanges) -> tuple[Int64s, Int64s]:
    """Return the pages that ranges touch, by their numbers in the file, and the index of the range
    that each page belongs to (int64 [n] each)."""
    first_pages = ranges.offsets // PAGE_BYTES
    counts = -(-(ranges.offsets + ranges.sizes) // PAGE_BYTES) - first_pages
    counts *= ranges.sizes > 0
    owners = np.repeat(np.arange(len(counts)), counts)
    pages_before = np.cumsum(counts) - counts
    return first_pages[owners] + np.arange(len(owners)) - pages_before[owners], owners


def _choose_portions(pages: Int64s, one_in: int) -> Int64s:
    """Choose one in `one_in` portions of pages, pseudo-randomly. Return the indices of their
    pages."""
    portions = (pages // _PORTION_PAGES).astype(np.uint64)
    hashes = portions * _HASH_FACTOR >> np.uint64(40)
    return np.flatnonzero(hashes % np.uint64(one_in) == 0)


def _join_reads(parts: list[PageReads]) -> PageReads:
    """Join reads, sort them by time, and remove duplicates, since neighbouring ranges may share a
    page."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return PageReads(nothing, nothing, nothing)
    reads = PageReads(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.lexsort((reads.pages, reads.nodes, reads.times))
    reads = PageReads(*(column[order] for column in reads))
    changes = _find_changes(reads)
    return PageReads(*(column[changes] for column in reads))


def _find_changes(reads: PageReads) -> Int64s:
    """Return the indices of the reads that differ from the previous read."""
    differs = [np.diff(column, prepend=-1) != 0 for column in reads]
    return np.flatnonzero(np.any(differs, axis=0))


def _find_homes(pages: Int64s, files: dict[str, int], num_nodes: int, copies: int) -> Int64s:
    """Return the home nodes of pages (int64 [n, copies]). Nodes are named by their numbers."""
    nodes = np.zeros((len(pages), copies), np.int64)
    if num_nodes == 1:
        return nodes
    homes = Homes([str(i) for i in range(num_nodes)])
    page_files = pages // _FILE_PAGES
    page_pieces = pages % _FILE_PAGES // _PIECE_PAGES
    for path, number in files.items():
        in_file = np.flatnonzero(page_files == number)
        pieces, which = np.unique(page_pieces[in_file], return_inverse=True)
        nodes[in_file] = homes.order(hex_digest(path), pieces, copies)[which]
    return nodes


def _count_epochs(
    run: Run, num_samples: int, reads: PageReads, sent: dict[str, Int64s], one_in: int
) -> Iterator[MirrorEpoch]:
    """Yield the data that all nodes transfer in each epoch. Only one in `one_in` portions of the
    data was simulated, so the counts are multiplied by `one_in`.

    Args:
        sent: for each read, the number of times that its page is sent from the source, over the
            network, and from a disk: int64 [n] each.
    """
    epoch_samples = int(run.data.parts["tokens"].sum()) // run.sequence_length + 1
    # Pages of the same portion that a step reads are requested together
    first_reads = _find_changes(reads._replace(pages=reads.pages // _PORTION_PAGES))
    requests = {name: np.maximum.reduceat(counts, first_reads) for name, counts in sent.items()}
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
