"""Megatron `.bin/.idx` pairs: a block is a span of whole sequences of the `.bin`; a document is a sequence.

The `.idx` says all that the index needs, so that no byte of the `.bin` is read to build it. Sequence lengths stay in
the `.idx`: a reader keeps where blocks begin, and reads the lengths of the blocks it is asked for.
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
    CLOSES,
    Array,
    BlockReader,
    DecodedBlock,
    FileIndex,
    FileToIndex,
    OpenedFile,
)
from megablend.formats.blocks import single_chunk
from megablend.formats.megatron.idx import HEADER_BYTES, Sequences, block_starts, parse_idx
from megablend.storage.base import Storage

_MAX_BYTES = (1 << 32) - 1
"""Sizes of blocks are kept in 32 bits."""


class MegatronFormat:
    """Pairs of a `.bin` and an `.idx`, named by either or by their common prefix."""

    name = "megatron"
    suffixes: Sequence[str] = (".bin", ".idx")
    documents_known: bool = True
    reader_block_bytes: int = 16

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
        data = storage.read(idx_path, 0, file.meta["idx_bytes"])
        if _digest(data) != file.structure:
            raise ChangedFileError(
                idx_path, f"has digest {_digest(data)}, had {file.structure} when it was indexed; {CHANGED_REMEDY}"
            )
        sequences = parse_idx(idx_path, data, file.size)
        starts = block_starts(sequences, file.meta["block_bytes"])
        return MegatronReader(
            data_path=data_path,
            idx_path=idx_path,
            token_dtype=file.token_dtype,
            starts=starts,
            first_tokens=_block_table(data_path, sequences, starts)["first_token"],
            storage=storage,
        )


MEGATRON = MegatronFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronReader:
    """Reads blocks of one `.bin`."""

    data_path: str
    idx_path: str
    token_dtype: str
    starts: Array
    """int64 [num_blocks + 1]: the first sequence of each block."""
    first_tokens: Array
    """int64 [num_blocks]: tokens of the file before each block."""
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
        # Of the blocks that begin at one token, all but the last are without tokens.
        number = int(np.searchsorted(self.first_tokens, block["first_token"], side="right")) - 1
        first = int(self.starts[number])
        lengths = np.frombuffer(self.storage.read(self.idx_path, HEADER_BYTES + 4 * first, 4 * rows), "<i4")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        if first + rows != self.starts[number + 1] or offsets[-1] != tokens:
            raise CorruptFileError(
                self.data_path,
                f"block of {rows} sequences and {tokens} tokens, where {self.idx_path} has "
                f"{int(self.starts[number + 1]) - first} and {offsets[-1]}; verify the cache, or build again",
                offset=offset,
            )
        return offsets


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
    blocks["flags"] = CLOSES
    return blocks
