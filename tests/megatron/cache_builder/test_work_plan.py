"""Plans: what is refused before a file is written, and numbers too large to build in a test."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megablend.errors import ConfigError, PlanError
from megablend.megatron.cache_builder.lengths import PartSize
from megablend.megatron.cache_builder.work_plan import SplitPlan, plan_cache
from megablend.megatron.request.layout import layouts
from megablend.megatron.request.request import Blend, CacheRequest


def request(*sizes: int | None, **options: Any) -> CacheRequest:
    common: dict[str, Any] = {
        "path_to_cache": "/c",
        "random_seed": 1,
        "sequence_length": 8,
        "tokenizer": {"class": "T"},
        "sizes": sizes,
        "blend": Blend(prefixes=("/a",)),
        "split": "1",
    }
    return CacheRequest(**{**common, **options})


def plan(asked: CacheRequest, tokens: int, documents: int = 100) -> list[SplitPlan]:
    """The plan where every part has so many tokens in so many documents."""
    size = PartSize(begin=0, end=documents, tokens=tokens, num_sequences=documents, checksum=0)
    return plan_cache(
        asked,
        {(part.prefix, part.span): size for layout in layouts(asked) for part in layout.parts},
    )


def test_sizes_of_a_weighted_blend_are_rounded_up_and_get_the_surplus() -> None:
    asked = request(1000, 10, 0, blend=Blend(prefixes=("/a", "/b"), weights=(1, 2)), split="1,1,0")
    train, valid = layouts(asked)
    assert train.targets == (334, 667)
    assert [part.num_samples for part in train.parts] == [336, 671]
    assert [part.num_samples for part in valid.parts] == [5, 8]
    split = plan(asked, 10_000)[0]
    assert split.num_samples == 1001
    assert split.blend is not None
    assert split.blend.size == 1001


@pytest.mark.parametrize(
    ("weights", "all_together"),
    [((1e308, 1e308), "inf"), ((1e-300, 1e300), r"1e\+300"), ((1e-320, 1e10), "10000000000.0")],
)
def test_weights_whose_shares_doubles_do_not_hold_are_refused(
    weights: tuple[float, float], all_together: str
) -> None:
    asked = request(1000, 10, 0, blend=Blend(prefixes=("/a", "/b"), weights=weights))
    with pytest.raises(
        ConfigError,
        match=rf"^/a: weight 1e.* of a total of {all_together} gives a share that rounds to 0\.0; use weights",
    ):
        layouts(asked)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, math.nan), (1.0, -2.0), (1.0, math.inf)])
def test_a_weight_that_is_no_share_is_named_where_it_counts(weights: tuple[float, float]) -> None:
    blend = Blend(prefixes=("/a", "/b"), weights=weights)
    with pytest.raises(
        ConfigError, match=rf"^/b has weight {weights[1]}; expected a number above 0, or leave"
    ):
        layouts(request(1000, 10, 0, blend=blend))
    apart = request(
        1,
        5,
        0,
        blend=None,
        split=None,
        blend_per_split=(None, blend, None),
        multiple_validation_sets=True,
    )
    assert [part.num_samples for part in layouts(apart)[0].parts] == [5, 5]


def test_a_split_without_tokens_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"^/a \(train\): its sequences 0 to 100 of 100 contain no tokens.*loop forever.*0 in --split",
    ):
        plan(request(0, 0, 0), 0)


def test_a_split_without_sequences_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"^/a \(train\): its sequences 0 to 0 of 0 contain no tokens, and Megatron would fail",
    ):
        plan(request(None, None, None), 0, documents=0)


def test_epochs_are_counted_in_32_bits() -> None:
    with pytest.raises(
        PlanError,
        match=r"/a \(train\): 3,000,000,000 samples.*read its 1 tokens 24,000,000,001 times",
    ):
        plan(request(3 * 10**9, 0, 0), 1)


def test_more_documents_than_31_bits_number_take_wide_sample_indices() -> None:
    (split,) = plan(request(10_000_000, 0, 0, add_extra_token_to_sequence=False), 2, documents=60)
    documents, samples, shuffled = split.datasets[0].artefact.arrays
    assert documents.shape == (40_000_000 * 60,)
    assert (samples.dtype, shuffled.dtype) == ("int64", "uint32")


def test_more_samples_than_32_bits_number_take_wide_shuffle_indices() -> None:
    (split,) = plan(request(None, 0, 0), 8 * (1 << 32))
    assert split.datasets[0].artefact.arrays[2].dtype == "int64"
    assert split.num_samples == (1 << 32) - 1


def test_a_kept_tail_that_single_precision_loses_is_refused() -> None:
    valid = {"blend": None, "split": None, "blend_per_split": (None, Blend(prefixes=("/a",)), None)}
    # in single precision two tokens fewer
    tokens = (1 << 25) + 3
    length = 2
    kept = {**valid, "drop_last_partial_validation_sequence": False, "sequence_length": length}
    exact = tokens // length
    assert (
        plan(request(0, exact, 0, **valid, sequence_length=length), tokens)[0].num_samples >= exact
    )
    (split,) = plan(request(0, None, 0, **kept), tokens + 1)
    assert split.num_samples == 1 << 24 | 2
    with pytest.raises(
        PlanError,
        match=r"/a \(valid\): Megatron computes in single precision, which gives 16,777,216 samples of 33,554,435",
    ):
        plan(request(0, (1 << 24) + 1, 0, **kept), tokens)


def test_a_prefix_with_one_weight_is_a_blend_only_over_all_splits() -> None:
    blend = Blend(prefixes=("/a",), weights=(3.0,))
    assert [layout.blended for layout in layouts(request(5, 0, 0, blend=blend))] == [True]
    apart = request(5, 0, 0, blend=None, split=None, blend_per_split=(blend, None, None))
    (layout,) = layouts(apart)
    assert not layout.blended
    assert layout.parts[0].num_samples == 5
