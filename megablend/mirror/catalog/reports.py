"""Reports of what the nodes of a cluster with etcd lack. Each node writes its own report to a key
that expires with its lease.

held/<node> JSON: `owed`, the shortfall of each want that the node does not hold completely;
                `listed`, the results of its listings of sources; `revision`, the revision of
                etcd on which the report is based

A shortfall consists of `missing`, the number of missing bytes; `short`, the number of bytes of room
that the node lacks; `trouble`, the reason why bytes are missing; `gone`, whether files were deleted
or replaced at the source, so that waiting does not help; and `stuck`, whether the problem requires
user action.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megablend.errors import ConfigError, ResourceError
from megablend.mirror.catalog.catalog import LATEST, Catalog, Want
from megablend.mirror.catalog.goal_state import Patience, shorten
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.members.etcd import EtcdAwayError
from megablend.mirror.node.frames import pack_json
from megablend.system.limited_json import parse_json

if TYPE_CHECKING:
    from megablend.mirror.members.etcd_members import EtcdMembers
    from megablend.mirror.peers.cluster import Cluster

_LOOK_SECONDS = 1.0
_INCOMPLETE_SECONDS = 10.0
"""Seconds between reports of a node that lacks pages, since its shortfall changes all the time."""
_TROUBLE_LETTERS = 200
"""The maximum length of `trouble` in a report, since etcd stores the reports of all nodes."""


class NodeReports:
    """The reports of the nodes of a cluster. Writes the report of this node, and reads those of all
    nodes.

    Args:
        cluster: the cluster.
        keys: the cluster's keys in etcd.
        catalog: this node's copy of the catalog.
        holding: knows what this node holds.
        listings: knows which sources this node has listed.
        get_revision: returns the revision of etcd with which this node's copy of the catalog
            agrees; 0 if it has not been compared with etcd since the start.
    """

    def __init__(
        self,
        cluster: Cluster,
        keys: EtcdMembers,
        catalog: Catalog,
        holding: Holding,
        listings: Listings,
        get_revision: Callable[[], int],
    ) -> None:
        self._cluster = cluster
        self._keys = keys
        self._prefix = f"{keys.prefix}held/"
        self._catalog = catalog
        self._holding = holding
        self._listings = listings
        self._get_revision = get_revision

    async def run(self) -> None:
        """Write this node's report whenever it changes, until cancelled. It is written at most
        every ten seconds, or at most every second if nothing is missing."""
        key = self._prefix + self._cluster.own
        known: int | None = None  # the revision of etcd in which the key was last put
        written = None
        written_at = 0.0
        while True:
            revision = self._get_revision()
            # The shortfalls must take all changes up to this revision into account
            await self._holding.wait_for(lambda: True)
            report = self._make_report(revision)
            lease = self._keys.lease
            is_new = (lease, report) != written
            is_due = not report["owed"] or time.monotonic() - written_at >= _INCOMPLETE_SECONDS
            if lease and revision and is_new and is_due:
                # Perhaps the lease has ended: then this node takes another one
                with contextlib.suppress(EtcdAwayError, ConfigError):
                    # A request that was given up may still reach etcd: it must not replace a later one
                    if known is None:
                        values, _ = await self._keys.etcd.get(key)
                        known = values[key].revision if key in values else 0
                    expected = {key: known}
                    known = None
                    known = await self._keys.etcd.change(
                        expected, {key: pack_json(report)}, lease=lease
                    )
                    if known is not None:
                        written = (lease, report)
                        written_at = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)

    def _make_report(self, revision: int) -> dict[str, Any]:
        shortfalls = {
            state.goal.want.name: {
                "missing": state.missing,
                "short": state.short,
                "trouble": shorten(state.trouble, _TROUBLE_LETTERS),
                "gone": state.error is not None,
                "stuck": state.is_stuck,
            }
            for state in self._holding.states
            if state.missing
        }
        return {"revision": revision, "owed": shortfalls, "listed": self._listings.describe()}

    async def _read_reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of all nodes, by name of the node. Raises: EtcdAwayError if etcd is
        unreachable."""
        values, _ = await self._keys.etcd.get(self._prefix)
        return {
            key.removeprefix(self._prefix): parse_json(value.data) for key, value in values.items()
        }

    async def read_listed(self) -> dict[str, Any]:
        """Return the result of the last listing of each dataset's source: see `Listings.describe`.
        Raises: EtcdAwayError if etcd is unreachable."""
        listed: dict[str, Any] = {}
        for report in (await self._read_reports()).values():
            listed |= report.get("listed", {})
        return listed

    async def read_progress(self) -> dict[str, dict[str, Any]]:
        """Return the progress of each want on all nodes, by name of the want.

        Returns: JSON objects with the numbers of nodes, complete nodes and missing bytes; the
            shortfall of each node that reports one; and the nodes that have not reported since the
            want's dataset last changed.

        Raises: EtcdAwayError.
        """
        reports = await self._read_reports()
        changed_in = self._find_changes()
        return {
            name: self._sum_up(want, reports, changed_in.get(want.dataset, 0))
            for name, want in self._catalog.wants.items()
        }

    def _find_changes(self) -> dict[str, int]:
        """Return the revision of etcd in which each dataset's wants and revisions last changed."""
        changed_in: dict[str, int] = {}
        for key, value in self._keys.shared.values.items():
            _, _, name = key.removeprefix(f"{self._keys.prefix}shared/").partition("/")
            dataset = name.partition("@")[0]
            changed_in[dataset] = max(changed_in.get(dataset, 0), value.revision)
        return changed_in

    def _sum_up(self, want: Want, reports: Mapping[str, Any], changed_in: int) -> dict[str, Any]:
        """Return the progress of a want in the format of `read_progress`. Reports are ignored if
        they are older than `changed_in`, the revision of etcd in which the want's dataset last
        changed."""
        nodes = want.nodes or self._cluster.names
        owing = dict[str, dict[str, Any]]()
        silent = []
        for node in nodes:
            report = reports.get(node)
            if report is None or report["revision"] < changed_in:
                silent.append(node)
            elif want.name in report["owed"]:
                # Nodes of earlier versions do not report the flags
                owing[node] = {"gone": False, "stuck": False, **report["owed"][want.name]}
        return {
            "want": want.target,
            "nodes": len(nodes),
            "complete": len(nodes) - len(owing) - len(silent),
            "missing": sum(owed["missing"] for owed in owing.values()),
            "owing": owing,
            "silent": silent,
        }

    async def is_settled(self, dataset: str) -> bool:
        """Return whether all reachable nodes hold their parts of a dataset's latest revision. Data
        that cannot be held without user action are ignored. Raises: EtcdAwayError if etcd is
        unreachable."""
        progress = (await self.read_progress()).get(f"{dataset}@{LATEST}")
        if progress is None:
            return True
        waiting = [
            node
            for node, report in progress["owing"].items()
            if not (report["short"] or report["gone"] or report["stuck"])
        ]
        return self._cluster.find_away().issuperset([*progress["silent"], *waiting])

    async def wait_for(self, want: Want) -> dict[str, Any]:
        """Wait until all nodes hold their parts of a want, even if etcd or nodes are unreachable
        for a long time. Returns: the progress in the format of `read_progress`. Raises:
        ResourceError if the want does not fit on a node, files no longer exist, or nothing can be
        fetched without user action; ConfigError if the want was removed."""
        patience = Patience()
        while want.name in self._catalog.wants:
            with contextlib.suppress(EtcdAwayError):
                progress = (await self.read_progress()).get(want.name)
                if progress is None:
                    continue  # the want was removed while the reports were read
                for node, shortfall in progress["owing"].items():
                    if shortfall["short"]:
                        raise ResourceError(
                            f"{want.target} does not fit on {node}: its mirror is short of {shortfall['short']:,} bytes "
                            "(pinned datasets and earlier wants come first and, unless this one is pinned, so does what "
                            "jobs need)\n"
                            f"remove other wants with `megablend datasets unwant`, raise `mirror.size` on {node}, or "
                            f"spread {want.target} over more nodes"
                        )
                    if shortfall["gone"]:
                        raise ResourceError(f"{node}: {shortfall['trouble']}")
                if progress["complete"] == progress["nodes"]:
                    return progress
                stuck = [
                    f"{node}: {report['trouble']}"
                    for node, report in progress["owing"].items()
                    if report["stuck"]
                ]
                if patience.look(progress["missing"], min(stuck, default="")):
                    raise patience.make_error(want)
            await asyncio.sleep(_LOOK_SECONDS)
        raise ConfigError(
            f"{want.target} is no longer wanted\nrequest it again with `megablend datasets want`"
        )

    async def find_incomplete(self) -> set[str]:
        """Return the names of revisions that are incomplete on any node. Raises: EtcdAwayError if
        etcd is unreachable."""
        progress = await self.read_progress()
        return {
            revision.name
            for name, want in self._catalog.wants.items()
            if name not in progress or progress[name]["complete"] < progress[name]["nodes"]
            for revision in self._catalog.list_revisions(want.dataset)
        }
