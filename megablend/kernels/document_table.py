"""Where documents begin, out of their lengths and running counts at every so many of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel

Int64s = npt.NDArray[np.int64]


@kernel
def add_lengths(lengths: npt.NDArray[np.int32], every: int, end_tokens: int, documents: Int64s, starts: Int64s) -> None:
    """Add to starts[i] the tokens of the documents from the last multiple of `every` up to documents[i].

    Args:
        lengths: int32 [n], tokens of each document.
        end_tokens: added for each document that has tokens.
        documents: int64 [m], each from 0 to n.
        starts: int64 [m], added to.
    """
    for i in range(len(documents)):
        for document in range(documents[i] // every * every, documents[i]):
            if lengths[document] > 0:
                starts[i] += np.int64(lengths[document]) + end_tokens
