from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from megablend import jit
from megablend.kernels.exact.sample_index import gather_lengths


@pytest.mark.skipif(bool(vars(config)["DISABLE_JIT"]), reason="nothing is compiled")
def test_whatever_is_compiled_is_compiled_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    turn = jit._turn

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        with turn():
            turns.append(1)
            yield

    monkeypatch.setattr(jit, "_turn", counted)
    fresh = jit.kernel(gather_lengths.py_func)  # type: ignore[attr-defined]
    lengths, out = np.arange(1, 4, dtype=np.int32), np.empty(3, np.int32)
    documents = np.array([2, 0, 1], np.int32)
    assert fresh(lengths, documents, out) == 6
    before = len(turns)
    assert fresh(lengths, documents, out) == 6
    assert len(turns) == before > 0
    documents.flags.writeable = False  # of another type for numba, as a memory-mapped file's are
    assert fresh(lengths, documents, out) == 6
    assert len(turns) == before + 1


@pytest.mark.skipif(bool(vars(config)["DISABLE_JIT"]), reason="nothing is compiled")
@pytest.mark.timeout(120)
def test_a_kernel_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    """On a full disk; a later process keeps it."""
    code = (
        "import sys, resource, numpy as np\n"
        "from megablend.kernels.exact.sample_index import gather_lengths\n"
        "if sys.argv[1:]: resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))\n"
        "lengths, out = np.arange(1, 4, dtype=np.int32), np.empty(3, np.int32)\n"
        "print(gather_lengths(lengths, np.array([2, 0, 1], np.int32), out), out.tolist())\n"
    )
    environment = {**os.environ, "MEGABLEND_KERNEL_CACHE": str(tmp_path)}
    said = 0
    for limit in (["0"], ["1000"], []):
        command = [sys.executable, "-c", code, *limit]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "6 [3, 1, 2]\n"
        assert bool(list(tmp_path.rglob("*.nbc"))) == (not limit)
        said += done.stderr.count("megablend: compiling kernels for this machine, once")
    assert said == 1  # by the first process on a node
