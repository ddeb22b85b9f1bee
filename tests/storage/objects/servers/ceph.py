"""Ceph's RADOS Gateway as an S3 server: a monitor, an object store in memory and the gateway, as Debian's packages have them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.storage.objects.servers.s3_admin import S3Admin
from tests.storage.objects.servers.start import find_free_port, running, unavailable, wait_for_port

ACCESS_KEY = "canary-key"
SECRET_KEY = "canary-secret"
PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon}]
public addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
run dir = {folder}
admin socket = {folder}/$cluster-$name.asok
log file = {folder}/$name.log
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
rgw data = {folder}/rgw
rgw frontends = beast endpoint={host}:{port}
"""
_KEYS = {
    "mon.": ["--cap", "mon", "allow *"],
    "client.admin": [
        "--cap",
        "mon",
        "allow *",
        "--cap",
        "osd",
        "allow *",
        "--cap",
        "mgr",
        "allow *",
    ],
    "osd.0": ["--cap", "mon", "allow *", "--cap", "osd", "allow *"],
    "client.rgw": ["--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"],
}


@contextlib.contextmanager
def serving_ceph(folder: Path, host: str = "127.0.0.1") -> Iterator[S3Admin]:
    """Start the servers with data in `folder`; yields a client with the keys of their one user.

    Args:
        host: address of this machine at which the gateway listens.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        unavailable(
            f"{', '.join(missing)} not installed: apt install ceph-mon ceph-osd ceph-common radosgw"
        )
    mon = find_free_port()
    port = find_free_port()
    fsid = str(uuid.uuid4())
    osd = str(uuid.uuid4())
    (folder / "ceph.conf").write_text(
        _CONFIG.format(folder=folder, fsid=fsid, mon=mon, host=host, port=port)
    )
    for name in ("osd", "rgw"):
        (folder / name).mkdir()
    keyring = str(folder / "keyring")
    monmap = str(folder / "monmap")
    for name, caps in _KEYS.items():
        _run(
            folder,
            "ceph-authtool",
            "--create-keyring" if name == "mon." else "",
            keyring,
            "--gen-key",
            "-n",
            name,
            *caps,
        )
    _run(
        folder,
        "monmaptool",
        "--create",
        "--fsid",
        fsid,
        "--addv",
        "a",
        f"[v1:127.0.0.1:{mon}]",
        monmap,
    )
    _run(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    with contextlib.ExitStack() as servers:

        def start(*command: str) -> subprocess.Popen[str]:
            log = folder / f"{command[0]}.out"
            return servers.enter_context(running(list(command), log, env=_environment(folder)))

        start("ceph-mon", "-f", "-i", "a")
        _run(folder, "ceph", "osd", "new", osd)
        _run(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-f", "-i", "0")
        gateway = start("radosgw", "-f", "-n", "client.rgw")
        wait_for_port(port, gateway, folder / "radosgw.out", host)
        keys = (f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        _run(
            folder,
            "radosgw-admin",
            "user",
            "create",
            "--uid=tester",
            "--display-name=tester",
            *keys,
        )
        yield S3Admin(f"http://{host}:{port}", ACCESS_KEY, SECRET_KEY)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "CEPH_CONF": str(folder / "ceph.conf")}


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [each for each in command if each],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=_environment(folder),
    )
    if done.returncode:
        unavailable(f"{' '.join(command)}: {done.stderr[-500:]}")
