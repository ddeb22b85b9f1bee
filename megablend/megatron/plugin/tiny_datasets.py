"""Build tiny datasets with the installed megatron-core and with the plugin, and compare them. Part
of the `probe`."""

from __future__ import annotations

import copy
import logging
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError
from megablend.megatron.cache_builder.build_cache import prepare_cache
from megablend.megatron.compat import has_default, query_result
from megablend.megatron.core import GPTDataset, GPTDatasetConfig
from megablend.megatron.plugin.config import MegablendDatasetConfig
from megablend.megatron.plugin.dataset import MegablendGPTDataset
from megablend.megatron.request.config import request_of
from megablend.storage.by_scheme import make_storage
from megablend.system.atomic_write import translate_os_errors

Case = tuple[dict[str, Any], list[int | None]]
"""The options of a config, and the numbers of samples of its splits."""
_EOD = 0
"""The end-of-document token."""
_LENGTHS = ([5, 0, 1, 9, 3, 7, 30, 2, 8, 4, 6, 1], [12, 6, 3, 25, 8, 11, 16, 9])
"""For each pair, the numbers of tokens in its documents."""
_ARRAYS = (
    "document_index",
    "sample_index",
    "shuffle_index",
    "dataset_index",
    "dataset_sample_index",
)
"""Names of the attributes of Megatron's datasets that are index arrays. Each class has some of
them."""
_COMPARED_SAMPLES = 3
"""The number of samples that are compared in each tiny dataset."""


def compare_builds(builder: type[Any]) -> str | None:
    """Build tiny datasets with Megatron and with the plugin, and return the first difference as
    text; None if there is none. An error raised by either of them also counts as a difference.

    Raises: CacheError if the temporary folder cannot be written.
    """
    parent = Path(tempfile.gettempdir())
    with (
        translate_os_errors(parent),
        tempfile.TemporaryDirectory(prefix="megablend-probe-", dir=parent) as folder,
        _without_messages(),
    ):
        prefixes = write_pairs(Path(folder))
        for case in CASES:
            options, sizes = case(prefixes)
            try:
                difference = _compare_case(builder, Path(folder, case.__name__), options, sizes)
            except FileNotFoundError as error:
                difference = f"Megatron looks for {Path(error.filename or str(error)).name}, which megablend does not write"
            except (OSError, CacheError, MemoryError):  # caused by this machine, not by a version
                raise
            except Exception as error:  # an unknown version may raise anything
                difference = f"{type(error).__name__}: {error}"
            if difference is not None:
                return f"tiny datasets ({case.__name__}): {difference}"
    return None


def _compare_case(
    builder: type[Any], cache: Path, options: dict[str, Any], sizes: list[int | None]
) -> str | None:
    """Return how Megatron's datasets for a config differ from megablend's in the files of the
    cache, the arrays or the samples; None if they are the same."""
    # Leave out options that this version lacks, but whose behaviour it has by default
    names = {field.name for field in fields(GPTDatasetConfig)}
    options = {
        name: value for name, value in options.items() if name in names or not has_default(name)
    }
    config = _make_config(GPTDatasetConfig, cache, options)

    # Files and arrays: Megatron's datasets open our cache, and write nothing to it; and Megatron
    # builds the same arrays in memory. `_open` is the step of the builder's `build` that opens a
    # cache; `build` itself would run this comparison again.
    prepare_cache(request_of(config, sizes), launch=SingleProcess(), storage=make_storage())
    written = _list_names(cache)
    compared: list[str | None] = []
    comparing = _comparing_arrays(builder, config, compared)
    theirs = comparing(GPTDataset, sizes, lambda: True, config)._open()
    added = sorted(_list_names(cache) - written)
    if added:
        return f"Megatron looks for {added[0]} in addition to what megablend writes"
    if not compared:
        return "Megatron does not open datasets by build_generic_dataset"
    difference = next(filter(None, compared), None)
    if difference is not None:
        return difference

    # Samples: our class reads the same samples from this cache as Megatron's class. `_fill` is the
    # step that prepares its datasets.
    our_config = _make_config(MegablendDatasetConfig, cache, options)
    ours = builder(MegablendGPTDataset, sizes, lambda: True, our_config)
    ours._fill(SingleProcess())
    return _compare_samples(ours._open(), theirs, config)


def _comparing_arrays(builder: type[Any], config: Any, compared: list[str | None]) -> type[Any]:
    """Return a subclass of the builder that compares arrays. It opens each dataset from megablend's
    cache, lets Megatron build the same dataset in memory, and appends the difference of each array
    to `compared`; None if it is the same."""
    in_memory = copy.copy(config)
    # So that every rank builds, and writes nothing
    in_memory.path_to_cache = None
    in_memory.mock = True

    def open_and_compare(
        cls: Any, is_built_on_rank: Any, synchronize_ranks: Any, *args: Any
    ) -> Any:
        dataset = cls(*args)
        rebuilt = cls(*args[:-1], in_memory)
        for name in _ARRAYS:
            is_same = _is_same(getattr(dataset, name, None), getattr(rebuilt, name, None))
            compared.append(
                None if is_same else f"Megatron builds a different {name} for {cls.__name__}"
            )
        return dataset

    members = {"build_generic_dataset": staticmethod(open_and_compare)}
    return type("Comparing", (builder,), members)


