"""Importing this has Megatron's functions run as they are written, in this process.

When megatron-core is imported, it wraps dozens of functions in `torch.compile`, which imports PyTorch's compiler: two seconds in
each process that needs only datasets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any


def compile_nothing(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """In place of `torch.compile`, also as a decorator with options."""
    return (lambda function: function) if model is None else model


class EagerMegatron(MetaPathFinder):
    """Replaces `torch.compile` just before megatron-core is imported; finds no module."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "megatron.core":
            import torch

            vars(torch)["compile"] = compile_nothing


sys.meta_path.insert(0, EagerMegatron())
