"""What is evicted as time passes."""

import math

import numpy as np
import pytest

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import PAGE_BYTES, Pages
from megablend.mirror.disk.room import NEVER, PAST_SECONDS, PINNED, WANTED, Need, Room

FILE = FileKey("s3://b/f", "e", 1 << 40)
SMALL = FileKey("s3://b/small", "e", 9000)
F = FILE.digest


def make_pages(*blocks: int) -> Pages:
    return Pages(np.array(blocks, np.uint32), np.ones(len(blocks), np.uint64))


def test_a_page_whose_time_has_passed_goes_before_those_to_come() -> None:
    now = 100.0
    held = make_pages(0, 1, 2)
    room = Room(
        lambda: [(F, held)],
        lambda _, block: int(held.masks[held.blocks == block].sum()),
        lambda: now,
    )
    room.add_file(F, 3, 0)
    for use, (block, due) in enumerate(((0, 101.0), (1, 300.0), (2, 200.0)), start=1):
        room.record_write(F, make_pages(block), due, use)
    assert room.choose(PAGE_BYTES, 150.0) == {(F, 1): 1}  # the one that is due last
    assert room.choose(PAGE_BYTES, 301.0) is None
    now = 101.0 + 2 * PAST_SECONDS
    assert room.choose(PAGE_BYTES, 301.0) == {(F, 0): 1}


def test_the_next_due_time_of_a_page_counts_when_one_has_passed() -> None:
    now = 100.0
    held = make_pages(0, 1)
    room = Room(
        lambda: [(F, held)],
        lambda _, block: int(held.masks[held.blocks == block].sum()),
        lambda: now,
    )
    room.add_file(F, 2, 0)
    blocks = np.array([0, 1, 0], np.uint32)
    room.set_due(
        [Need(FILE, Pages(blocks, np.ones(3, np.uint64)), np.array([101.0, 150.0, 400.0]))]
    )
    assert room.choose(PAGE_BYTES, 120.0) == {(F, 1): 1}
    now = 120.0
    assert room.choose(PAGE_BYTES, 121.0) == {(F, 0): 1}


def test_pages_that_are_due_too_late_to_be_sent_go_before_others_that_are_due() -> None:
    """Times of more than 24 days arrive as infinite."""
    held = make_pages(0, 1, 2)
    room = Room(lambda: [(F, held)], lambda *_: 1, lambda: 100.0)
    room.add_file(F, 3, 0)
    room.set_due(
        [Need.of(FILE, make_pages(0), due=2e6), Need.of(FILE, make_pages(1))], PAST_SECONDS
    )
    assert room.choose(PAGE_BYTES, 150.0) == {(F, 2): 1}  # not due at all
    assert room.choose(PAGE_BYTES, 150.0) == {(F, 1): 1}


def test_pages_count_as_read_when_it_is_said() -> None:
    """Not later, though no other page of their block is still to be read."""
    now = 100.0
    held = make_pages(0, 1)
    room = Room(lambda: [(F, held)], lambda *_: 1, lambda: now)
    room.add_file(F, 2, 0)
    due = np.array([100.0, 150.0])
    room.set_due([Need(FILE, held, due)], 0.5)
    now += 1.0
    assert room.choose(PAGE_BYTES, now) == {(F, 0): 1}


def test_a_small_file_is_kept_for_the_page_of_it_that_is_due_first() -> None:
    """It goes as a whole: not since one of its pages is never due."""
    held = {
        SMALL.digest: Pages(np.zeros(1, np.uint32), np.array([7], np.uint64)),
        F: make_pages(0, 1),
    }
    room = Room(
        held.items,
        lambda digest, block: int(held[digest].masks[held[digest].blocks == block].sum()),
        lambda: 100.0,
    )
    room.add_file(SMALL.digest, 1, 0, is_whole=True)
    room.add_file(F, 2, 0)
    dues = np.array([150.0, 400.0])
    two = Pages(np.zeros(2, np.uint32), np.array([2, 4], np.uint64))
    others = Need(FILE, make_pages(0, 1), np.array([200, 130.0]))
    room.set_due([Need(SMALL, two, dues), others])
    assert room.choose(PAGE_BYTES, 110.0) == {(F, 0): 1}
    held[F] = make_pages(1)
    assert room.choose(PAGE_BYTES, 110.0) == {(SMALL.digest, 0): 7}


