"""Reports of all nodes of a cluster with etcd: each node writes its own to a key with its lease.

held/<node>     JSON: `owed`, the shortfall of each want that the node does not hold completely;
                `listed`, how it listed sources; `revision`, of etcd, which the report is based on
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megablend.errors import ConfigError, ResourceError
from megablend.mirror.catalog.catalog import LATEST, Catalog, Want
from megablend.mirror.catalog.goal_state import Patience, shorten
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.mates import Mates
from megablend.mirror.members.etcd import EtcdAwayError
from megablend.mirror.node.frames import pack_json
from megablend.system.limited_json import parse_json

_LOOK_SECONDS = 1.0
_INCOMPLETE_SECONDS = 10.0
"""Seconds between reports of a node that lacks pages: its shortfall changes all the time."""
_TROUBLE_LETTERS = 200
"""The most letters of a trouble in a report: etcd keeps the troubles of all nodes."""


class Shortfall(NamedTuple):
    """The part of a want that a node does not hold. The fields are named as in reports."""

    missing: int
    """The number of bytes that are missing."""
    short: int
    """The number of bytes of room that the node lacks; 0 if the want fits."""
    trouble: str
    gone: bool
    """Whether waiting does not help, since files were deleted or replaced at the source."""
    stuck: bool
    """Whether only a person can end the trouble."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Shortfall:
        """Read a shortfall from a report. Nodes of earlier versions do not report the flags."""
        return cls(
            fields["missing"],
            fields["short"],
            fields["trouble"],
            gone=fields.get("gone", False),
            stuck=fields.get("stuck", False),
        )


class Progress(NamedTuple):
    """The part of a want that the nodes of a cluster hold, according to their reports."""

    want: Want
    num_nodes: int
    """The number of nodes that must hold a part of the want."""
    shortfalls: dict[str, Shortfall]
    """The shortfall of each node that reports one, by node."""
    silent: list[str]
    """The nodes that have not reported since the want's dataset last changed."""

    @property
    def is_complete(self) -> bool:
        """Whether all nodes hold their parts."""
        return not self.shortfalls and not self.silent

    @property
    def obstacle(self) -> str:
        """What a person has to change on one of the nodes; empty if there is nothing."""
        stuck = [f"{node}: {each.trouble}" for node, each in self.shortfalls.items() if each.stuck]
        return min(stuck, default="")

    def as_json(self) -> dict[str, Any]:
        """Return the progress for people and programs."""
        return {
            "want": self.want.target,
            "nodes": self.num_nodes,
            "complete": self.num_nodes - len(self.shortfalls) - len(self.silent),
            "missing": sum(each.missing for each in self.shortfalls.values()),
            "owing": {node: each._asdict() for node, each in self.shortfalls.items()},
            "silent": self.silent,
        }


