"""Convert Megatron's own config to a CacheRequest."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Protocol

from megablend.errors import ConfigError
from megablend.megatron.compat import setting
from megablend.megatron.request.request import SPLITS, Blend, CacheRequest
from megablend.megatron.request.tokenizer import identifiers_of


class DatasetConfig(Protocol):
    """The interface of a GPTDatasetConfig: the settings that the content of a cache depends on."""

    random_seed: int
    sequence_length: int
    blend: tuple[Sequence[str], Sequence[float] | None] | None
    blend_per_split: Sequence[tuple[Sequence[str], Sequence[float] | None] | None] | None
    split: str | None
    multiple_validation_sets: bool | None
    full_validation: bool | None
    path_to_cache: str | None
    tokenizer: Any
    mock: bool
    mid_level_dataset_surplus: float
    drop_last_partial_validation_sequence: bool
    add_extra_token_to_sequence: bool


def request_of(config: DatasetConfig, sizes: Sequence[int | None]) -> CacheRequest:
    """Return the CacheRequest for a config and the numbers of samples of train, valid and test.

    Raises: ConfigError if Megatron would reject these arguments or use mock data.
    """
    if config.mock:
        raise ConfigError(
            "the config has neither blend nor blend_per_split, so Megatron would use mock data, which is not cached; set one "
            "of the two"
        )
    if len(sizes) != len(SPLITS):
        raise ConfigError(f"{len(sizes)} sizes given; expected three, for train, valid and test")
    per_split = config.blend_per_split or ()
    return CacheRequest(
        path_to_cache=config.path_to_cache or "",
        random_seed=config.random_seed,
        sequence_length=config.sequence_length,
        tokenizer=identifiers_of(config.tokenizer),
        sizes=whole_sizes(sizes),
        blend=_make_blend(config.blend),
        blend_per_split=tuple(map(_make_blend, per_split)) if any(per_split) else None,
        split=config.split,
        multiple_validation_sets=bool(setting(config, "multiple_validation_sets")),
        full_validation=bool(setting(config, "full_validation")),
        mid_level_dataset_surplus=setting(config, "mid_level_dataset_surplus"),
        drop_last_partial_validation_sequence=config.drop_last_partial_validation_sequence,
        add_extra_token_to_sequence=config.add_extra_token_to_sequence,
    )


def whole_sizes(sizes: Sequence[int | None]) -> tuple[int | None, ...]:
    """Convert whole numbers of other types, such as 1e6, to integers, because Megatron derives file
    names from the printed sizes. Other values stay as they are, and CacheRequest rejects them."""
    return tuple(
        int(size) if isinstance(size, numbers.Real) and size == size // 1 else size
        for size in sizes
    )


def _make_blend(blend: tuple[Sequence[str], Sequence[float] | None] | None) -> Blend | None:
    if blend is None:
        return None
    prefixes, weights = blend
    try:
        values = None if weights is None else tuple(map(float, weights))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a blend has the weights {weights}; expected numbers ({error})"
        ) from None
    return Blend(prefixes=tuple(prefixes), weights=values)
