"""What datasets need of a cluster whose nodes share a catalog."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from megablend.mirror.members.etcd import Etcd, Followed


class Nodes(Protocol):
    """What datasets need of a cluster."""

    @property
    def own(self) -> str:
        """This node's name."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """All nodes of the view in force."""
        ...

    @property
    def copies(self) -> int:
        """On how many nodes a page shall be."""
        ...

    def find_away(self) -> Collection[str]:
        """Those that do not answer."""
        ...

    async def post(self, node: str, path: str, body: bytes) -> bytes:
        """The answer of another node. Raises: AwayError; what it failed with."""
        ...


class Keys(Protocol):
    """What is in etcd, as a node knows it."""

    etcd: Etcd
    prefix: str
    """Of all keys; it ends with a slash."""
    shared: Followed
    """What is below `shared/` of the prefix."""
    lease: int
    """This node's; 0: it has none just now."""


class Mates(NamedTuple):
    """A cluster with etcd."""

    nodes: Nodes
    keys: Keys
