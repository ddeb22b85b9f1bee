"""MegablendDatasetBuilder: a replacement of Megatron's builder. If files are missing in the cache,
all ranks build them together; if the cache is complete, no rank waits for another.

    each rank  opens its datasets, if the cache has a completion marker for them
    all ranks  exchange whether they could open them; if all could, nothing else is done
    otherwise  the ranks of each cache folder build it; then all open their datasets and report it

The results are Megatron's own objects, made by Megatron's own code, which finds all of its files in
the cache. Modules that need numba, pyarrow or pydantic are imported where they are used, so that
importing this module is fast.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from megablend.distributed.base import Communicator
from megablend.distributed.fail_together import FailTogether, Job, Subgroup
from megablend.distributed.find_job import this_job
from megablend.distributed.folder_groups import AUTO, ranks_sharing_folder
from megablend.distributed.same_settings import compare_settings, digest_settings
from megablend.errors import ConfigError
from megablend.lazy import cached_property
from megablend.megatron import core
from megablend.megatron.cache_builder.idx_copies import make_copies
from megablend.megatron.compat import TRIED, assumes_whole_cache, find_unknown_settings, is_tried
from megablend.megatron.core import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    Split,
    installed_version,
)
from megablend.megatron.pair_files import PairState, check_pair, look_at_pairs
from megablend.megatron.plugin.config import (
    cache_of,
    data_path_entries,
    idx_folder,
    list_settings,
    pairs_of,
    uses_own_plan,
)
from megablend.megatron.plugin.dataset import (
    BlendedDataset,
    MegablendGPTDataset,
    catalog_entries,
    check_sequence_counts,
    make_dataset_storage,
)
from megablend.megatron.plugin.deferred import PrefixOpener, defer, identifiers
from megablend.megatron.request.address import PAIR, parse_address
from megablend.megatron.request.config import request_of, whole_sizes
from megablend.megatron.request.layout import layouts
from megablend.megatron.request.request import CacheRequest
from megablend.storage.location import find_scheme
from megablend.storage.objects.helper import closing_helper
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.megatron.cache_builder.completion_marker import Marker


class MegablendDatasetBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    """A replacement for BlendedMegatronDatasetBuilder, with the same arguments.

    It builds GPTDataset over `.bin/.idx` pairs, and MegablendGPTDataset over pairs, Parquet and
    Arrow files. Everything else is left to Megatron's own builder, with a warning: other classes,
    mock data, a config without a cache folder, unknown settings, and incompatible versions of
    megatron-core.

    Args:
        cls: GPTDataset or MegablendGPTDataset.
        sizes: the numbers of samples of train, valid and test.
        is_built_on_rank: returns whether this rank uses datasets. Even rank 0 need not use any.
        config: GPTDatasetConfig or MegablendDatasetConfig.
        others, options: further arguments, which are passed on to the builder of the installed
            version.
    """

    def __init__(
        self,
        cls: type[Any],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: Any,
        *others: Any,
        **options: Any,
    ) -> None:
        # Older versions insist on datasets on global rank 0
        super().__init__(cls, list(whole_sizes(sizes)), lambda: True, config, *others, **options)
        self.is_built_on_rank = is_built_on_rank
        self._others = (others, options)
        self._marker: Marker | None = None

    def build(self) -> list[Any]:
        """Return the datasets of train, valid and test; None for a split without data, or if this
        rank uses no datasets. All ranks must call this method.

        Raises: ConfigError, PlanError, DataError, CacheError or LaunchError. If one rank fails, all
            ranks raise its error.
        """
        reason = self._not_ours()
        if reason:
            return self._leave_to_megatron(reason)
        from megablend.megatron.plugin.probe import known_misfit

        builder: Any = MegablendDatasetBuilder
        if assumes_whole_cache(self.config):
            reason = known_misfit(builder)
            return self._open() if reason is None else self._leave_to_megatron(reason)
        job = this_job()
        try:
            reason = known_misfit(builder)
        except BaseException as error:
            job.world.abort(error)
        if reason is None and not is_tried(installed_version()) and job.rank == 0:
            LOG.warning(
                "megablend has not been tested with megatron-core %s, but continues: it has compared small "
                "datasets with those that Megatron builds, and they are the same",
                installed_version(),
            )
        datasets = None if reason else self._open_whole()
        settings = list_settings(self.cls, self.config, self.sizes)
        states = job.world.allgather((reason, datasets is not None, digest_settings(settings)))
        compare_settings(job.world, settings, [digest for _, _, digest in states])
        reasons = [of_rank for of_rank, _, _ in states if of_rank]
        if reasons:
            return self._leave_to_megatron(reasons[0])
        if all(is_open for _, is_open, _ in states):
            assert datasets is not None
            return datasets
        with job.members(range(job.size)) as world, closing_helper():
            try:
                pairs_before = self._look_at_pairs()
                self._build_together(job, world)
                datasets = self._open(self._read_marker())
                for prefix, pair in pairs_before.items():
                    check_pair(prefix, pair)
                world.finish()
            except BaseException as error:
                world.abort(error)
        return datasets

    def _not_ours(self) -> str | None:
        """Return the reason why megablend does not build these datasets; None if it builds them.
        Raises: ConfigError if Megatron cannot build them either."""
        unknown = ", ".join(find_unknown_settings(self.config, GPTDatasetConfig))
        if self._is_our_class:
            if self._uses_own_plan and self.cls is not MegablendGPTDataset:
                raise ConfigError(
                    f"order: {self.config.order} makes the samples of MegablendGPTDataset, and {self.cls.__name__} would "
                    "not be asked for any; give MegablendGPTDataset to the builder, or choose order: megatron"
                )
            if unknown:
                raise ConfigError(
                    f"{self.cls.__name__}: megatron-core {installed_version()} has settings that megablend does not "
                    f"know: {unknown}; leave them at their defaults, or use GPTDataset over .bin/.idx pairs"
                )
            return None
        if self.cls is not GPTDataset:
            return f"{self.cls.__name__} is not a class that megablend builds"
        if self.config.mock:
            return "the config has no data"
        if not self.config.path_to_cache:
            return "path_to_cache (--data-cache-path) is not set"
        if unknown:
            return f"megatron-core {installed_version()} has settings that megablend does not know: {unknown}"
        return None

    def _leave_to_megatron(self, reason: str) -> list[Any]:
        """Build the datasets with Megatron's own builder. All ranks must call this method. Raises:
        ConfigError for a class that only megablend builds."""
        if self._is_our_class:
            raise ConfigError(
                f"{self.cls.__name__} does not work with megatron-core {installed_version()}: {reason}; use a version "
                f"from {TRIED[0]} to {TRIED[-1]}, or GPTDataset over .bin/.idx pairs"
            )
        warnings.warn(
            f"{reason}: Megatron builds the datasets itself", RuntimeWarning, stacklevel=3
        )
        others, options = self._others
        builder = BlendedMegatronDatasetBuilder(
            self.cls, self.sizes, self.is_built_on_rank, self.config, *others, **options
        )
        return list(builder.build())

    def _open_whole(self) -> list[Any] | None:
        """Open the datasets and return them; return None if the cache is not marked complete or
        cannot be opened. The build that follows then finds out what is wrong with the cache."""
        try:
            # The marker does not say whether objects have changed: the build compares them
            if any(map(find_scheme, self._look_at_pairs())):
                return None
            marker = self._read_marker()
            if marker is not None or not self._has_marker:
                return self._open(marker)
        except Exception:
            # Also Megatron's errors: a rank that raised here would miss the exchange in `build`;
            # the build that follows repairs or reports the fault
            pass
        return None

    def _read_marker(self) -> Marker | None:
        """Read the completion marker of the cache; None if there is no valid marker, or this rank
        needs none."""
        from megablend.megatron.cache_builder.completion_marker import read_marker

        return read_marker(self._request()) if self._has_marker else None

    def _open(self, marker: Marker | None = None) -> list[Any]:
        """Open the datasets of this rank from a complete cache, without waiting for other ranks. If
        the cache's completion marker is given, the datasets of a blend are opened when they are
        first used."""
        if not self.is_built_on_rank():
            return [None, None, None]
        if self._uses_own_plan:
            from megablend.megatron.plugin.own_orders import open_own_orders

            return list(open_own_orders(self.config, self.sizes))
        if self._is_our_class:
            check_sequence_counts(self.config)
        self._marker = marker
        return list(super().build())

    def _look_at_pairs(self) -> dict[str, PairState]:
        """Return the states of the files of all pairs that this rank will open, by prefix."""
        if not self._has_marker:
            return {}
        if self._is_our_class:  # the request also contains addresses, which may not be indexed yet
            return look_at_pairs(pairs_of(self.config))
        return look_at_pairs(
            {part.prefix for layout in layouts(self._request()) for part in layout.parts}
        )

    def _build_together(self, job: Job, world: FailTogether) -> None:
        """Build the missing files, together with the ranks that share the cache folder."""
        cache = Path(cache_of(self.config)) if self.is_built_on_rank() else None
        ranks = ranks_sharing_folder(world, cache, getattr(self.config, "shared_fs", AUTO))
        if cache is None:
            return
        with job.members(ranks) as group:
            launch = Subgroup(group, world)
            self._fill(launch)
            launch.barrier()  # no rank opens files that another still writes

    def _fill(self, launch: Communicator) -> None:
        """Build the files that are missing in the cache. All ranks of the launch must call this
        method."""
        cache = cache_of(self.config)
        if self._uses_own_plan:
            from megablend.megatron.plugin.own_orders import build_own_orders

            build_own_orders(self.config, self.sizes, launch)
            return
        from megablend.megatron.cache_builder.build_cache import prepare_cache
        from megablend.megatron.cache_builder.catalog import build_catalog
        from megablend.megatron.cache_builder.document_tables import build_table

        storage = make_dataset_storage(self.config)
        if self._is_our_class:
            for word in data_path_entries(self.config):
                address = parse_address(word)
                if address.format != PAIR:
                    build_table(cache, address, launch=launch, storage=storage)
            pairs = pairs_of(self.config)
            if pairs:
                make_copies(pairs, idx_folder(self.config), launch=launch, storage=storage)
                build_catalog(cache, pairs, launch=launch, storage=storage)
        prepare_cache(self._request(), launch=launch, storage=storage)

    def _request(self) -> CacheRequest:
        """Return the request for these datasets. Its addresses include the digests of their index
        snapshots."""
        if not self._is_our_class:
            return request_of(self.config, self.sizes)
        from megablend.megatron.cache_builder.document_tables import table_path

        config = self.config
        cache = cache_of(self.config)
        names = {word: self._named(word) for word in data_path_entries(config)}
        renamed = copy.copy(config)
        renamed.blend = _rename_prefixes(config.blend, names)
        renamed.blend_per_split = config.blend_per_split and [
            _rename_prefixes(blend, names) for blend in config.blend_per_split
        ]
        request = request_of(renamed, self.sizes)
        addresses = {name: parse_address(name) for name in names.values()}
        lengths_at = {
            name: str(table_path(cache, address))
            for name, address in addresses.items()
            if address.index
        }
        return dataclasses.replace(request, dataset_class=self.cls.__name__, lengths_at=lengths_at)

    def _named(self, word: str) -> str:
        """Return the name that descriptions use for a prefix or an address: the prefix itself, or
        the address together with the digest of its index snapshot. Raises: CacheError if an address
        is not indexed, or its index is damaged."""
        if parse_address(word).format == PAIR:
            return word
        from megablend.megatron.cache_builder.document_tables import check_index, pinned_address

        address = pinned_address(cache_of(self.config), word)
        # A dataset that is opened at its first sample could no longer have its index built again
        check_index(cache_of(self.config), address)
        return str(address)

    @property
    def _has_marker(self) -> bool:
        """Whether this rank uses a cache that gets a completion marker when it is built."""
        return self.is_built_on_rank() and not self._uses_own_plan

    @property
    def _is_our_class(self) -> bool:
        """Whether the datasets are of a class that only megablend builds."""
        return issubclass(self.cls, MegablendGPTDataset)

    @cached_property
    def _uses_own_plan(self) -> bool:
        """Whether samples come from megablend's own plan."""
        return uses_own_plan(self.config) and self._is_our_class

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: Any, sizes_per_dataset: list[list[int | None]]
    ) -> list[list[Any]]:
        """Build the datasets as Megatron's method does, but on all ranks at the same time. If the
        completion marker lists all datasets, they are opened when they are first used.

        The datasets of the first prefix are always opened immediately, so that errors in the config
        and Megatron's warnings appear now.
        """
        build = self._build_megatron_dataset_splits
        first = build(prefixes[0], split, sizes_per_dataset[0])
        datasets = self._defer(first, prefixes, split, sizes_per_dataset)
        if datasets is None:
            with ThreadPoolExecutor(max(1, self.config.num_dataset_builder_threads)) as pool:
                rest = pool.map(
                    lambda prefix, sizes: build(prefix, split, sizes),
                    prefixes[1:],
                    sizes_per_dataset[1:],
                )
                datasets = [first, *rest]
        return [list(of_split) for of_split in zip(*datasets, strict=True)]

    def _defer(
        self,
        first: list[Any],
        prefixes: list[str],
        split: Any,
        sizes_per_dataset: list[list[int | None]],
    ) -> list[list[Any]] | None:
        """Make datasets that are opened on first use, as a list for each prefix; None if the marker
        does not list all of them.

        Args:
            first: the opened datasets of the first prefix. Their identifiers are compared with
                those that deferred datasets would have; if they differ, None is returned.
        """
        if self._marker is None or any(
            dataset is not None and identifiers(dataset) != dataset.unique_identifiers
            for dataset in first
        ):
            return None
        datasets = []
        entries = catalog_entries(self.config) if self._is_our_class else {}
        for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True):
            path = self._path(prefix)
            of_prefix: list[Any] = []
            files = self._marker.pairs.get(path)
            etags = entries[path]["etags"] if path in entries else None
            opener = PrefixOpener(self.cls, self.config, path, split, files, etags)
            for number, (size, index_split) in enumerate(zip(sizes, Split, strict=True)):
                samples = self._marker.num_samples.get((path, number, size))
                if first[number] is None:
                    of_prefix.append(None)
                    continue
                if samples is None:
                    return None
                attributes = {
                    "dataset_path": path,
                    "num_samples": size,
                    "index_split": index_split,
                    "config": self.config,
                }
                of_prefix.append(
                    defer(
                        self.cls, partial(opener.dataset, index_split, size), samples, **attributes
                    )
                )
            datasets.append(of_prefix)
        return datasets

    def _path(self, prefix: str) -> str:
        """Return the `dataset_path` of the datasets of a prefix or an address."""
        return self._named(prefix) if self._is_our_class else prefix

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Any, sizes: list[int | None], synchronize_ranks: bool = True
    ) -> list[Any]:
        """Build datasets like Megatron's method of this name, but without waiting for rank 0."""
        return list(
            super()._build_megatron_dataset_splits(self._path(dataset_path), split, sizes, False)
        )

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build a dataset like Megatron's method of this name, but without waiting for rank 0."""
        if torch.distributed.is_initialized() and not is_built_on_rank():
            return None
        if cls is core.BlendedDataset and all(
            isinstance(dataset, MegablendGPTDataset) for dataset in args[0]
        ):
            return BlendedDataset(*args)
        return cls(*args)


def _rename_prefixes(blend: Any, names: Mapping[str, str]) -> Any:
    """Return a blend with its prefixes renamed; None if the blend is None."""
    return None if blend is None else ([names[word] for word in blend[0]], blend[1])
