"""MegablendDatasetBuilder: Megatron's builder, but all ranks build what the cache lacks, and on a hit nobody waits for anybody.

    each rank  opens its datasets, if the cache has a receipt of them
    everyone   says whether that worked: where it did for all, that is all
    else       the ranks that see one cache folder build it together; then each opens its datasets; then everyone says so

What comes out are Megatron's own objects, made by Megatron's own code, which finds every file it looks for.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed

from megablend.index.launch import Launch
from megablend.megatron.address import PAIR, parse_address
from megablend.megatron.agree import AgreedLaunch, GroupLaunch
from megablend.megatron.api import request_of
from megablend.megatron.cache import prepare_cache
from megablend.megatron.catalog import build_catalog
from megablend.megatron.compat import assumes_whole_cache, unknown_version
from megablend.megatron.core import BlendedMegatronDatasetBuilder, GPTDataset
from megablend.megatron.dataset import MegablendGPTDataset, cache_of, pairs_of, words_of
from megablend.megatron.job import Job, this_job
from megablend.megatron.nodes import AUTO, builders
from megablend.megatron.pages import build_pages, open_pages
from megablend.megatron.receipt import read_receipt
from megablend.megatron.request import CacheRequest
from megablend.megatron.tables import build_table, pinned_address, table_path


class MegablendDatasetBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    """In place of BlendedMegatronDatasetBuilder, with the same arguments.

    Serves GPTDataset over `.bin/.idx`, and MegablendGPTDataset over these, Parquet and Arrow. Other classes, mock data, a
    config without a cache folder and versions of megatron-core that are not known go Megatron's own way, with a warning.

    Args:
        cls: GPTDataset or MegablendGPTDataset.
        sizes: samples of train, valid and test.
        is_built_on_rank: whether this rank holds datasets; no rank is special.
        config: GPTDatasetConfig or MegablendDatasetConfig.
    """

    def __init__(
        self, cls: type[Any], sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool], config: Any
    ) -> None:
        super().__init__(cls, list(sizes), lambda: True, config)  # older versions insist on datasets on global rank 0
        self.is_built_on_rank = is_built_on_rank

    def build(self) -> list[Any]:
        """Train, valid and test; None where a split has no data, or this rank holds no datasets. Called on all ranks.

        Raises: on all ranks the error of any: ConfigError, PlanError, DataError, CacheError, LaunchError.
        """
        if reason := self._not_ours():
            warnings.warn(f"{reason}: the datasets are built Megatron's own way", RuntimeWarning, stacklevel=2)
            return list(super().build())
        if assumes_whole_cache(self.config):
            return self._open()
        job = this_job()
        found = self._open_whole()
        if all(job.everyone.allgather(found is not None)):
            assert found is not None
            return found
        with job.members(range(job.size)) as everyone:
            try:
                self._build_together(job, everyone)
                found = self._open()
                everyone.finish()
            except BaseException as error:
                everyone.abort(error)
        return found

    def _not_ours(self) -> str | None:
        """Why the datasets are none of our business."""
        version = unknown_version()
        if issubclass(self.cls, MegablendGPTDataset):
            if version:
                unknown = (
                    f"megatron-core {version} is not known to megablend; {self.cls.__name__} is tried all the same"
                )
                warnings.warn(unknown, RuntimeWarning, stacklevel=3)
            return None
        if version:
            return f"megatron-core {version} is not known to megablend"
        if self.cls is not GPTDataset:
            return f"{self.cls.__name__} is no class that megablend builds"
        if self.config.mock:
            return "the config names no data"
        if not self.config.path_to_cache:
            return "path_to_cache (--data-cache-path) is not given"
        return None

    def _open_whole(self) -> list[Any] | None:
        """The datasets, if the cache says that it is whole, and is; building finds out what is wrong with it."""
        try:
            if not self.is_built_on_rank() or self._in_pages or read_receipt(self._request()):
                return self._open()
        except Exception:  # of Megatron's too: whatever it is, all ranks meet again where it is mended, or told
            pass
        return None

    def _open(self) -> list[Any]:
        """The datasets of this rank, out of a whole cache. Nothing here waits for another rank."""
        if not self.is_built_on_rank():
            return [None, None, None]
        if self._in_pages:
            return list(open_pages(self.config, self.sizes))
        return list(super().build())

    def _build_together(self, job: Job, everyone: AgreedLaunch) -> None:
        """Build what is missing, with the ranks that see the same cache folder."""
        cache = Path(cache_of(self.config)) if self.is_built_on_rank() else None
        ranks = builders(everyone, cache, getattr(self.config, "shared_fs", AUTO))
        if cache is None:
            return
        with job.members(ranks) as group:
            launch = GroupLaunch(group, everyone)
            self._fill(launch)
            launch.barrier()  # no rank opens what another still writes

    def _fill(self, launch: Launch) -> None:
        cache = cache_of(self.config)
        if self._in_pages:
            build_pages(self.config, self.sizes, launch)
            return
        if issubclass(self.cls, MegablendGPTDataset):
            for word in words_of(self.config):
                if (address := parse_address(word)).format != PAIR:
                    build_table(cache, address, launch=launch)
            if pairs := pairs_of(self.config):
                build_catalog(cache, pairs, launch=launch)
        prepare_cache(self._request(), launch=launch)

    def _request(self) -> CacheRequest:
        """What the cache is to hold: for addresses, under names that tell their index."""
        if not issubclass(self.cls, MegablendGPTDataset):
            return request_of(self.config, self.sizes)
        config, cache = self.config, cache_of(self.config)
        names = {word: self._named(word) for word in words_of(config)}
        tables = {name: table_path(cache, address) for name in names.values() if (address := parse_address(name)).index}
        named = copy.copy(config)
        named.blend = _renamed(config.blend, names)
        named.blend_per_split = config.blend_per_split and [_renamed(blend, names) for blend in config.blend_per_split]
        request = request_of(named, self.sizes)
        lengths_at = {name: str(path) for name, path in tables.items()}
        return dataclasses.replace(request, dataset_class=self.cls.__name__, lengths_at=lengths_at)

    def _named(self, word: str) -> str:
        """A prefix or an address as descriptions have it."""
        if parse_address(word).format == PAIR:
            return word
        return str(pinned_address(cache_of(self.config), word))

    @cached_property
    def _in_pages(self) -> bool:
        return getattr(self.config, "order", "megatron") != "megatron" and issubclass(self.cls, MegablendGPTDataset)

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: Any, sizes_per_dataset: list[list[int | None]]
    ) -> list[list[Any]]:
        """As Megatron does it, on all ranks at once."""
        with ThreadPoolExecutor(max(1, self.config.num_dataset_builder_threads)) as pool:
            by_prefix = pool.map(
                lambda prefix, sizes: self._build_megatron_dataset_splits(prefix, split, sizes),
                prefixes,
                sizes_per_dataset,
            )
        return [list(datasets) for datasets in zip(*by_prefix, strict=True)]

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Any, sizes: list[int | None], synchronize_ranks: bool = True
    ) -> list[Any]:
        """As Megatron does it, without waiting for rank 0."""
        path = self._named(dataset_path) if issubclass(self.cls, MegablendGPTDataset) else dataset_path
        return list(super()._build_megatron_dataset_splits(path, split, sizes, False))

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """As Megatron does it, without waiting for rank 0."""
        if torch.distributed.is_initialized() and not is_built_on_rank():
            return None
        return cls(*args)


def _renamed(blend: Any, names: Mapping[str, str]) -> Any:
    """A blend, or none, with its prefixes under other names."""
    return None if blend is None else ([names[word] for word in blend[0]], blend[1])
