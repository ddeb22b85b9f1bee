"""Inspect the code of the installed megatron-core without running it: its methods, its settings,
and which of its functions wait for other ranks. Part of the `probe`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from types import CodeType
from typing import Any

from megablend.megatron.compat import has_default
from megablend.megatron.core import GPTDatasetConfig
from megablend.megatron.request.config import DatasetConfig

BUILDER_METHODS = (
    "__init__",
    "build",
    "build_generic_dataset",
    "_build_megatron_dataset_splits",
    "_build_megatron_datasets_parallel",
)
"""Methods of Megatron's builder that MegablendDatasetBuilder overrides or calls."""
DATASET_METHODS = (
    "__len__",
    "build_low_level_dataset",
    "_build_document_sample_shuffle_indices",
    "_query_document_sample_shuffle_indices",
)
"""Methods of GPTDataset that MegablendGPTDataset overrides or calls."""
_PASSED_ON = {"others", "options"}
"""Parameters of megablend's methods that accept optional arguments of newer Megatron versions,
which are passed on to Megatron."""
_OPENING_MODULES = (
    "blended_megatron_dataset_builder",
    "blended_dataset",
    "gpt_dataset",
    "megatron_dataset",
)
"""Modules whose functions open datasets."""
_COLLECTIVES = {
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
}
"""Names of the functions of torch.distributed that wait for other ranks."""


def compare_methods(ours: type[Any], theirs: type[Any], overridden: tuple[str, ...]) -> str | None:
    """Return the first incompatibility between a class of Megatron's and megablend's subclass of
    it, as text; None if they are compatible.

    It is an incompatibility if an overridden method is missing or takes other arguments, or if
    Megatron's class has a method with the name of one that the subclass adds. Optional arguments
    that the subclass passes on are allowed.

    Args:
        ours: megablend's subclass.
        theirs: Megatron's class.
        overridden: names of the methods that the subclass overrides or calls.
    """
    for name in overridden:
        if not hasattr(theirs, name):
            return f"{theirs.__name__} has no {name}"
        taken = _parameters(getattr(ours, name))
        expected = [parameter for parameter in taken if parameter not in _PASSED_ON]
        passes_on = len(taken) > len(expected)
        found = [
            parameter
            for parameter, kind in _parameters(getattr(theirs, name)).items()
            if parameter in expected or not passes_on or kind.default is kind.empty
        ]
        if found != expected:
            return f"{theirs.__name__}.{name} takes ({', '.join(found)}); expected ({', '.join(expected)})"
    for name in vars(ours):
        is_added = name not in overridden and not name.startswith(("__", "_abc"))
        if is_added and hasattr(theirs, name):
            return f"{theirs.__name__} has a {name} of its own"
    return None


def find_waiting_function() -> str | None:
    """Return a message about a function that waits for other ranks and is not overridden by the
    builder, in the modules that open datasets; None if there is none."""
    for module in _OPENING_MODULES:
        for name, code in _list_functions(sys.modules[f"megatron.core.datasets.{module}"]):
            if _used_names(code) & _COLLECTIVES and name not in BUILDER_METHODS:
                return f"{module}.{name} waits for other ranks"
    return None


def find_missing_setting() -> str | None:
    """Return a message about a setting that a cache depends on but Megatron's config does not have;
    None if there is none."""
    found = {field.name for field in fields(GPTDatasetConfig)}
    for name in DatasetConfig.__annotations__:
        if name not in found and not has_default(name):
            return f"GPTDatasetConfig has no {name}"
    return None


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _list_functions(module: Any) -> Iterator[tuple[str, CodeType]]:
    """Yield the name and code of each function of a module and of its classes."""
    for holder in (module, *filter(inspect.isclass, vars(module).values())):
        for name, value in vars(holder).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield name, function.__code__


def _used_names(code: CodeType) -> set[str]:
    """Return the names that the code of a function refers to, including the functions defined
    inside it."""
    inner = [_used_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
