"""Until all nodes have a dataset from one slow source: how long it takes, and what it costs whom.

    python tools/bench/mirror/all_copies.py [--mb 64] [--nodes 1,2,4,8] [--seconds 300]
        [--contenders megablend,rsyncs]

Nodes are network namespaces on this machine, the source is nginx behind a token bucket (`tc tbf`), a
dataset is files of 1 MiB. Compared, in turns: on each node by itself `rclone copy`, or obstore, which
writes what it reads; obstore through nginx on each node, with slices that consistent hashing gives to
one of them (NGINX_RING of machines.py); a chain, in which the first node has an rsync from the source,
and each next one has rsyncs of the files that the node before it has by then, until it has all;
`megablend datasets want --copies all --wait` on one node of a cluster with etcd. nginx, rsync's
daemons, etcd and node processes, which have shared one file, run before anything is measured, and the
dataset is added; starts of clients and commands count. What each node has is compared at the end.

CPU is that of daemons, clients and commands on the nodes (of Python clients, what follows imports), by
GB that have left and reached the nodes' links. That of the source and of etcd does not count.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machines
from machines import BRIDGE, SOURCE, run_on_node

SOURCE_URL = f"http://{SOURCE}:8080"
ETCD_URL = f"http://{BRIDGE}:2379"
RCLONE = ["rclone", "--config", "", "copy", "--http-url", f"{SOURCE_URL}/data/", ":http:"]
MEGABLEND = [sys.executable, "-m", "megablend"]
CONTENDERS = ("rclone", "obstore", "nginx ring", "rsyncs", "megablend")
HEAD = (
    "nodes contender   seconds  of one alone  source/data  CPU s a GB  most/mean  MB sent by each"
)


def main() -> None:
    """Compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--nodes", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most for a contender")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        read_files(json.loads(options.client))
    elif not options.inside:
        machines.run_inside()
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """In namespaces of its own: run all contenders."""
    counts = list(map(int, options.nodes.split(",")))
    machines.make_network(max(counts), "100mbit")
    (folder / "data").mkdir()
    rng = random.Random(0)
    for name in ["warm-up", *(f"data/{i:05d}" for i in range(options.mb))]:
        (folder / name).write_bytes(rng.randbytes(1 << 20))
    serve = f"server {{ listen 8080; root {folder}; autoindex on; }}"
    machines.start_nginx("src", folder / "source", serve)
    start_rsync("src", SOURCE, folder / "data", folder / "rsync")
    start_etcd(folder / "etcd")
    print(f"{options.mb} files of 1 MiB, 100 Mbit/s, load {os.getloadavg()[0]:.1f}\n{HEAD}")
    alone = float("inf")
    for count in counts:
        for name in options.contenders.split(","):
            run = folder / f"{name}-{count}".replace(" ", "-")
            run.mkdir()
            start(name, run, count)
            wall, cpu, received, source, *sent = measure(name, run, count, options.seconds)
            check(run, count)
            if count == 1:
                alone = min(alone, wall)
            print(
                f"{count:5} {name:10} {wall:8.2f} {wall / alone:12.2f}x"
                f" {source / (options.mb << 20):12.3f} {cpu / (received + sum(sent)) * 1e9:11.2f}"
                f" {max(sent) * count / sum(sent):10.2f} ",
                *(f"{each / 1e6:.0f}" for each in sent),
                flush=True,
            )
            for i in range(count):
                machines.kill(i)
            shutil.rmtree(run)
    print(f"load {os.getloadavg()[0]:.1f}")


def start(name: str, run: Path, count: int) -> None:
    """Start what runs before anything is measured."""
    if name == "nginx ring":
        machines.start_ring(run, count)
    elif name == "megablend":
        start_nodes(run, count)
    elif name == "rsyncs":
        for i in range(count):
            (run / f"held{i}").mkdir()
            start_rsync(f"n{i}", f"10.9.0.{i + 1}", run / f"held{i}", run / f"rsync{i}")


def measure(name: str, run: Path, count: int, seconds: float) -> list[float]:
    """Copy to all nodes: seconds, CPU seconds, and bytes that all nodes received, that the source
    sent, and that each node sent. What takes longer than `seconds` is killed, which is an error."""

    def count_all() -> list[float]:
        nodes = [f"n{i}" for i in range(count)]
        cpu = sum(map(machines.count_cpu, range(count)))
        received = sum(map(machines.count_received, nodes))
        return [cpu, received, *map(machines.count_sent, ["src", *nodes])]

    limit = threading.Timer(seconds, lambda: list(map(machines.kill, range(count))))
    limit.daemon = True
    limit.start()
    before = count_all()
    begin = time.monotonic()
    if name == "megablend":
        watch = threading.Thread(target=watch_mirrors, args=(run, count), daemon=True)
        watch.start()
        cpu = ask(run, "want", "data", "--copies", "all", "--wait")
        watch.join()
    else:
        with ThreadPoolExecutor(count) as threads:
            cpu = sum(threads.map(lambda node: copy(name, run, node), range(count)))
    wall = time.monotonic() - begin
    limit.cancel()
    changes = [after - earlier for after, earlier in zip(count_all(), before, strict=True)]
    return [wall, cpu + changes[0], *changes[1:]]


def watch_mirrors(run: Path, count: int) -> None:
    """Print when the mirrors have all bytes, which is before the command says so."""
    begin = time.monotonic()
    size = (1 + len(list_files(run.parent / "data"))) << 20  # with the file that was shared before
    while any(count_held(run / f"node{i}" / "files") < size for i in range(count)):
        time.sleep(0.1)
    print(f"      all bytes after {time.monotonic() - begin:.2f} s")


