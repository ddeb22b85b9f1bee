"""Whether the plugin fits the installed megatron-core, checked by inspecting its code and by
building tiny datasets both ways.

    methods    those that our classes override exist and take the same arguments; those that we add do not exist there
    waiting    no step of opening datasets waits for other ranks, except those that we override
    settings   those that a cache depends on exist
    builds     Megatron finds all files that it needs in a cache of ours, and builds the same arrays and samples by itself

A version that differs in any of these is refused with a message that says how; its number does not
matter. It is checked once per node, and the outcome stored:

<kernel cache>/megatron-<digest>.json     what was found of this code of Megatron's, with this code of ours
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import logging
import struct
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError
from megablend.jit import cache_dir
from megablend.megatron.cache_builder.build_cache import prepare_cache
from megablend.megatron.compat import has_default, query_result
from megablend.megatron.core import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    installed_version,
)
from megablend.megatron.plugin.config import MegablendDatasetConfig
from megablend.megatron.plugin.dataset import MegablendGPTDataset
from megablend.megatron.request.config import DatasetConfig, request_of
from megablend.storage.by_scheme import make_storage
from megablend.system.atomic_write import replace_file, translate_os_errors

Case = tuple[dict[str, Any], list[int | None]]
"""Options of a config, and sizes."""
_EOD = 0
_LENGTHS = ([5, 0, 1, 9, 3, 7, 30, 2, 8, 4, 6, 1], [12, 6, 3, 25, 8, 11, 16, 9])
_BUILDER_METHODS = (
    "__init__",
    "build",
    "build_generic_dataset",
    "_build_megatron_dataset_splits",
    "_build_megatron_datasets_parallel",
)
_DATASET_METHODS = (
    "__len__",
    "build_low_level_dataset",
    "_build_document_sample_shuffle_indices",
    "_query_document_sample_shuffle_indices",
)
_WAITING = {
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
}
_MODULES = (
    "blended_megatron_dataset_builder",
    "blended_dataset",
    "gpt_dataset",
    "megatron_dataset",
)
_ARRAYS = (
    "document_index",
    "sample_index",
    "shuffle_index",
    "dataset_index",
    "dataset_sample_index",
)
_COMPARED = 3
"""Samples of each tiny dataset."""


class ProbeTokenizer:
    """What GPTDataset asks of a tokenizer; no two special tokens are the same."""

    vocab_size = 300
    pad = 299
    eod = _EOD
    eos = 298

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict(
            [("class", "megablend.ProbeTokenizer"), ("words", ["ö"])]
        )


def write_pairs(folder: Path) -> list[str]:
    """Write the pairs; returns their prefixes."""
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
    """A blend by weights, its last epochs shuffled by themselves."""
    return {"blend": (prefixes, [0.3, 0.7]), "split": "6,2,2", "mid_level_dataset_surplus": 0.5}, [
        60,
        9,
        0,
    ]


def by_length(prefixes: list[str]) -> Case:
    """Blends without weights: of a whole epoch, and of a part."""
    return {"blend": (prefixes, None), "split": "1,1,0"}, [None, 4, 0]


def alone(prefixes: list[str]) -> Case:
    """A prefix by itself in each split; partial sequences are kept."""
    partial = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False}
    blends = {"blend_per_split": [(prefixes[:1], None), (prefixes[1:], [1.0]), None]}
    return {**blends, **partial, "create_attention_mask": True}, [40, 15, 0]


def validation_sets(prefixes: list[str]) -> Case:
    """Several validation sets, each used as a whole."""
    several = {"multiple_validation_sets": True, "full_validation": True}
    kept = {"drop_last_partial_validation_sequence": False}
    return {
        "blend_per_split": [(prefixes, [2.0, 1.0]), (prefixes, None), None],
        **several,
        **kept,
    }, [20, None, 0]


CASES: tuple[Callable[[list[str]], Case], ...] = (several_epochs, by_length, alone, validation_sets)
"""Functions that make a case from prefixes."""


def find_misfit(builder: type[Any]) -> str | None:
    """What differs from what the plugin needs; None if nothing does. Waits for no other rank.

    Args:
        builder: MegablendDatasetBuilder.

    Raises: CacheError if the temporary folder cannot be written.
    """
    return (
        _compare_methods(builder, BlendedMegatronDatasetBuilder, _BUILDER_METHODS)
        or _compare_methods(MegablendGPTDataset, GPTDataset, _DATASET_METHODS)
        or _find_waiting()
        or _find_missing_setting()
        or _compare_builds(builder)
    )


def _compare_methods(ours: type[Any], theirs: type[Any], replaced: tuple[str, ...]) -> str | None:
    for name in replaced:
        if not hasattr(theirs, name):
            return f"{theirs.__name__} has no {name}"
        expected = _parameters(getattr(ours, name))
        found = _parameters(getattr(theirs, name))
        if found != expected:
            return f"{theirs.__name__}.{name} takes ({', '.join(found)}); expected ({', '.join(expected)})"
    for name in vars(ours):
        added = name not in replaced and not name.startswith("__") and not name.startswith("_abc")
        if added and hasattr(theirs, name):
            return f"{theirs.__name__} has a {name} of its own"
    return None


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _find_waiting() -> str | None:
    """A function of the modules that open datasets that waits for other ranks, besides those that
    the builder replaces."""
    for module in _MODULES:
        for name, code in _functions(sys.modules[f"megatron.core.datasets.{module}"]):
            if _names(code) & _WAITING and name not in _BUILDER_METHODS:
                return f"{module}.{name} waits for other ranks"
    return None


def _functions(module: Any) -> Iterator[tuple[str, CodeType]]:
    """The functions of a module, and of its classes, by name."""
    for holder in (module, *filter(inspect.isclass, vars(module).values())):
        for name, value in vars(holder).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield name, function.__code__


def _names(code: CodeType) -> set[str]:
    """What a function and the functions in it look up by name."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _find_missing_setting() -> str | None:
    found = {field.name for field in fields(GPTDatasetConfig)}
    for name in DatasetConfig.__annotations__:
        if name not in found and not has_default(name):
            return f"GPTDatasetConfig has no {name}"
    return None


