from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megablend.distributed.assign import assign_longest_first
from tests.examples import examples

COSTS = st.lists(st.integers(0, 1000), max_size=40)


@examples(50)
@given(COSTS, st.integers(1, 9))
def test_every_item_goes_to_one_rank(costs: list[int], num_ranks: int) -> None:
    items = assign_longest_first(costs, num_ranks)
    assert len(items) == num_ranks
    assert sorted(item for rank in items for item in rank) == list(range(len(costs)))


@examples(30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_the_dearest_load_is_near_the_best_possible(costs: list[int], num_ranks: int) -> None:
    def dearest(ranks: tuple[int, ...]) -> int:
        return max(
            sum(cost for cost, at in zip(costs, ranks, strict=True) if at == rank)
            for rank in range(num_ranks)
        )

    best = min(dearest(ranks) for ranks in product(range(num_ranks), repeat=len(costs)))
    assert (
        max(sum(costs[item] for item in rank) for rank in assign_longest_first(costs, num_ranks))
        * 3
        <= best * 4
    )
