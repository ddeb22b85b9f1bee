"""The digest that identifies content: BLAKE2b of 16 bytes, in hexadecimal."""

from __future__ import annotations

import hashlib
import json

DIGEST_BYTES = 16
"""The size of a digest in bytes."""


def hex_digest(data: str | bytes | memoryview, size: int = DIGEST_BYTES) -> str:
    """Return the hexadecimal digest of bytes, or of a text encoded as UTF-8.

    Args:
        size: the size of the digest in bytes; smaller for short names.
    """
    content = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def digest_json(value: object, *, as_stored: bool = False) -> str:
    """Return the digest of a JSON value, written without spaces and with sorted keys.

    Args:
        as_stored: whether to leave the keys in their present order, which takes half as long. Use
            it if the keys are already sorted, or if their order matters.
    """
    return hex_digest(json.dumps(value, sort_keys=not as_stored, separators=(",", ":")))
