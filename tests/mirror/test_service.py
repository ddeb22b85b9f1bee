"""A node process as a service: what it tells systemd, and the files of configs/ that start it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megablend.mirror.node.frames import Kind
from megablend.storage.store_options import parse_options
from tests.cli.commands import ROOT
from tests.mirror.nodes import connect, get_status, mirror

pytestmark = pytest.mark.usefixtures("obstore")
CONFIGS = Path(ROOT) / "configs"


@contextlib.contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """Listens as a service manager does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(500)
        yield listener


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_service_tells_how_it_is(tmp_path: Path, is_abstract: bool) -> None:
    name = f"megablend-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    config = tmp_path / "config.json"
    with (
        mirror(tmp_path / "mirror", "http://127.0.0.1:9") as settings,
        manager(f"\0{name}" if is_abstract else name) as listener,
    ):
        config.write_text(json.dumps({"storage": {"mirror": settings}}))
        node = subprocess.Popen(
            [sys.executable, "-m", "megablend", "node", "run", str(config)],
            env=os.environ
            | {"PYTHONPATH": ROOT, "NOTIFY_SOCKET": f"@{name}" if is_abstract else name},
            stdout=subprocess.DEVNULL,
        )
        with node:
            try:
                assert listener.recv(100) == b"READY=1"
                assert get_status(settings)["pid"] == node.pid
                assert {listener.recv(100) for _ in range(2)} == {b"WATCHDOG=1"}
                node.send_signal(signal.SIGTERM)
                while (told := listener.recv(100)) == b"WATCHDOG=1":
                    pass
                assert told == b"STOPPING=1"
                assert node.wait(500) == 0
            finally:
                node.kill()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(100)


def test_a_process_that_a_job_starts_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be in a service itself."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with (
        mirror(tmp_path / "mirror", "http://127.0.0.1:9") as settings,
        manager(str(tmp_path / "notify")) as listener,
    ):
        assert get_status(settings)["service"] is False
        connect(settings).command(Kind.STOP)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(100)


def test_a_manager_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    with mirror(tmp_path / "mirror", "http://127.0.0.1:9") as settings:
        config.write_text(json.dumps({"storage": {"mirror": settings}}))
        node = subprocess.Popen(
            [sys.executable, "-m", "megablend", "node", "run", str(config)],
            env=os.environ | {"PYTHONPATH": ROOT, "NOTIFY_SOCKET": str(tmp_path / "none")},
            stdout=subprocess.PIPE,
            text=True,
        )
        with node:
            try:
                assert node.stdout is not None
                assert node.stdout.readline().endswith("ready\n")
                assert get_status(settings)["service"] is True
            finally:
                node.terminate()
            assert node.wait(500) == 0


def test_the_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs the command systemd-analyze: the unit is not checked")

    def verify(text: str) -> str:
        path = tmp_path / "megablend-node.service"
        path.write_text(text)
        # It knows no units of a machine: a container has none
        command = ["systemd-analyze", "verify", "--recursive-errors=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        return f"{done.returncode} {done.stdout}{done.stderr}".strip()

    text = (CONFIGS / "megablend-node.service").read_text(encoding="utf-8")
    assert verify(text) == "0"
    assert "Unknown key" in verify(text.replace("WatchdogSec", "WatchdogSecs"))
    assert "Failed to parse" in verify(text.replace("Type=notify", "Type=notifies"))


def test_the_manifest_fits_together() -> None:
    """Its config is one that a node takes, and its mounts, ports and files are those that the config names."""
    text = (CONFIGS / "megablend-node.kubernetes.yaml").read_text(encoding="utf-8")
    config, daemons = yaml.safe_load_all(text)
    pod = daemons["spec"]["template"]["spec"]
    assert "hostNetwork" not in pod
    assert (
        daemons["spec"]["selector"]["matchLabels"]
        == daemons["spec"]["template"]["metadata"]["labels"]
    )
    (node,) = pod["containers"]
    (prepare,) = pod["initContainers"]
    given: dict[str, Any] = yaml.safe_load(
        config["data"]["mirror.yaml"].replace("HOST_IP", "10.0.0.1")
    )
    options = parse_options(given["storage"]).mirror
    assert options is not None
    (port,) = node["ports"]
    assert options.port == port["containerPort"] == port["hostPort"]
    names = config["data"]["nodes"].split()
    assert options.advertise in names
    assert {int(name.rpartition(":")[2]) for name in names} == {options.port}
    for probe in (node["startupProbe"], node["livenessProbe"]):
        assert probe["httpGet"] == {"path": "/metrics", "port": port["name"]}
    script = prepare["command"][-1]
    for path in (options.folder, options.nodes, options.secret_file, node["command"][-1]):
        assert str(path) in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    volumes = {each["name"] for each in pod["volumes"]}
    mounts = [each for part in (node, prepare) for each in part["volumeMounts"]]
    assert {each["name"] for each in mounts} == volumes
    assert {each["image"] for each in (node, prepare)} == {node["image"]}
