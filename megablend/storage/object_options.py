"""Options of object stores by URL prefix: for each option the longest matching prefix decides.

The queries of URLs, which are secrets, are left out when the options are pickled, unless the pickle
goes to a process of this program. The options are parsed by a separate module, `store_options`,
since that needs pydantic, which takes a tenth of a second to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.context
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megablend.storage.mirror_options import MirrorOptions

_pickling = threading.local()
"""A thread-local object. It has the attribute `carries_queries` in a thread that is within
`carrying_queries`."""


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """Options of all object stores of a config. Picklable and hashable."""

    by_prefix: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    """Prefixes and their settings, the shortest prefix first."""
    urls: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """URLs of web servers without their query, each with its query (or ""). A query is sent with
    requests and stored nowhere else. It is None if it was left out of the pickle of these
    options."""
    mirror: MirrorOptions | None = None
    """The settings of the mirror, a folder on each node that keeps the bytes that were read; None
    for no mirror."""

    def __reduce__(self) -> tuple[type[ObjectOptions], tuple[Any, ...]]:
        urls = self.urls
        if not _is_starting_process():
            urls = tuple((url, None if query else query) for url, query in urls)
        return ObjectOptions, (self.by_prefix, urls, self.mirror)

    def __copy__(self) -> ObjectOptions:
        return self

    def __deepcopy__(self, memo: object) -> ObjectOptions:
        return self  # a copy through a pickle may lack queries

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """Return the schema with which a config accepts these options unchanged."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)

    def alone(self) -> ObjectOptions:
        """Return the same options, but with a mirror on this node only. Commands use them, since
        they read little and do not wait for other nodes."""
        if self.mirror is None:
            return self
        return dataclasses.replace(self, mirror=self.mirror.alone())


@contextlib.contextmanager
def carrying_queries() -> Iterator[None]:
    """Keep the queries of URLs in the pickles that this thread makes. Such pickles must only be
    sent to a process of this program, and not be stored."""
    _pickling.carries_queries = True
    try:
        yield
    finally:
        _pickling.carries_queries = False


def _is_starting_process() -> bool:
    """Return whether the pickle that is being made is only for another process of this program,
    according to multiprocessing or `carrying_queries`."""
    return multiprocessing.context.get_spawning_popen() is not None or getattr(
        _pickling, "carries_queries", False
    )
