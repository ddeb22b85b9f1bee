"""Opens a socket to a mirror's node process, which is started if none is running."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import pickle
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megablend.errors import ConfigError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.greeting import find_credentials
from megablend.mirror.members.launchers import describe_members
from megablend.mirror.node.frames import PROTOCOL, Kind, pack, pack_json, read_frame, unpack_error
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.rate_limiter import JOB_SIZES
from megablend.system.after_fork import python_command
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG
from megablend.system.private_folder import find_private_folder

_RETRY_SECONDS = 0.05


class NodeLostError(Exception):
    """Raised if the node process has exited, or does not respond."""


@dataclass(eq=False)
class Opener:
    """Opens connections to a node process, which is started if necessary."""

    options: MirrorOptions
    objects: ObjectOptions
    agreed: MirrorOptions | None
    """The settings that must agree with those of the node process; None for a client that reads no
    files, and only sends commands."""
    starts: bool
    """Whether a node process is started if none is running."""
    lost_at: float = -math.inf
    """The monotonic time at which an attempt to connect last failed."""
    was_open: bool = False
    """Whether this process has been connected before. If so, it continues without the mirror if a
    node process can no longer be started."""

    def open(self) -> socket.socket:
        """Connect to the node process within `options.patience` seconds, and exchange greetings.
        Raises: NodeLostError if the node process does not respond, or none is running and `starts`
        is False; ConfigError if it cannot be started, or refuses this process."""
        if time.monotonic() - self.lost_at < self.options.patience:
            raise NodeLostError("the node process was not responding a moment ago")
        deadline = time.monotonic() + self.options.patience
        while True:
            connection = self._connect() or self._start()
            if connection is not None:
                self.was_open = True
                return connection
            if time.monotonic() > deadline:
                self.lost_at = time.monotonic()
                raise NodeLostError(f"no response for {self.options.patience:g} s")
            time.sleep(_RETRY_SECONDS)

    def _connect(self) -> socket.socket | None:
        """Connect to a running node process. Returns: the socket; None if none is listening."""
        try:
            folder = MirrorFolder.attach(self.options.folder)
        except ConfigError:
            return None  # the started node process makes the mirror, or reports why it cannot
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.options.patience)
        try:
            with folder.socket_address() as address:
                connection.connect(address)
            connection.sendall(pack(Kind.HELLO, 0, pack_json(self._make_hello(folder))))
            kind, _, payload = read_frame(connection)
        except PermissionError:
            connection.close()
            raise ConfigError(
                f"{folder.path}: another user's node process owns this mirror\n"
                "set `mirror.group` to a group that both users belong to, or use another folder"
            ) from None
        except (OSError, EOFError):
            connection.close()
            return None
        if kind == Kind.FAILED:
            connection.close()
            raise unpack_error(payload)
        differing = parse_json(payload)["differing"]
        if differing:
            LOG.warning(
                "mirror: %s: the node process uses its own %s, not those of this config",
                folder.path,
                ", ".join(differing),
            )
        return connection

    def _make_hello(self, folder: MirrorFolder) -> dict[str, Any]:
        hello: dict[str, Any] = {"protocol": PROTOCOL}
        if self.agreed is not None:
            hello |= {
                "credentials": find_credentials(self.objects, folder.id),
                "queries": [[url, query] for url, query in self.objects.urls if query],
                "options": self.agreed.as_json(),
                "members": describe_members(self.agreed, os.environ),
            }
        return hello

    def _start(self) -> socket.socket | None:
        """Start a node process, unless one was started in the meantime, and connect to it. Returns:
        the socket; None if another process is starting a node process at the moment, or the new one
        was killed."""
        if not self.starts:
            raise NodeLostError("no process listens on the mirror's socket")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._find_lock_path(), flags, 0o600), "r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            return self._connect() or self._run_starter()

    def _find_lock_path(self) -> Path:
        """Return the path of a lock file, which prevents two processes of this user from starting a
        node process at the same time. The file is in a private temporary folder, since this user
        may not be permitted to write to the mirror's folder."""
        folder = self.options.folder.encode(errors="surrogateescape")
        folder_hash = hashlib.blake2b(folder, digest_size=8).hexdigest()
        private, _ = find_private_folder(
            [Path(tempfile.gettempdir())], Path(f"megablend-{os.geteuid()}"), prefix="megablend-"
        )
        return private / f"{folder_hash}.start.lock"

    def _run_starter(self) -> socket.socket | None:
        """Run the program that starts a node process, and connect. Returns: see `_start`."""
        settings = (self.options, ObjectOptions(self.objects.by_prefix))
        # Limits are divided among the job's processes; the node process is not one of them
        environment = {key: os.environ[key] for key in os.environ.keys() - JOB_SIZES}
        try:
            starter = subprocess.run(
                python_command("megablend.mirror.process", "main"),
                input=pickle.dumps(settings),
                capture_output=True,
                env=environment,
                timeout=max(30.0, self.options.patience),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        message = starter.stderr.decode(errors="replace").strip()
        # It prints that it is ready, since its exit code is lost where SIGCHLD is ignored. If there
        # is no message, the program was killed: another start may succeed
        if message and not starter.stdout:
            if self.was_open:
                self.lost_at = time.monotonic()
                raise NodeLostError(f"the node process cannot be started: {message}")
            raise ConfigError(f"mirror: {message}")
        return self._connect()
