"""Plan which bytes coming steps read, and when they are due, for storages that keep copies of files
on this node.

Such a storage fetches the ranges that are due first, and evicts the ranges that are due last.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from megablend.arrays import Float64s, Int64s
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import Snapshot
from megablend.prefetch.read_schedule import StepSequence, locate_steps
from megablend.run.run import Run
from megablend.storage.hints import DueRanges, HintedStorage, takes_hints

CHUNK_SAMPLES = 1 << 14
"""Number of samples that are located at a time, which limits the memory for locating samples."""
MAX_BLOCKS = 1 << 20
"""Maximum number of blocks in one plan; blocks of later steps are left out."""


def find_mirror(run: Run) -> HintedStorage | None:
    """Return the run's storage if it keeps copies of the run's files, otherwise None."""
    storage = run.store.storage
    snapshot = run.store.snapshot
    paths = (snapshot.path(column.files.start, run.store.roots) for column in snapshot.columns)
    if takes_hints(storage) and any(takes_hints(storage, path) for path in paths):
        return storage
    return None


def plan_due(
    run: Run, sequence: StepSequence, step: int, step_seconds: float, num_steps: int
) -> list[DueRanges]:
    """Plan the reads of `num_steps` steps, beginning with step `step`, given that a step begins
    every `step_seconds`.

    A block is listed once for each epoch that uses it. If only its first use were listed, a storage
    would evict the block right after it.
    """
    blocks = list[Int64s]()
    steps = list[Int64s]()
    stop = step + num_steps
    chunk = max(1, CHUNK_SAMPLES // sequence.micro_batch_size)
    for begin in range(step, stop, chunk):
        samples, step_offsets = sequence.samples(begin, min(chunk, stop - begin))
        if not len(samples):
            break
        chunk_blocks, first_steps = find_due(run, samples, step_offsets)
        blocks.append(chunk_blocks)
        steps.append(begin - step + first_steps)
    if not blocks:
        return []
    all_blocks = np.concatenate(blocks)[:MAX_BLOCKS]
    due = step_seconds * np.concatenate(steps)[:MAX_BLOCKS].astype(np.float64)
    by_block = np.argsort(all_blocks, kind="stable")
    return list_ranges(run, all_blocks[by_block], due[by_block])


def find_due(run: Run, samples: Int64s, step_offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Find the blocks that steps use in each epoch, and the first step of the epoch that uses each
    block.

    Args:
        samples: int64 [m], the samples of all steps.
        step_offsets: int64 [num_steps + 1], offsets of the steps in `samples`.

    Returns: blocks and steps, int64 [n] each, sorted by epoch, then by block.
    """
    spans = locate_steps(run, samples, step_offsets).spans
    num_blocks = int(spans.blocks.max(initial=0)) + 1
    keys, first_spans = np.unique(spans.epochs * num_blocks + spans.blocks, return_index=True)
    first_samples = spans.rows[first_spans]
    return keys % num_blocks, np.searchsorted(step_offsets, first_samples, side="right") - 1


def list_ranges(run: Run, blocks: Int64s, due: Float64s) -> list[DueRanges]:
    """List the byte ranges to read for blocks, file by file. This includes the ranges of the
    dictionaries, and of the blocks of extra columns, that these blocks need.

    Args:
        blocks: int64 [n], numbers in the index, ascending.
        due: float64 [n], when each block is due, in seconds from now.
    """
    store = run.store
    snapshot = store.snapshot
    blocks, due = _add_extra_blocks(store, blocks, due)
    rows = snapshot.blocks(blocks)
    listed = list[DueRanges]()
    for file, in_file in store.cut_by_file(blocks):
        path = snapshot.path(file, store.roots)
        stops = partial(_find_stops, snapshot, blocks[in_file])
        for ranges in snapshot.column_of(file).kind.list_ranges(path, rows[in_file], stops):
            assert ranges.owners is not None
            range_due = due[in_file][ranges.owners]
            listed.append(DueRanges(ranges.path, ranges.offsets, ranges.sizes, range_due))
    is_encoded = is_by_dictionary(rows["encoding"])
    return listed + _list_dictionaries(store, blocks[is_encoded], due[is_encoded])


def _add_extra_blocks(store: BlockStore, blocks: Int64s, due: Float64s) -> tuple[Int64s, Float64s]:
    """Add the blocks of extra columns that are read along with blocks of tokens. Each is due
    together with the first block that needs it.

    Returns: the numbers of all blocks, int64 [n], ascending; when each block is due, float64 [n].
    """
    numbers = [blocks]
    times = [due]
    for extra_blocks, positions in store.list_extra_blocks(blocks):
        firsts = _find_first_due(extra_blocks, due[positions])
        numbers.append(extra_blocks[firsts])
        times.append(due[positions[firsts]])
    all_blocks = np.concatenate(numbers)
    by_block = np.argsort(all_blocks, kind="stable")
    return all_blocks[by_block], np.concatenate(times)[by_block]


def _list_dictionaries(store: BlockStore, blocks: Int64s, due: Float64s) -> list[DueRanges]:
    """List the ranges of the dictionaries of blocks. A dictionary is due together with the first
    block that needs it (`blocks`: int64 [n], ascending, all with a dictionary)."""
    snapshot = store.snapshot
    chunks, sizes = snapshot.chunks_of(blocks, "dictionary_bytes")
    _, offsets = snapshot.chunks_of(blocks, "dictionary_offset")
    firsts = _find_first_due(chunks, due)
    firsts = firsts[sizes[firsts] > 0]
    listed = list[DueRanges]()
    for file, in_file in store.cut_by_file(blocks[firsts]):
        path = snapshot.path(file, store.roots)
        some = firsts[in_file]
        listed.append(DueRanges(path, offsets[some], sizes[some].astype(np.int64), due[some]))
    return listed


def _find_first_due(keys: Int64s, due: Float64s) -> Int64s:
    """Return, for each distinct key, the index of its earliest due time (int64 [num_distinct], by
    ascending key)."""
    order = np.lexsort((due, keys))
    is_first = np.diff(keys[order], prepend=-1) > 0
    return order[is_first]


def _find_stops(snapshot: Snapshot, blocks: Int64s) -> Int64s:
    """Return the offset in the file at which the block after each of the given blocks begins; for a
    file's last block, the end of the file (int64 [n])."""
    files = snapshot.file_of(blocks)
    stops = snapshot.files.sizes[files]
    has_next = np.flatnonzero(blocks + 1 < snapshot.files.first_block[files + 1])
    stops[has_next] = snapshot.blocks(blocks[has_next] + 1)["offset"]
    return stops
