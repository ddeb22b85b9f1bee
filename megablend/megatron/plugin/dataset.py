"""A GPTDataset that reads Parquet files, Arrow files, or any number of `.bin/.idx` pairs. The same
documents yield the same samples in every format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    ConfigError,
    DamagedCacheError,
    DataError,
)
from megablend.lazy import cached_property
from megablend.megatron import core
from megablend.megatron.cache_builder.idx_copies import IdxCopies
from megablend.megatron.cache_builder.pooled_array import ENTRIES_START, PooledArray
from megablend.megatron.compat import is_tried, setting
from megablend.megatron.core import GPTDataset, installed_version
from megablend.megatron.plugin.config import (
    MegablendDatasetConfig,
    cache_of,
    data_path_entries,
    idx_folder,
    pairs_of,
)
from megablend.megatron.plugin.megatron_code import find_replaced_function
from megablend.megatron.request.address import PAIR, is_in_object_store, parse_address
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage

if TYPE_CHECKING:
    from megablend.formats.base import Array
    from megablend.megatron.plugin.documents import Documents, PairDocuments


class IndexArrays(NamedTuple):
    """The index arrays of Megatron's GPTDataset, opened when they are first read."""

    documents: PooledArray
    """The documents of all epochs, in shuffled order."""
    samples: PooledArray
    """For each sample: the position in `documents` at which it begins, and the offset of its first
    token in that document. The last row is the end of the last sample."""
    shuffle: PooledArray
    """The shuffled numbers of the samples."""


