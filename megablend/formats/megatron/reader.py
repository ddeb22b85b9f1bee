"""Megatron `.bin/.idx` pairs: a block is a span of whole sequences of the `.bin`; a document is a
sequence.

The `.idx` contains everything that the index needs, so no byte of the `.bin` is read to build it.
Sequence lengths stay in the `.idx`: a reader keeps none of them in memory, and reads the lengths of
the blocks that are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.config.read_spec import ReadSpec
from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    UnsupportedFileError,
)
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    Array,
    BaseFormat,
    BlockReader,
    DecodedBlock,
    FileIndex,
    OpenedFile,
    Stops,
    check_size,
    refuse_column,
)
from megablend.formats.blocks import single_chunk
from megablend.formats.megatron.idx import (
    HEADER_BYTES,
    Sequences,
    block_starts,
    describe_unused_bytes,
    parse_idx,
)
from megablend.formats.megatron.lengths import WHOLE_BYTES, LengthReader, digest_idx
from megablend.storage.base import Bytes, Storage
from megablend.storage.ranges import FetchedRanges, FileRanges
from megablend.system.digest import hex_digest

NO_IDX_REMEDY = (
    "restore the .idx, or, if the .bin is a plain file of token ids (nanoGPT, llm.c, ...), "
    "set `format: raw` for its source"
)
_MAX_BYTES = (1 << 32) - 1
"""Maximum size of a block: the index stores sizes in 32 bits."""
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronReader:
    """A reader that decodes blocks of one `.bin`."""

    data_path: str
    bin_bytes: int
    """Size of the `.bin`."""
    idx_path: str
    token_dtype: str
    lengths: LengthReader

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Return ranges of lengths in the `.idx`, and spans of the `.bin`; see
        BlockReader.byte_ranges."""
        if fetched or not len(blocks):
            return []
        self._check_rows(blocks)
        firsts = blocks["first_row"].astype(np.int64)
        counts = blocks["rows"].astype(np.int64)
        # Without tokens, all lengths of a block are 0
        has_tokens = blocks["tokens"] > 0
        lengths = self.lengths.byte_ranges(firsts[has_tokens], counts[has_tokens])
        ranges = [FileRanges(self.idx_path, *lengths)]
        if tokens:
            offsets = blocks["offset"][has_tokens].astype(np.int64)
            sizes = blocks["tokens"][has_tokens] * np.dtype(self.token_dtype).itemsize
            self._check_span(offsets, sizes)
            ranges.append(FileRanges(self.data_path, offsets, sizes, np.arange(len(offsets))))
        return ranges if has_tokens.any() else []

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> list[DecodedBlock]:
        """See BlockReader.decode."""
        offsets, _ = self.find_pieces(blocks, chunks, fetched)
        dtype = np.dtype(self.token_dtype).newbyteorder("<")
        decoded = []
        num_used = 0
        for num_tokens, block_offsets in zip(blocks["tokens"].tolist(), offsets, strict=True):
            data: Bytes = _EMPTY
            if num_tokens:
                data = fetched[1][num_used]
                num_used += 1
            data.setflags(write=False)
            decoded.append(DecodedBlock(data.view(dtype), block_offsets))
        return decoded

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.find_pieces; only the `.idx` is needed."""
        all_offsets = []
        num_used = 0
        columns = (blocks[name].tolist() for name in ("first_row", "rows", "tokens"))
        for block, first, count, num_tokens in zip(blocks, *columns, strict=True):
            offsets = np.zeros(count + 1, np.int64)
            if num_tokens:
                begin = int(fetched[0].ranges.offsets[num_used])
                data = fetched[0][num_used]
                self.lengths.decode(begin, data, first, count).cumsum(out=offsets[1:])
                self._check_tokens(block, int(offsets[-1]))
                num_used += 1
            all_offsets.append(offsets)
        return all_offsets, 0

    def _check_rows(self, blocks: Array) -> None:
        """Check that the `.idx` contains the blocks' sequences. Raises: CorruptFileError."""
        first = blocks["first_row"]
        rows = blocks["rows"]
        num_sequences = self.lengths.num_sequences
        is_outside = (first < 0) | (rows < 0) | (first + rows > num_sequences)
        is_wrong = (blocks["tokens"] > 0) & is_outside
        if is_wrong.any():
            i = int(np.argmax(is_wrong))
            raise CorruptFileError(
                self.data_path,
                f"a block has {rows[i]} sequences from sequence {first[i]} on, but {self.idx_path} has {num_sequences} in "
                f"total; {CHANGED_REMEDY}",
                offset=int(blocks["offset"][i]),
            )

    def _check_span(self, offsets: Int64s, sizes: Int64s) -> None:
        """Check that the blocks are within the `.bin` as it was indexed.
        Raises: CorruptFileError."""
        is_wrong = (offsets < 0) | (offsets + sizes > self.bin_bytes)
        if is_wrong.any():
            i = int(np.argmax(is_wrong))
            raise CorruptFileError(
                self.data_path,
                f"a block of {sizes[i]} bytes ends after the end of the file ({self.bin_bytes} bytes); "
                f"{CHANGED_REMEDY}",
                offset=int(offsets[i]),
            )

    def _check_tokens(self, block: np.void, num_tokens: int) -> None:
        """Compare a block's tokens with the sum of its lengths. Raises: CorruptFileError."""
        if num_tokens != block["tokens"]:
            raise CorruptFileError(
                self.data_path,
                f"a block has {block['rows']} sequences and {block['tokens']} tokens, but according to "
                f"{self.idx_path} these sequences have {num_tokens}; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )


class MegatronFormat(BaseFormat):
    """The format of pairs of a `.bin` and an `.idx`, given by either path or their common
    prefix."""

    name = "megatron"
    suffixes: Sequence[str] = (".bin", ".idx")
    has_group_digests: bool = True

    def files(self, path: str) -> Sequence[str]:
        """Return the paths of the `.bin` and the `.idx`."""
        prefix = path[:-4] if path.endswith(tuple(self.suffixes)) else path
        return [f"{prefix}.bin", f"{prefix}.idx"]

    def list_ranges(self, path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
        """Return spans of the `.bin`, and the ranges of the `.idx` that contain their lengths; see
        Format.list_ranges."""
        lengths = FileRanges(
            self.files(path)[1],
            HEADER_BYTES + 4 * blocks["first_row"],
            4 * blocks["rows"],
            np.arange(len(blocks)),
        )
        return [*super().list_ranges(path, blocks, stops), lengths]

    def describe_missing_remedy(self, path: str) -> str | None:
        """See Format.describe_missing_remedy."""
        if path.endswith(".idx"):
            return NO_IDX_REMEDY
        return "restore the .bin next to the .idx of the pair"

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Cut the sequences into blocks of about `block_bytes`; see Format.index."""
        refuse_column(path, read, ".bin/.idx")
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
            structure=hex_digest(data),
            meta={"idx_bytes": idx_bytes, "block_bytes": read.block_bytes},
            scanned_bytes=0,
        )

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed pair; see Format.open."""
        data_path, idx_path = self.files(path)
        check_size(data_path, file.size, storage)
        check_size(idx_path, file.meta["idx_bytes"], storage)
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
        """Return whether the `.idx` is long; see BaseFormat."""
        return int(file.meta["idx_bytes"]) > WHOLE_BYTES

    def make_group_digests(
        self, path: str, file: OpenedFile, *, storage: Storage
    ) -> npt.NDArray[np.uint64]:
        """Compute digests of the groups of the `.idx`; see BaseFormat."""
        idx_path = self.files(path)[1]
        digest, digests = digest_idx(idx_path, file.meta["idx_bytes"], storage)
        if digest != file.structure:
            raise ChangedFileError(
                idx_path,
                "changed while it was being indexed; wait until its writer has finished, then build again",
            )
        return digests

    def describe_unused_bytes(self, path: str, blocks: Array, size: int) -> str | None:
        """See Format.describe_unused_bytes."""
        used = int((blocks["offset"] + blocks["stored_bytes"]).max(initial=0))
        if used >= size:
            return None
        return describe_unused_bytes(path, self.files(path)[1], used, size)


def _block_table(path: str, sequences: Sequences, starts: Array) -> Array:
    """Make the block table of a pair, BLOCK_DTYPE [num_blocks]; `starts`: see `block_starts`.
    Raises: UnsupportedFileError if a block is too large."""
    blocks = np.zeros(len(starts) - 1, BLOCK_DTYPE)
    # Tokens, and sequences with tokens, before each sequence
    tokens_before = running_totals(sequences.lengths)
    filled_before = running_totals(sequences.lengths > 0)
    blocks["tokens"] = np.diff(tokens_before[starts])
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
    blocks["first_token"] = tokens_before[starts[:-1]]
    blocks["rows"] = np.diff(starts)
    blocks["ends"] = np.diff(filled_before[starts])
    blocks["flags"] = ENDS_AT_DOCUMENT_END
    return blocks


MEGATRON = MegatronFormat()