def _compare_builds(builder: type[Any]) -> str | None:
    """Build tiny datasets both ways. What Megatron or we raise meanwhile is a difference, too.

    Raises: CacheError if the temporary folder cannot be written.
    """
    own = Path(tempfile.gettempdir())
    with (
        translate_os_errors(own),
        tempfile.TemporaryDirectory(prefix="megablend-probe-", dir=own) as folder,
        _quiet(),
    ):
        prefixes = write_pairs(Path(folder))
        for case in CASES:
            options, sizes = case(prefixes)
            try:
                difference = _compare(builder, Path(folder, case.__name__), options, sizes)
            except FileNotFoundError as error:
                difference = f"Megatron looks for {Path(error.filename or str(error)).name}, which megablend does not write"
            except (OSError, CacheError, MemoryError):  # of this machine, not of a version
                raise
            except Exception as error:  # code that is not known may raise anything
                difference = f"{type(error).__name__}: {error}"
            if difference is not None:
                return f"tiny datasets ({case.__name__}): {difference}"
    return None


def _compare(
    builder: type[Any], cache: Path, options: dict[str, Any], sizes: list[int | None]
) -> str | None:
    known = {field.name for field in fields(GPTDatasetConfig)}
    options = {
        name: value for name, value in options.items() if name in known or not has_default(name)
    }
    config = _config(GPTDatasetConfig, cache, options)
    prepare_cache(request_of(config, sizes), launch=SingleProcess(), storage=make_storage())
    made = _contents(cache)
    built: list[tuple[Any, tuple[Any, ...]]] = []
    found = _recorder(builder, built)(GPTDataset, sizes, lambda: True, config)._open()
    if new := sorted(_contents(cache) - made):
        return f"Megatron looks for {new[0]} in addition to what megablend writes"
    memory = copy.copy(config)
    # so that every rank builds, and writes nothing
    memory.path_to_cache = None
    memory.mock = True
    for ours, arguments in built:
        theirs = type(ours)(*arguments[:-1], memory)
        for name in _ARRAYS:
            if not _same(getattr(ours, name, None), getattr(theirs, name, None)):
                return f"Megatron builds a different {name} for {type(ours).__name__}"
    opened = builder(
        MegablendGPTDataset, sizes, lambda: True, _config(MegablendDatasetConfig, cache, options)
    )
    opened._fill(SingleProcess())
    return _compare_samples(opened._open(), found, config)