def count_held(folder: Path) -> int:
    """Bytes that the disk holds of a mirror's sparse files."""
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*.data"))


def copy(name: str, run: Path, node: int) -> float:
    """Copy to a node: CPU seconds."""
    held = run / f"held{node}"
    if name == "rclone":
        return run_on_node(node, [*RCLONE, str(held)])
    if name == "rsyncs":
        return copy_from_last(run, node)
    url = SOURCE_URL if name == "obstore" else f"http://10.9.0.{node + 1}:8081"
    order = {"url": f"{url}/data", "names": list_files(run.parent / "data"), "folder": str(held)}
    client = [sys.executable, __file__, "--client", json.dumps(order)]
    return float(subprocess.check_output(["ip", "netns", "exec", f"n{node}", *client]))


def check(run: Path, count: int) -> None:
    """Raise AssertionError unless each node has all files."""
    data = run.parent / "data"
    for i in range(count):
        held = run / f"held{i}"
        if not held.exists():
            path = [*MEGABLEND, "datasets", "path", "data", "--mirror", str(run / f"{i}.json")]
            held = Path(subprocess.check_output(path, text=True).strip())
        found = filecmp.cmpfiles(data, held, list_files(data), shallow=False)
        assert found[1:] == ([], []), (held, found)


def list_files(folder: Path) -> list[str]:
    """The names of files that are there as a whole; rsync begins those of others with a dot."""
    return sorted(each.name for each in folder.iterdir() if each.name[0] != ".")


def read_files(order: dict[str, Any]) -> None:
    """Copy files, four at a time as rclone does, and print the CPU seconds that it took here."""
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(order["url"], client_options={"allow_http": True})
    folder = Path(order["folder"])
    folder.mkdir()
    begun = resource.getrusage(resource.RUSAGE_SELF)

    def copy_file(name: str) -> None:
        with (folder / name).open("wb") as file:
            for part in store.get(name).stream():
                file.write(part)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(copy_file, order["names"]))
    now = resource.getrusage(resource.RUSAGE_SELF)
    print(now.ru_utime + now.ru_stime - begun.ru_utime - begun.ru_stime)


def start_rsync(namespace: str, address: str, files: Path, config: Path) -> None:
    """rsync's daemon; as root it would change its groups, which is not allowed here."""
    config.write_text(f"use chroot = no\nport = 8730\n[data]\npath = {files}\n")
    daemon = ["unshare", "-U", "--map-user=1000", "rsync", "--daemon", "--no-detach"]
    daemon += [f"--config={config}", f"--log-file={config}.log"]
    subprocess.Popen(["ip", "netns", "exec", namespace, *daemon])
    machines.wait_for_port(address, 8730)


def copy_from_last(run: Path, node: int) -> float:
    """The chain's rsyncs on a node: CPU seconds."""
    held = run / f"held{node}"
    if node == 0:
        return run_on_node(node, ["rsync", "-rt", f"rsync://{SOURCE}:8730/data/", str(held)])
    cpu = 0.0
    lacks = set(list_files(run.parent / "data"))
    while lacks:
        there = lacks & set(list_files(run / f"held{node - 1}"))
        if there:
            urls = [f"rsync://10.9.0.{node}:8730/data/{name}" for name in sorted(there)]
            cpu += run_on_node(node, ["rsync", "-t", *urls, str(held)])
        lacks -= there
        time.sleep(0.01)
    return cpu


def start_etcd(folder: Path) -> None:
    """etcd at the bridge."""
    urls = [f"--listen-client-urls={ETCD_URL}", f"--advertise-client-urls={ETCD_URL}"]
    log = folder.with_suffix(".log").open("wb")
    subprocess.Popen(["etcd", f"--data-dir={folder}", *urls], stdout=log, stderr=log)
    machines.wait_for_port(BRIDGE, 2379)


def start_nodes(run: Path, count: int) -> None:
    """Node processes that have met, and have shared a file; the dataset is added."""
    etcd = {"endpoints": [ETCD_URL], "nodes_expected": count, "prefix": run.name}
    nodes = []
    for i in range(count):
        mirror = machines.make_mirror(run, i, count) | {"nodes": "etcd", "etcd": etcd}
        (run / f"{i}.json").write_text(json.dumps({"storage": {"mirror": mirror}}))
        node = ["ip", "netns", "exec", f"n{i}", *MEGABLEND, "node", "run", str(run / f"{i}.json")]
        nodes.append(subprocess.Popen(node, stdout=subprocess.PIPE))
    for each in nodes:
        assert each.stdout is not None
        assert each.stdout.readline(), "a node process has ended"
    ask(run, "add", "warm-up", f"{SOURCE_URL}/warm-up")
    ask(run, "want", "warm-up", "--copies", "all", "--wait")
    urls = [f"{SOURCE_URL}/data/{name}" for name in list_files(run.parent / "data")]
    ask(run, "add", "data", *urls)


def ask(run: Path, *arguments: str) -> float:
    """A command on the first node: CPU seconds."""
    command = [*MEGABLEND, "datasets", *arguments, "--json", "--mirror", str(run / "0.json")]
    return run_on_node(0, ["sh", "-c", 'exec "$0" "$@" >/dev/null', *command])


if __name__ == "__main__":
    main()
