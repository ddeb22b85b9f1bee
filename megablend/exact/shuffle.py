"""RandomState.shuffle."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.kernels.exact import numpy_shuffle as kernels

SMALL = 1 << 16
"""Below this number of entries numpy takes about a millisecond: loading a kernel takes longer."""
LARGE = 1 << 32
"""Above this number of entries numpy draws 64-bit words."""


class Generator:
    """The generator of numpy.random.RandomState(seed), of which shuffles alone are drawn.

    A RandomState takes 0.2 ms to make, to read and to set, about as long as a small dataset takes to shuffle.
    """

    def __init__(self, seed: int) -> None:
        key, self.position = _seeded(seed)
        self.key = key.copy()
        """uint32 [624]"""

    def shuffle(self, array: npt.NDArray[Any]) -> None:
        """Shuffle `array` in place as RandomState.shuffle does, and leave the generator as that does."""
        if _fits(array) and len(array) <= LARGE:
            self.position = _shuffle(array, self.key, self.position)
            return
        state = np.random.RandomState()
        state.set_state(("MT19937", self.key, self.position, 0, 0.0))
        state.shuffle(array)
        found = state.get_state(legacy=False)["state"]
        self.key, self.position = found["key"], found["pos"]


def shuffle(array: npt.NDArray[Any], state: np.random.RandomState) -> None:
    """Shuffle `array` in place as `state.shuffle(array)` does, and leave the state as that does.

    Args:
        array: [n], int32, uint32 or int64 for speed; whatever else it is, numpy itself shuffles it.
        state: not used by anything else at the same time.

    Source: numpy.random.RandomState.shuffle.
    """
    generator = state.get_state(legacy=False)
    if not (_fits(array) and SMALL <= len(array) <= LARGE and generator["bit_generator"] == "MT19937"):
        state.shuffle(array)
        return
    words = generator["state"]
    words["pos"] = _shuffle(array, words["key"], words["pos"])
    state.set_state(generator)


def _shuffle(array: npt.NDArray[Any], key: npt.NDArray[np.uint32], position: int) -> int:
    entries = np.asarray(array).view(np.uint32 if array.itemsize == 4 else np.uint64)
    return kernels.shuffle(entries, key, position)


def _fits(array: npt.NDArray[Any]) -> bool:
    return array.ndim == 1 and array.flags.c_contiguous and array.dtype.kind in "iu" and array.itemsize in (4, 8)


@lru_cache(maxsize=8)
def _seeded(seed: int) -> tuple[npt.NDArray[np.uint32], int]:
    found = np.random.RandomState(seed).get_state(legacy=False)["state"]
    return found["key"], int(found["pos"])
