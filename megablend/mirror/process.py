"""Starts a mirror's node process: as a service, or in the background for a rank."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import megablend
from megablend.errors import MegablendError
from megablend.mirror.disk.folder import FolderInUseError, MirrorFolder
from megablend.mirror.members.launchers import find_members
from megablend.mirror.node_parts import Node, requires_nodes
from megablend.storage.location import MIRROR_VARIABLE
from megablend.storage.mirror_options import EtcdOptions, MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.clients import divide_limits
from megablend.system.failures import translating
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.mirror.members.etcd_members import EtcdMembers

_MAX_LOG_BYTES = 1 << 20
_ETCD_PREFIX = "MEGABLEND_ETCD_"
"""The prefix of the environment variables with the credentials for etcd, which end with USER and
PASSWORD."""
_READY = "ready"
"""The message that the child sends to its parent as soon as the child serves clients. Any other
message is the text of an error."""


def run_node(
    options: MirrorOptions,
    objects: ObjectOptions,
    *,
    is_service: bool,
    ready: Callable[[], None],
) -> None:
    """Run a node process until it is stopped.

    Args:
        ready: a function that is called as soon as clients can connect.

    Raises: ConfigError if the folder cannot be used; FolderInUseError if another process owns it.
    """
    # So that its own reads of the source do not go through a mirror
    os.environ.pop(MIRROR_VARIABLE, None)
    folder = MirrorFolder.create(options.folder, group=options.group)
    members = find_members(options, os.environ)
    if members is not None and options.etcd is not None:
        members = members._replace(views=make_views(options, options.etcd, members.own, folder))
    if members is not None:
        # The nodes share the limits of the source
        divide_limits(members.size)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each request to another node may take a connection
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with folder.lock():

        async def run() -> None:
            node = Node(options, objects, folder, members, is_service=is_service)
            cluster = node.cluster
            if cluster is not None and options.etcd is not None:
                cluster.view_listeners.append(lambda: divide_limits(cluster.num_nodes))
            gc.freeze()  # collections need not look at modules and the like
            await node.run(ready)

        asyncio.run(run())


def make_views(
    options: MirrorOptions, etcd_options: EtcdOptions, own: str, folder: MirrorFolder
) -> EtcdMembers:
    """Return the membership of this node in a cluster with etcd.

    Args:
        own: the name of this node.

    Raises: ConfigError if a file that is named in the settings cannot be used.
    """
    with requires_nodes("nodes"):
        from megablend.mirror.members.etcd import Etcd
        from megablend.mirror.members.etcd_members import EtcdMembers
        from megablend.mirror.peers.signing import make_contexts, read_private
    password = os.environ.get(f"{_ETCD_PREFIX}PASSWORD")
    if etcd_options.password_file is not None:
        password = read_private("etcd: password_file", etcd_options.password_file).decode().strip()
    contexts = make_contexts(etcd_options.tls)
    etcd = Etcd(
        etcd_options.endpoints,
        tls=None if contexts is None else contexts[1],
        user=etcd_options.user or os.environ.get(f"{_ETCD_PREFIX}USER"),
        password=password,
    )
    return EtcdMembers(etcd, etcd_options, own, folder)


def main() -> None:
    """Run the process that a rank starts with pickled settings on stdin. It forks. The parent exits
    when the child serves clients, or with an error if the child fails."""
    options, objects = pickle.load(sys.stdin.buffer)
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        message = os.fdopen(reading).read()
        is_ready = message.startswith(_READY)
        (sys.stdout if is_ready else sys.stderr).write(message)
        sys.exit(0 if is_ready else 1)
    os.close(reading)
    os.setsid()
    os.chdir("/")

    def report(message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(writing, message.encode())
        os.close(writing)

    def ready() -> None:
        _log_to(Path(options.folder) / "node.log")
        report(_READY)

    try:
        with translating(options.folder):
            run_node(options, objects, is_service=False, ready=ready)
    except FolderInUseError:
        report(_READY)  # another process serves the clients
    except MegablendError as error:
        report(str(error))
    os._exit(0)


def _log_to(path: Path) -> None:
    """Redirect stdout and stderr to a log file. It is emptied first if it is too long."""
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    LOG.info("megablend %s: node process %d", megablend.__version__, os.getpid())