class MegablendGPTDataset(GPTDataset):  # type: ignore[misc]
    """A GPTDataset that keeps only a limited number of files open, however many documents and index
    arrays it reads.

    MegablendDatasetBuilder creates these datasets and builds the files that they open. The dicts of
    samples are made in one of two ways. Either the installed GPTDataset makes them, one at a time;
    or `_read_fast` makes them, which reads the tokens of many samples by one kernel call. The fast
    way is only used for pairs whose samples all have the same masks, and only if it returns the
    same dict as GPTDataset for the first sample.
    """

    _reads_fast: bool | None = None
    """Whether the dicts of samples are made the fast way. This is None until the first sample has
    been read."""

    document_index: Any
    sample_index: Any
    shuffle_index: Any

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MegablendDatasetConfig) -> Documents:
        """Open the documents of an address or a prefix.

        Raises: CacheError if the documents were not prepared; ConfigError for an invalid address.
        """
        from megablend.megatron.cache_builder.catalog import catalog_path
        from megablend.megatron.cache_builder.document_tables import pinned_address
        from megablend.megatron.plugin.documents import PairDocuments, TableDocuments

        address = parse_address(dataset_path)
        cache = cache_of(config)
        storage = make_dataset_storage(config)
        if address.format == PAIR:
            return PairDocuments(dataset_path, catalog_path(cache, pairs_of(config)), storage)
        num_tables = len(data_path_entries(config)) - len(pairs_of(config))
        # A config of Megatron's own, or of another package, has the default
        memory = getattr(config, "memory", MegablendDatasetConfig.memory) // num_tables
        try:
            return TableDocuments(cache, pinned_address(cache, dataset_path), memory, storage)
        except DamagedCacheError as error:
            raise _with_remedy(error) from error

    def __len__(self) -> int:
        return len(self._arrays.samples) - 1

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return a sample as the same dict that GPTDataset returns. Raises: IndexError if `idx` is
        out of range, and the errors of Documents.get."""
        fast = _read_fast([(self, [idx])]) if self._reads_fast else None
        return self._read_as_megatron(idx) if fast is None else fast[0]

    def __getitems__(self, indices: Sequence[int | None]) -> list[dict[str, Any]]:
        """Return the dicts of the samples of a batch. Called by torch's DataLoader. Raises: see
        `__getitem__`."""
        fast = _read_fast([(self, indices)]) if self._reads_fast else None
        return [self[idx] for idx in indices] if fast is None else fast

    def _read_as_megatron(self, idx: int | None) -> dict[str, Any]:
        """Return the dict that the installed GPTDataset makes. The first dict is compared with that
        of `_read_fast`; if they are equal, the following dicts are made the fast way."""
        try:
            expected: dict[str, Any] = super().__getitem__(idx)
        except DataError as error:
            remedy = (
                f"restore the file, or remove the cache ({cache_of(self.config)}) and restart the job, which builds "
                "it again"
            )
            # The usual remedy presumes a config of megablend
            problem = error.problem.replace(CHANGED_REMEDY, remedy)
            raise type(error)(error.path, problem, offset=error.offset) from error
        except DamagedCacheError as error:
            raise _with_remedy(error) from error
        if self._reads_fast is None and idx is not None:
            fast = _read_fast([(self, [idx])]) if self._can_read_fast() else None
            self._reads_fast = fast is not None and _are_same(fast[0], expected)
        return expected

    def _can_read_fast(self) -> bool:
        """Return whether `_read_fast` supports datasets of this class and config.

        Subclasses, and functions that replace Megatron's, may change any sample, not only the first
        one: fill-in-the-middle, for example, changes some at random.
        """
        from megablend.megatron.plugin.documents import PairDocuments

        return (
            type(self) is MegablendGPTDataset
            and isinstance(self.dataset, PairDocuments)
            and bool(self.masks_and_position_ids_are_cacheable)
            and bool(self.config.add_extra_token_to_sequence)
            and not getattr(self.config, "inter_document_masking", False)
            and is_tried(installed_version())
            and find_replaced_function() is None
        )

    def _read_tokens(self, indices: Sequence[int | None], out: Array) -> bool:
        """Read the tokens of samples into `out`, and return True; return False if the kernel cannot
        read these samples.

        Args:
            out: [n, sequence_length + 1], of the dtype of the documents.
        """
        from megablend.kernels.gpt_samples import read_samples

        numbers = np.asarray(indices)
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            return False
        documents: PairDocuments = self.dataset
        idx_file, bin_file = documents.files
        with (  # an ExitStack takes a tenth of a sample's time
            self._arrays.documents.descriptor() as documents_fd,
            self._arrays.samples.descriptor() as samples_fd,
            self._arrays.shuffle.descriptor() as shuffle_fd,
            documents.storage.descriptor(idx_file) as idx_fd,
            documents.storage.descriptor(bin_file) as bin_fd,
        ):
            if idx_fd < 0 or bin_fd < 0:  # in an object store
                return False
            fds = np.array((documents_fd, samples_fd, shuffle_fd, idx_fd, bin_fd), np.int64)
            is_read: bool = read_samples(
                numbers, fds, self._layout, documents.sequence_lengths, out.view(np.uint8)
            )
            documents.check_sizes(idx_fd, bin_fd)
        return is_read

    @cached_property
    def _layout(self) -> Array:
        """The sizes and offsets by which the kernel `read_samples` finds the entries of the
        files."""
        documents = self.dataset
        _, samples, shuffle = self._arrays
        widths = samples.dtype.itemsize, shuffle.dtype.itemsize, documents.dtype.itemsize
        return np.array(
            [len(shuffle), *widths, ENTRIES_START, documents.pointers_start, 1], np.int64
        )

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """Return the three index arrays, which are opened when they are first read. (Megatron would
        memory-map three files for each dataset.)

        With `defer_npy_index_mmap`, return None for each of them, as Megatron does. They are then
        set when the first sample is read.
        """
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        paths = [
            str(Path(cache_of(self.config), f"{base}-{name}.npy"))
            for name in ("document_index", "sample_index", "shuffle_index")
        ]
        self.path_to_document_index, self.path_to_sample_index, self.path_to_shuffle_index = paths
        storage = make_dataset_storage(self.config)
        self._arrays = IndexArrays(*(PooledArray(path, storage) for path in paths))
        return (None, None, None) if setting(self.config, "defer_npy_index_mmap") else self._arrays

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return the tokens of a sample, as GPTDataset's method of this name does. The index arrays
        are opened when they are first read."""
        if self.shuffle_index is None:
            self.document_index, self.sample_index, self.shuffle_index = self._arrays
        result: tuple[Any, ...] = super()._query_document_sample_shuffle_indices(idx)
        return result


class BlendedDataset(core.BlendedDataset):  # type: ignore[misc]
    """Megatron's blend, except that all samples of a batch that belong to the same dataset are read
    together. The class has the same name as Megatron's, because the name is part of the names of
    the cache files."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the dicts of several samples. The dicts and errors are the same as those of
        `__getitem__`."""
        if self.dataset_index is None or not len(indices):  # opened with the first sample
            return [self[idx] for idx in indices]
        numbers = np.asarray(self.dataset_index)[indices]  # faster than a map's entries one by one
        samples = np.asarray(self.dataset_sample_index)[indices].tolist()
        positions: dict[int, list[int]] = {}  # positions in the batch, by number of the dataset
        for position, number in enumerate(numbers.tolist()):
            positions.setdefault(number, []).append(position)
        parts = [
            (self.datasets[number], [samples[position] for position in of_dataset])
            for number, of_dataset in positions.items()
        ]
        can_read_fast = all(dataset._reads_fast for dataset, _ in parts)
        dicts = _read_fast(parts) if can_read_fast else None
        if dicts is None:
            dicts = [member for dataset, own in parts for member in dataset.__getitems__(own)]
        by_position = dict(zip(chain.from_iterable(positions.values()), dicts, strict=True))
        return [{"dataset_id": number, **by_position[k]} for k, number in enumerate(numbers)]


