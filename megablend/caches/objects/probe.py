"""Does the store let only one of several processes create an object? Otherwise two builds would replace each other's commits."""

from __future__ import annotations

import secrets

from megablend.errors import CacheError
from megablend.storage.objects.prefix import ObjectPrefix

PROBES = ".probes"
_ROUNDS, _RACERS = 2, 8


def check_creates_once(prefix: ObjectPrefix) -> None:
    """Let requests race to create an object. Raises: CacheError if several succeed, or an existing one is replaced."""
    for _ in range(_ROUNDS):
        key = f"{PROBES}/{secrets.token_hex(8)}"
        try:
            winners = prefix.create_each(key, [b"%d" % number for number in range(_RACERS)])
            is_replaced = prefix.create(key, b"late")
        finally:
            prefix.remove([key])
        if winners > 1 or is_replaced:
            raise CacheError(
                f"{prefix.location}: this store ignores `If-None-Match: *` of a PUT, so that builds could overwrite each other's "
                "commits: use a store that honours it, or a cache in a folder"
            )
