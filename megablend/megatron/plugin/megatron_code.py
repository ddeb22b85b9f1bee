"""Inspect the code of the installed megatron-core without running it: which of its functions wait
for other ranks. Part of the `probe`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_OVERRIDDEN = (
    "__init__",
    "build",
    "build_generic_dataset",
    "_build_megatron_dataset_splits",
    "_build_megatron_datasets_parallel",
)
"""Methods of Megatron's builder that MegablendDatasetBuilder overrides."""
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


def find_waiting_function() -> str | None:
    """Return a message about a function that waits for other ranks and is not overridden by the
    builder, in the modules that open datasets; None if there is none."""
    for module in _OPENING_MODULES:
        for name, code in _list_functions(sys.modules[f"megatron.core.datasets.{module}"]):
            if _used_names(code) & _COLLECTIVES and name not in _OVERRIDDEN:
                return f"{module}.{name} waits for other ranks"
    return None


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
