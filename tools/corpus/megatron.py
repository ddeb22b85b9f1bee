"""A writer of Megatron-LM's `.bin/.idx`.

The `.bin` is the tokens back to back; the `.idx` is a header (magic, version, dtype code, number of sequences, length
of the boundaries), the sequences' lengths and byte offsets, and the sequences at which documents begin. Here a document
is one sequence and ends with an end-of-document token, as `preprocess_data.py --append-eod` leaves it.

Source: megatron.core.datasets.indexed_dataset (`_IndexWriter`, `IndexedDatasetBuilder`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_CODE = 8


class MegatronWriter:
    """Documents of tokens below 2**16 as the pair of files `<prefix>.bin` and `<prefix>.idx`."""

    def __init__(self, prefix: Path, *, end_of_document: int) -> None:
        self.files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._end = np.array([end_of_document], np.uint16)
        self._lengths: list[int] = []
        self._bin = self.files[0].open("wb")

    def write(self, paths: Sequence[str], documents: Sequence[npt.NDArray[np.int32]]) -> None:
        """Append documents; `paths` finds no place in this format.

        Raises: OverflowError at a token of 2**16 or more.
        """
        for document in documents:
            if document.size and document.max() > np.iinfo(np.uint16).max:
                raise OverflowError(
                    f"{self.files[0]}: token {document.max()} does not fit in uint16"
                )
            self._bin.write(document.astype(np.uint16).tobytes() + self._end.tobytes())
            self._lengths.append(document.size + 1)

    def close(self) -> None:
        """Finish the `.bin`, and write the `.idx`."""
        self._bin.close()
        lengths = np.array(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._end.itemsize
        with self.files[1].open("wb") as index:
            index.write(
                MAGIC + struct.pack("<QBQQ", VERSION, UINT16_CODE, lengths.size, lengths.size + 1)
            )
            index.write(lengths.tobytes())
            index.write((ends - lengths * np.int64(self._end.itemsize)).tobytes())
            index.write(np.arange(lengths.size + 1, dtype=np.int64).tobytes())
