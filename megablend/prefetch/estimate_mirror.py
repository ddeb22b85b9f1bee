"""What mirrors take from the source, from one another and from their disks, found by planning the
reads of a run's loaders, and by a simulation of what mirrors keep.

In it a page leaves the source if no node holds it. The node that reads it and the first home of its
piece keep it, and give up first what they will need last. What opening files reads, what is fetched
again after a failure or a restart, and what was evicted for being fetched ahead is not included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.mirror.disk.pages import BLOCK_BYTES, PAGE_BYTES, PIECE_BLOCKS, PORTION_BLOCKS
from megablend.mirror.members.homes import Homes
from megablend.prefetch.due_ranges import list_ranges
from megablend.prefetch.memory_budget import batches_of, plan_budget
from megablend.prefetch.memory_need import check_memory
from megablend.prefetch.read_schedule import StepSequence
from megablend.prefetch.windows import plan_windows
from megablend.run.run import Run
from megablend.run.skips import Skips
from megablend.storage.mirror_options import ALL, MirrorOptions

MAX_PAGES = 1 << 20
"""Reads of pages that are simulated: of longer runs those of every n-th portion, in mirrors of an
n-th of the size."""
_PORTION_PAGES = PORTION_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_PIECE_PAGES = PIECE_BLOCKS * BLOCK_BYTES // PAGE_BYTES
_FILE_PAGES = 1 << 40
"""More than a file has."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class MirrorEpoch:
    """Bytes and requests of all nodes in an epoch: as many samples as all sources have in one
    pass."""

    number: int
    samples: int
    source_bytes: int
    source_requests: int
    network_bytes: int
    """That nodes send to one another."""
    network_requests: int
    disk_bytes: int
    """That ranks read from mirrors."""
    disk_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorEstimate:
    """What the mirrors of a job take to read train."""

    nodes: int
    size: int | None
    """Bytes of the mirror of each node; None: as many as are needed."""
    copies: int
    needed_bytes: int
    """Of the pages that are read, each once; 0 if all files are local."""
    fits: bool
    """Whether all of them fit into the mirrors together, with their copies."""
    is_exact: bool
    """Whether all reads were simulated, not those of some parts of the files."""
    epochs: tuple[MirrorEpoch, ...]


class Reads(NamedTuple):
    """Pages that are read, each in one read once: int64 [n] each, by time."""

    pages: Int64s
    """Number of the file, times _FILE_PAGES, and of the page in it."""
    times: Int64s
    """First sample of the step for which it is read."""
    nodes: Int64s