def _config(cls: type[Any], cache: Path, options: dict[str, Any]) -> Any:
    filled = {
        "random_seed": 5,
        "sequence_length": 7,
        "tokenizer": ProbeTokenizer(),
        "path_to_cache": str(cache),
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "create_attention_mask": False,
    }
    return cls(**{**filled, **options})


def _recorder(builder: type[Any], built: list[tuple[Any, tuple[Any, ...]]]) -> type[Any]:
    """The builder, which notes each dataset that it opens, with its arguments."""

    def note(cls: Any, is_built_on_rank: Any, synchronize_ranks: Any, *args: Any) -> Any:
        built.append((cls(*args), args))
        return built[-1][0]

    return type("Recorder", (builder,), {"build_generic_dataset": staticmethod(note)})


def _compare_samples(ours: list[Any], theirs: list[Any], config: Any) -> str | None:
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, list):
            if (difference := _compare_samples(one, other, config)) is not None:
                return difference
        elif other is not None:
            if len(one) != len(other):
                return (
                    f"MegablendGPTDataset has {len(one)} samples where GPTDataset has {len(other)}"
                )
            for k in range(min(len(other), _COMPARED)):
                if one[k].keys() != other[k].keys() or not all(
                    _same(one[k][name], other[k][name]) for name in other[k]
                ):
                    return f"sample {k} differs between MegablendGPTDataset and GPTDataset"
            if isinstance(other, GPTDataset) and len(other):
                answer = other._query_document_sample_shuffle_indices(0)
                if len(answer) != len(query_result(config, answer[0], answer[1], [])):
                    return f"GPTDataset's query returns {len(answer)} values"
    return None


def _same(one: Any, other: Any) -> bool:
    one, other = (
        value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for value in (one, other)
    )
    return bool(one.dtype == other.dtype and np.array_equal(one, other))


def _contents(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} if cache.exists() else set()


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron's log messages about tiny datasets would only confuse."""
    logger = logging.getLogger("megatron.core.datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@cache
def misfit(builder: type[Any]) -> str | None:
    """Why the plugin does not fit the installed megatron-core, as found before, or else by
    `find_misfit`; None if it does."""
    path = cache_dir() / f"megatron-{_digest()}.json"
    try:
        kept: str | None = json.loads(path.read_text(encoding="utf-8"))["misfit"]
        return kept
    except (OSError, ValueError, KeyError, TypeError):
        found = find_misfit(builder)
    text = json.dumps({"version": installed_version(), "misfit": found}, indent=1)
    with contextlib.suppress(CacheError, OSError):  # a full disk: the next process checks again
        replace_file(path, text.encode())
    return found


def _digest() -> str:
    """Digest of everything that the result depends on."""
    digest = hashlib.blake2b(
        f"{installed_version()} {np.__version__} {sys.version}".encode(), digest_size=16
    )
    for path in _files():
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _files() -> list[Path]:
    """Megatron's datasets and their compiled helpers, and megablend's code outside the kernels."""
    theirs = Path(sys.modules[GPTDataset.__module__].__file__ or "").parent
    ours = Path(__file__).parents[1]
    return sorted([*theirs.glob("*.py"), *theirs.glob("helpers*.so"), *ours.rglob("*.py")])
