"""Whether a client can read through a running node process, as the client's greeting says."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from megablend.errors import ConfigError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.node.frames import PROTOCOL
from megablend.mirror.node.local_server import LeavingError, LocalServer
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions

_CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "HTTPS_PROXY", "HTTP_PROXY")
"""Prefixes of variables that decide how object stores are read."""


@dataclass(frozen=True)
class Greeter:
    """Compares the settings of clients with those of the node process.

    A process that a job has started, and through which no rank reads, ends if its settings are not
    those of a client, so that another process can take its place.
    """

    options: MirrorOptions
    objects: ObjectOptions
    folder: MirrorFolder
    members: list[Any]
    """The nodes of the cluster, by `describe_members`."""
    is_service: bool

    def compare(self, hello: dict[str, Any], server: LocalServer) -> list[str]:
        """Compare the settings in the HELLO of a client that reads files.

        Returns: the names of settings that differ, but do not keep the client from reading.

        Raises: LeavingError if the node process has to end; ConfigError if it cannot end, and the
            client cannot use it.
        """
        has_to_stay = self.is_service or server.is_read
        if hello.get("protocol") != PROTOCOL:
            if not has_to_stay:
                raise LeavingError
            raise ConfigError(
                f"{self.folder.path}: the node process speaks protocol {PROTOCOL}, but this process speaks "
                f"{hello.get('protocol')}\n"
                "run the same version of megablend in both, and stop the node process (`megablend node stop`)"
            )
        own = (self.options if hello["members"] else self.options.alone()).as_json()
        clients = hello["options"]
        differing = [name for name in {**own, **clients} if own.get(name) != clients.get(name)]
        if self.is_service:
            return differing
        credentials = find_credentials(self.objects, self.folder.id)
        has_other_credentials = hello["credentials"] != credentials
        has_other_nodes = hello["members"] not in ([], self.members)
        if not has_to_stay and (has_other_credentials or has_other_nodes or differing):
            raise LeavingError
        if has_other_credentials:
            raise ConfigError(
                f"{self.folder.path}: its node process reads object stores with other credentials or settings "
                "than this process\n"
                "use another `folder`, wait until the jobs that read there have ended, or run it as a service "
                "(`megablend node run`), which reads with settings of its own"
            )
        if has_other_nodes and server.is_read_by_a_cluster:
            raise ConfigError(
                f"{self.folder.path}: is in use by a job with a different set of nodes\n"
                "use another `folder`, or wait for that job to end"
            )
        if has_other_nodes:
            raise LeavingError
        return differing


def find_credentials(objects: ObjectOptions, salt: str) -> str:
    """Return a digest of the settings and environment variables that decide how object stores are
    read. The salt of each folder differs, so that digests of two folders cannot be compared."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.upper().startswith(_CREDENTIAL_PREFIXES)
    )
    text = json.dumps([objects.by_prefix, variables], sort_keys=True)
    key = salt.encode()[:64]
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), key=key).hexdigest()
