"""The parts of a cluster by which its nodes share a catalog of datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megablend.mirror.members.etcd_members import EtcdMembers
    from megablend.mirror.peers.cluster import Cluster


class Mates(NamedTuple):
    """A cluster whose nodes meet in etcd."""

    nodes: Cluster
    keys: EtcdMembers
