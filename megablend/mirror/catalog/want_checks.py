"""Checks a want before it is added to the catalog: its nodes must exist, and the data must fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from megablend.errors import ConfigError, MissingFileError, ResourceError, did_you_mean
from megablend.mirror.catalog.catalog import Revision, Want
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.node.engine import AwayError

if TYPE_CHECKING:
    from megablend.mirror.peers.cluster import Cluster

_SHARE_SECONDS = 10.0
"""The maximum time to wait for this node's share, which is unknown until the nodes have met."""


def choose_copies(want: Want, cluster: Cluster | None) -> Want:
    """Check the nodes and the number of copies of a want. Returns: the want; if it names nodes, its
    number of copies is set. Raises: ConfigError if a node is not in the cluster, or there are more
    copies than nodes; ResourceError if the nodes are not known yet.

    Args:
        cluster: the nodes of a cluster with etcd; None without one.
    """
    if cluster is None:
        if want.nodes or want.copies:
            raise ConfigError(
                f"{want.target}: this node cannot share wants with other nodes\n"
                "run the command on each of them, without `--nodes` and `--copies N`, or set `nodes: etcd` under `mirror`"
            )
        return want
    names = cluster.names
    if not names and (want.nodes or want.copies):
        raise ResourceError(
            f"{want.target}: the nodes have not connected to one another yet\n"
            "try again when they have: `megablend node status` shows which nodes have joined"
        )
    for node in want.nodes:
        if node not in names:
            near = did_you_mean(node, names, before=": ")
            raise ConfigError(
                f"{node!r} is not one of the {len(names)} nodes{near}\n"
                "give the host:port of a node; `megablend node status` shows that of this one"
            )
    num_nodes = len(want.nodes or names)
    if want.copies > num_nodes:
        raise ConfigError(
            f"{want.target}: {want.copies} copies cannot be kept on {num_nodes} nodes\n"
            "request fewer copies, or `all`, or name more nodes"
        )
    if want.nodes and not want.copies:
        return replace(want, copies=min(cluster.copies, num_nodes))
    return want


async def check_size(want: Want, revision: Revision, holding: Holding) -> None:
    """Check that this node's mirror can hold its share of a revision. Raises: ConfigError."""
    if want.nodes and holding.catalog.own not in want.nodes:
        return
    try:
        num_bytes, num_pinned_bytes = await asyncio.wait_for(
            _find_sizes(want, revision, holding), _SHARE_SECONDS
        )
    except (asyncio.TimeoutError, ResourceError, AwayError, MissingFileError):
        return  # `Holding` reports a want that does not fit as soon as the share is known
    capacity = await holding.engine.call(holding.engine.store.find_capacity)
    if num_pinned_bytes + num_bytes > capacity:
        raise ConfigError(
            f"{want.target} cannot fit on this node: {num_bytes:,} bytes of it and {num_pinned_bytes:,} pinned bytes "
            f"exceed the {capacity:,} bytes of the mirror\n"
            "raise `mirror.size`, or spread the dataset over more nodes"
        )


async def _find_sizes(want: Want, revision: Revision, holding: Holding) -> tuple[int, int]:
    """Return the number of bytes of this node's share of a revision, and the number of other bytes
    that are pinned already. The second number is 0 if the want is not pinned."""
    share = await holding.find_share(want, revision)
    sizes = await asyncio.to_thread(share.find_sizes)
    united = sizes
    catalog = holding.catalog
    for other in catalog.own_wants if want.is_pinned else ():
        if other.is_pinned and other.name in catalog.revisions:
            other_share = await holding.find_share(other, catalog.revisions[other.name])
            united = await asyncio.to_thread(united.unite, other_share.find_sizes())
    return sizes.num_bytes, united.num_bytes - sizes.num_bytes
