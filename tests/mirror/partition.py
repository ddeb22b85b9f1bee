"""A cluster of machines on this one, with etcd on the first of them, is cut in two while it reads the source, and healed.

`cut_in_two` runs this module in namespaces of its own, as `tests.mirror.namespaces` does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megablend.storage.by_scheme import make_storage
from megablend.storage.store_options import parse_options
from tests.cli.commands import run
from tests.mirror.namespaces import SOURCE, UNSHARE, environment, make_network, start_source
from tests.mirror.nodes import count_only, find_held, get_status

_ETCD = "http://10.9.0.1:2379"
_NOBODY = "02:00:00:00:00:99"
_PERIOD = 0.25
DUE = "due.bin"


def cut_in_two(folder: Path, files: Path, **about: Any) -> dict[str, Any]:
    """Start nodes, want all files but DUE on them, and cut them in two.

    Args:
        about: `count` of nodes, of which the last `apart` are cut off for so many `seconds`; the `rate` of a connection to the
            source, in bytes a second; `lease`.

    Returns: `{"began": bytes of the source when the cut was made, "healing": when it was healed, "sent": bytes by file,
        "views": of each node [[seconds, number, nodes, whether formed], ...] where they changed, in seconds since the cut,
        "healed": seconds until all were in one view again, "due": seconds that a read on the smaller side took,
        "only": bytes that only its nodes held when the others made their view}`.
    """
    order = {"folder": str(folder), "files": str(files), **about}
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-m", "tests.mirror.partition", json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    count = order["count"]
    make_network(count)
    log = start_source(folder, Path(order["files"]), f"limit_rate {order['rate']};")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_node(0, _etcd(folder), folder / "etcd.log"))
        _until(_is_etcd_there)
        configs = [_configure(folder, i, order) for i in range(count)]
        for i, config in enumerate(configs):
            command = [sys.executable, "-m", "megablend", "node", "run", str(config)]
            stack.enter_context(_in_node(i, command, folder / f"n{i}.log"))
        logs = [folder / f"n{i}.log" for i in range(count)]
        _until(lambda: all(": ready" in each.read_text() for each in logs))
        print(json.dumps(_cut(order, configs, log)))


def _cut(order: dict[str, Any], configs: list[Path], log: Path) -> dict[str, Any]:
    count = order["count"]
    nodes = [json.loads(config.read_text())["storage"]["mirror"] for config in configs]
    views: list[list[list[Any]]] = [[] for _ in nodes]
    began = time.monotonic()

    def look() -> bool:
        """Whether all are in one view."""
        for settings, seen in zip(nodes, views, strict=True):
            state = get_status(settings)["cluster"]
            now = [state["view"], state["nodes"], state["formed"]]
            if not seen or seen[-1][1:] != now:
                seen.append([round(time.monotonic() - began, 1), *now])
        last = [seen[-1][1:] for seen in views]
        return all(each == [last[0][0], count, True] for each in last)

    _until(look)
    urls = Path(order["folder"]) / "all.urls"
    names = sorted(each.name for each in Path(order["files"]).iterdir())
    urls.write_text("".join(f"http://{SOURCE}/{name}\n" for name in names if name != DUE))
    for arguments in (["add", "d", str(urls)], ["want", "d"]):
        done = run("datasets", *arguments, "--mirror", configs[0])
        assert done.returncode == 0, done.stderr
    size = sum(each.stat().st_size for each in Path(order["files"]).iterdir())
    _until(lambda: sum(_count_sent(log).values()) > 0.1 * size)
    at_cut = sum(_count_sent(log).values())
    _connect(count, order["apart"], is_cut=True)
    began = time.monotonic()
    for seen in views:
        del seen[:-1]
        seen[-1][0] = 0.0
    waits = 0.0
    only: int | None = None
    while time.monotonic() < began + order["seconds"]:
        look()
        if only is None and views[0][-1][2] == count - order["apart"]:
            held = [find_held(Path(each["folder"])) for each in nodes]
            apart = range(count - order["apart"], count)
            only = sum(count_only(held[i], held[: apart[0]] + held[i + 1 :]) for i in apart)
        if not waits and time.monotonic() > began + order["seconds"] / 2:
            waits = _read(nodes[-1])
        time.sleep(_PERIOD)
    at_healing = sum(_count_sent(log).values())
    _connect(count, order["apart"], is_cut=False)
    healing = time.monotonic()
    _until(look)
    healed = time.monotonic() - healing
    done = run("datasets", "want", "d", "--wait", "--mirror", configs[0])
    assert done.returncode == 0, done.stderr
    return {
        "began": at_cut,
        "healing": at_healing,
        "sent": _count_sent(log),
        "views": views,
        "healed": healed,
        "due": waits,
        "only": only,
    }


def _read(settings: dict[str, Any]) -> float:
    """Seconds that it takes to read a file that nobody holds."""
    began = time.monotonic()
    storage = make_storage(objects=parse_options({"mirror": settings}))
    assert storage.read(f"http://{SOURCE}/{DUE}", 0, 9) == bytes(9)
    return time.monotonic() - began


def _configure(folder: Path, i: int, order: dict[str, Any]) -> Path:
    mirror = {
        "folder": str(folder / f"n{i}"),
        "prefixes": [f"http://{SOURCE}/"],
        "reserve": 0,
        "nodes": "etcd",
        "etcd": {
            "endpoints": [_ETCD],
            "nodes_expected": order["count"],
            "lease": order["lease"],
        },
        "copies": 2,
        "advertise": f"10.9.0.{i + 1}",
        "insecure": True,
    }
    storage = {"mirror": mirror, f"http://{SOURCE}/": {"max_requests": 4 * order["count"]}}
    path = folder / f"n{i}.json"
    path.write_text(json.dumps({"storage": storage}))
    return path


def _etcd(folder: Path) -> list[str]:
    peers = "http://127.0.0.1:2380"
    return [
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
    ]


def _is_etcd_there() -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"{_ETCD}/health", timeout=2) as answer,
    ):
        return b'"true"' in answer.read()
    return False


@contextlib.contextmanager
def _in_node(i: int, command: list[str], log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"n{i}", *command], stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _connect(count: int, apart: int, *, is_cut: bool) -> None:
    """Let the two parts not reach one another, silently; or let them."""
    rest = f"lladdr {_NOBODY} nud permanent dev eth0" if is_cut else "dev eth0"
    what = "replace" if is_cut else "del"
    for i in range(count - apart):
        for j in range(count - apart, count):
            for one, other in ((i, j), (j, i)):
                command = f"ip -n n{one} neigh {what} 10.9.0.{other + 1} {rest}"
                subprocess.run(command.split(), check=True)


def _count_sent(log: Path) -> Counter[str]:
    """Bytes by file."""
    found = Counter[str]()
    for line in log.read_text().splitlines():
        _, size, name = line.split()
        found[name.removeprefix("/")] += int(size)
    return found


def _until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(_PERIOD)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
