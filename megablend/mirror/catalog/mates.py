"""The parts of a cluster by which its nodes share a catalog of datasets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from megablend.mirror.members.etcd import Etcd
    from megablend.mirror.members.followed import Followed


class Nodes(Protocol):
    """The other nodes."""

    @property
    def own(self) -> str:
        """This node's name."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names of all nodes of the view in force, sorted."""
        ...

    @property
    def copies(self) -> int:
        """The number of nodes that must hold each page."""
        ...

    def find_away(self) -> Collection[str]:
        """Return the names of the nodes that are away."""
        ...

    async def meet(self) -> None:
        """Wait until the nodes work together. Raises: ResourceError if too few are connected;
        ConfigError."""
        ...

    async def post(self, node: str, path: str, body: bytes) -> bytes:
        """Send a request to another node, and return the response. Raises: AwayError; the error that
        the node responds with."""
        ...


class Keys(Protocol):
    """The keys in etcd, as a node knows them."""

    etcd: Etcd
    prefix: str
    """The prefix of all keys, which ends with a slash."""
    shared: Followed
    """The values of the keys below `shared/` of the prefix."""
    lease: int
    """The id of this node's lease; 0 while it has none."""


class Mates(NamedTuple):
    """A cluster whose nodes meet in etcd."""

    nodes: Nodes
    keys: Keys
