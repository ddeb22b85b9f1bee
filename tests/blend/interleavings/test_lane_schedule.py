from math import gcd

import numpy as np
import pytest

from megablend.blend.interleavings.lane_schedule import bit_reversal_permutation, make_lane_schedule


def positions(
    lanes: int, slots: int, shift: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Where each lane stands at each slot: int64 [slots, lanes]."""
    firsts, stride, _ = make_lane_schedule(lanes, slots)
    turns = (stride * np.arange(slots)[:, None] + shift) % slots
    return np.asarray((firsts + lanes * turns) % (lanes * slots), np.int64)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 7, 8, 12, 36, 64, 100])
def test_every_position_once_and_lanes_keep_apart(lanes: int) -> None:
    for slots in [*range(1, 40), 64, 100, 128]:
        stands = positions(lanes, slots, 5 % slots)
        assert np.array_equal(np.sort(stands.ravel()), np.arange(lanes * slots))
        assert (stands % lanes == stands[:1] % lanes).all(), "a lane owns one residue"


@pytest.mark.parametrize(("lanes", "slots"), [(1, 1), (8, 1), (1, 9), (8, 12), (12, 8), (64, 100)])
def test_samples_inverts_the_pattern(lanes: int, slots: int) -> None:
    for shift in range(min(slots, 3)):
        stands = positions(lanes, slots, shift).ravel()
        assert np.array_equal(
            make_lane_schedule(lanes, slots).samples(stands, shift), np.arange(lanes * slots)
        )


@pytest.mark.parametrize("lanes", [4, 8, 12, 36, 64, 100])
def test_one_lane_to_a_window_in_steps_halves_and_quarters(lanes: int) -> None:
    for slots in [*range(1, 40), 64, 100, 128]:
        firsts = make_lane_schedule(lanes, slots).firsts
        for parts in (1, 2, 4):
            step = lanes // parts
            for part in range(parts):
                windows = firsts[part * step : (part + 1) * step] // (slots * parts)
                assert np.array_equal(np.sort(windows), np.arange(step)), (slots, parts)


@pytest.mark.parametrize("lanes", [1, 3, 8, 12, 64])
def test_lanes_own_their_residue_where_they_divide_the_cycle(lanes: int) -> None:
    for slots in (lanes, 2 * lanes, 10 * lanes):
        assert np.array_equal(make_lane_schedule(lanes, slots).firsts % lanes, np.arange(lanes))


@pytest.mark.parametrize("size", [*range(1, 33), 97, 100, 1000, 1024])
def test_reversal_is_a_permutation(size: int) -> None:
    assert np.array_equal(np.sort(bit_reversal_permutation(size)), np.arange(size))


def test_reversal_of_a_power_of_two_reverses_digits() -> None:
    assert bit_reversal_permutation(8).tolist() == [int(f"{i:03b}"[::-1], 2) for i in range(8)]


@pytest.mark.parametrize(
    ("lanes", "slots"),
    [
        (1, 1000),
        (8, 64),
        (64, 64),
        (64, 65),
        (64, 1000),
        (512, 512),
        (512, 700),
        (100, 128),
        (97, 970),
        (64, 3),
        (24, 4096),
    ],
)
def test_sums_stay_near_the_share(lanes: int, slots: int) -> None:
    """Of any stretch [0, edge) of a cycle, after any number of steps; two edges make a source."""
    assert gcd(make_lane_schedule(lanes, slots).stride, slots) == 1
    stands = positions(lanes, slots, slots // 3)
    for edge in np.linspace(1, lanes * slots, 23).astype(int):
        below = (stands < edge).sum(axis=1)
        share = edge / slots
        assert np.abs(below - share).max() < 2
        assert np.abs(np.cumsum(below) - share * np.arange(1, slots + 1)).max() < 6
