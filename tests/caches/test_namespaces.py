"""Four nodes, each a network namespace with folders that no other one sees: they build, train, and one of them is replaced."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import megablend
from tests.caches.test_processes import MPIRUN, ROOT
from tests.caches.test_remote_cache import configs
from tests.index.index_data import environment
from tests.storage.objects.servers.ceph import serving_ceph
from tests.storage.objects.servers.fill import AzureContainer
from tests.storage.objects.servers.start import find_free_port, running, unavailable, wait_for_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NUM_NODES = 4
StoreAt: TypeAlias = "Callable[[str, Path], AbstractContextManager[Store]]"
READ = """
import hashlib, json, sys
import megablend
config, state, count = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
loader = megablend.Loader(megablend.open(config, state=state), micro_batch_size=2)
digest, batches = hashlib.blake2b(), iter(loader)
for _ in range(count):
    digest.update(next(batches)["tokens"].numpy().tobytes())
print(json.dumps({"digest": digest.hexdigest(), "state": loader.state_dict()}))
"""


class Nodes:
    """Network namespaces on a bridge; what runs in one sees a folder of its own, on a file system that only it has mounted."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.name = f"mb{secrets.token_hex(2)}"
        self.net = f"10.{77 + number}.{secrets.randbelow(200) + 1}"

    @property
    def address(self) -> str:
        return f"{self.net}.1"

    def start(self) -> None:
        self._ip("link", "add", self.name, "type", "bridge")
        self._ip("addr", "add", f"{self.address}/24", "dev", self.name)
        self._ip("link", "set", self.name, "up")
        for node in range(NUM_NODES):
            (self.folder / str(node)).mkdir(parents=True)
            name = f"{self.name}-{node}"
            self._ip("netns", "add", name)
            self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("link", "set", name, "master", self.name, "up")
            for command in (
                f"addr add {self.net}.{node + 2}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                self._ip("-n", name, *command.split())

    def stop(self) -> None:
        for node in range(NUM_NODES):
            subprocess.run(
                ["ip", "netns", "del", f"{self.name}-{node}"], capture_output=True, check=False
            )
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def command(self, node: str, *command: str) -> list[str]:
        """A command on a node; `node` may be a variable of the shell."""
        here = self.folder / node
        script = (
            f'mount -t tmpfs tmpfs "{here}" && mkdir "{here}/home" "{here}/tmp" && export HOME="{here}/home" '
            f'TMPDIR="{here}/tmp" XDG_CACHE_HOME="{here}/home" MEGABLEND_LOCAL_CACHE="{here}/copies" && exec "$0" "$@"'
        )
        inner = [
            "ip",
            "netns",
            "exec",
            f"{self.name}-{node}",
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            *command,
        ]
        return [
            "sh",
            "-c",
            " ".join(
                f'"{each}"' if "$" in each and "$0" not in each else _quote(each) for each in inner
            ),
        ]

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "nodes", secrets.randbelow(100))
    try:
        made.start()
    except (OSError, subprocess.CalledProcessError) as error:
        made.stop()
        unavailable(f"no network namespaces: {error}")
    try:
        yield made
    finally:
        made.stop()


@dataclass(frozen=True)
class Store:
    """An object store that the nodes reach, with one bucket."""

    root: str
    environment: dict[str, str]
    put: Callable[[str, bytes], object]


@contextlib.contextmanager
def azurite_at(address: str, folder: Path) -> Iterator[Store]:
    program = shutil.which("azurite-blob")
    if program is None:
        unavailable("azurite is not installed")
    port = find_free_port()
    options = [
        "--disableTelemetry",
        "--skipApiVersionCheck",
        "--silent",
        "--location",
        str(folder / "azurite"),
    ]
    command = [program, "--blobHost", "0.0.0.0", "--blobPort", str(port), *options]
    with running(command, folder / "azurite.log") as process:
        wait_for_port(port, process, folder / "azurite.log")
        container = AzureContainer(f"http://{address}:{port}/devstoreaccount1", "box")
        yield Store(
            "az://box",
            container.environment | {"AZURE_STORAGE_ENDPOINT": container.url},
            container.put,
        )


@contextlib.contextmanager
def ceph_at(address: str, folder: Path) -> Iterator[Store]:
    (folder / "ceph").mkdir()
    with serving_ceph(folder / "ceph", address) as admin:
        admin.make_bucket("box")
        keys = {"AWS_ACCESS_KEY_ID": admin.access_key, "AWS_SECRET_ACCESS_KEY": admin.secret_key}
        yield Store(
            "s3://box", keys | {"AWS_ENDPOINT_URL": admin.endpoint}, partial(admin.put, "box")
        )


def run(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=700, env=env, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("store_at", [azurite_at, ceph_at], ids=["azurite", "ceph"])
def test_nodes_without_a_common_folder(
    store_at: StoreAt, obstore: None, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = os.environ.get("MEGABLEND_KERNEL_CACHE") or str(Path("~/.cache").expanduser())
    with store_at(nodes.address, tmp_path) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MEGABLEND_KERNEL_CACHE", kernels)
        local, config = configs(tmp_path, f"{store.root}/caches/x")
        data = tmp_path / "data"
        for path in filter(Path.is_file, data.rglob("*")):
            store.put(f"data/{path.relative_to(data)}", path.read_bytes())
        for source in config["sources"] if isinstance(config["sources"], list) else []:
            source["path"] = source["path"].replace(str(data), f"{store.root}/data")
        local = json.loads(json.dumps(local).replace(f"{store.root}/data", str(data)))
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        env = environment()
        build = nodes.command(
            "$PMI_RANK", sys.executable, "-m", "megablend", "build", str(file), "--json"
        )
        report = run([MPIRUN, "-n", str(NUM_NODES), *build], env)
        assert (report["ranks"], report["index"]["digest"]) == (
            NUM_NODES,
            megablend.build(local).index.digest,
        )

        def read(node: int, state: object, count: int) -> dict[str, Any]:
            return run(
                nodes.command(
                    str(node),
                    sys.executable,
                    "-c",
                    READ,
                    json.dumps(config),
                    json.dumps(state),
                    str(count),
                ),
                env,
            )

        first = read(0, None, 7)
        second = read(3, first["state"], 8)  # another node takes its place
        batches = iter(megablend.Loader(megablend.open(local), micro_batch_size=2))
        for found, count in ((first, 7), (second, 8)):
            digest = hashlib.blake2b()
            for _ in range(count):
                digest.update(next(batches)["tokens"].numpy().tobytes())
            assert found["digest"] == digest.hexdigest()
