"""The remaining samples of a stage that is ended early, at the end of a cycle. At most one period
of each source is cut there; the tails of the lanes' runs in this period remain.

If lanes are ordered by residue, the ordinals in their tails ascend. An ordinal is found by prefix
sums over residues and a bisection.
"""

from __future__ import annotations

from megablend.arrays import Int32s, Int64s
from megablend.jit import device, kernel
from megablend.kernels.blend.dealing import dealt_below, residue_of
from megablend.kernels.blend.inverse import fill_period_of
from megablend.kernels.blend.periods import BEGIN, END, FIRST_ORDINAL, make_leaf, make_stage
from megablend.kernels.blend.tree import leaf_counts, least_multiple


@kernel
def find_tails(
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_samples: Int64s,
    leaf_tokens: Int64s,
    leaf_spans: Int64s,
    leaf_epochs: Int64s,
    sample_tokens: int,
    lanes: int,
    slots: int,
    cut: int,
    periods: Int64s,
    parts: Int64s,
    edges: Int64s,
) -> None:
    """Find the period of each source that is cut at the end of cycle `cut` - 1.

    Fills edges, int64 [3, num_leaves]: the period's first ordinal, the number of ordinals read so
    far, and its end; if no period is cut, all three are the number of ordinals read. Also fills
    periods, int64 [1, num_leaves, PERIOD_FIELDS], and parts, int64 [1, num_leaves, max(leaf_spans),
    PART_FIELDS], for these periods. Other arguments: see megablend.kernels.blend.lanes.locate.
    """
    total = int(leaf_samples.sum())
    stage = make_stage(left_leaves, left_samples, total, lanes, slots)
    for rank in range(len(leaf_samples)):
        leaf = make_leaf(rank, leaf_samples, leaf_tokens, leaf_spans, leaf_epochs, sample_tokens)
        _, read = leaf_counts(left_leaves, left_samples, total, cut * stage.step, rank)
        _, dealt = leaf_counts(left_leaves, left_samples, total, stage.dealt, rank)
        edges[0, rank] = edges[1, rank] = edges[2, rank] = read
        if read >= dealt:
            continue
        stop_cycle = least_multiple(
            left_leaves, left_samples, total, leaf.total, rank, read + 1, stage.step
        )
        fill_period_of(stage, leaf, stop_cycle - 1, read, periods, parts)
        period = periods[0, rank]
        part = parts[0, rank]
        if period[BEGIN] < cut:
            edges[0, rank] = period[FIRST_ORDINAL]
            cycles = int(period[END] - period[BEGIN])
            edges[2, rank] = period[FIRST_ORDINAL] + dealt_below(
                period, part, lanes, lanes, 0, cycles
            )


@kernel
def tail_ordinals(
    ranks: Int64s,
    places: Int64s,
    lanes: int,
    cut: int,
    periods: Int64s,
    parts: Int64s,
    ordinals: Int64s,
) -> None:
    """Find the ordinals at given places in the tails of leaves.

    Args:
        ranks: int64 [n], the leaf of each ordinal.
        places: int64 [n], the position of each ordinal in the leaf's tails.
        periods, parts: as `find_tails` fills them.
        ordinals: int64 [n], filled with the ordinals.
    """
    for i in range(len(ranks)):
        period = periods[0, ranks[i]]
        part = parts[0, ranks[i]]
        place = int(places[i])
        cycles = int(period[END] - period[BEGIN])
        num_read = int(cut - period[BEGIN])
        residue = residue_of(period, part, lanes, place, num_read, cycles)
        place -= dealt_below(period, part, lanes, residue, num_read, cycles)
        before = dealt_below(period, part, lanes, residue, 0, cycles)
        read = _read_by(period, part, lanes, residue, num_read)
        ordinals[i] = period[FIRST_ORDINAL] + before + read + place


@kernel
def count_tails(
    ranks: Int64s,
    ordinals: Int64s,
    lanes: int,
    cut: int,
    periods: Int64s,
    parts: Int64s,
    counts: Int64s,
    left: Int64s,
) -> None:
    """For each of several ordinals, count the smaller ordinals in the tails of its leaf.

    Args:
        ranks: int64 [n], the leaf of each ordinal.
        ordinals: int64 [n], ordinals of the cut periods.
        periods, parts: as `find_tails` fills them.
        counts: int64 [n], filled with the number of ordinals in the leaf's tails that are below
            each ordinal.
        left: int64 [n], filled with 1 if the ordinal itself is in the tails, otherwise 0.
    """
    for i in range(len(ranks)):
        period = periods[0, ranks[i]]
        part = parts[0, ranks[i]]
        cycles = int(period[END] - period[BEGIN])
        num_read = int(cut - period[BEGIN])
        place = int(ordinals[i] - period[FIRST_ORDINAL])
        residue = residue_of(period, part, lanes, place, 0, cycles)
        place -= dealt_below(period, part, lanes, residue, 0, cycles)
        read = _read_by(period, part, lanes, residue, num_read)
        counts[i] = dealt_below(period, part, lanes, residue, num_read, cycles) + max(
            0, place - read
        )
        left[i] = place >= read


@device
def _read_by(period: Int64s, part: Int64s, lanes: int, residue: int, num_read: int) -> int:
    """Return the number of ordinals that the lane of a residue reads in the period's first
    `num_read` cycles."""
    return dealt_below(period, part, lanes, residue + 1, 0, num_read) - dealt_below(
        period, part, lanes, residue, 0, num_read
    )
