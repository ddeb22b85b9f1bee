"""YAML (and with it JSON) of bounded depth and size: a few bytes can ask for a deep stack, or by aliases for all memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: ten times as fast, which thousands of sources need."""
MAX_BYTES = 64 << 20
"""Of a config: 500,000 files by their names."""
MAX_DEPTH = 64
"""Of lists and mappings in one another; configs need six."""
MAX_REPEATED = 1 << 18
"""Values that aliases repeat, written out."""


def read_limited(path: Path) -> str:
    """The text of a config. Raises: OSError; ValueError where it is not UTF-8, or larger than MAX_BYTES."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # of a pipe or a device, too, no more
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes, where a config has at most as many")
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # line ends as files have them
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def compose_and_load(text: str) -> tuple[yaml.Node | None, Any]:
    """The nodes of a YAML document, with their lines, and its value.

    Raises: yaml.YAMLError, ValueError where it is not YAML, or beyond the limits.
    """
    _check(yaml.parse(text, Loader=LOADER))
    try:
        return yaml.compose(text, Loader=LOADER), yaml.load(text, Loader=LOADER)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # of values that are not what their tag says
        raise ValueError(f"a value does not fit its tag ({type(error).__name__}: {error})") from error


def _check(events: Iterator[Any]) -> None:
    """Walk through a document's parts as they come, before anything is made of them."""
    sizes: dict[str | None, int] = {}  # of anchors, written out
    repeated = 0
    nested: list[tuple[str | None, int]] = []  # of the open ones: the anchor, and the values inside so far
    for event in events:
        size = 1
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            if size == 0:
                raise _refused(f"*{event.anchor} refers to itself, or to nothing", event)
            repeated += size
            if repeated > MAX_REPEATED:
                raise _refused(f"aliases repeat more than {MAX_REPEATED:,} values", event)
        elif isinstance(event, yaml.CollectionStartEvent):
            nested.append((event.anchor, 1))
            if len(nested) > MAX_DEPTH:
                raise _refused(f"lists or mappings nested more than {MAX_DEPTH} deep", event)
            continue
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = nested.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
        else:
            continue
        if nested:
            nested[-1] = nested[-1][0], nested[-1][1] + size


def _refused(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
