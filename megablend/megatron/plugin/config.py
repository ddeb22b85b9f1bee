"""GPTDatasetConfig with the settings that megablend adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megablend.distributed.folder_groups import SHARED_FS
from megablend.errors import ConfigError
from megablend.megatron.core import GPTDatasetConfig
from megablend.megatron.request.address import PAIR, parse_address
from megablend.order.registry import find_order
from megablend.storage.object_options import ObjectOptions

MEGATRON_ORDER = "megatron"
"""Megatron's own shuffles; every other order is one of megablend's (megablend.order.registry)."""


def uses_own_plan(config: GPTDatasetConfig) -> bool:
    """Return whether samples come from megablend's plan, not from Megatron's index arrays."""
    return getattr(config, "order", MEGATRON_ORDER) != MEGATRON_ORDER


_SAMPLE_SETTINGS = (
    "sequence_length",
    "random_seed",
    "split",
    "multiple_validation_sets",
    "full_validation",
    "mid_level_dataset_surplus",
    "drop_last_partial_validation_sequence",
    "add_extra_token_to_sequence",
    "order",
    "run",
    "lanes",
    "shuffle_window",
)
"""The settings that decide which tokens a sample has, apart from the blends."""


def list_settings(
    cls: type[Any], config: GPTDatasetConfig, sizes: Sequence[int | None]
) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, so that all read the same samples.
    Data paths are shortened to their last part, since nodes may have their data in different
    folders."""
    return {
        "class": cls.__name__,
        "sizes": list(sizes),
        **{name: getattr(config, name, None) for name in _SAMPLE_SETTINGS},
        "blend": [_without_folders(config.blend)],
        "blend_per_split": [_without_folders(blend) for blend in config.blend_per_split or ()],
    }


def _without_folders(blend: Any) -> Any:
    """Return the weights of a blend and the last parts of its prefixes; None if it is None."""
    return blend and {
        "prefixes": [str(word).rpartition("/")[2] for word in blend[0]],
        "weights": blend[1],
    }


@dataclass(kw_only=True)
class MegablendDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """The configuration of MegablendGPTDataset and of MegablendDatasetBuilder.

    Prefixes may be addresses of other formats:
    `parquet:/data/web/*.parquet?column=input_ids&append_eod=0`, `arrow:...`.
    """

    order: str = MEGATRON_ORDER
    """"megatron": Megatron's own shuffles, sample by sample the same over any format; "block":
    megablend's plan, which reads whole blocks, needs no arrays and reads nothing twice; "document":
    megablend's plan over single documents, fully shuffled, which reads a block for each."""

    run: str = "default"
    """In orders other than "megatron": the name of the run in the cache. The samples of a run never
    change; another name starts a new run."""

    lanes: int = 8
    """In orders other than "megatron": the number of independent streams, best a multiple of micro
    batch x data-parallel size (x workers)."""

    shuffle_window: int = 64
    """In orders other than "megatron": the samples per lane that are shuffled together."""

    cycle: int | None = None
    """The old name of `shuffle_window`."""

    shared_fs: str = "auto"
    """Whether all ranks see one cache folder: "yes", "no" (one per machine) or "auto" (detected
    when something must be built)."""

    max_open_files: int = 256
    """The number of descriptors of data files and index arrays that MegablendGPTDataset keeps open
    in a process."""

    memory: int = 512 << 20
    """The bytes that a process may hold for reading a split, like `memory` of a config. In
    Megatron's order they are for decoded pages of Parquet and Arrow files, and each address in the
    data paths gets an equal part."""

    storage: ObjectOptions | Mapping[str, Mapping[str, Any]] | str | None = None
    """The settings of object stores (endpoint, region, ...) by URL prefix, as under `storage` of a
    config of megablend; or the path of a YAML or JSON file that has them under `storage`; None for
    the file that the environment variable MEGABLEND_STORAGE names."""

    def __post_init__(self) -> None:
        """Check the settings that Megatron does not know."""
        from megablend.config.storage_settings import load_storage_settings

        super().__post_init__()
        if self.cycle is not None:
            if self.shuffle_window != 64:
                raise ConfigError(
                    "cycle: duplicate key: cycle is the old name of shuffle_window; remove cycle"
                )
            self.shuffle_window = self.cycle
            self.cycle = None  # a copy of this config is checked again
        if uses_own_plan(self):
            try:
                find_order(self.order)
            except ValueError as error:
                raise ConfigError(f"order: {error}, or {MEGATRON_ORDER}") from None
        if self.shared_fs not in SHARED_FS:
            raise ConfigError(
                f"shared_fs is {self.shared_fs!r}; choose one of {', '.join(SHARED_FS)}"
            )
        self.storage = load_storage_settings(self.storage)
        for name in ("lanes", "shuffle_window", "max_open_files", "memory"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")


def cache_of(config: Any) -> str:
    """Return the config's cache folder. Raises: ConfigError if it has none."""
    if not config.path_to_cache:
        raise ConfigError(
            "path_to_cache (--data-cache-path) is not set; set it to the folder in which to store the index and the "
            "arrays of these datasets"
        )
    return str(config.path_to_cache)


def idx_folder(config: Any) -> Path:
    """Return the folder of the config's copies of `.idx` files."""
    given = getattr(config, "object_storage_cache_path", None)
    return Path(given or Path(cache_of(config), "megablend-idx")).absolute()


def data_path_entries(config: Any) -> list[str]:
    """Return all prefixes and addresses of a config's blends, as they are written, each once."""
    blends = [config.blend, *(config.blend_per_split or ())]
    return list(dict.fromkeys(word for blend in blends if blend is not None for word in blend[0]))


def pairs_of(config: Any) -> tuple[str, ...]:
    """Return all prefixes of `.bin/.idx` pairs of a config's blends, each once."""
    return _select_pairs(tuple(data_path_entries(config)))


@lru_cache(maxsize=8)
def _select_pairs(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries that are prefixes of pairs. Cached, since `pairs_of` is called for each of
    thousands of pairs."""
    return tuple(entry for entry in entries if parse_address(entry).format == PAIR)
