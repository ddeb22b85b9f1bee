"""numpy.random.RandomState.shuffle, faster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.kernels.exact import numpy_shuffle as kernels

SMALL = 1 << 16
"""Below this number of entries numpy takes less than about a millisecond; loading a kernel takes longer."""
LARGE = 1 << 32
"""Above this number of entries numpy draws 64-bit random words."""


class Generator:
    """The generator of numpy.random.RandomState(seed), used only for shuffles.

    Creating a RandomState, reading and setting its state takes 0.2 ms, about as long as shuffling a small dataset.
    """

    def __init__(self, seed: int) -> None:
        key, self.position = _seeded(seed)
        self.key = key.copy()
        """uint32 [624], the Mersenne Twister state."""

    def shuffle(self, array: npt.NDArray[Any]) -> None:
        """Shuffle `array` in place and advance the generator exactly as RandomState.shuffle does."""
        if _fits(array) and len(array) <= LARGE:
            self.position = _shuffle(array, self.key, self.position)
            return
        state = np.random.RandomState()
        state.set_state(("MT19937", self.key, self.position, 0, 0.0))
        state.shuffle(array)
        twister = state.get_state(legacy=False)["state"]
        self.key, self.position = twister["key"], twister["pos"]


def shuffle(array: npt.NDArray[Any], state: np.random.RandomState) -> None:
    """Shuffle `array` in place and advance `state` exactly as `state.shuffle(array)` does.

    Args:
        array: [n], int32, uint32 or int64 for speed; any other array is shuffled by numpy itself.
        state: must not be used concurrently.

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
    twister = np.random.RandomState(seed).get_state(legacy=False)["state"]
    return twister["key"], int(twister["pos"])
