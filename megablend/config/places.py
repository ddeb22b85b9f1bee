"""Where a key is in a config file, and how messages write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml


class Places:
    """Line numbers of a config's keys."""

    def __init__(self, name: str, node: yaml.Node | None) -> None:
        self.name = name
        self.node = node

    def line(self, location: Sequence[str | int]) -> str:
        """`file:line` of the deepest part of a location that exists in the file."""
        node, line = self.node, None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
                if found is None:
                    continue  # a level that validation inserted (train), or a missing key
                line, node = found[0].start_mark.line, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
        return self.name if line is None else f"{self.name}:{line + 1}"

    def split(self, name: str) -> list[str]:
        """The location part for a split's sources, if the config lists sources by split."""
        top = self.node.value if isinstance(self.node, yaml.MappingNode) else []
        return [name] if any(k.value == "sources" and isinstance(v, yaml.MappingNode) for k, v in top) else []

    def duplicates(self) -> Iterator[tuple[str, int]]:
        """Duplicate keys in a mapping, with their lines."""
        stack, visited = [self.node], set[int]()
        while stack:
            node = stack.pop()
            if id(node) in visited:  # an alias, perhaps to a node that contains it
                continue
            visited.add(id(node))
            if isinstance(node, yaml.MappingNode):
                seen = set()
                for key, value in node.value:
                    if key.value in seen:
                        yield str(key.value), key.start_mark.line + 1
                    seen.add(key.value)
                    stack.append(value)
            elif isinstance(node, yaml.SequenceNode):
                stack.extend(node.value)


def join_keys(location: Sequence[str | int]) -> str:
    """A location as messages write it: `sources[0].path`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
