"""Many decoded blocks, represented by arrays of the addresses of their tokens; single DecodedBlock
objects are created only when they are accessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.base import NO_OFFSETS, Array, DecodedBlock

DTYPES = tuple(
    np.dtype(name)
    for name in (
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
        *("uint64", "bool", "float16", "float32", "float64"),
    )
)
"""Types of tokens, and of numbers in extra columns."""
KINDS = {dtype: kind for kind, dtype in enumerate(DTYPES)}
"""The index of each dtype in DTYPES."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBlocks(Sequence[DecodedBlock]):
    """Several decoded blocks: a sequence of DecodedBlock that also has the arrays that kernels
    need."""

    owners: list[Any]
    """For each block, the owner of its tokens' memory, an Arrow buffer or an array; or the
    DecodedBlock itself."""
    kinds: npt.NDArray[np.int8]
    """Index in DTYPES of each block's dtype: int8 [n]."""
    sizes: Int64s
    """Number of tokens of each block: int64 [n]."""
    addresses: Int64s
    """Address in memory of each block's tokens: int64 [n]."""
    offsets: list[Int64s] | None
    """The `offsets` of each block; None if they were not requested."""
    extra: tuple[DecodedBlocks, ...] = ()
    """For each extra column, blocks that have its numbers in place of tokens, as integers with the
    same bits."""

    @staticmethod
    def of(blocks: Sequence[DecodedBlock]) -> DecodedBlocks:
        """Make a DecodedBlocks from single blocks, whose arrays must be contiguous."""
        if isinstance(blocks, DecodedBlocks):
            return blocks
        kinds = np.empty(len(blocks), np.int8)
        sizes = np.empty(len(blocks), np.int64)
        addresses = np.empty(len(blocks), np.int64)
        offsets = list[Int64s]()
        for i, block in enumerate(blocks):
            kinds[i] = KINDS[block.tokens.dtype]
            sizes[i] = len(block.tokens)
            addresses[i] = address_of(block.tokens)
            offsets.append(block.offsets)
        columns = zip(*(block.extra for block in blocks), strict=True)
        extra = tuple(map(_of_numbers, columns))
        return DecodedBlocks(list(blocks), kinds, sizes, addresses, offsets, extra)

    @staticmethod
    def joined(parts: Sequence[DecodedBlocks]) -> DecodedBlocks:
        """Concatenate the blocks of all parts."""
        if len(parts) == 1:
            return parts[0]
        with_offsets = all(part.offsets is not None for part in parts)
        none = np.empty(0, np.int64)
        return DecodedBlocks(
            [owner for part in parts for owner in part.owners],
            np.concatenate([np.empty(0, np.int8), *(part.kinds for part in parts)]),
            np.concatenate([none, *(part.sizes for part in parts)]),
            np.concatenate([none, *(part.addresses for part in parts)]),
            [offsets for part in parts for offsets in part.offsets or ()] if with_offsets else None,
            tuple(
                DecodedBlocks.joined(column)
                for column in zip(*(part.extra for part in parts), strict=True)
            ),
        )

    def taken(self, indices: Int64s) -> DecodedBlocks:
        """Return the blocks at these indices, which may repeat (int64 [m])."""
        index_list = indices.tolist()
        return DecodedBlocks(
            [self.owners[i] for i in index_list],
            self.kinds[indices],
            self.sizes[indices],
            self.addresses[indices],
            None if self.offsets is None else [self.offsets[i] for i in index_list],
            tuple(column.taken(indices) for column in self.extra),
        )

    def without_offsets(self) -> DecodedBlocks:
        """Return the same blocks without document offsets."""
        return DecodedBlocks(self.owners, self.kinds, self.sizes, self.addresses, None, self.extra)

    def __len__(self) -> int:
        return len(self.owners)

    @overload
    def __getitem__(self, i: int) -> DecodedBlock: ...
    @overload
    def __getitem__(self, i: slice) -> list[DecodedBlock]: ...
    def __getitem__(self, i: int | slice) -> DecodedBlock | list[DecodedBlock]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        owner = self.owners[i]
        if isinstance(owner, DecodedBlock):
            return owner
        dtype = DTYPES[self.kinds[i]]
        size = int(self.sizes[i])
        tokens: Array = np.empty(0, dtype)
        if size:
            memory = pa.py_buffer(owner)
            tokens = np.frombuffer(memory, dtype, size, int(self.addresses[i]) - memory.address)
        tokens.setflags(write=False)
        return DecodedBlock(tokens, NO_OFFSETS if self.offsets is None else self.offsets[i])


def _of_numbers(column: Sequence[npt.NDArray[Any]]) -> DecodedBlocks:
    """Make a DecodedBlocks from the numbers of an extra column, one array for each block."""
    return DecodedBlocks.of(
        [DecodedBlock(numbers.view(f"i{numbers.itemsize}"), NO_OFFSETS) for numbers in column]
    )


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the memory address of an array's first item."""
    address: int = array.__array_interface__["data"][0]
    return address


def addresses_of(buffers: Sequence[pa.Buffer]) -> Int64s:
    """Return the memory addresses of Arrow buffers: int64 [n]."""
    return np.array([buffer.address for buffer in buffers], np.int64)
