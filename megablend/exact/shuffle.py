"""RandomState.shuffle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.kernels import shuffle as kernels

SMALL = 1 << 16
"""Below so many entries numpy takes about a millisecond: not worth the loading of a kernel."""
LARGE = 1 << 32
"""Above so many entries numpy draws 64-bit words."""


def shuffle(array: npt.NDArray[Any], state: np.random.RandomState) -> None:
    """Shuffle `array` in place as `state.shuffle(array)` does, and leave the state as that does.

    Args:
        array: [n], int32, uint32 or int64 for speed; whatever else it is, numpy itself shuffles it.
        state: used by nobody else meanwhile.

    Source: numpy.random.RandomState.shuffle.
    """
    generator = state.get_state(legacy=False)
    if not (_fits(array) and SMALL <= len(array) <= LARGE and generator["bit_generator"] == "MT19937"):
        state.shuffle(array)
        return
    words = generator["state"]
    entries = np.asarray(array).view(np.uint32 if array.itemsize == 4 else np.uint64)
    words["pos"] = kernels.shuffle(entries, words["key"], words["pos"])
    state.set_state(generator)


def _fits(array: npt.NDArray[Any]) -> bool:
    return array.ndim == 1 and array.flags.c_contiguous and array.dtype.kind in "iu" and array.itemsize in (4, 8)
