"""Machines of a cluster on this one, for benchmarks: network namespaces at a bridge, and a source whose rate is limited."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

SOURCE = "10.9.0.254"
BRIDGE = "10.9.0.253"
"""The address of what is neither a node nor the source."""
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


def run_inside() -> NoReturn:
    """Run this program again in namespaces of its own, with `--inside`. All in them ends with this process."""
    command = ["unshare", "-Urnm", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environ = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    os.execvpe(command[0], [*command, sys.executable, *sys.argv, "--inside"], environ)


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


def wait_for_port(address: str, port: int) -> None:
    """Until a machine takes connections."""
    with socket.socket() as connection:
        while connection.connect_ex((address, port)):
            time.sleep(0.05)


def make_network(count: int, rate: str) -> None:
    """A bridge, with the source, whose rate is limited, and the nodes."""
    commands = [
        "mount -t tmpfs none /run",
        "ip link add br0 type bridge",
        f"ip addr add {BRIDGE}/24 dev br0",
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


def run_on_node(node: int, command: list[str]) -> float:
    """Run a command on a node until it ends: its CPU seconds."""
    inside = ["ip", "netns", "exec", f"n{node}", *command]
    pid = os.posix_spawnp(inside[0], inside, os.environ)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise subprocess.CalledProcessError(status, command)
    return used.ru_utime + used.ru_stime


def count_sent(namespace: str) -> int:
    """Bytes that have left a machine, headers included."""
    return _count_link_bytes(namespace, "tx")


def count_received(namespace: str) -> int:
    """Bytes that have reached a machine, headers included."""
    return _count_link_bytes(namespace, "rx")


def _count_link_bytes(namespace: str, way: str) -> int:
    command = ["ip", "-s", "-j", "-n", namespace, "link", "show", "eth0"]
    found = subprocess.run(command, capture_output=True, check=True)
    count: int = json.loads(found.stdout)[0]["stats64"][way]["bytes"]
    return count


def list_processes(node: int) -> list[int]:
    """Process numbers of what runs on a node."""
    found = subprocess.run(["ip", "netns", "pids", f"n{node}"], capture_output=True, check=True)
    return [int(each) for each in found.stdout.split()]


def count_cpu(node: int) -> float:
    """CPU seconds of what runs on a node, and of its children that have ended."""
    ticks = 0
    for pid in list_processes(node):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(node: int) -> None:
    """End what runs on a node."""
    for pid in list_processes(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
