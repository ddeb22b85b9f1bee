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
"""The name of the order of Megatron's own shuffles. All other orders are megablend's
(megablend.order.registry)."""


def uses_own_plan(config: GPTDatasetConfig) -> bool:
    """Return whether the order of samples comes from megablend's plan, rather than from Megatron's
    index arrays."""
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
"""The settings that determine the tokens of each sample, in addition to the blends."""


def list_settings(
    cls: type[Any], config: GPTDatasetConfig, sizes: Sequence[int | None]
) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, so that all ranks read the same
    samples. Data paths are shortened to their last component, since nodes may have their data in
    different folders."""
    return {
        "class": cls.__name__,
        "sizes": list(sizes),
        **{name: getattr(config, name, None) for name in _SAMPLE_SETTINGS},
        "blend": [_without_folders(config.blend)],
        "blend_per_split": [_without_folders(blend) for blend in config.blend_per_split or ()],
    }


def _without_folders(blend: Any) -> Any:
    """Return the weights of a blend and the last components of its prefixes; None if the blend is
    None."""
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
    """"megatron": Megatron's own shuffles, with the same samples in every format; "block":
    megablend's plan, which reads whole blocks, needs no arrays and reads nothing twice; "document":
    megablend's plan over single documents, fully shuffled, which reads a block for each
    document."""

    run: str = "default"
    """The name of the run in the cache, for orders other than "megatron". The samples of a run
    never change; another name starts a new run."""

    lanes: int = 8
    """The number of independent streams, for orders other than "megatron". It should be a multiple
    of micro batch size x data-parallel size (x workers)."""

    shuffle_window: int = 64
    """The number of samples per lane that are shuffled together, for orders other than
    "megatron"."""

    cycle: int | None = None
    """The old name of `shuffle_window`."""

    shared_fs: str = "auto"
    """Whether all ranks share one cache folder: "yes", "no" (each machine has its own) or "auto"
    (detected when files must be built)."""

    max_open_files: int = 256
    """The maximum number of data files and index arrays that MegablendGPTDataset keeps open in a
    process."""

    memory: int = 512 << 20
    """The number of bytes that a process may use for reading a split, like `memory` of a megablend
    config. In Megatron's order, they are used for decoded pages of Parquet and Arrow files, and are
    divided equally among the addresses in the data paths."""

    storage: ObjectOptions | Mapping[str, Mapping[str, Any]] | str | None = None
    """The settings of object stores (endpoint, region, ...) by URL prefix, as under `storage` in a
    megablend config; or the path of a YAML or JSON file that contains them under `storage`. If it
    is None, the file named by the environment variable MEGABLEND_STORAGE is used."""

    def __post_init__(self) -> None:
        """Check the settings that are megablend's own."""
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
    """Return the path of the config's cache folder. Raises: ConfigError if it is not set."""
    if not config.path_to_cache:
        raise ConfigError(
            "path_to_cache (--data-cache-path) is not set; set it to the folder in which to store the index and the "
            "arrays of these datasets"
        )
    return str(config.path_to_cache)


def idx_folder(config: Any) -> Path:
    """Return the folder for local copies of `.idx` files from object stores."""
    folder = getattr(config, "object_storage_cache_path", None)
    return Path(folder or Path(cache_of(config), "megablend-idx")).absolute()


def data_path_entries(config: Any) -> list[str]:
    """Return the distinct prefixes and addresses of a config's blends, spelled as in the config."""
    blends = [config.blend, *(config.blend_per_split or ())]
    return list(dict.fromkeys(word for blend in blends if blend is not None for word in blend[0]))


def pairs_of(config: Any) -> tuple[str, ...]:
    """Return the distinct prefixes of `.bin/.idx` pairs in a config's blends."""
    return _select_pairs(tuple(data_path_entries(config)))


@lru_cache(maxsize=8)
def _select_pairs(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries that are prefixes of pairs. Results are cached, since `pairs_of` is called
    for each of thousands of pairs."""
    return tuple(entry for entry in entries if parse_address(entry).format == PAIR)