def _with_remedy(error: DamagedCacheError) -> DamagedCacheError:
    """Return the error with what a job of the plugin can do, instead of the usual remedy, which
    presumes a config of megablend."""
    return DamagedCacheError(
        f"{error.problem}; remove the folder of this index or table, and restart the job, which builds it again",
        error.problem,
    )


def _read_fast(
    parts: Sequence[tuple[MegablendGPTDataset, Sequence[int | None]]],
) -> list[dict[str, Any]] | None:
    """Return the dicts of complete samples of several datasets with the same config. The tokens of
    each dataset are read by one kernel call.

    Return None if the samples must be read by GPTDataset, which may also raise the appropriate
    error. All samples of a dataset share one tensor of position ids and one attention mask, as in
    GPTDataset.

    Args:
        parts: pairs of a dataset and the indices of its samples.
    """
    first = parts[0][0]
    if any(dataset.dataset.dtype != first.dataset.dtype for dataset, _ in parts):
        return None
    owners = [dataset for dataset, indices in parts for _ in indices]
    raw = np.empty((len(owners), first.config.sequence_length + 1), first.dataset.dtype)
    begin = 0
    for dataset, indices in parts:
        end = begin + len(indices)
        try:
            is_read = dataset._read_tokens(indices, raw[begin:end])
        except ChangedFileError:
            is_read = False
        if not is_read:
            return None
        begin = end
    tokens = raw[:, :-1].astype(np.int64)
    labels = raw[:, 1:].astype(np.int64)
    # Faster than expanding one mask
    masks = [dataset.cached_loss_mask.clone() for dataset in owners]
    pad = first._pad_token_id
    if np.count_nonzero(raw == pad):
        for mask, row in zip(masks, labels, strict=True):
            mask[torch.from_numpy(row == pad)] = 0.0
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
    has_mask = first.config.create_attention_mask
    return [
        {
            "tokens": torch.from_numpy(row),
            "labels": torch.from_numpy(label),
            **({"attention_mask": dataset.cached_attention_mask} if has_mask else {}),
            "loss_mask": mask,
            "position_ids": dataset.cached_position_ids,
        }
        for dataset, row, label, mask in zip(owners, tokens, labels, masks, strict=True)
    ]


def _are_same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether two samples have the same keys in the same order, and tensors with the same
    values and dtypes."""
    return list(ours) == list(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
        for name in ours
    )


def catalog_entries(config: Any) -> dict[str, dict[str, Any]]:
    """Return the catalog's entries of the pairs of a config, by prefix. Raises: CacheError if the
    catalog is missing or damaged."""
    from megablend.megatron.cache_builder.catalog import catalog_path, open_catalog

    prefixes = pairs_of(config)
    return open_catalog(catalog_path(cache_of(config), prefixes))[1] if prefixes else {}


def check_sequence_counts(config: Any) -> None:
    """Check that the setting `sequences_per_dataset` agrees with the `.idx` files. Megatron's class
    takes the number of sequences of each file from this setting; MegablendGPTDataset reads the
    files.

    Raises: ConfigError; CacheError if the pairs' catalog is missing or damaged.
    """
    sequence_counts = getattr(config, "sequences_per_dataset", None)
    if not sequence_counts:
        return
    for prefix, entry in catalog_entries(config).items():
        num_sequences = entry["sequences"]
        counts = sequence_counts.get(prefix)
        if counts is None or counts[0] != num_sequences:
            expected = "does not list it" if counts is None else f"says {counts[0]:,}"
            raise ConfigError(
                f"{prefix}.idx has {num_sequences:,} sequences, but sequences_per_dataset (--per-dataset-sequences-path) "
                f"{expected}: make that file again with Megatron's tools/build_sequences_per_dataset.py, or leave it out"
            )


def make_dataset_storage(config: Any) -> Storage:
    """Return a storage for reading the datasets of a config. It limits the number of files that the
    process keeps open.

    Object stores are read in such a way that Megatron's DataLoader may fork this process.
    """
    from megablend.config.storage_settings import load_storage_settings

    objects = load_storage_settings(getattr(config, "storage", None))
    storage = make_storage(max_open_files=getattr(config, "max_open_files", None), objects=objects)
    if not any(map(is_in_object_store, data_path_entries(config))):
        return storage
    from megablend.storage.objects.fork_safe import ForkSafeStorage

    return IdxCopies(ForkSafeStorage(storage), idx_folder(config))
