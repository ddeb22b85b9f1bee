"""Megatron `.bin/.idx` pairs: a block is a span of whole sequences of the `.bin`; a document is a
sequence.

The `.idx` contains everything that the index needs, so no byte of the `.bin` is read to build it.
Sequence lengths stay in the `.idx`: a reader keeps none of them in memory, and reads the lengths of
the blocks that are requested.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megablend.config.read_spec import ReadSpec
from megablend.errors import CHANGED_REMEDY, ChangedFileError, ConfigError, UnsupportedFileError
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    Array,
    BaseFormat,
    BlockReader,
    FileIndex,
    OpenedFile,
)
from megablend.formats.blocks import single_chunk
from megablend.formats.megatron.idx import Sequences, block_starts, parse_idx
from megablend.formats.megatron.lengths import WHOLE_BYTES, LengthReader, digest_idx
from megablend.formats.megatron.span_reader import MegatronReader
from megablend.storage.base import Storage

_MAX_BYTES = (1 << 32) - 1
"""Block sizes are stored in 32 bits."""
NO_IDX_REMEDY = (
    "restore the .idx, or, if the .bin is a plain file of token ids (nanoGPT, llm.c, ...), "
    "set `format: raw` for its source"
)


class MegatronFormat(BaseFormat):
    """Pairs of a `.bin` and an `.idx`, given by either path or by their common prefix."""

    name = "megatron"
    suffixes: Sequence[str] = (".bin", ".idx")

    def files(self, path: str) -> Sequence[str]:
        """The `.bin` and the `.idx`."""
        prefix = path[:-4] if path.endswith(tuple(self.suffixes)) else path
        return [f"{prefix}.bin", f"{prefix}.idx"]

    def describe_missing_remedy(self, path: str) -> str | None:
        """See Format.describe_missing_remedy."""
        return (
            NO_IDX_REMEDY
            if path.endswith(".idx")
            else "restore the .bin beside the .idx of the pair"
        )

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Cut the sequences into blocks of about `block_bytes`; see Format.index."""
        if read.column is not None:
            key = "extra_columns" if read.allow_float else "column"
            raise ConfigError(
                f"{path}: .bin/.idx files have no columns; remove {key}: {read.column}"
            )
        data_path, idx_path = self.files(path)
        bin_bytes = storage.stat(data_path).size
        idx_bytes = storage.stat(idx_path).size
        data = storage.read(idx_path, 0, idx_bytes)
        sequences = parse_idx(idx_path, data, bin_bytes)
        blocks = _block_table(data_path, sequences, block_starts(sequences, read.block_bytes))
        return FileIndex(
            rows=len(sequences.lengths),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=sequences.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=_digest(data),
            meta={"idx_bytes": idx_bytes, "block_bytes": read.block_bytes},
            scanned_bytes=0,
        )

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """A reader of an indexed pair; see Format.open."""
        data_path, idx_path = self.files(path)
        for name, size in ((data_path, file.size), (idx_path, file.meta["idx_bytes"])):
            found = storage.stat(name).size
            if found != size:
                raise ChangedFileError(
                    name, f"has {found} bytes, had {size} when it was indexed; {CHANGED_REMEDY}"
                )
        lengths = LengthReader(
            idx_path, file.meta["idx_bytes"], file.structure, file.group_digests, storage
        )
        return MegatronReader(
            data_path=data_path,
            bin_bytes=file.size,
            idx_path=idx_path,
            token_dtype=file.token_dtype,
            lengths=lengths,
        )

    def needs_group_digests(self, file: OpenedFile) -> bool:
        """Whether the `.idx` is long; see GroupDigestFormat."""
        return int(file.meta["idx_bytes"]) > WHOLE_BYTES

    def make_group_digests(
        self, path: str, file: OpenedFile, *, storage: Storage
    ) -> npt.NDArray[np.uint64]:
        """Digests of groups of the `.idx`; see GroupDigestFormat."""
        idx_path = self.files(path)[1]
        found, digests = digest_idx(idx_path, file.meta["idx_bytes"], storage)
        if found != file.structure:
            raise ChangedFileError(
                idx_path,
                "changed while it was being indexed; wait until its writer has finished, then build again",
            )
        return digests

    def describe_unused_bytes(self, path: str, blocks: Array, size: int) -> str | None:
        """A warning about bytes at the end of a `.bin` that belong to no sequence: Megatron accepts
        such a pair silently."""
        used = int((blocks["offset"] + blocks["stored_bytes"]).max(initial=0))
        if used >= size:
            return None
        return (
            f"{path}: has {size:,} bytes, of which {self.files(path)[1]} describes the first {used:,}; the rest is never read; "
            "check that the two files belong together"
        )


MEGATRON = MegatronFormat()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _block_table(path: str, sequences: Sequences, starts: Array) -> Array:
    """BLOCK_DTYPE [num_blocks]. Raises: UnsupportedFileError where a block is too large."""
    blocks = np.zeros(len(starts) - 1, BLOCK_DTYPE)
    cumulative = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(sequences.lengths, dtype=np.int64)]
    )
    non_empty = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(sequences.lengths > 0, dtype=np.int64)]
    )
    blocks["tokens"] = np.diff(cumulative[starts])
    sizes = blocks["tokens"] * np.dtype(sequences.token_dtype).itemsize
    if (sizes > _MAX_BYTES).any():
        number = int(np.argmax(sizes > _MAX_BYTES))
        raise UnsupportedFileError(
            path,
            f"a block of {sizes[number]} bytes is larger than the limit of {_MAX_BYTES}; choose a smaller block_bytes, or split "
            "the longest sequences",
            offset=int(sequences.pointers[starts[number]]),
        )
    blocks["offset"] = sequences.pointers[starts[:-1]]
    blocks["stored_bytes"] = blocks["decoded_bytes"] = sizes
    blocks["first_token"] = cumulative[starts[:-1]]
    blocks["rows"] = np.diff(starts)
    blocks["ends"] = np.diff(non_empty[starts])
    blocks["flags"] = ENDS_AT_DOCUMENT_END
    return blocks
