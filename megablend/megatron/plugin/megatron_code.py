"""Inspect the code of the installed megatron-core without running it: which of its functions wait
for other ranks, and which were replaced in this process. Part of the `probe`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import _lru_cache_wrapper, cache
from types import CodeType, FunctionType, ModuleType
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
_BUILDING_MODULES = (
    *_OPENING_MODULES,
    "blended_megatron_dataset_config",
    "helpers",
    "indexed_dataset",
    "utils",
)
"""Modules whose functions build or open datasets, or read samples."""
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


def find_replaced_function() -> str | None:
    """Return the name of a function of Megatron's datasets that is not the one in its file, since
    something has replaced it in this process, as packages do that patch Megatron; or that such a
    package has added; the name of a module whose file cannot be read. Return None if there is
    none."""
    for name in _BUILDING_MODULES:
        module = sys.modules.get(f"megatron.core.datasets.{name}")
        if module is None:  # Megatron imports some when it first builds
            continue
        codes_of_file = _codes_of_file(module)
        if codes_of_file is None:
            return name
        for holder_name, codes in codes_of_file.items():
            holder: Any = getattr(module, holder_name) if holder_name else module
            for function_name, code in codes.items():
                if not _has_code(vars(holder).get(function_name), code):
                    return ".".join(filter(None, (name, holder_name, function_name)))
            # Dataclasses and enumerations have generated methods
            if name in _OPENING_MODULES and holder_name and not is_dataclass(holder):
                for member, value in vars(holder).items():
                    if member not in codes and inspect.isfunction(_function(value)):
                        return f"{name}.{holder_name}.{member}"
    return None


@cache
def _codes_of_file(module: ModuleType) -> dict[str, dict[str, CodeType]] | None:
    """Return the codes of the functions that a module's file defines, by name: those outside
    classes under "", those of a class under its name. Return None if there is no code to read."""
    loader: Any = module.__loader__
    try:
        whole = loader.get_code(module.__name__)
    except (AttributeError, ImportError, OSError, SyntaxError):
        whole = None
    if whole is None:
        return None
    codes = {"": _inner(whole)}
    for name in list(codes[""]):
        # The names in the body of a class begin with __module__
        if inspect.isclass(vars(module).get(name)):
            codes[name] = _inner(codes[""].pop(name))
    return codes


def _inner(code: CodeType) -> dict[str, CodeType]:
    """Return the codes of the functions and classes that a code defines, by name."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {defined.co_name: defined for defined in inner if not defined.co_name.startswith("<")}


def _has_code(value: Any, code: CodeType) -> bool:
    """Return whether a member of a module or class is the function with this code."""
    function = _function(value)
    return inspect.isfunction(function) and (function.__code__ is code or function.__code__ == code)


def _function(value: Any) -> Any:
    """Return the function in a static method, class method, property or cache of results; other
    values as they are."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, _lru_cache_wrapper):  # Megatron has one of these itself
        return value.__wrapped__
    return getattr(value, "__func__", value)


def _list_functions(module: Any) -> Iterator[tuple[str, CodeType]]:
    """Yield the name and code of each function of a module and of its classes, also of those that
    others have put there, and of what they wrap."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for member, of_class in vars(value).items():
                for function in _unwrapped(_function(of_class)):
                    yield member, function.__code__
        elif getattr(value, "__module__", None) == module.__name__:
            for function in _unwrapped(value):
                yield name, function.__code__


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    """Yield a function, and the functions that it wraps; nothing for other values."""
    while value is not None:
        if inspect.isfunction(value):
            yield value
        value = getattr(value, "__wrapped__", None)


def _used_names(code: CodeType) -> set[str]:
    """Return the names that the code of a function refers to, including the functions defined
    inside it."""
    inner = [_used_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
