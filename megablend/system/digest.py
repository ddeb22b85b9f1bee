"""The digest by which content is known: BLAKE2b of 16 bytes, in hexadecimal."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 16
"""The size of a digest."""


def hex_digest(data: str | bytes | memoryview, size: int = DIGEST_BYTES) -> str:
    """Return the digest of some bytes, or of a text in UTF-8; of another size for short names."""
    content = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(content, digest_size=size).hexdigest()
