"""Keeps track of the pages that other nodes hold, according to their announcements."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import NO_PAGES, Pages, add_pages, intersect, subtract
from megablend.mirror.disk.room import Need


class Holders:
    """The pages that each other node has announced to this one."""

    def __init__(self) -> None:
        self._announced: dict[FileKey, dict[str, Pages]] = {}

    def note(self, name: str, needs: Sequence[Need]) -> None:
        """Record that another node has announced pages."""
        for need in needs:
            add_pages(self._announced.setdefault(need.key, {}), name, need.pages)

    def find(self, key: FileKey, pages: Pages) -> list[str]:
        """Return the names of the nodes that have announced any of the pages."""
        by_node = self._announced.get(key, {})
        return [name for name, held in by_node.items() if intersect(pages, held)]

    def forget(self, name: str, key: FileKey, pages: Pages) -> None:
        """Record that a node no longer holds pages that it announced."""
        by_node = self._announced.get(key, {})
        left = subtract(by_node.pop(name, NO_PAGES), pages)
        if left:
            by_node[name] = left
        elif not by_node:
            self._announced.pop(key, None)
