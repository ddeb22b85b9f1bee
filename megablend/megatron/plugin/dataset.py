"""GPTDataset over Parquet, Arrow, or any number of `.bin/.idx` pairs: the same samples for the same documents."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from megablend.config.storage_settings import load_storage_settings
from megablend.errors import ConfigError
from megablend.megatron.cache_builder.catalog import catalog_path
from megablend.megatron.cache_builder.document_tables import pinned_address
from megablend.megatron.cache_builder.idx_copies import IdxCopies, copies_folder
from megablend.megatron.cache_builder.pooled_array import PooledArray
from megablend.megatron.compat import setting
from megablend.megatron.core import GPTDataset
from megablend.megatron.plugin.config import MegablendDatasetConfig
from megablend.megatron.plugin.documents import Documents, PairDocuments, TableDocuments
from megablend.megatron.request.dataset_uri import PAIR, is_in_object_store, parse_address
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.before_fork import BeforeForkStorage


class MegablendGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset whose documents and index arrays are read through a bounded number of descriptors.

    Made by MegablendDatasetBuilder, which builds what this class only opens. All that makes a sample's dict of its tokens is
    the installed GPTDataset's own.
    """

    document_index: Any
    sample_index: Any
    shuffle_index: Any

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MegablendDatasetConfig) -> Documents:
        """Open the documents of an address or a prefix.

        Raises: CacheError where they were not prepared; ConfigError for an address that cannot be read.
        """
        address = parse_address(dataset_path)
        cache, storage = cache_of(config), make_dataset_storage(config)
        if address.format == PAIR:
            return PairDocuments(dataset_path, catalog_path(cache, pairs_of(config)), storage)
        num_tables = len(data_path_entries(config)) - len(pairs_of(config))
        return TableDocuments(cache, pinned_address(cache, dataset_path), config.memory // num_tables, storage)

    def __len__(self) -> int:
        return len(self._arrays[1]) - 1

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """Arrays that are opened when they are first read; Megatron would map three for each dataset.

        Where Megatron's are deferred (`defer_npy_index_mmap`), these are None until the first sample is read.
        """
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        paths = [
            str(Path(cache_of(self.config), f"{base}-{name}.npy"))
            for name in ("document_index", "sample_index", "shuffle_index")
        ]
        self.path_to_document_index, self.path_to_sample_index, self.path_to_shuffle_index = paths
        storage = make_dataset_storage(self.config)
        self._arrays = PooledArray(paths[0], storage), PooledArray(paths[1], storage), PooledArray(paths[2], storage)
        return (None, None, None) if setting(self.config, "defer_npy_index_mmap") else self._arrays

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """As GPTDataset does it, on arrays of a bounded number of descriptors."""
        if self.shuffle_index is None:
            self.document_index, self.sample_index, self.shuffle_index = self._arrays
        found: tuple[Any, ...] = super()._query_document_sample_shuffle_indices(idx)
        return found


def cache_of(config: Any) -> str:
    """The config's cache folder. Raises: ConfigError where it has none."""
    if not config.path_to_cache:
        raise ConfigError(
            "path_to_cache (--data-cache-path) is not set; the index and the arrays of these datasets are stored there"
        )
    return str(config.path_to_cache)


def make_dataset_storage(config: Any) -> Storage:
    """Make the storage that the config's datasets are read from; it bounds the files that the process keeps open.

    Object stores are read in a way that lets Megatron's DataLoader fork this process.
    """
    objects = load_storage_settings(getattr(config, "storage", None))
    storage = make_storage(max_open_files=getattr(config, "max_open_files", None), objects=objects)
    if not any(map(is_in_object_store, data_path_entries(config))):
        return storage
    return IdxCopies(BeforeForkStorage(storage), idx_folder(config))


def idx_folder(config: Any) -> Path:
    """Where the config's copies of `.idx` files are."""
    return copies_folder(cache_of(config), getattr(config, "object_storage_cache_path", None))


def data_path_entries(config: Any) -> list[str]:
    """All prefixes and addresses of a config's blends, as they are written, each once."""
    blends = [config.blend, *(config.blend_per_split or ())]
    return list(dict.fromkeys(word for blend in blends if blend is not None for word in blend[0]))


def pairs_of(config: Any) -> tuple[str, ...]:
    """The prefixes of `.bin/.idx` pairs among them."""
    return _pairs(tuple(data_path_entries(config)))


@lru_cache(maxsize=8)
def _pairs(words: tuple[str, ...]) -> tuple[str, ...]:
    """Cached, since it is called for each of thousands of pairs."""
    return tuple(word for word in words if parse_address(word).format == PAIR)
