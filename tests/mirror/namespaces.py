"""Machines of a cluster on this one: network namespaces at a bridge, where nginx serves the source.

`run_cluster` runs this module in namespaces of its own (user, network, mounts, processes), as an ordinary user too; it makes a
network namespace for each node, and one rank reads in each.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megablend.mirror.disk.folder import MirrorFolder

SOURCE = "10.9.0.254:8080"
UNSHARE = ["unshare", "-Urnm", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SECONDS = 280
_GO = "go"
_NGINX = """daemon off; {user} worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
    log_format bytes '$request_method $body_bytes_sent $request_uri';
    access_log {folder}/access bytes;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{ listen 8080; root {files}; {more} }}
}}
"""


def find_obstacle() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    for program in ("unshare", "ip", "nginx"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", "mount -t tmpfs none /run && ip link add br0 type bridge"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    return tried.stderr.strip() or None if tried.returncode else None


def run_cluster(folder: Path, files: Path, steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serve files to machines, and do one step after another.

    Args:
        steps: each `{"ranks": [{"node": i, "config": ..., "rank": r, "size": n}, ...]}`, read at the same time; with
            `"build": config`, that is built before, on node 0; with `"kill": folder`, the node process of that mirror is
            killed before, and the folder taken away. With `"epoch": n` each rank reads n batches and the validation, waits
            until all have done so, and reads the rest and the validation again.

    Returns: of each step `{"digests": [of each rank], "bytes": that have left the source in it, "later": those of them
        that left it after all had waited}`.
    """
    order = folder / "order.json"
    order.write_text(json.dumps({"folder": str(folder), "files": str(files), "steps": list(steps)}))
    command = [*UNSHARE, sys.executable, "-m", "tests.mirror.namespaces", "run", str(order)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def _run(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    ranks = [rank for step in order["steps"] for rank in step["ranks"]]
    count = 1 + max(rank["node"] for rank in ranks)
    make_network(count)
    log = start_source(folder, Path(order["files"]))
    found = []
    for step in order["steps"]:
        before = _count_bytes(log)
        if "kill" in step:
            mirror = Path(step["kill"])
            os.kill(MirrorFolder.attach(mirror).read_owner()["pid"], signal.SIGKILL)
            mirror.rename(f"{mirror}.lost")
        if "build" in step:
            _in_node(0, count, "build", json.dumps(step["build"]))
        meeting = Path(tempfile.mkdtemp(dir=folder))
        with ThreadPoolExecutor(len(step["ranks"])) as threads:
            orders = [
                json.dumps(rank | {"epoch": step.get("epoch"), "meeting": str(meeting)})
                for rank in step["ranks"]
            ]
            reading = [
                threads.submit(_in_node, rank["node"], count, "read", order)
                for rank, order in zip(step["ranks"], orders, strict=True)
            ]
            while len(list(meeting.iterdir())) < len(reading) and not all(
                each.done() for each in reading
            ):
                time.sleep(0.05)
            time.sleep(0.2)  # nginx writes its log after an answer
            halfway = _count_bytes(log)
            (meeting / _GO).touch()
        time.sleep(0.2)
        after = _count_bytes(log)
        digests = [json.loads(each.result().splitlines()[-1]) for each in reading]
        found.append({"digests": digests, "bytes": after - before, "later": after - halfway})
    print(json.dumps(found))


def start_source(folder: Path, files: Path, more: str = "") -> Path:
    """nginx, which answers when this returns.

    Args:
        more: settings of it.
    Returns: its log: method, bytes of the body and name of each answer.
    """
    served = folder / "nginx"
    served.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    about = _NGINX.format(user=user, folder=served, files=files, more=more)
    (served / "conf").write_text(about)
    subprocess.Popen(["nginx", "-c", str(served / "conf"), "-e", str(served / "errors")])
    while not (served / "pid").exists():
        time.sleep(0.01)
    return served / "access"


def make_network(count: int) -> None:
    """Namespaces n0, n1, ... at a bridge in this one: 10.9.0.1, 10.9.0.2, ...; the bridge is SOURCE's."""
    commands = [
        "mount -t tmpfs none /run",
        "ip link add br0 type bridge",
        "ip addr add 10.9.0.254/24 dev br0",
        "ip link set br0 up",
        "ip link set lo up",
    ]
    for i in range(count):
        commands += [
            f"ip netns add n{i}",
            f"ip link add v{i} type veth peer name eth0 netns n{i}",
            f"ip link set v{i} master br0 up",
            f"ip -n n{i} addr add 10.9.0.{i + 1}/24 dev eth0",
            f"ip -n n{i} link set eth0 up",
            f"ip -n n{i} link set lo up",
        ]
    for command in commands:
        subprocess.run(command.split(), check=True)


def _in_node(node: int, count: int, *arguments: str) -> str:
    """Run this module in a node, with the variables that torchrun sets."""
    job = {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(count), "MASTER_ADDR": "10.9.0.1"}
    command = ["ip", "netns", "exec", f"n{node}", sys.executable, "-m", "tests.mirror.namespaces"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
        env=os.environ | job,
    )
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)
    return done.stdout


def _count_bytes(log: Path) -> int:
    return sum(int(line.split()[1]) for line in log.read_text().splitlines()) if log.exists() else 0


def _read(order: dict[str, Any]) -> None:
    import megablend
    from tests.mirror.test_runs import digest_fields

    def load(split: str) -> megablend.Loader:
        return megablend.Loader(
            megablend.open(order["config"], split),
            micro_batch_size=4,
            data_parallel_rank=order["rank"],
            data_parallel_size=order["size"],
            replicas=order.get("replicas", 1),
        )

    batches = iter(load("train"))
    found = [digest_fields(batch) for batch in itertools.islice(batches, order["epoch"])]
    if order["epoch"] is not None:
        found += map(digest_fields, load("valid"))
        meeting = Path(order["meeting"])
        (meeting / str(order["node"])).touch()
        while not (meeting / _GO).exists():
            time.sleep(0.05)
        found += map(digest_fields, batches)
        found += map(digest_fields, load("valid"))
    print(json.dumps(found))


def _build(config: dict[str, Any]) -> None:
    import megablend

    megablend.build(config)


if __name__ == "__main__":
    what, argument = sys.argv[1:]
    if what == "run":
        _run(json.loads(Path(argument).read_text()))
    else:
        {"build": _build, "read": _read}[what](json.loads(argument))
