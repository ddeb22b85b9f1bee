"""Reports of all nodes of a cluster with etcd: each node writes its own to a key with its lease.

held/<node>     what the node lacks of what is wanted, and which sources it has listed
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from megablend.errors import ConfigError, ResourceError
from megablend.mirror.catalog.catalog import LATEST, Catalog, Want
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.mates import Mates
from megablend.mirror.members.etcd import EtcdAwayError
from megablend.mirror.node.frames import pack_json
from megablend.system.limited_json import parse_json

_LOOK_SECONDS = 1.0
_HELD_SECONDS = 10.0
_TROUBLE_LETTERS = 200


class Told:
    """Writes this node's report, and reads those of all nodes.

    Args:
        mates: the cluster.
        catalog: this node's copy of the catalog.
        holding: knows what this node holds.
        listings: knows which sources this node has listed.
        get_revision: returns the revision of etcd with which the copy agrees; 0 if it has not been
            compared since the start.
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
        self._catalog = catalog
        self._holding = holding
        self._listings = listings
        self._get_revision = get_revision

    async def run(self) -> None:
        """Write the report whenever it changes, until cancelled: at most every ten seconds, or every
        second if nothing is missing."""
        last = None
        told_at = 0.0
        while True:
            revision = self._get_revision()
            await self._holding.wait_for(lambda: True)
            owed = {
                state.goal.want.name: {
                    "missing": state.missing,
                    "short": state.short,
                    "trouble": state.trouble[:_TROUBLE_LETTERS],
                    # What will not come, however long it is waited for
                    "gone": state.error is not None,
                }
                for state in self._holding.states
                if state.missing
            }
            lease = self._keys.lease
            told = {"revision": revision, "owed": owed, "listed": self._listings.describe()}
            now = (lease, told)
            is_due = not owed or time.monotonic() - told_at >= _HELD_SECONDS
            if lease and revision and now != last and is_due:
                key = f"{self._keys.prefix}held/{self._nodes.own}"
                try:
                    await self._keys.etcd.change({}, {key: pack_json(told)}, lease=lease)
                    last = now
                    told_at = time.monotonic()
                except (EtcdAwayError, ConfigError):
                    pass  # the lease has ended, perhaps: there will be another
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_told(self) -> dict[str, dict[str, Any]]:
        """The reports that `run` has written, by node. Raises: EtcdAwayError."""
        prefix = f"{self._keys.prefix}held/"
        values, _ = await self._keys.etcd.get(prefix)
        return {key.removeprefix(prefix): parse_json(each.data) for key, each in values.items()}

    async def read_listed(self) -> dict[str, Any]:
        """By dataset, how its source was listed, as the nodes report it: see `Listings.describe`.
        Raises: EtcdAwayError."""
        told = (await self._read_told()).values()
        return {name: each for some in told for name, each in some.get("listed", {}).items()}

    async def read_held(self) -> list[dict[str, Any]]:
        """For each want, how many nodes hold their part of it, and what the others lack. Raises:
        EtcdAwayError."""
        held = await self._read_told()
        since: dict[str, int] = {}
        """By dataset, the revision of etcd that last changed it: reports from before do not count."""
        for key, value in self._keys.shared.values.items():
            dataset = (
                key.removeprefix(f"{self._keys.prefix}shared/").partition("/")[2].partition("@")[0]
            )
            since[dataset] = max(since.get(dataset, 0), value.revision)
        found = []
        for want in self._catalog.wants.values():
            nodes = want.nodes or self._nodes.names
            owed = {
                node: each["owed"].get(want.name)
                for node in nodes
                if (each := held.get(node)) and each["revision"] >= since.get(want.dataset, 0)
            }
            found.append(
                {
                    "want": want.target,
                    "nodes": len(nodes),
                    "complete": sum(each is None for each in owed.values()),
                    "missing": sum(each["missing"] for each in owed.values() if each),
                    "owing": {node: each for node, each in owed.items() if each},
                    "silent": [node for node in nodes if node not in owed],
                }
            )
        return found

    async def is_settled(self, dataset: str) -> bool:
        """Whether all nodes that answer hold their parts of the latest revision of a dataset, as far
        as that is possible. Raises: EtcdAwayError."""
        away = self._nodes.find_away()
        for want in await self.read_held():
            if want["want"] == f"{dataset}@{LATEST}":
                is_silent = any(node not in away for node in want["silent"])
                owing = [each for node, each in want["owing"].items() if node not in away]
                if is_silent or not all(each["short"] or each.get("gone") for each in owing):
                    return False
        return True

    async def wait_for(self, want: Want) -> dict[str, Any]:
        """Wait until all nodes hold their parts of a want, however long etcd or nodes are away.
        Raises: ResourceError if it does not fit on one of them, or files are gone; ConfigError if it
        is no longer wanted."""
        while want.name in self._catalog.wants:
            with contextlib.suppress(EtcdAwayError):
                held = {each["want"]: each for each in await self.read_held()}
                found = held.get(want.target)
                if found is None:
                    continue  # it is not wanted any more since etcd was asked
                for node, owed in found["owing"].items():
                    if owed["short"]:
                        raise ResourceError(
                            f"{want.target} does not fit on {node}: it needs {owed['short']:,} bytes more than are "
                            "left after pinned datasets, earlier wants and the data of jobs\n"
                            "unwant something, raise `mirror.size` there, or spread it over more nodes"
                        )
                    if owed.get("gone"):
                        raise ResourceError(f"{node}: {owed['trouble']}")
                if found["complete"] == found["nodes"]:
                    return found
            await asyncio.sleep(_LOOK_SECONDS)
        raise ConfigError(f"{want.target} is no longer wanted\nrequest it again")

    async def find_unsettled(self) -> set[str]:
        """The names of all revisions of the datasets of which some node lacks something. Raises:
        EtcdAwayError."""
        held = await self.read_held()
        settled = {each["want"] for each in held if each["complete"] == each["nodes"]}
        wants = [each for each in self._catalog.wants.values() if each.target not in settled]
        known = [self._catalog.list_revisions(each.dataset) for each in wants]
        return {revision.name for some in known for revision in some}