def _compare_samples(ours: list[Any], theirs: list[Any], config: Any) -> str | None:
    """Return how datasets differ from Megatron's; None if they are the same. Both lists have an
    item for each split: a dataset, a list of validation sets, or None for a split without data."""
    for our_split, their_split in zip(ours, theirs, strict=True):
        if their_split is None:
            continue
        compare = _compare_samples if isinstance(their_split, list) else _compare_dataset
        difference = compare(our_split, their_split, config)
        if difference is not None:
            return difference
    return None


def _compare_dataset(ours: Any, theirs: Any, config: Any) -> str | None:
    """Return how two datasets differ in their lengths or first samples; None if they are the
    same."""
    if len(ours) != len(theirs):
        return f"MegablendGPTDataset has {len(ours)} samples where GPTDataset has {len(theirs)}"
    for k in range(min(len(theirs), _COMPARED_SAMPLES)):
        our_sample = ours[k]
        sample = theirs[k]
        if our_sample.keys() != sample.keys() or not all(
            _is_same(our_sample[name], sample[name]) for name in sample
        ):
            return f"sample {k} differs between MegablendGPTDataset and GPTDataset"
    # Megatron's own methods unpack the query's result, which our class has to return in that form
    if isinstance(theirs, GPTDataset) and len(theirs):
        result = theirs._query_document_sample_shuffle_indices(0)
        if len(result) != len(query_result(config, result[0], result[1], [])):
            return f"GPTDataset's query returns {len(result)} values"
    return None


def _make_config(cls: type[Any], cache: Path, options: dict[str, Any]) -> Any:
    defaults = {
        "random_seed": 5,
        "sequence_length": 7,
        "tokenizer": ProbeTokenizer(),
        "path_to_cache": str(cache),
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "create_attention_mask": False,
    }
    return cls(**{**defaults, **options})


def _is_same(one: Any, other: Any) -> bool:
    one, other = (
        value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for value in (one, other)
    )
    return bool(one.dtype == other.dtype and np.array_equal(one, other))


def _list_names(cache: Path) -> set[str]:
    """Return the names of the files of a cache."""
    return {path.name for path in cache.iterdir()} if cache.exists() else set()


@contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress Megatron's log messages, which are about tiny datasets and would confuse users."""
    logger = logging.getLogger("megatron.core.datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class ProbeTokenizer:
    """A stand-in for a tokenizer, with only the attributes that GPTDataset reads. All of its
    special tokens are different."""

    vocab_size = 300
    pad = 299
    eod = _EOD
    eos = 298

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict(
            [("class", "megablend.ProbeTokenizer"), ("words", ["ö"])]
        )


def write_pairs(folder: Path) -> list[str]:
    """Write the `.bin/.idx` pairs of the tiny datasets, and return their prefixes."""
    return [
        _write_pair(folder / f"pair{number}", lengths) for number, lengths in enumerate(_LENGTHS)
    ]


def _write_pair(prefix: Path, lengths: list[int]) -> str:
    sizes = np.array(lengths, "<i4")
    tokens = np.arange(sizes.sum(), dtype="<u2") % 23  # end-of-document tokens among them
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    pointers = 2 * (np.cumsum(sizes, dtype="<i8") - sizes)
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(
        header + sizes.tobytes() + pointers.tobytes() + documents.tobytes()
    )
    return str(prefix)


def several_epochs(prefixes: list[str]) -> Case:
    """Return a case with a weighted blend of datasets whose last epochs are shuffled separately."""
    blend = {"blend": (prefixes, [0.3, 0.7]), "split": "6,2,2"}
    return {**blend, "mid_level_dataset_surplus": 0.5}, [60, 9, 0]


def by_length(prefixes: list[str]) -> Case:
    """Return a case with unweighted blends: one of a whole epoch, and one of a part of an epoch."""
    return {"blend": (prefixes, None), "split": "1,1,0"}, [None, 4, 0]


def alone(prefixes: list[str]) -> Case:
    """Return a case with a single prefix in each split, in which partial sequences are kept."""
    partial = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False}
    blends = {"blend_per_split": [(prefixes[:1], None), (prefixes[1:], [1.0]), None]}
    return {**blends, **partial, "create_attention_mask": True}, [40, 15, 0]


def validation_sets(prefixes: list[str]) -> Case:
    """Return a case with several validation sets, each of one whole epoch."""
    sets = {"multiple_validation_sets": True, "full_validation": True}
    partial = {"drop_last_partial_validation_sequence": False}
    blends = {"blend_per_split": [(prefixes, [2.0, 1.0]), (prefixes, None), None]}
    return {**blends, **sets, **partial}, [20, None, 0]


CASES: tuple[Callable[[list[str]], Case], ...] = (several_epochs, by_length, alone, validation_sets)
"""Functions that each return a case for the prefixes of the tiny datasets."""
