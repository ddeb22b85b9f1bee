"""Remedies in messages of the exact arrays: what a message says is done, and then they are made."""

from __future__ import annotations

import numpy as np
import pytest

from megablend.errors import PlanError
from megablend.exact.documents import document_index
from megablend.exact.epochs import num_epochs
from megablend.exact.samples import sample_index
from megablend.exact.shuffle import Generator


def test_a_split_without_tokens() -> None:
    with pytest.raises(PlanError, match="expected at least one: give it a larger share of the data, or a share of 0"):
        num_epochs(0, 10, 8, 1)
    assert num_epochs(9, 10, 8, 1) == 9  # a larger share
    assert num_epochs(0, None, 8, 1) == 1  # no samples are asked of a split without a share


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_of_other_documents(threads: int) -> None:
    lengths, generator = np.array([5, 6], np.int32), Generator(1)
    others = document_index(np.arange(3), 1, generator, separate_final_epoch=False)
    says = "refers to documents 0 to 2, but lengths are given for 2; rebuild it for these documents"
    with pytest.raises(PlanError, match=says):
        sample_index(lengths, others, 4, 2, extra=1, threads=threads)
    rebuilt = document_index(np.arange(2), 1, generator, separate_final_epoch=False)
    assert sample_index(lengths, rebuilt, 4, 2, extra=1, threads=threads).shape == (3, 2)
