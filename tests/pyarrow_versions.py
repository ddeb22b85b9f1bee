"""Files that older versions of pyarrow cannot write. Any version reads them: golden files show that."""

from __future__ import annotations

import pyarrow as pa
import pytest

INSTALLED = int(pa.__version__.partition(".")[0])


def needs_pyarrow(version: int, what: str) -> pytest.MarkDecorator:
    """Skips a test that writes files with something that pyarrow has only since a major version."""
    return pytest.mark.skipif(
        version > INSTALLED, reason=f"pyarrow {INSTALLED} does not write {what}"
    )
