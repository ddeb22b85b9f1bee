"""Cached dictionaries are freed while what they are in is still there."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit
atexit.register(lambda: print("kept:", (0, 0) in CACHE))  # runs after those that are registered later
import numpy as np, pyarrow as pa
from megablend.formats.parquet.decoding.dictionaries import CACHE
pool = pa.proxy_memory_pool(pa.default_memory_pool())
CACHE.get((0, 0), lambda: np.frombuffer(pa.allocate_buffer(1 << 20, pool), np.uint8))
print("kept:", (0, 0) in CACHE)
"""


@pytest.mark.long
def test_arrays_in_a_memory_pool_of_the_program_are_freed_before_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "kept: True\nkept: False\n"), done.stderr
