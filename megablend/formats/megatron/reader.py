"""Megatron `.bin/.idx` pairs: a block is a span of whole sequences of the `.bin`; a document is a sequence.

The `.idx` says all that the index needs, so that no byte of the `.bin` is read to build it. Sequence lengths stay in
the `.idx`: a reader holds nothing of it, and reads the lengths of the blocks it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.errors import CHANGED_REMEDY, ChangedFileError, ConfigError, CorruptFileError, UnsupportedFileError
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    Array,
    BlockReader,
    DecodedBlock,
    FileIndex,
    FileToIndex,
    OpenedFile,
)
from megablend.formats.blocks import single_chunk
from megablend.formats.megatron.idx import Sequences, block_starts, parse_idx
from megablend.formats.megatron.lengths import LengthReader
from megablend.storage.base import Storage

_MAX_BYTES = (1 << 32) - 1
"""Sizes of blocks are kept in 32 bits."""


class MegatronFormat:
    """Pairs of a `.bin` and an `.idx`, named by either or by their common prefix."""

    name = "megatron"
    suffixes: Sequence[str] = (".bin", ".idx")
    documents_known: bool = True
    reader_block_bytes: int = 0

    def files(self, path: str) -> Sequence[str]:
        """The `.bin` and the `.idx`."""
        prefix = path[:-4] if path.endswith(tuple(self.suffixes)) else path
        return [f"{prefix}.bin", f"{prefix}.idx"]

    def index(self, file: FileToIndex, *, storage: Storage) -> FileIndex:
        """Cut the sequences into blocks of about `block_bytes`; see Format.index."""
        if file.column is not None:
            key = "extra_columns" if file.numbers else "column"
            raise ConfigError(f"{file.path}: .bin/.idx files have no columns; leave out {key}: {file.column}")
        data_path, idx_path = self.files(file.path)
        bin_bytes, idx_bytes = storage.stat(data_path).size, storage.stat(idx_path).size
        data = storage.read(idx_path, 0, idx_bytes)
        sequences = parse_idx(idx_path, data, bin_bytes)
        blocks = _block_table(data_path, sequences, block_starts(sequences, file.block_bytes))
        return FileIndex(
            rows=len(sequences.lengths),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=sequences.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=_digest(data),
            meta={"idx_bytes": idx_bytes, "block_bytes": file.block_bytes},
            scanned_bytes=0,
        )

    def open(self, path: str, column: str | None, file: OpenedFile, *, storage: Storage) -> BlockReader:
        """A reader of an indexed pair; see Format.open."""
        data_path, idx_path = self.files(path)
        for name, size in ((data_path, file.size), (idx_path, file.meta["idx_bytes"])):
            found = storage.stat(name).size
            if found != size:
                raise ChangedFileError(name, f"has {found} bytes, had {size} when it was indexed; {CHANGED_REMEDY}")
        lengths = LengthReader(idx_path, file.meta["idx_bytes"], file.structure, file.group_digests, storage)
        return MegatronReader(
            data_path=data_path,
            idx_path=idx_path,
            token_dtype=file.token_dtype,
            lengths=lengths,
            storage=storage,
        )


MEGATRON = MegatronFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronReader:
    """Reads blocks of one `.bin`."""

    data_path: str
    idx_path: str
    token_dtype: str
    lengths: LengthReader
    storage: Storage

    def read(self, blocks: Array, chunks: Array, *, pieces: bool = True) -> list[DecodedBlock]:
        """Read spans of the `.bin`; see BlockReader.read."""
        return [self._read(block) for block in blocks]

    def pieces(self, blocks: Array, chunks: Array) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.pieces; the `.idx` tells."""
        return [self._offsets(block) for block in blocks], 0

    def _read(self, block: np.void) -> DecodedBlock:
        tokens, offset = int(block["tokens"]), int(block["offset"])
        dtype = np.dtype(self.token_dtype).newbyteorder("<")
        offsets = self._offsets(block)
        data = self.storage.read(self.data_path, offset, tokens * dtype.itemsize) if tokens else b""
        return DecodedBlock(np.frombuffer(data, dtype), offsets)

    def _offsets(self, block: np.void) -> npt.NDArray[np.int64]:
        rows, tokens, offset = int(block["rows"]), int(block["tokens"]), int(block["offset"])
        if not tokens:
            return np.zeros(rows + 1, np.int64)
        first, there = int(block["first_row"]), self.lengths.num_sequences
        if first < 0 or rows < 0 or first + rows > there:
            raise CorruptFileError(
                self.data_path,
                f"block of {rows} sequences from {first} on, where {self.idx_path} has {there} in all; "
                f"{CHANGED_REMEDY}",
                offset=offset,
            )
        offsets = np.zeros(rows + 1, np.int64)
        np.cumsum(self.lengths.read(first, rows), out=offsets[1:])
        if offsets[-1] != tokens:
            raise CorruptFileError(
                self.data_path,
                f"block of {rows} sequences and {tokens} tokens, where those of {self.idx_path} have {offsets[-1]}; "
                f"{CHANGED_REMEDY}",
                offset=offset,
            )
        return offsets


def describe_rest(path: str, blocks: Array, bin_bytes: int) -> str | None:
    """A note about bytes at the end of a `.bin` that no sequence lies in: Megatron takes such a pair without a word.

    Args:
        path: of the `.bin`.
        blocks: BLOCK_DTYPE [num_blocks], of the whole file.
    """
    used = int((blocks["offset"] + blocks["stored_bytes"]).max(initial=0))
    if used >= bin_bytes:
        return None
    idx_path = MEGATRON.files(path)[1]
    return (
        f"{path}: has {bin_bytes:,} bytes, of which {idx_path} describes the first {used:,}; the rest is never read: check that "
        "the two belong together"
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _block_table(path: str, sequences: Sequences, starts: Array) -> Array:
    """BLOCK_DTYPE [num_blocks]. Raises: UnsupportedFileError where a block is too large."""
    blocks = np.zeros(len(starts) - 1, BLOCK_DTYPE)
    cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences.lengths, dtype=np.int64)])
    non_empty = np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences.lengths > 0, dtype=np.int64)])
    blocks["tokens"] = np.diff(cumulative[starts])
    sizes = blocks["tokens"] * np.dtype(sequences.token_dtype).itemsize
    if (sizes > _MAX_BYTES).any():
        number = int(np.argmax(sizes > _MAX_BYTES))
        raise UnsupportedFileError(
            path,
            f"a block of {sizes[number]} bytes is larger than {_MAX_BYTES}; choose a smaller block_bytes, or cut the "
            "sequences that are longer",
            offset=int(sequences.pointers[starts[number]]),
        )
    blocks["offset"] = sequences.pointers[starts[:-1]]
    blocks["stored_bytes"] = blocks["decoded_bytes"] = sizes
    blocks["first_token"] = cumulative[starts[:-1]]
    blocks["rows"] = np.diff(starts)
    blocks["ends"] = np.diff(non_empty[starts])
    blocks["flags"] = ENDS_AT_DOCUMENT_END
    return blocks
