from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from numba.core import config

from megablend import jit
from megablend.kernels.samples import gather_lengths


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
