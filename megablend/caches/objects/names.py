"""Which objects below a cache's prefix are its own: other people's are neither read nor removed."""

from __future__ import annotations

import re

_OWN = re.compile(r"[0-9a-f]{16,}(-.+)?")


def is_own(name: str) -> bool:
    """Whether a file or a folder can be the cache's by its name, which begins with a digest: then a dash where more follows."""
    return _OWN.fullmatch(name) is not None
