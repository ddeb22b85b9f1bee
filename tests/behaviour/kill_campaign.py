"""Kills builds and collections of garbage at random moments, two at a time on one cache: FOLDER FIRST-SEED COUNT.

Each round begins with no cache, a built one, or one that lacks files which came later. A build is killed, and often a second
build or a `gc` beside it. Then: the cache is read where its run is whole, built, verified and read. Prints a line of JSON:
how many processes were killed while they worked, and what went wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import megablend
from megablend.errors import CacheError


def tokens_of(config: dict[str, Any]) -> str:
    dataset = megablend.open(config)
    tokens = np.concatenate([dataset[k]["tokens"].numpy() for k in range(len(dataset))])
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()


def start(work: Callable[[], object], output: Path) -> int:
    """Do `work` in a forked child, which has no other way out than status 0, 3 for a CacheError, or 70."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        signal.alarm(100)
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        status = 0
    except CacheError as error:
        os.write(2, f"{error}\n".encode())
        status = 3
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(status)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Campaign:
    """Rounds on caches of one config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads(
            (folder / "config.json").read_text(encoding="utf-8")
        )
        self.cache = Path(self.config["cache"])
        self.output = folder / "output"
        fewer = json.loads((folder / "fewer.json").read_text(encoding="utf-8"))
        self.killed = 0
        self.problems: list[str] = []
        # In this process, so that children find all that is compiled and imported
        megablend.build(fewer)
        shutil.copytree(self.cache, folder / "older")
        began = time.monotonic()
        megablend.build(self.config)
        self.seconds = time.monotonic() - began
        self.runs = {index: tokens_of(self.config) for index in [self._index()]}
        shutil.copytree(self.cache, folder / "built")
        shutil.rmtree(self.cache)
        megablend.build(self.config)
        self.runs[self._index()] = tokens_of(self.config)
        megablend.gc(self.cache, older_than_days=0)

    def _index(self) -> str:
        ledger = json.loads((self.cache / "runs" / "demo.json").read_text(encoding="utf-8"))
        return str(ledger["index"])

    def round(self, seed: int) -> None:
        chance = random.Random(seed)
        shutil.rmtree(self.cache, ignore_errors=True)
        before = chance.choice(["none", "older", "built"])
        if before != "none":
            shutil.copytree(self.folder / before, self.cache)
        self.output.write_bytes(b"")
        second = chance.choice(["none", "build", "gc"])
        commands = {"build": self._build, "gc": lambda: megablend.gc(self.cache, older_than_days=0)}
        pids = [start(commands[name], self.output) for name in ("build", second) if name != "none"]
        victims = pids[:1] if chance.random() < 0.7 else pids
        for victim in victims:
            time.sleep(chance.uniform(0, 1.3 * self.seconds / len(victims)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        ends = [wait(pid) for pid in pids]
        self.killed += ends.count(-signal.SIGKILL)
        what = f"seed {seed}: from {before}, with {second}: ended {ends}: "
        if set(ends) - {0, -signal.SIGKILL} - ({3} if second == "gc" else set()):
            self.problems.append(what + self.output.read_text(errors="replace"))
        if end := wait(start(self._check, self.output)):
            self.problems.append(f"{what}then {end}: {self.output.read_text(errors='replace')}")

    def _build(self) -> None:
        megablend.build(self.config)

    def _check(self) -> None:
        if (self.cache / "runs" / "demo.json").exists():
            assert tokens_of(self.config) == self.runs[self._index()], "read before the next build"
        megablend.build(self.config)
        assert tokens_of(self.config) == self.runs[self._index()], "read after the next build"
        assert megablend.verify(self.cache, data=True).problems == ()
        left = [str(path) for path in self.cache.rglob(".tmp-*")]
        assert not left, left


def main() -> None:
    campaign = Campaign(Path(sys.argv[1]))
    first = int(sys.argv[2])
    count = int(sys.argv[3])
    seed = first
    while campaign.killed < count:
        campaign.round(seed)
        seed += 1
    print(
        json.dumps(
            {"rounds": seed - first, "killed": campaign.killed, "problems": campaign.problems}
        )
    )


if __name__ == "__main__":
    main()
