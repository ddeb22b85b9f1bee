"""The digest by which content is known: BLAKE2b of 16 bytes, in hexadecimal."""

from __future__ import annotations

import hashlib
import json

DIGEST_BYTES = 16
"""The size of a digest."""


def hex_digest(data: str | bytes | memoryview, size: int = DIGEST_BYTES) -> str:
    """Return the digest of some bytes, or of a text in UTF-8; of another size for short names."""
    content = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def digest_json(value: object, *, as_stored: bool = False) -> str:
    """Return the digest of a JSON value, written without spaces and with sorted keys. `as_stored`:
    its keys are sorted already, or their order counts; sorting them takes half of the time."""
    return hex_digest(json.dumps(value, sort_keys=not as_stored, separators=(",", ":")))
