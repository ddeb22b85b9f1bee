"""YAML (and so JSON) with limits on depth and size: a few bytes can exhaust the stack, or through aliases the memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where PyYAML includes it: ten times faster, which matters with thousands of sources."""
MAX_BYTES = 64 << 20
"""Largest config: enough to list 500,000 files by name."""
MAX_DEPTH = 64
"""Maximum nesting of lists and mappings; configs need six levels."""
MAX_REPEATED = 1 << 18
"""Maximum number of values that aliases expand to."""


def read_limited(path: Path) -> str:
    """The text of a config. Raises: OSError; ValueError where it is not UTF-8, or larger than MAX_BYTES."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # a limit for pipes and devices, too
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than the limit of {MAX_BYTES:,} bytes")
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # translates line endings as text files do
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def compose_and_load(text: str) -> tuple[yaml.Node | None, Any]:
    """Parse a YAML document: its nodes, with their lines, and its value.

    Raises: yaml.YAMLError, ValueError if it is not YAML, or exceeds the limits.
    """
    _check(yaml.parse(text, Loader=LOADER))
    try:
        node = yaml.compose(text, Loader=LOADER)
        if node is None or "<<" in text:  # merged keys are inserted into the nodes that are loaded
            return node, yaml.load(text, Loader=LOADER)
        return node, _construct(node)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # a value that does not match its tag
        raise ValueError(f"a value does not fit its tag ({type(error).__name__}: {error})") from error


def _construct(node: yaml.Node) -> Any:
    loader = LOADER("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check(events: Iterator[Any]) -> None:
    """Check the limits on the stream of events, before any value is constructed."""
    sizes: dict[str | None, int] = {}  # expanded size of each anchor
    repeated = 0
    nested: list[tuple[str | None, int]] = []  # open collections: anchor, and number of values so far
    for event in events:
        size = 1
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            if size == 0:
                raise _refused(f"*{event.anchor} refers to itself, or to an anchor that does not exist", event)
            repeated += size
            if repeated > MAX_REPEATED:
                raise _refused(f"aliases expand to more than {MAX_REPEATED:,} values", event)
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
