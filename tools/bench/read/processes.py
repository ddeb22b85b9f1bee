"""What a tree of processes uses, some of which may have left the parent: recognised by a variable in their environment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "MEGABLEND_BENCH_MARK"
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over processes, those that have ended and were waited for included."""

    cpu_seconds: float
    read_bytes: int
    """That storage had to give: what was in the page cache does not count."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use at a moment, shared pages divided by those who share them."""

    pss: int
    own: int
    """Of these, not of files: what the kernel cannot drop."""


def marked(mark: str) -> list[int]:
    """Processes whose environment holds MARK=mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                entries = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in entries:
                found.append(int(folder.name))
    return found


def usage(mark: str) -> Usage:
    """What the marked processes have used so far."""
    ticks = read = 0
    for pid in marked(mark):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            counters = Path(f"/proc/{pid}/io").read_text()
        except OSError:
            continue
        # User, system, and those of children that were waited for
        ticks += sum(int(field) for field in fields[11:15])
        read += _field(counters, "read_bytes:")
    return Usage(ticks / _TICK, read)


def memory(mark: str) -> Memory:
    """What the marked processes hold now."""
    pss = own = 0
    for pid in marked(mark):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        pss += _field(rollup, "Pss:") << 10
        own += (_field(rollup, "Pss_Anon:") + _field(rollup, "Pss_Shmem:")) << 10
    return Memory(pss, own)


def end(mark: str) -> None:
    """Kill the marked processes."""
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _field(text: str, name: str) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))
