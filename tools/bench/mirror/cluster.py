"""Several nodes read all of a file from one slow source: how often it leaves the source, how long it takes, and what it costs.

    python tools/bench/mirror/cluster.py [--nodes 4] [--mb 128] [--rate 100mbit]

Nodes are network namespaces on this machine, the source is nginx behind a token bucket (`tc tbf`). Compared, in turns: each
node by itself, with megablend's storage, with obstore alone, and with `rclone copyurl` (which copies the file and reads nothing);
nginx on each node, with slices of 1 MiB that consistent hashing gives to one of them, which caches them (the recipe is
NGINX_RING below); megablend's node processes. Each in reads of 64 KiB and of 4 MiB, in an order of its own on each node, then
again without the last node, which has died. nginx and node processes run before anything is measured. Dragonfly, JuiceFS and
Alluxio were not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machines import (
    SOURCE,
    count_cpu,
    count_sent,
    kill,
    make_mirror,
    make_network,
    run_inside,
    run_on_node,
    start_nginx,
    start_ring,
)

SIZES = {"64 KiB": 64 << 10, "4 MiB": 4 << 20}


def main() -> None:
    """Compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--mb", type=int, default=128)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        read_all(json.loads(options.client))
    elif options.inside:
        compare(options)
    else:
        run_inside()


def compare(options: argparse.Namespace) -> None:
    """In namespaces of its own: run all contenders."""
    folder = Path(tempfile.mkdtemp(prefix="megablend-bench-"))
    try:
        make_network(options.nodes, options.rate)
        (folder / "files").mkdir()
        rng = random.Random(0)
        for name in [*SIZES, "warm-up"]:
            (folder / "files" / name.replace(" ", "")).write_bytes(rng.randbytes(options.mb << 20))
        start_nginx("src", folder / "source", f"server {{ listen 8080; root {folder}/files; }}")
        print(f"{options.nodes} nodes, {options.mb} MiB, source {options.rate}")
        print(
            "contender            reads   wall s  source/data  CPU s a GB  again without one: wall s  source/data"
        )
        for name, start in (
            ("each by itself", start_none),
            ("obstore", start_none),
            ("rclone", start_none),
            ("nginx ring", start_ring),
            ("megablend", start_nodes),
        ):
            for size in SIZES:
                run = folder / f"{name}-{size}".replace(" ", "")
                run.mkdir()
                start(run, options.nodes)
                first = read_on_all(name, run, size, range(options.nodes), options)
                kill(options.nodes - 1)
                again = read_on_all(name, run, size, range(options.nodes - 1), options)
                print(
                    f"{name:20} {size:>6} {first['wall']:8.1f} {first['source']:12.3f} {first['cpu']:11.2f}"
                    f" {again['wall']:25.1f} {again['source']:12.3f}",
                    flush=True,
                )
                for i in range(options.nodes):
                    kill(i)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_on_all(
    name: str, run: Path, size: str, nodes: range, options: argparse.Namespace
) -> dict[str, float]:
    """Read the file on these nodes at the same time."""
    before = count_sent("src")
    cpu_before = sum(map(count_cpu, range(options.nodes)))
    started = time.monotonic()

    def client(node: int) -> float:
        host = f"10.9.0.{node + 1}:8081" if name == "nginx ring" else f"{SOURCE}:8080"
        order: dict[str, Any] = {
            "url": f"http://{host}/{size.replace(' ', '')}",
            "read": SIZES[size],
            "seed": node,
        }
        order["size"] = options.mb << 20
        if name == "rclone":
            copy = ["copyurl", order["url"], str(run / f"copy{node}")]
            return run_on_node(node, ["rclone", "--config", "", "--quiet", *copy])
        order["by_obstore"] = name == "obstore"
        if name == "megablend":
            order["mirror"] = make_mirror(run, node, options.nodes)
        return run_client(node, order)

    with ThreadPoolExecutor(len(nodes)) as threads:
        cpu = sum(threads.map(client, nodes))
    wall = time.monotonic() - started
    cpu += sum(map(count_cpu, range(options.nodes))) - cpu_before
    total = options.mb << 20
    return {
        "wall": wall,
        "source": (count_sent("src") - before) / total,
        "cpu": cpu / (total * len(nodes) / 1e9),
    }


def run_client(node: int, order: dict[str, Any]) -> float:
    """Read on a node: the CPU seconds of the reading process."""
    inside = ["ip", "netns", "exec", f"n{node}"]
    command = [*inside, sys.executable, __file__, "--client", json.dumps(order)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def read_all(order: dict[str, Any]) -> None:
    """Read all of a file, 16 reads at a time, and print the CPU seconds that it took here."""
    import numpy as np
    from obstore.store import HTTPStore

    from megablend.storage.by_scheme import make_storage
    from megablend.storage.store_options import parse_options

    settings = {"mirror": order["mirror"]} if "mirror" in order else {}
    storage = make_storage(objects=parse_options(settings))
    offsets = list(range(0, order["size"], order["read"]))
    random.Random(order["seed"]).shuffle(offsets)
    begun = resource.getrusage(resource.RUSAGE_SELF)

    base, _, path = order["url"].rpartition("/")
    store = HTTPStore.from_url(base, client_options={"allow_http": True})

    def read(offset: int) -> None:
        size = min(order["read"], order["size"] - offset)
        if order["by_obstore"]:
            assert len(store.get_range(path, start=offset, length=size)) == size
            return
        fetched = storage.fetch(
            order["url"], np.array([offset]), np.array([size]), lambda n: np.empty(n, np.uint8)
        )
        assert len(fetched.result(timeout=600)[0]) == size

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(read, offsets))
    now = resource.getrusage(resource.RUSAGE_SELF)
    print(now.ru_utime + now.ru_stime - begun.ru_utime - begun.ru_stime)


def start_none(run: Path, count: int) -> None:
    """Nothing: what is needed starts with the first read."""


def start_nodes(run: Path, count: int) -> None:
    """Node processes: the first read of each node starts its own."""

    def start(node: int) -> None:
        size = 64 << 10
        order = {"url": f"http://{SOURCE}:8080/warm-up", "read": size, "size": size, "seed": node}
        mirror = make_mirror(run, node, count)
        run_client(node, order | {"by_obstore": False, "mirror": mirror})

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(start, range(count)))


if __name__ == "__main__":
    main()
