"""The system fails a call, any of those that concern the data or the cache: handled, or an error that names path and cause.

strace injects the failure (an errno for the n-th call of a kind) into a command. Never a traceback, never exit code 70, never a
hang; and afterwards the cache is built, verified and read as if nothing had been. MEGABLEND_TEST_FAULTS sets how many the long
part injects, MEGABLEND_TEST_SEED the first one's seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from tests.preloaded import python
from tests.runs import documents, make_config, write_source

STRACE = shutil.which("strace")
KINDS = (
    "openat,read,pread64,mmap,fstat,newfstatat,getdents64,write,pwrite64,fsync,rename,flock,mkdir,unlink,unlinkat,rmdir,ftruncate,"
    "lseek,close,fadvise64,access,readlink"
)
ERRORS = ("EACCES", "EIO", "ESTALE", "EMFILE", "ENOMEM", "ENOSPC")
COMMANDS = (
    "build",
    "build again",
    "describe",
    "describe cache",
    "show",
    "verify",
    "verify data",
    "gc",
    "read",
    "read large",
    "read direct",
    "megatron",
)
FAULTS = int(os.environ.get("MEGABLEND_TEST_FAULTS", "200"))
SEED = int(os.environ.get("MEGABLEND_TEST_SEED", "0"))


class Call(NamedTuple):
    kind: str
    number: int
    """Of the calls of this kind by its thread, from 1."""
    text: str


class Done(NamedTuple):
    status: int
    output: str
    log: list[str]


class Server:
    """A warm process that forks a child a command."""

    def __init__(self, folder: Path, warm: list[dict[str, Any]]) -> None:
        self.folder = folder
        (folder / "warm.json").write_text(json.dumps(warm))
        script = Path(__file__).with_name("fault_server.py")
        self.errors = (folder / "server.log").open("wb")
        self.process = subprocess.Popen(
            [*python("torch"), str(script), str(folder / "warm.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin: IO[str] = self.process.stdin
        self.stdout: IO[str] = self.process.stdout
        assert self._line() == "ready", (folder / "server.log").read_text()

    def run(self, order: dict[str, Any], *trace: str) -> Done:
        output = self.folder / "output"
        log = self.folder / "trace"
        self.stdin.write(json.dumps({**order, "output": str(output)}) + "\n")
        pid = int(self._line())
        tracer = None
        if trace:
            tracer = subprocess.Popen(
                [str(STRACE), "-f", "-y", "-s", "0", "-o", str(log), *trace, "-p", str(pid)],
                stderr=subprocess.PIPE,
                text=True,
            )
            assert tracer.stderr is not None
            assert "attached" in tracer.stderr.readline()
        self.stdin.write("go\n")
        status = int(self._line())
        if tracer is not None:
            tracer.communicate(timeout=500)
        return Done(
            status,
            output.read_text(errors="replace"),
            log.read_text().splitlines() if trace else [],
        )

    def _line(self) -> str:
        watch = threading.Timer(250, self.process.kill)
        watch.start()
        line = self.stdout.readline().strip()
        watch.cancel()
        return line

    def close(self) -> None:
        self.stdin.close()
        self.process.wait(timeout=500)
        self.stdout.close()
        self.errors.close()


class Campaign:
    """Data, a built cache, and the commands on a copy of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        warm = [{"argv": ["build", self._config(folder / "warm")]}, *self._orders(folder / "warm")]
        self._config(self.work)
        self.server = Server(folder, warm)
        self.calls: dict[str, list[Call]] = {}
        assert self.server.run(self.order("build")).status == 0
        shutil.copytree(self.work / "cache", folder / "built")
        self.tokens = self.server.run(self.order("read")).output
        assert self.server.run(self.order("megatron")).status == 0
        self.megatron = {
            path.name: path.read_bytes() for path in (self.work / "cache-megatron").glob("[!.]*.*")
        }

    def _config(self, folder: Path) -> str:
        kinds = ("parquet", "arrow", "megatron")
        sources = [
            write_source(folder, i, kind, documents(i, 30, 20, 3)) | {"weight": 1}
            for i, kind in enumerate(kinds)
        ]
        config = make_config(folder, sources, samples=40, run="demo", order="row")
        (folder / "demo.json").write_text(json.dumps(config))
        (folder / "direct.json").write_text(json.dumps(config | {"direct_io": True}))
        return str(folder / "demo.json")

    def _orders(self, folder: Path) -> list[dict[str, Any]]:
        config = str(folder / "demo.json")
        cache = str(folder / "cache")
        commands = [
            ["build", config],
            ["build", config],
            ["describe", config],
            ["describe", cache],
            ["show", config, "-k", "7"],
            ["verify", cache],
            ["verify", "--data", cache],
            ["gc", "--older-than", "0", cache],
        ]
        reads: list[dict[str, Any]] = [
            {"read": config},
            {"read": config, "large": True},
            {"read": str(folder / "direct.json")},
        ]
        prefixes = " ".join(
            str(path.with_suffix("")) for path in sorted(folder.glob("source2/*.bin"))
        )
        words = f"--data-path {prefixes} --seq-length 8 --split 1,0,0 --train-samples 40"
        options = f'--valid-samples 0 --test-samples 0 --tokenizer-identifiers {{"class":"T"}} --data-cache-path {cache}-megatron'
        megatron = ["megatron-cache", *words.split(), *options.split()]
        return [*({"argv": command} for command in commands), *reads, {"argv": megatron}]

    def order(self, command: str) -> dict[str, Any]:
        return self._orders(self.work)[COMMANDS.index(command)]

    def prepare(self, command: str) -> None:
        shutil.rmtree(self.work / "cache", ignore_errors=True)
        shutil.rmtree(self.work / "cache-megatron", ignore_errors=True)
        if command != "build":
            shutil.copytree(self.folder / "built", self.work / "cache")
        if command == "gc":
            (self.work / "cache" / "fragments" / "old-one").write_bytes(b"x")

    def calls_of(self, command: str) -> list[Call]:
        """The calls that concern our folders, of a command that nothing befalls."""
        if command not in self.calls:
            self.prepare(command)
            done = self.server.run(self.order(command), "-e", f"trace={KINDS}")
            assert done.status == 0, done.output
            counts: Counter[tuple[str, str]] = Counter()
            found = []
            for line in done.log:
                match = re.match(r"(\d+) +(\w+)\(", line)
                if match:
                    counts[match[1], match[2]] += 1
                    if str(self.work) in line:
                        found.append(Call(match[2], counts[match[1], match[2]], line))
            assert found
            self.calls[command] = found
        return self.calls[command]

    def fault(self, seed: int) -> None:
        chance = random.Random(seed)
        command = chance.choice(COMMANDS)
        calls = self.calls_of(command)
        kind = chance.choice(sorted({call.kind for call in calls}))
        call = chance.choice([call for call in calls if call.kind == kind])
        error = chance.choice(ERRORS)
        self.prepare(command)
        done = self.server.run(
            self.order(command),
            "-e",
            f"trace={kind}",
            "-e",
            f"inject={kind}:error={error}:when={call.number}",
        )
        injected = [line for line in done.log if "(INJECTED)" in line]
        what = f"seed {seed}: {command}: {error} in {injected or call.text}\nexit {done.status}\n{done.output}"
        assert "Traceback" not in done.output, what
        if command.startswith("read") and done.status == 0:
            assert self.tokens in done.output, what
        if done.status != 0:
            assert done.status in (2, 3), what
            if str(self.work) in "".join(injected):  # rather than a file of the system
                self.check_message(command, done.output, what)
        self.check_afterwards(command, what)

    def check_message(self, command: str, output: str, what: str) -> None:
        """The last line names a path, and what helps."""
        lines = [line for line in output.splitlines() if line.strip()]
        assert lines, what
        if command in ("verify", "verify data"):
            assert any(str(self.work) in line for line in lines), what
        else:
            assert lines[-1].startswith("megablend: "), what
            assert str(self.work) in lines[-1] or "out of memory" in lines[-1], what

    def check_afterwards(self, command: str, what: str) -> None:
        (self.work / "cache" / "fragments" / "old-one").unlink(missing_ok=True)
        again = ["megatron"] if command == "megatron" else ["build", "verify data"]
        for order in map(self.order, again):
            done = self.server.run(order)
            assert done.status == 0, f"{what}\nafterwards: {done.output}"
        if command == "megatron":
            found = {
                path.name: path.read_bytes()
                for path in (self.work / "cache-megatron").glob("[!.]*.*")
            }
            assert found == self.megatron, f"{what}\nafterwards: {sorted(found)}"
            return
        done = self.server.run(self.order("read"))
        assert done.output == self.tokens, f"{what}\nafterwards: {done.output}"


def problem_of(campaign: Campaign, seed: int) -> str | None:
    try:
        campaign.fault(seed)
    except AssertionError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    found = Campaign(tmp_path_factory.mktemp("faults"))
    yield found
    found.server.close()


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_fails(campaign: Campaign, seed: int) -> None:
    campaign.fault(seed)


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.timeout(20 * FAULTS + 60)
def test_many_calls_that_fail(campaign: Campaign) -> None:
    problems = [
        problem for seed in range(SEED, SEED + FAULTS) if (problem := problem_of(campaign, seed))
    ]
    assert not problems, f"{len(problems)} of {FAULTS}:\n" + "\n\n".join(problems)
