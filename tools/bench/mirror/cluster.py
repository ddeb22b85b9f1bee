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
import os
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

SOURCE = "10.9.0.254"
SIZES = {"64 KiB": 64 << 10, "4 MiB": 4 << 20}
NGINX = """daemon off; {user} worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{ access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; {rest} }}
"""
NGINX_RING = """
proxy_cache_path {folder}/cache keys_zone=kept:10m max_size=10g use_temp_path=off;
upstream ring {{ hash $uri$slice_range consistent; {servers} keepalive 32; }}
server {{ listen 8081; location / {{
    slice 1m; proxy_set_header Range $slice_range; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering on;
    proxy_next_upstream error timeout; proxy_connect_timeout 2s; proxy_pass http://ring; }} }}
server {{ listen 8082; location / {{
    proxy_cache kept; proxy_cache_key $uri$http_range; proxy_cache_lock on; proxy_cache_lock_timeout 60s;
    proxy_cache_valid 206 1d; proxy_set_header Range $http_range; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_pass http://{source}:8080; }} }}
"""


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
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        command = ["unshare", "-Urnm", "--pid", "--fork", "--kill-child", "--mount-proc"]
        arguments = [sys.executable, __file__, *sys.argv[1:], "--inside"]
        sys.exit(subprocess.run([*command, *arguments], env=os.environ | {"PATH": path}).returncode)


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
    before = count_sent()
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
        inside = ["ip", "netns", "exec", f"n{node}"]
        if name == "rclone":
            copied = [
                *inside,
                "rclone",
                "--config",
                "",
                "--quiet",
                "copyurl",
                order["url"],
                str(run / f"copy{node}"),
            ]
            pid = os.posix_spawnp(copied[0], copied, os.environ)
            _, status, used = os.wait4(pid, 0)
            assert status == 0
            return used.ru_utime + used.ru_stime
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
        "source": (count_sent() - before) / total,
        "cpu": cpu / (total * len(nodes) / 1e9),
    }


def make_mirror(run: Path, node: int, count: int) -> dict[str, Any]:
    """The `mirror` setting of a node."""
    names = [f"10.9.0.{i + 1}:7171" for i in range(count)]
    return {
        "folder": str(run / f"node{node}"),
        "nodes": names,
        "advertise": names[node],
        "insecure": True,
        "reserve": 0,
        "prefixes": [f"http://{SOURCE}:8080/"],
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
    from megablend.storage.options_parser import parse_options

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


def start_ring(run: Path, count: int) -> None:
    """nginx on each node."""
    servers = " ".join(f"server 10.9.0.{i + 1}:8082;" for i in range(count))
    for i in range(count):
        folder = run / f"nginx{i}"
        start_nginx(
            f"n{i}", folder, NGINX_RING.format(folder=folder, servers=servers, source=SOURCE)
        )


def start_nginx(namespace: str, folder: Path, rest: str) -> None:
    """nginx in a namespace, which answers when this returns."""
    folder.mkdir(parents=True)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "conf").write_text(NGINX.format(user=user, folder=folder, rest=rest))
    command = ["nginx", "-c", str(folder / "conf"), "-e", str(folder / "errors")]
    subprocess.Popen(["ip", "netns", "exec", namespace, *command])
    while not (folder / "pid").exists():
        time.sleep(0.01)


def make_network(count: int, rate: str) -> None:
    """A bridge, with the source, whose rate is limited, and the nodes."""
    commands = [
        "mount -t tmpfs none /run",
        "ip link add br0 type bridge",
        "ip link set br0 up",
        "ip link set lo up",
    ]
    for name, address in [("src", SOURCE), *((f"n{i}", f"10.9.0.{i + 1}") for i in range(count))]:
        commands += [
            f"ip netns add {name}",
            f"ip link add v{name} type veth peer name eth0 netns {name}",
            f"ip link set v{name} master br0 up",
            f"ip -n {name} addr add {address}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ]
    commands.append(
        f"ip netns exec src tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms"
    )
    for command in commands:
        subprocess.run(command.split(), check=True)


def count_sent() -> int:
    """Bytes that have left the source, headers included."""
    found = subprocess.run(
        ["ip", "-s", "-j", "-n", "src", "link", "show", "eth0"], capture_output=True, check=True
    )
    sent: int = json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"]
    return sent


def list_processes(node: int) -> list[int]:
    """Process numbers of what runs on a node."""
    found = subprocess.run(["ip", "netns", "pids", f"n{node}"], capture_output=True, check=True)
    return [int(each) for each in found.stdout.split()]


def count_cpu(node: int) -> float:
    """CPU seconds of what runs on a node."""
    ticks = 0
    for pid in list_processes(node):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(node: int) -> None:
    """End what runs on a node."""
    for pid in list_processes(node):
        os.kill(pid, 9)


if __name__ == "__main__":
    main()
