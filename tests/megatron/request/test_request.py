"""Requests: what Megatron's config asserts, and its split strings and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megablend.errors import ConfigError
from megablend.megatron.request.flags import count_samples
from megablend.megatron.request.layout import sequence_range, split_matrix
from megablend.megatron.request.request import Blend, CacheRequest
from tests.examples import examples

BLEND = Blend(prefixes=("/a", "/b"), weights=(1.0, 2.0))
PLAIN = Blend(prefixes=("/a", "/b"))


def request(**options: Any) -> CacheRequest:
    common = {
        "path_to_cache": "/c",
        "random_seed": 1,
        "sequence_length": 8,
        "tokenizer": {"class": "T"},
    }
    return CacheRequest(
        **{**common, "sizes": (1, 1, 1), "blend": BLEND, "split": "1,1,1", **options}
    )


BY_SPLIT: dict[str, Any] = {"blend": None, "split": None, "blend_per_split": (BLEND, None, None)}
FULL = BY_SPLIT | {
    "blend_per_split": (None, PLAIN, None),
    "multiple_validation_sets": True,
    "full_validation": True,
}

REFUSED: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    # options that are refused, what is said, options that do what it says
    (
        {"path_to_cache": ""},
        r"no cache folder is set \(--data-cache-path, path_to_cache\); set the one that training will use",
        [{"path_to_cache": "/c"}],
    ),
    ({"sequence_length": 0}, r"sequence length is 0; expected 1 or more", [{"sequence_length": 1}]),
    (
        {"random_seed": 1.5},
        r"random_seed is 1\.5; expected a whole number",
        [{"random_seed": 1}, {"random_seed": np.int64(1)}],
    ),
    ({"random_seed": -1}, r"the seed is -1", [{"random_seed": 0}]),
    (
        {"random_seed": 1 << 32},
        r"numpy's RandomState takes 0 to 4294967295",
        [{"random_seed": 4294967295}],
    ),
    (
        {"mid_level_dataset_surplus": -0.1},
        r"surplus is -0\.1; expected 0 or more",
        [{"mid_level_dataset_surplus": 0}],
    ),
    ({"blend": None}, r"either one blend for all splits", [{}, BY_SPLIT]),
    ({"blend_per_split": (BLEND, None, None)}, r"either one blend for all splits", [{}, BY_SPLIT]),
    (
        {"split": None},
        r"needs the proportions of train, valid and test; set split \(--split\), such as 969,30,1",
        [{"split": "969,30,1"}],
    ),
    (
        BY_SPLIT | {"split": "1,1,1"},
        r"split '1,1,1' cannot be combined with a separate blend for each split \(--train-data-path, \.\.\.\); "
        "leave out one of the two",
        [BY_SPLIT, {}],
    ),
    (
        {"sizes": (1, -1, 1)},
        r"valid: -1 samples requested; expected a whole number, 0 or more",
        [{"sizes": (1, 0, 1)}],
    ),
    (
        {"sizes": (1, None, 1)},
        r"valid: the number of samples is missing .*; leave the weights out, or give a number",
        [{"sizes": (1, None, 1), "blend": PLAIN}, {"sizes": (1, 1, 1)}],
    ),
    (
        FULL,
        r"valid: with full validation, each validation set takes whole epochs, but 1 samples are requested; leave the number out",
        [FULL | {"sizes": (1, None, 1)}],
    ),
]


@pytest.mark.parametrize(
    ("options", "message", "remedies"), REFUSED, ids=[each[1][:30] for each in REFUSED]
)
def test_requests_that_megatron_would_reject(
    options: dict[str, Any], message: str, remedies: list[dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**options)
    for remedy in remedies:
        request(**remedy)


def test_weights_go_with_prefixes() -> None:
    with pytest.raises(ConfigError, match=r"1 weights for 2 prefixes; give one for each"):
        Blend(prefixes=("a", "b"), weights=(1.0,))
    Blend(prefixes=("a", "b"), weights=(1.0, 2.0))


@examples(200)
@given(
    st.lists(
        st.floats(0, 1e4).map(lambda part: f"{part:.4f}") | st.integers(0, 999).map(str),
        min_size=1,
        max_size=3,
    )
)
def test_split_matrix_is_megatrons(parts: list[str]) -> None:
    split = ", ".join(parts)
    if not any(map(float, parts)):
        with pytest.raises(ConfigError, match=r"one of them above 0"):
            split_matrix(split)
        return
    expected = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    assert repr(split_matrix(split)) == repr(expected)


@pytest.mark.parametrize("split", ["1e-3,1", "1,-1", "+1", "1,2,3,4", "", "a", "1.2.3"])
def test_splits_that_megatron_misreads(split: str) -> None:
    with pytest.raises(ConfigError, match=r"^split '"):
        split_matrix(split)


def test_ranges_round_half_to_even() -> None:
    assert sequence_range((0.5, 1.0), 5) == (2, 5)
    assert sequence_range((0.5, 1.0), 7) == (4, 7)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"train_iters": 10, "global_batch_size": 4, "eval_interval": 3, "eval_iters": 2},
            (40, 32, 8),
        ),
        (
            {"train_samples": 43, "global_batch_size": 4, "eval_interval": 3, "eval_iters": 2},
            (43, 32, 8),
        ),
        ({"train_samples": 43, "valid_samples": 5, "test_samples": 6}, (43, 5, 6)),
        ({"train_samples": 43, "global_batch_size": 4, "full_validation": True}, (43, None, 400)),
    ],
)
def test_sizes_are_those_of_the_training_loop(
    flags: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert count_samples({0, 1, 2}, **flags) == expected


def test_splits_without_data_need_no_flags() -> None:
    assert count_samples({0}, train_samples=7) == (7, 0, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"train: its size is unknown; give --train-samples, or --train-iters"),
        (
            {"train_iters": 3},
            r"train: the number of samples cannot be computed without --global-batch-size",
        ),
        (
            {"train_iters": 3, "train_samples": 3},
            r"--train-samples and --train-iters are both given",
        ),
        (
            {"train_samples": 3},
            r"valid: the number of samples cannot be computed without --eval-interval; add that flag, or --valid-samples",
        ),
        (
            {"train_samples": 3, "eval_interval": 1},
            r"valid: the number of samples cannot be computed without --global-batch-size",
        ),
        (
            {"train_samples": 3, "valid_samples": 1},
            r"test: the number of samples cannot be computed without --global-batch-size.*--test-samples",
        ),
        (
            {"train_samples": 3, "valid_samples": 1, "full_validation": True},
            r"leave out --valid-samples",
        ),
        (
            {
                "train_samples": 9,
                "eval_interval": 2,
                "global_batch_size": 3,
                "rampup_batch_size": ("1", "1", "3"),
            },
            r"valid: the number of samples cannot be computed with --rampup-batch-size; set it with --valid-samples",
        ),
    ],
)
def test_flags_that_sizes_lack(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_samples({0, 1, 2}, **flags)
