"""One contender measured: started in a process of its own, made cold or warm, its tree of processes watched while it reads."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_data import data_bytes, disk_bytes, files_of
from processes import MARK, Memory, Usage, end, memory, usage
from residency import drop, load, resident

SAMPLING = 0.2
"""Seconds between two looks at memory."""
READY_LIMIT = 90.0
COLD = 0.01
WARM = 0.99
"""Shares of pages in memory, at most and at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a contender is stopped."""

    seconds: float
    """Of reading, after the first batch."""
    first: float
    """Until the first batch."""
    tokens: int
    """One pass."""


class ContenderError(Exception):
    """A contender ended, or took too long; says why."""


def measure(
    name: str, folder: Path, order: str, state: str, python: str, limits: Limits
) -> dict[str, Any]:
    """A row of results.

    Args:
        folder: the contender's data.
        order: of megablend; else empty.
        state: "warm" or "cold".
        python: an interpreter that has what the contender needs.

    Raises: ContenderError; RuntimeError where the page cache could not be brought into the state.
    """
    mark = uuid.uuid4().hex
    here, there = os.pipe()
    script = Path(__file__).parent / "contender_process.py"
    command = [
        python,
        str(script),
        name,
        str(folder),
        str(limits.seconds),
        str(limits.tokens),
        str(there),
    ]
    with tempfile.TemporaryFile() as log, os.fdopen(here, "rb", buffering=0) as pipe:
        environment = {**os.environ, **quiet(folder), MARK: mark}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[there],
        )
        os.close(there)
        try:
            return _watched(process, pipe, mark, folder, order, state, limits)
        except ContenderError as failure:
            with suppress(subprocess.TimeoutExpired):  # it says why after it has closed the pipe
                process.wait(2)
            log.seek(0)
            lines = [
                line for line in log.read().decode(errors="replace").splitlines() if line.strip()
            ]
            raise ContenderError(
                f"{failure}: {lines[-1].strip()[:200] if lines else 'it said nothing'}"
            ) from None
        finally:
            end(mark)
            process.wait()
            assert process.stdin
            process.stdin.close()


def quiet(folder: Path) -> dict[str, str]:
    """Environment in which no peer looks for a network or writes outside of the folder."""
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
        ),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder.parent / "hf"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }


def _watched(
    process: subprocess.Popen[bytes],
    pipe: Any,
    mark: str,
    folder: Path,
    order: str,
    state: str,
    limits: Limits,
) -> dict[str, Any]:
    assert process.stdin
    next_message(pipe, "ready", READY_LIMIT)
    share = _prepare(files_of(folder, order), state)
    peaks = [Memory(0, 0)]
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(mark, peaks, stop))
    watcher.start()
    opening = usage(mark)
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
        first = next_message(pipe, "first", limits.first)
        before = usage(mark)
        done = next_message(pipe, "done", limits.seconds + 30)
        after = usage(mark)
    finally:
        stop.set()
        watcher.join()
    peaks.append(memory(mark))
    return _row(first, done, (opening, before, after), peaks, limits, share, folder, order)


def _row(
    first: dict[str, Any],
    done: dict[str, Any],
    usages: tuple[Usage, Usage, Usage],
    peaks: list[Memory],
    limits: Limits,
    share: float,
    folder: Path,
    order: str,
) -> dict[str, Any]:
    opening, before, after = usages
    tokens = done["tokens"]
    used = data_bytes(folder) / limits.tokens * (tokens + first["tokens"])
    return {
        "resident": share,
        "tokens": tokens,
        "seconds": done["seconds"],
        "first_s": first["seconds"],
        "tokens_per_s": tokens / done["seconds"] if tokens else 0.0,
        "cpu_s_per_1e9": (after.cpu_seconds - before.cpu_seconds) / tokens * 1e9
        if tokens
        else None,
        "read_per_used": (after.read_bytes - opening.read_bytes) / used,
        "p50_ms": done["p50_ms"],
        "p99_ms": done["p99_ms"],
        "pss_bytes": max(peak.pss for peak in peaks),
        "own_bytes": max(peak.own for peak in peaks),
        "disk_bytes": disk_bytes(folder, order),
    }


def _prepare(files: list[Path], state: str) -> float:
    """Bring the files into memory, or out of it; the share of their pages that is there."""
    for _ in range(3):
        load(files) if state == "warm" else drop(files)
        share = resident(files)
        if (state == "warm" and share >= WARM) or (state == "cold" and share <= COLD):
            return share
        time.sleep(0.5)
    raise RuntimeError(f"{share:.1%} of {files[0].parent} is in memory; expected it to be {state}")


def _watch(mark: str, peaks: list[Memory], stop: threading.Event) -> None:
    while not stop.wait(SAMPLING):
        peaks.append(memory(mark))


def next_message(pipe: Any, step: str, limit: float) -> dict[str, Any]:
    """The contender's next message. Raises ContenderError where it is not there in time, or not what is expected."""
    deadline = time.monotonic() + limit
    # Not `select`, which takes no descriptor above 1,023
    coming = select.poll()
    coming.register(pipe, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not coming.poll(1000 * left):
            raise ContenderError(f"not {step} after {limit:.0f} s")
        part = pipe.read(1)  # no more: the next message may follow at once
        if not part:
            raise ContenderError(f"ended before it was {step}")
        line += part
    found: dict[str, Any] = json.loads(line)
    assert found["step"] == step
    return found