def estimate_mirror(
    run: Run,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
    num_workers: int,
    num_nodes: int,
    size: int | None,
) -> MirrorEstimate:
    """Find what a split's loaders take through mirrors, from its first sample to its last.

    Args:
        num_nodes: over which the ranks are divided, equally, neighbours together.
        size: bytes of each node's mirror; None: that of the run's `mirror` setting, or no limit.

    Raises: ConfigError if memory is too small.
    """
    options = run.runtime.objects.mirror or MirrorOptions(folder="")
    size = options.size if size is None else size
    copies = num_nodes if options.copies == ALL else min(int(options.copies), num_nodes)
    every = max(1, run.num_samples * run.sequence_length * 4 // PAGE_BYTES // MAX_PAGES)
    step = micro_batch_size * data_parallel_size
    future = StepSequence(
        first=0,
        micro_batch_size=micro_batch_size,
        stride=step * max(1, num_workers),
        stop=run.num_samples // step * step,
    )
    num_batches = batches_of(num_workers)
    check_memory(
        run,
        Skips(),
        micro_batch_size=micro_batch_size,
        stride=future.stride,
        num_batches=num_batches,
    )
    files: dict[str, int] = {}
    found = [Reads(*(np.empty(0, np.int64) for _ in Reads._fields))]
    for i, begin in enumerate(range(0, min(future.stride, future.stop), micro_batch_size)):
        node = i % data_parallel_size * num_nodes // data_parallel_size
        for pages, times in _list_pages(run, future, begin, num_batches, options, files):
            # Of which portions looks random
            mixed = (pages // _PORTION_PAGES).astype(np.uint64) * _STEP >> np.uint64(40)
            some = np.flatnonzero(mixed % np.uint64(every) == 0)
            found.append(Reads(pages[some], times[some], np.full(len(some), node)))
    reads = Reads(*map(np.concatenate, zip(*found, strict=True)))
    order = np.lexsort((reads.pages, reads.nodes, reads.times))
    # Neighbouring ranges may share a page
    is_new = np.any([np.diff(each[order], prepend=-1) != 0 for each in reads], axis=0)
    reads = Reads(*(each[order[is_new]] for each in reads))
    room = None if size is None else size // PAGE_BYTES // every
    moved = simulate(reads, _find_homes(reads.pages, files, num_nodes, copies), num_nodes, room)
    needed = len(np.unique(reads.pages)) * PAGE_BYTES * every
    return MirrorEstimate(
        nodes=num_nodes,
        size=size,
        copies=copies,
        needed_bytes=needed,
        fits=size is None or needed * copies <= num_nodes * size,
        is_exact=every == 1,
        epochs=tuple(_count_epochs(run, future.stop, reads, moved, every)) if needed else (),
    )


def _list_pages(
    run: Run,
    future: StepSequence,
    begin: int,
    num_batches: int,
    options: MirrorOptions,
    files: dict[str, int],
) -> Iterator[tuple[Int64s, Int64s]]:
    """What a process reads of files that mirrors keep: pages and times, as in Reads.

    Args:
        begin: the process's first sample.
        files: their numbers; those that are new are added.
    """
    stride = future.stride
    for section in run.sections:
        view = run.view(section)
        first = begin + -(-max(0, section.start - begin) // stride) * stride
        coming = StepSequence(
            first=first,
            micro_batch_size=future.micro_batch_size,
            stride=stride,
            stop=min(section.stop, future.stop),
        )
        budget = plan_budget(
            view, micro_batch_size=future.micro_batch_size, num_batches=num_batches
        )
        for window in plan_windows(view, coming, budget):
            reads = np.sort(window.reads)
            times = first + stride * window.schedule.first_use[reads].astype(np.float64)
            for each in list_ranges(view, window.schedule.ids[reads], times):
                if options.covers(each.path):
                    number = files.setdefault(each.path, len(files))
                    begins = each.offsets // PAGE_BYTES
                    counts = -(-(each.offsets + each.sizes) // PAGE_BYTES) - begins
                    counts *= each.sizes > 0
                    which = np.repeat(np.arange(len(begins)), counts)
                    inside = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
                    pages = number * _FILE_PAGES + begins[which] + inside
                    yield pages, each.due[which].astype(np.int64)
            first += stride * window.schedule.num_steps


def _find_homes(pages: Int64s, files: dict[str, int], num_nodes: int, copies: int) -> Int64s:
    """The homes of pages, int64 [n, copies], of nodes with these numbers for names."""
    homes = Homes([str(i) for i in range(num_nodes)])
    found = np.zeros((len(pages), copies), np.int64)
    numbers = pages // _FILE_PAGES
    for path, number in files.items() if num_nodes > 1 else ():
        here = np.flatnonzero(numbers == number)
        pieces, which = np.unique(pages[here] % _FILE_PAGES // _PIECE_PAGES, return_inverse=True)
        digest = blake2b(path.encode(), digest_size=16).hexdigest()
        found[here] = homes.order(digest, pieces, copies)[which]
    return found


class _Node:
    """The mirror of a node.

    Args:
        room: pages that it can hold; None: any number.
    """

    def __init__(self, room: int | None) -> None:
        self._room = room
        self.held: dict[int, int] = {}
        """When each page is needed next: the number of the read."""
        self._queue: list[tuple[int, int]] = []

    def keep(self, page: int, needed: int) -> bool:
        """Hold a page, or give up those that are needed last; whether it is held."""
        self.held[page] = needed
        if self._room is None:
            return True
        heapq.heappush(self._queue, (-needed, page))
        while len(self.held) > self._room:
            last, other = heapq.heappop(self._queue)
            if self.held.get(other) == -last:
                del self.held[other]
        return page in self.held


def simulate(
    reads: Reads, homes: Int64s, num_nodes: int, room: int | None
) -> tuple[Int64s, Int64s]:
    """Read all pages, one after another. What is not needed again is given up before all else, what
    was read longest ago first.

    Args:
        homes: int64 [n, copies].
        room: pages that a node can hold.

    Returns: how often a page is sent by the source, and by a node, for each read: int64 [n] each.
    """
    count = len(reads.pages)
    by_all = _find_next(reads.pages, np.zeros_like(reads.nodes))
    by_node = _find_next(reads.pages, reads.nodes)
    nodes = [_Node(room) for _ in range(num_nodes)]
    holders: dict[int, set[int]] = {}
    source = np.zeros(count, np.int64)
    network = np.zeros(count, np.int64)
    rows = zip(
        reads.pages.tolist(),
        reads.nodes.tolist(),
        homes.tolist(),
        by_all.tolist(),
        by_node.tolist(),
        strict=True,
    )
    for i, (page, node, (home, *others), next_of_all, next_of_node) in enumerate(rows):
        known = holders.setdefault(page, set())
        known -= {each for each in known if page not in nodes[each].held}
        is_new = node not in known
        if is_new:
            source[i] = not known
            # The home gets it, and gives it to the node
            network[i] = (bool(known) and home not in known) + (home != node)
        if (is_new or home in known) and nodes[home].keep(page, next_of_all):
            known.add(home)
        if node != home and nodes[node].keep(page, next_of_node):
            known.add(node)
        for other in others if is_new else ():
            if other not in known and nodes[other].keep(page, 2 * count - i):
                known.add(other)
                network[i] += 1
    return source, network


def _find_next(pages: Int64s, nodes: Int64s) -> Int64s:
    """The next read of each read's page by its node: int64 [n]; more than all numbers if there is
    none, the more the earlier it was read."""
    count = len(pages)
    order = np.lexsort((nodes, pages))
    is_same = (np.diff(pages[order]) == 0) & (np.diff(nodes[order]) == 0)
    found = 2 * count - np.arange(count)
    found[order[:-1][is_same]] = order[1:][is_same]
    return found


def _count_epochs(
    run: Run, num_samples: int, reads: Reads, moved: tuple[Int64s, Int64s], every: int
) -> Iterator[MirrorEpoch]:
    """What is read in each epoch.

    Args:
        moved: what `_simulate` finds.
    """
    length = int(run.data.parts["tokens"].sum()) // run.sequence_length + 1
    # Pages of a portion that a step reads are asked for together
    portions = reads._replace(pages=reads.pages // _PORTION_PAGES)
    firsts = np.flatnonzero(np.any([np.diff(each, prepend=-1) != 0 for each in portions], axis=0))
    for number, first in enumerate(range(0, num_samples, length)):
        last = min(num_samples, first + length)
        edges = np.searchsorted(reads.times, [first, last])
        begin, stop = np.searchsorted(firsts, edges).tolist()
        counts = list[int]()
        for each in (*moved, np.ones_like(reads.pages)):
            pages = int(each[slice(*edges)].sum())
            sent = np.maximum.reduceat(each, firsts)[begin:stop]
            counts += [pages * PAGE_BYTES * every, int(sent.sum()) * every]
        yield MirrorEpoch(number, last - first, *counts)
