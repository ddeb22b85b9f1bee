"""Nodes and etcd are killed and stopped at random while datasets that are wanted come from the source: all comes, each byte as it
is there, and little is read twice.

MEGABLEND_TEST_NODE_KILLS sets how many are killed or stopped, MEGABLEND_TEST_SEED the first round's seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.mirror.catalog.test_cluster_datasets import Service, keys, services
from tests.mirror.catalog.test_datasets import MB, check_folder, count_sent, make_files
from tests.mirror.etcd import EtcdServer
from tests.mirror.nodes import count_only, find_held
from tests.storage.faulty import Faults

__all__ = ["keys"]

KILLS = int(os.environ.get("MEGABLEND_TEST_NODE_KILLS", "200"))
SEED = int(os.environ.get("MEGABLEND_TEST_SEED", "0"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("obstore", "keys"),
    pytest.mark.timeout(600 + 20 * KILLS),
]
LEASE = 5.0
NODES = 4
MOST_AWAY = 2
REQUESTS = 4
"""In flight at the source, of each node."""
REQUEST_BYTES = MB
SIZES = {"small": 700, "third.bin": MB // 3, "big.bin": 3 * MB + 5}


@dataclass
class Campaign:
    """Kills and stops nodes, and etcd, while what they are to hold comes from the source."""

    nodes: list[Service]
    etcd: EtcdServer
    draw: random.Random
    num_kills: int = 0
    num_node_kills: int = 0
    num_starts: int = 0
    only_bytes: int = 0
    """Of what only nodes held that were away for longer than a lease, when it ended."""
    back: dict[int, tuple[float, Callable[[], None]]] = field(default_factory=dict)
    """By node, and -1 for etcd: when it comes back, and how."""
    since: dict[int, float] = field(default_factory=dict)
    """Nodes that are away, and may still have a lease."""
    is_forgotten: set[int] = field(default_factory=set)
    """Nodes that are away, and whose lease has ended."""

    def run(self, count: int, is_over: Callable[[], bool]) -> None:
        """Until so many were killed or stopped, or nothing is left to be read."""
        following = 0.0
        while self.num_kills < count and not is_over():
            self._step()
            if time.monotonic() >= following:
                self._hit()
                following = time.monotonic() + self.draw.uniform(0.3, 2.5)
            time.sleep(0.05)

    def end(self) -> None:
        """All come back."""
        while self.back:
            self._step(all_at_once=True)

    def _step(self, *, all_at_once: bool = False) -> None:
        now = time.monotonic()
        for i in [i for i, since in self.since.items() if now - since > 2 / 3 * LEASE]:
            # Its last sign of life may have been earlier by a third
            del self.since[i]
            self.is_forgotten.add(i)
            others = set(range(len(self.nodes))) - self.is_forgotten
            self.only_bytes += count_only(
                find_held(self.nodes[i].folder), [find_held(self.nodes[j].folder) for j in others]
            )
        for i, (due, come) in list(self.back.items()):
            if due <= now or all_at_once:
                del self.back[i]
                self.since.pop(i, None)
                self.is_forgotten.discard(i)
                come()

    def _hit(self) -> None:
        if self.draw.random() < 0.1 and -1 not in self.back:
            self._hit_etcd()
            return
        there = [i for i in range(len(self.nodes)) if i not in self.back]
        count = 2 if self.draw.random() < 0.25 else 1
        room = MOST_AWAY - (len(self.nodes) - len(there))
        for i in self.draw.sample(there, min(count, room)):
            self._hit_node(i)

    def _hit_etcd(self) -> None:
        self.num_kills += 1
        away = self.draw.uniform(0.5, 8)
        if self.draw.random() < 0.5:
            self.etcd.stop()
            come: Callable[[], None] = self.etcd.start
        else:
            self.etcd.send(signal.SIGSTOP)
            come = lambda: self.etcd.send(signal.SIGCONT)  # noqa: E731
        self.back[-1] = time.monotonic() + away, come

    def _hit_node(self, i: int) -> None:
        node = self.nodes[i]
        assert node.process is not None
        assert node.process.poll() is None, node.config.with_suffix(".log").read_text()
        process = node.process
        self.num_kills += 1
        self.num_node_kills += 1
        if self.draw.random() < 0.3:
            process.send_signal(signal.SIGSTOP)
            away = self.draw.uniform(1, 30)
            come: Callable[[], None] = lambda: process.send_signal(signal.SIGCONT)  # noqa: E731
        else:
            node.kill()
            away = self.draw.choice((0, self.draw.uniform(0, LEASE), self.draw.uniform(LEASE, 12)))

            def come() -> None:
                self.num_starts += 1
                node.launch()

        self.since[i] = time.monotonic()
        self.back[i] = time.monotonic() + away, come


def run_round(folder: Path, seed: int, count: int, num_files: int, rate: float) -> int:
    """One cluster, which is killed and stopped so often, or until nothing is left to be read. Returns: how often it was."""
    draw = random.Random(seed)
    sizes = {f"{part}-{i}-{name}": size for part in "abc" for i in range(num_files) for name, size in SIZES.items()}  # fmt: skip
    files: dict[str, bytes] = {}
    for i in range(3):
        files |= make_files(f"d{i}", sizes, seed + i)
    folder.mkdir()
    print(f"seed {seed}:", end=" ", flush=True)
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    limits = {"max_requests": REQUESTS}  # of all nodes, but each may have so few
    try:
        with services(folder, files, etcd, NODES, LEASE, limits, copies=2) as nodes:
            found = _run(nodes, etcd, files, Campaign(nodes, etcd, draw), count, rate)
    finally:
        etcd.stop()
    return found


def _run(
    nodes: list[Service],
    etcd: EtcdServer,
    files: Mapping[str, bytes],
    campaign: Campaign,
    count: int,
    rate: float,
) -> int:
    first, second = nodes[:2]
    source = first.source
    of_a = {}
    for i in range(3):
        # Of each dataset two revisions, which have a third of the files in common
        for parts in ("ab", "bc"):
            patterns = [f"s3://b/d{i}/{part}-*" for part in parts]
            revision = str(first.ask("add", f"d{i}", *patterns)["digest"])
            if parts == "ab":
                of_a[i] = f"d{i}@{revision}"
    names = [str(node.storage["mirror"]["advertise"]) for node in nodes]
    wants: list[list[str]] = [
        [of_a[0], "--copies", "all"],
        ["d0", "--copies", "all"],
        [of_a[1]],
        ["d1", "--copies", "3"],
        [of_a[2], "--pin", "--copies", "2"],
        ["d2", "--nodes", ",".join(names[:2]), "--copies", "1"],
    ]
    source.faults = Faults(rate=rate)
    listed = count_sent(source)
    for want in wants:
        second.ask("want", *want)
    unique = sum(map(len, files.values()))
    began = time.monotonic()
    campaign.run(count, lambda: source.bytes - listed > 0.9 * unique)
    lasted = time.monotonic() - began
    read_by_then = source.bytes - listed
    campaign.end()
    source.faults = Faults()
    started = time.monotonic()
    for node in nodes:
        node.wait_until_ready()
        node.wait_for_view(NODES)
    for want in wants:
        held = second.ask("want", *want, "--wait")
        assert held["complete"] == held["nodes"]
        assert held["missing"] == 0
    took = time.monotonic() - started
    sent = count_sent(source) - listed
    more = sent - unique
    states = (NODES + campaign.num_node_kills) * len(files)
    in_flight = campaign.num_node_kills * REQUESTS * REQUEST_BYTES
    print(
        f"{campaign.num_kills} kills in {lasted:.0f} s, of them {campaign.num_node_kills} of nodes; "
        f"{read_by_then / 1e6:.1f} MB read by then; complete after {took:.1f} s; unique {unique / 1e6:.1f} MB, "
        f"{more / 1e6:.2f} MB more, {campaign.only_bytes / 1e6:.2f} MB of them at most what only nodes held that were away, "
        f"{in_flight / 1e6:.1f} MB at most in flight"
    )
    assert took <= 60
    assert 0 <= more <= in_flight + campaign.only_bytes + states
    for node in nodes:
        for target, parts in ((of_a[0], "ab"), ("d0", "bc")):
            expected = {k: v for k, v in files.items() if k.startswith("d0/") and k[3] in parts}
            check_folder(node.ask("path", target)["path"], expected, "d0")
    source.is_down = True
    reader = campaign.draw.choice(nodes)
    for name, data in files.items():
        if not name.startswith("d0/"):
            assert reader.read(f"s3://b/{name}") == data, name
    return campaign.num_kills


def test_all_comes_though_nodes_and_etcd_are_killed(tmp_path: Path) -> None:
    num_done = 0
    rounds = 0
    while num_done < KILLS:
        left = KILLS - num_done
        num_done += run_round(tmp_path / str(rounds), SEED + rounds, left, 2, 1.2e6)
        rounds += 1
