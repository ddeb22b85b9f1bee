"""The validated arguments of Megatron's builder: blends, sizes, seed, sequence length, tokenizer.
They are named as in Megatron's config."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megablend.errors import ConfigError
from megablend.megatron.request.address import check_prefix

SPLITS = ("train", "valid", "test")
MAX_DATASETS = 32_766
"""Maximum number of datasets in a blend: dataset numbers are stored in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Prefixes of `.bin/.idx` pairs (or other addresses), and their weights."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """The weights as given, not normalized; None if the datasets are weighted by their lengths. The
    weights that are used are checked by `layouts`."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ConfigError(
                "a blend has no prefixes; expected at least one, the path of a .bin/.idx pair without suffix"
            )
        if len(self.prefixes) > MAX_DATASETS:
            raise ConfigError(
                f"a blend has {len(self.prefixes):,} prefixes, but Megatron allows at most {MAX_DATASETS:,}; merge some of them"
            )
        for prefix in self.prefixes:
            check_prefix(prefix)
        if self.weights is not None and len(self.weights) != len(self.prefixes):
            raise ConfigError(
                f"a blend has {len(self.weights)} weights for {len(self.prefixes)} prefixes; give one for each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """The arguments of one call of Megatron's dataset builder. Fields that GPTDatasetConfig also
    has are named as there."""

    path_to_cache: str
    random_seed: int
    sequence_length: int
    tokenizer: Mapping[str, Any]
    """The tokenizer's `unique_identifiers`, in their order."""
    sizes: tuple[int | None, ...]
    """Number of samples of train, valid and test; None for one epoch."""
    blend: Blend | None = None
    """The blend of all splits, divided by `split`; None if `blend_per_split` is given instead."""
    blend_per_split: tuple[Blend | None, ...] | None = None
    split: str | None = None
    multiple_validation_sets: bool = False
    """Whether each prefix of the valid blend is a validation set by itself. As in Megatron, this
    requires `blend_per_split`."""
    full_validation: bool = False
    mid_level_dataset_surplus: float = 0.005
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    dataset_class: str = "GPTDataset"
    """Name of the datasets' class in descriptions and file names."""
    lengths_at: Mapping[str, str] = field(default_factory=dict)
    """For each address that is not a `.bin/.idx` pair: the path of the `.npy` file with the lengths
    of its documents (int32)."""

    def __post_init__(self) -> None:
        if not self.path_to_cache:
            raise ConfigError(
                "no cache folder is set (--data-cache-path, path_to_cache); set the one that training will use"
            )
        for name in ("sequence_length", "random_seed"):
            if not isinstance(getattr(self, name), numbers.Integral):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected a whole number, such as 1234"
                )
        if self.sequence_length < 1:
            raise ConfigError(f"the sequence length is {self.sequence_length}; expected 1 or more")
        if not 0 <= self.random_seed < 1 << 32:
            raise ConfigError(
                f"the seed is {self.random_seed}; numpy's RandomState takes 0 to {(1 << 32) - 1}"
            )
        surplus = self.mid_level_dataset_surplus
        if not (isinstance(surplus, numbers.Real) and 0 <= surplus < math.inf):
            raise ConfigError(f"the mid-level surplus is {surplus!r}; expected 0 or more")
        if (self.blend is None) == (self.blend_per_split is None):
            raise ConfigError(
                "expected either one blend for all splits (--data-path) or blends by split (--train-data-path, ...)"
            )
        if self.blend is not None and self.split is None:
            raise ConfigError(
                "one blend for all splits needs the proportions of train, valid and test; set split (--split), such as 969,30,1"
            )
        if self.blend_per_split is not None and self.split is not None:
            raise ConfigError(
                f"split {self.split!r} cannot be combined with a separate blend for each split (--train-data-path, ...); "
                "leave out one of the two"
            )
        self._check_sizes()

    def list_settings(self) -> dict[str, Any]:
        """Return all fields by name, except paths, since these may differ between nodes."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("path_to_cache", "lengths_at")
        }

    def blend_of(self, split: int) -> Blend | None:
        """Return the blend of a split; None if the split has no data.

        Args:
            split: the number of the split, 0 to 2.
        """
        return self.blend if self.blend_per_split is None else self.blend_per_split[split]

    def _check_sizes(self) -> None:
        for name, size, blend in zip(
            SPLITS, self.sizes, map(self.blend_of, range(len(SPLITS))), strict=True
        ):
            if size is not None and not (isinstance(size, int) and size >= 0):
                raise ConfigError(
                    f"{name}: {size!r} samples requested; expected a whole number, 0 or more"
                )
            if size is None and blend is not None and blend.weights is not None:
                raise ConfigError(
                    f"{name}: the number of samples is missing (as with full validation), which "
                    "Megatron allows only for prefixes without weights; leave the weights out, or "
                    "give a number"
                )
        valid = None if self.blend_per_split is None else self.blend_per_split[1]
        # A single validation set may have a number of samples
        has_sets = self.multiple_validation_sets and valid is not None and len(valid.prefixes) > 1
        if has_sets and self.full_validation and self.sizes[1] is not None:
            raise ConfigError(
                f"valid: with full validation, each validation set takes whole epochs, but {self.sizes[1]} samples are "
                "requested; leave the number out"
            )
