"""Two jobs, and two users, that share the mirror of a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.process import run_node
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from tests.mirror.nodes import get_status, mirror
from tests.mirror.test_clusters import count_bytes, read_all, with_mirror
from tests.mirror.test_runs import digest_batches, make_configs
from tests.preloaded import python
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
OWNER = 1201
OTHER = 1202
GROUP = "users"
GROUP_ID = 100
USERS = (
    ("owner", OWNER, GROUP_ID),
    ("in the group", OTHER, GROUP_ID),
    ("outside", OTHER, OTHER),
)


def test_two_jobs_share_what_they_read(tmp_path: Path) -> None:
    """Two runs over the same files, at the same time, through one node process."""
    with FaultySource({}) as source, mirror(tmp_path / "m", source.url) as settings:
        plain, remote = make_configs(tmp_path, source, {})
        others = [
            each | {"seed": 99, "sequence_length": 32, "cache": f"{each['cache']}-99"}
            for each in (plain, remote)
        ]
        for config in (plain, remote, *others):
            megablend.build(config)
        before = source.bytes
        first, second = (read_all([each])[0] for each in (plain, others[0]))
        assert first != second
        jobs = [with_mirror(each, settings) for each in (remote, others[1])]
        code = "import sys; from tests.mirror.test_users import print_batches; print_batches(sys.stdin)"

        def run(job: dict[str, Any]) -> list[str]:
            command = [*python("torch"), "-c", code]
            text = json.dumps(job)
            done = subprocess.run(
                command, input=text, stdout=subprocess.PIPE, text=True, check=True
            )
            found: list[str] = json.loads(done.stdout)
            return found

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(run, jobs))
        assert found == [first, second]
        # But for parts of answers that hold no file's bytes
        by_node = get_status(settings)["source_bytes"]
        assert 0 <= source.bytes - before - by_node <= 40 * len(source.files)
        assert source.bytes - before <= 1.001 * count_bytes(source) + 40 * len(source.files)


def print_batches(stdin: Any) -> None:
    """In a process of its own: digests of the batches of the config that it is given."""
    print(json.dumps(digest_batches(json.load(stdin))))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")
def test_another_user_reads_what_a_group_shares(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.mirror.test_users", tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    for name in ("owner", "in the group"):
        assert (found[name]["status"], found[name]["said"]) == (0, ""), process.stderr
    assert found["owner"]["bytes"] > 0
    assert found["in the group"]["bytes"] == 0
    assert found["outside"]["status"] == 1, process.stderr
    assert found["outside"]["bytes"] == 0
    assert f"belongs to user {OWNER}" in found["outside"]["said"]
    assert "`mirror.group`" in found["outside"]["said"]


def read_as_users(folder: Path) -> None:
    """Print what three users read. They are forked from a process that has loaded all they need, but
    read no object store yet: they may be unable to read the interpreter's files."""
    with FaultySource({}) as source:
        plain, remote = make_configs(folder, source, {})
        write = "import json, sys, megablend; megablend.build(json.load(sys.stdin))"
        subprocess.run(
            [sys.executable, "-c", write], input=json.dumps(remote), text=True, check=True
        )
        megablend.build(plain)
        expected = digest_batches(plain)
        for path in (folder, *folder.parents):
            path.chmod(path.stat().st_mode | 0o055)
        for path in folder.rglob("*"):
            path.chmod(path.stat().st_mode | 0o555)
        own = folder / "m"
        own.mkdir()
        os.chown(own, OWNER, GROUP_ID)
        settings = {
            "folder": str(own),
            "prefixes": [f"{source.url}/"],
            "reserve": 0,
            "group": GROUP,
        }
        config = with_mirror(remote, settings)
        reading, writing = os.pipe()

        def serve() -> None:
            options = parse_mirror(settings)
            run_node(options, ObjectOptions(), is_service=True, ready=lambda: os.close(writing))

        node = fork_as(OWNER, GROUP_ID, serve)
        os.close(writing)
        os.read(reading, 1)
        found: dict[str, dict[str, Any]] = {}
        for name, user, group in USERS:
            before = source.bytes
            log = folder / f"{name}.log"
            log.touch()
            log.chmod(0o666)

            def read(log: Path = log) -> None:
                os.dup2(os.open(log, os.O_WRONLY), 2)
                MirrorFolder.attach(own)
                assert digest_batches(config) == expected

            child = fork_as(user, group, read)
            found[name] = {
                "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
                "bytes": source.bytes - before,
                "said": log.read_text(),
            }
        os.kill(node, signal.SIGTERM)
        os.waitpid(node, 0)
        print(json.dumps(found))


def fork_as(user: int, group: int, work: Callable[[], None]) -> int:
    """Do something in a child process of another user; its exit code is 0 if that went well."""
    child = os.fork()
    if child:
        return child
    try:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    read_as_users(Path(sys.argv[1]))