class NodeReports:
    """Writes this node's report, and reads those of all nodes.

    Args:
        mates: the cluster.
        catalog: this node's copy of the catalog.
        holding: knows what this node holds.
        listings: knows which sources this node has listed.
        get_revision: returns the revision of etcd that the copy agrees with; 0 if the copy has not
            been compared with etcd since the start.
    """

    def __init__(
        self,
        mates: Mates,
        catalog: Catalog,
        holding: Holding,
        listings: Listings,
        get_revision: Callable[[], int],
    ) -> None:
        self._nodes = mates.nodes
        self._keys = mates.keys
        self._prefix = f"{mates.keys.prefix}held/"
        self._catalog = catalog
        self._holding = holding
        self._listings = listings
        self._get_revision = get_revision

    async def run(self) -> None:
        """Write the report whenever it changes, until cancelled: at most every ten seconds, or every
        second if nothing is missing."""
        key = self._prefix + self._nodes.own
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
            state.goal.want.name: Shortfall(
                missing=state.missing,
                short=state.short,
                trouble=shorten(state.trouble, _TROUBLE_LETTERS),
                gone=state.error is not None,
                stuck=state.is_stuck,
            )._asdict()
            for state in self._holding.states
            if state.missing
        }
        return {"revision": revision, "owed": shortfalls, "listed": self._listings.describe()}

    async def _read_reports(self) -> dict[str, dict[str, Any]]:
        """Read the reports that `run` has written, by node. Raises: EtcdAwayError."""
        values, _ = await self._keys.etcd.get(self._prefix)
        return {
            key.removeprefix(self._prefix): parse_json(value.data) for key, value in values.items()
        }

    async def read_listed(self) -> dict[str, Any]:
        """Return how the source of each dataset was listed, by dataset: see `Listings.describe`.
        Raises: EtcdAwayError."""
        listed: dict[str, Any] = {}
        for report in (await self._read_reports()).values():
            listed |= report.get("listed", {})
        return listed

    async def read_progress(self) -> list[Progress]:
        """Return the progress of each want. Raises: EtcdAwayError."""
        reports = await self._read_reports()
        changed_in = self._find_changes()
        return [
            self._sum_up(want, reports, changed_in.get(want.dataset, 0))
            for want in self._catalog.wants.values()
        ]

    def _find_changes(self) -> dict[str, int]:
        """Return the revision of etcd in which each dataset's wants and revisions last changed."""
        changed_in: dict[str, int] = {}
        for key, value in self._keys.shared.values.items():
            _, _, name = key.removeprefix(f"{self._keys.prefix}shared/").partition("/")
            dataset = name.partition("@")[0]
            changed_in[dataset] = max(changed_in.get(dataset, 0), value.revision)
        return changed_in

    def _sum_up(self, want: Want, reports: Mapping[str, Any], changed_in: int) -> Progress:
        """Return the progress of a want. A report that is older than the revision `changed_in` of
        etcd does not count."""
        nodes = want.nodes or self._nodes.names
        shortfalls: dict[str, Shortfall] = {}
        silent = []
        for node in nodes:
            report = reports.get(node)
            if report is None or report["revision"] < changed_in:
                silent.append(node)
            elif want.name in report["owed"]:
                shortfalls[node] = Shortfall.from_json(report["owed"][want.name])
        return Progress(want, len(nodes), shortfalls, silent)

    async def is_settled(self, dataset: str) -> bool:
        """Whether all reachable nodes hold their parts of the latest revision of a dataset, as far
        as that is possible without a person. Raises: EtcdAwayError."""
        unreachable = self._nodes.find_away()
        for progress in await self.read_progress():
            if progress.want.name != f"{dataset}@{LATEST}":
                continue
            if any(node not in unreachable for node in progress.silent):
                return False
            for node, shortfall in progress.shortfalls.items():
                has_ended = shortfall.short or shortfall.gone or shortfall.stuck
                if node not in unreachable and not has_ended:
                    return False
        return True

    async def wait_for(self, want: Want) -> Progress:
        """Wait until all nodes hold their parts of a want, however long etcd or nodes are
        unreachable. Raises: ResourceError if the want does not fit on one of them, files are gone,
        or nothing comes because of what only a person can change; ConfigError if it is no longer
        wanted."""
        patience = Patience()
        while want.name in self._catalog.wants:
            with contextlib.suppress(EtcdAwayError):
                progress_of = {each.want.name: each for each in await self.read_progress()}
                progress = progress_of.get(want.name)
                if progress is None:
                    continue  # the want was removed while the reports were read
                for node, shortfall in progress.shortfalls.items():
                    if shortfall.short:
                        raise ResourceError(
                            f"{want.target} does not fit on {node}: it needs {shortfall.short:,} bytes more than are "
                            "left after pinned datasets, earlier wants and the data of jobs\n"
                            "unwant something, raise `mirror.size` there, or spread it over more nodes"
                        )
                    if shortfall.gone:
                        raise ResourceError(f"{node}: {shortfall.trouble}")
                if progress.is_complete:
                    return progress
                missing = sum(each.missing for each in progress.shortfalls.values())
                if patience.look(missing, progress.obstacle):
                    raise patience.make_error(want)
            await asyncio.sleep(_LOOK_SECONDS)
        raise ConfigError(f"{want.target} is no longer wanted\nrequest it again")

    async def find_incomplete(self) -> set[str]:
        """Return the names of all revisions of datasets of which some node lacks a part. Raises:
        EtcdAwayError."""
        complete = {each.want.name for each in await self.read_progress() if each.is_complete}
        return {
            revision.name
            for want in self._catalog.wants.values()
            if want.name not in complete
            for revision in self._catalog.list_revisions(want.dataset)
        }
