"""Kills builds into an object store at random moments, often two at a time: CONFIG FOLDER FIRST-SEED COUNT.

Each round is a cache of its own, and each process a node of its own. After a kill: where the run is there it is read, then it is
built, read and verified. This process never uses the store's client, so that children can be forked. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megablend
from tests.behaviour.kill_campaign import start, tokens_of, wait


class Campaign:
    """Rounds on caches of one config."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.output = folder / "output"
        folder.mkdir(exist_ok=True)
        local = config | {"cache": str(folder / "local")}
        # In this process, so that children find all that is compiled and imported
        megablend.build(local)
        self.expected = tokens_of(local)
        self.killed = 0
        self.nodes = 0
        self.problems: list[str] = []
        for name in ("first", "second"):  # the first also compiles
            began = time.monotonic()
            assert self.run(megablend.build, f"{config['cache']}/{name}") == 0, (
                self.output.read_text()
            )
            self.seconds = time.monotonic() - began

    def begin(self, work: Callable[[dict[str, Any]], object], cache: str) -> int:
        """Start work on a cache, on a new node."""
        self.nodes += 1
        os.environ["MEGABLEND_LOCAL_CACHE"] = str(self.folder / f"node{self.nodes}")
        return start(lambda: work(self.config | {"cache": cache}), self.output)

    def run(self, work: Callable[[dict[str, Any]], object], cache: str) -> int:
        return wait(self.begin(work, cache))

    def round(self, seed: int) -> None:
        chance = random.Random(seed)
        self.output.write_bytes(b"")
        cache = f"{self.config['cache']}/{seed}"
        if chance.random() < 0.3:
            self.run(megablend.build, cache)
        pids = [self.begin(megablend.build, cache) for _ in range(chance.choice([1, 2]))]
        time.sleep(chance.uniform(0, 0.9 * self.seconds))
        os.kill(pids[0], signal.SIGKILL)
        ends = [wait(pid) for pid in pids]
        self.killed += ends.count(-signal.SIGKILL)
        what = f"seed {seed}: ended {ends}: "
        if set(ends) - {0, -signal.SIGKILL}:
            self.problems.append(what + self.output.read_text(errors="replace"))
        if end := self.run(self._check, cache):
            self.problems.append(f"{what}then {end}: {self.output.read_text(errors='replace')}")
        for node in self.folder.glob("node*"):
            shutil.rmtree(node)

    def _check(self, config: dict[str, Any]) -> None:
        if self._has_runs(config["cache"]):
            assert tokens_of(config) == self.expected, "read before the next build"
        megablend.build(config)
        assert tokens_of(config) == self.expected, "read after the next build"
        assert megablend.verify(config["cache"]).problems == ()

    def _has_runs(self, cache: str) -> bool:
        try:
            return bool(megablend.list_runs(cache))
        except megablend.CacheError as error:
            if "there is no cache here" not in str(error):
                raise
            return False  # killed before its first object was written


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    campaign = Campaign(config, Path(sys.argv[2]))
    seed = first = int(sys.argv[3])
    while campaign.killed < int(sys.argv[4]):
        campaign.round(seed)
        seed += 1
        progress = f"{seed - first} rounds, {campaign.killed} killed; {campaign.problems}"
        campaign.folder.with_name("progress").write_text(progress)
    print(
        json.dumps(
            {"rounds": seed - first, "killed": campaign.killed, "problems": campaign.problems}
        )
    )


if __name__ == "__main__":
    main()
