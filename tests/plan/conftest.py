"""An indexed config that tests of mistakes and of their remedies change."""

from __future__ import annotations

from typing import Any

import pytest

import megablend
from tests.runs import make_config, write_source


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An indexed config of sources of 400, 800, 1,600 and 3 tokens, with weights 6, 3, 1 and 0; run `built` is committed."""
    folder, sources = tmp_path_factory.mktemp("mistakes"), []
    for d, (name, size, weight) in enumerate((("s0", 400, 6), ("s1", 800, 3), ("s2", 1600, 1), ("tiny", 3, 0))):
        pieces = 4 if size > 3 else 1
        documents = [[d * 10**5 + i for i in range(size // pieces)] for _ in range(pieces)]
        source = write_source(folder, d, "arrow", documents, num_files=1)
        sources.append(source | {"name": name, "weight": weight})
    config = make_config(folder, sources, samples=200)
    megablend.build(config | {"run": "built"})
    return config
