"""Headers of `.npy` files."""

from __future__ import annotations

import gc
import io
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megablend.megatron.cache_builder.artefacts import read_header


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as they can, also while Python parses: where memory is collected."""
    before = sys.getswitchinterval()
    threshold = gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    gc.callbacks.append(_wait)
    yield
    gc.callbacks.remove(_wait)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(before)


def _wait(phase: str, info: dict[str, int]) -> None:
    time.sleep(0)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_read_headers_at_the_same_time() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(48, dtype=np.int32))
    data = file.getvalue()

    def read(_: int) -> None:
        for _ in range(30):
            assert read_header(io.BytesIO(data)) == ((1, 0), (48,), False, np.dtype(np.int32))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(16)))