def test_more_is_evicted_at_once_than_is_sorted_at_a_time() -> None:
    held = make_pages(*range(200_000))
    room = Room(lambda: [(F, held)], lambda _, block: 1)
    room.add_file(F, 200_000, 0)
    for block in (7, 150_000):
        room.touch(F, make_pages(block), 1)
    chosen = room.choose(199_998 * PAGE_BYTES, math.inf)
    assert chosen is not None
    assert {block for _, block in chosen} == set(range(200_000)) - {7, 150_000}


def test_what_is_wanted_goes_after_what_nobody_needs_and_pinned_never() -> None:
    held = {F: make_pages(0, 1, 2, 3), "g": make_pages(0)}
    room = Room(
        held.items,
        lambda digest, block: int(held[digest].masks[held[digest].blocks == block].sum()),
        lambda: 100.0,
    )
    room.add_file(F, 4, 0)
    room.add_file("g", 1, 0)
    room.record_write(F, make_pages(0, 1, 2, 3), math.inf, 1)
    room.record_write("g", make_pages(0), math.inf, 2)
    dues = np.array([200.0, 300.0])
    room.set_due([Need(FILE, make_pages(1, 2), dues)])
    room.set_kept({F: np.array([WANTED, WANTED, PINNED, PINNED])})
    # For what is never due, nothing goes that is wanted
    assert room.choose(2 * PAGE_BYTES, math.inf) is None
    assert room.choose(PAGE_BYTES, math.inf) == {("g", 0): 1}
    held["g"] = make_pages()
    assert room.choose(2 * PAGE_BYTES, 150.0) == {(F, 0): 1, (F, 1): 1}
    # Whatever is due, and whether the room suffices or not
    room.set_kept({F: np.array([WANTED, WANTED, PINNED, PINNED])})
    assert room.choose(9 * PAGE_BYTES, math.inf, any_due=True) == {(F, 0): 1, (F, 1): 1}
    room.set_kept({F: np.full(4, -NEVER)})
    assert room.choose(4 * PAGE_BYTES, math.inf, any_due=True) == {(F, i): 1 for i in range(4)}


def test_a_pinned_page_that_comes_for_a_job_stays() -> None:
    """After what is evicted next was sorted."""
    held = {F: make_pages(0, 1)}
    room = Room(held.items, lambda _, block: int(block in held[F].blocks), lambda: 100.0)
    room.add_file(F, 3, 0)
    room.record_write(F, make_pages(0, 1), math.inf, 1)
    room.set_kept({F: np.array([-NEVER, -NEVER, PINNED])})
    assert room.choose(PAGE_BYTES, math.inf, any_due=True) == {(F, 0): 1}
    held[F] = make_pages(1, 2)
    room.record_write(F, make_pages(2), 500.0, 2)
    assert room.choose(9 * PAGE_BYTES, math.inf, any_due=True) == {(F, 1): 1}


@pytest.mark.parametrize("seed", range(15))
def test_any_blocks_go_in_their_order(seed: int) -> None:
    """Against a sort of all of them."""
    draw = np.random.default_rng(seed)
    held = make_pages(*range(12))
    room = Room(lambda: [(F, held)], lambda _, block: int(block < 12), lambda: 100.0)
    room.add_file(F, 12, 0)
    uses = (1 + draw.permutation(12)).tolist()
    for block in range(12):
        room.record_write(F, make_pages(block), math.inf, uses[block])
    kept = draw.choice([-NEVER, WANTED, PINNED], 12)
    due = {block: 101.0 + block for block in draw.permutation(12)[:5].tolist()}
    rows = np.array([*due], np.uint32)
    room.set_due([Need(FILE, Pages(rows, np.ones(5, np.uint64)), np.array([*due.values()]))])

    def rank(block: int) -> tuple[int, float]:
        if kept[block] == PINNED:
            return (3, 0.0)
        if block in due:
            return (2, -due[block])
        return (int(kept[block] == WANTED), uses[block])

    going = [block for block in sorted(range(12), key=rank) if rank(block)[0] < 3]
    for count in range(1, len(going) + 1):
        room.set_kept({F: kept})
        chosen = room.choose(count * PAGE_BYTES, math.inf, any_due=True)
        assert chosen == {(F, block): 1 for block in going[:count]}
