"""Datasets of a blend that are opened when they are first used, since Megatron takes a second on
every rank to open a thousand datasets.

Until then, a dataset has only the attributes that a blend and a training script read from all
datasets: path, split, identifiers and length. When a sample or any other attribute is read, or an
attribute is set, Megatron's own constructor opens the files, and the object becomes an ordinary
instance of its class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from megablend.megatron.pair_files import PairState, check_etags, check_pair
from megablend.system.after_fork import ProcessLock

Open = Callable[[], Any]
"""A function without arguments that constructs a dataset."""

_opening = ProcessLock()
_shared_numbers = np.zeros(0, np.int32)


def defer(cls: type[Any], opener: Open, length: int, **attributes: Any) -> Any:
    """Return an instance of a subclass of `cls` that becomes an instance of `cls` when it is first
    used.

    Args:
        opener: constructs the dataset. Called once, on first use. Must be picklable.
        length: the number of samples in the dataset.
        attributes: the attributes that the constructor would set: dataset_path, num_samples,
            index_split and config.
    """
    return _restore(cls, {"_opener": opener, "_length": length, **attributes})


@cache
def _deferred(cls: type[Any]) -> type[Any]:
    """Return a subclass of `cls` for datasets that are not opened yet."""
    members: dict[str, Any] = {
        "__len__": _length,
        "__getitem__": _sample,
        "__getattr__": _attribute,
        "__setattr__": _set_attribute,
        "__delattr__": _delete_attribute,
        "__reduce_ex__": _reduce,
        "unique_identifiers": property(identifiers),
        "__module__": cls.__module__,
    }
    deferred = type(cls.__name__, (cls,), members)
    deferred.__qualname__ = cls.__qualname__
    return deferred


def _restore(cls: type[Any], attributes: dict[str, Any]) -> Any:
    """Make a dataset that is not opened yet from attributes that `_reduce` has pickled."""
    key: Any = cls
    deferred: Any = _deferred(key)
    dataset = deferred.__new__(deferred)
    dataset.__dict__.update(attributes)
    return dataset


def identifiers(dataset: Any) -> OrderedDict[str, Any]:
    """Return the `unique_identifiers` that the constructor of a dataset sets. Source:
    MegatronDataset.__init__."""
    return OrderedDict(
        [
            ("class", type(dataset).__name__),
            ("dataset_path", dataset.dataset_path),
            ("num_samples", dataset.num_samples),
            ("index_split", dataset.index_split.name),
            *((name, getattr(dataset.config, name)) for name in dataset._key_config_attributes()),
        ]
    )


class PrefixOpener:
    """A picklable object that opens the datasets of one prefix. These datasets share the documents
    of the prefix.

    Args:
        cls: the class of the datasets.
        split: the split matrix.
        files: the states of the pair's files when the cache was compared with them; None if the
            dataset is not read from a pair.
        etags: the etags of the pair's files in the catalog of the job; None if it has no catalog.
    """

    def __init__(
        self,
        cls: type[Any],
        config: Any,
        path: str,
        split: Any,
        files: PairState | None = None,
        etags: Sequence[str | None] | None = None,
    ) -> None:
        self._cls = cls
        self._config = config
        self._path = path
        self._split = split
        self._files = files
        self._etags = etags
        self._documents: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        own = (self._cls, self._config, self._path, self._split, self._files, self._etags)
        return PrefixOpener, own

    def dataset(self, kind: Any, num_samples: int | None) -> Any:
        """Open the dataset of a split.

        Raises: MissingFileError; ChangedFileError if the pair's files have changed.
        Source: BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
        """
        if self._documents is None:
            self._check()
            documents = self._cls.build_low_level_dataset(self._path, self._config)
            self._check()  # again: the files may have changed just before they were opened
            if self._etags is not None:
                check_etags(self._path, self._etags, documents.etags)
            self._documents = documents
        count = float(self._cls.numel_low_level_dataset(self._documents))
        begin, end = (round(edge * count) for edge in self._split[kind.value])
        return self._cls(
            self._documents, self._path, _numbers(end)[begin:end], num_samples, kind, self._config
        )

    def _check(self) -> None:
        if self._files is not None:
            check_pair(self._path, self._files)


def _numbers(end: int) -> npt.NDArray[np.int32]:
    """Return a read-only array of the numbers 0, 1, ..., with at least `end` entries. The `indices`
    of all datasets are slices of this one array."""
    global _shared_numbers
    if len(_shared_numbers) < end:
        _shared_numbers = np.arange(end, dtype=np.int32)
        _shared_numbers.flags.writeable = False
    return _shared_numbers


def _length(dataset: Any) -> int:
    length = dataset.__dict__.get("_length")
    # None if another thread has just opened the dataset: its class is Megatron's now
    return len(dataset) if length is None else int(length)


def _sample(dataset: Any, idx: Any) -> Any:
    return _open(dataset)[idx]


def _attribute(dataset: Any, name: str) -> Any:
    """Open the dataset to read an attribute that it does not have yet. Special methods, which
    `copy` and `pickle` look up, belong to the class, so they do not open the dataset."""
    if name.startswith("__") or "_opener" not in dataset.__dict__:
        if name in dataset.__dict__:  # another thread has opened it in the meantime
            return dataset.__dict__[name]
        raise AttributeError(f"{type(dataset).__name__!r} object has no attribute {name!r}")
    return getattr(_open(dataset), name)


def _set_attribute(dataset: Any, name: str, value: Any) -> None:
    setattr(_open(dataset), name, value)


def _delete_attribute(dataset: Any, name: str) -> None:
    delattr(_open(dataset), name)


def _reduce(dataset: Any, protocol: Any) -> Any:
    """Pickle the attributes of a dataset that is not opened yet. A spawned worker then opens only
    the datasets that it uses."""
    with _opening.lock:
        attributes = dict(dataset.__dict__)
    if "_opener" not in attributes:
        return Dataset.__reduce_ex__(dataset, protocol)
    base = type(dataset).__mro__[1]
    return _restore, (base, attributes)


def _open(dataset: Any) -> Any:
    """Open a dataset in place, unless another thread has already opened it. Return the dataset."""
    with _opening.lock:
        opener = dataset.__dict__.get("_opener")
        if opener is not None:
            opened = opener()
            # Before the class changes: other threads use the dataset unlocked
            dataset.__dict__.update(opened.__dict__)
            object.__setattr__(dataset, "__class__", type(opened))
            del dataset.__dict__["_opener"], dataset.__dict__["_length"]
    return dataset
