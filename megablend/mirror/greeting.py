"""Compares a client's settings with those of the running node process, to decide whether the client
can read through it."""

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
"""The prefixes of the environment variables that determine how object stores are read."""


@dataclass(frozen=True)
class Greeter:
    """The settings of a node process, with which the settings of clients are compared.

    If the settings of a client differ, and the node process was started by a job but no rank reads
    through it any longer, the node process exits, so that another one can take its place.
    """

    options: MirrorOptions
    objects: ObjectOptions
    folder: MirrorFolder
    members: list[Any]
    """The nodes of the cluster, from `describe_members`."""
    is_service: bool

    def compare(self, hello: dict[str, Any], server: LocalServer) -> list[str]:
        """Compare the settings in the HELLO of a client that reads files.

        Returns: the names of settings that differ, but do not prevent the client from reading.

        Raises: LeavingError if the node process has to exit; ConfigError if the client cannot use
            the node process, and the node process cannot exit.
        """
        has_to_stay = self.is_service or server.is_read
        if hello.get("protocol") != PROTOCOL:
            if not has_to_stay:
                raise LeavingError
            raise ConfigError(
                f"{self.folder.path}: the node process speaks protocol {PROTOCOL}, but this process speaks "
                f"{hello.get('protocol')}\n"
                "stop the node process with `megablend node stop`, and run the same version of megablend in both"
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
                f"{self.folder.path}: the node process uses other credentials or settings for object stores than this "
                "process\n"
                "wait until its jobs have ended, or use another `mirror.folder`"
            )
        if has_other_nodes and server.is_read_by_a_cluster:
            raise ConfigError(
                f"{self.folder.path}: is in use by a job with a different set of nodes\n"
                "wait for that job to end, or use another `mirror.folder`"
            )
        if has_other_nodes:
            raise LeavingError
        return differing


def find_credentials(objects: ObjectOptions, salt: str) -> str:
    """Return a digest of the settings and environment variables that determine how object stores
    are read. Each folder has its own salt, so that digests of two folders cannot be compared."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.upper().startswith(_CREDENTIAL_PREFIXES)
    )
    text = json.dumps([objects.by_prefix, variables], sort_keys=True)
    key = salt.encode()[:64]
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), key=key).hexdigest()
