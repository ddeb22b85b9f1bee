"""Parse and check a Megatron `.idx`: lengths and byte pointers of the sequences in its `.bin`.

    MMIDIDX\\0\\0 | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
    | lengths int32 | pointers int64 | document boundaries int64 | modes int8 (if multimodal)

Source: megatron.core.datasets.indexed_dataset, _IndexWriter and _IndexReader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.errors import UNFINISHED, CorruptFileError, UnsupportedFileError
from megablend.formats.base import Array

_MAGIC = b"MMIDIDX\0\0"
_LEGACY_MAGIC = b"TNTIDX\0\0"
HEADER_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8
# Names of numpy's dtypes by dtype code
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of an `.idx`, whose counts agree with the file's size."""

    token_dtype: str
    num_sequences: int
    num_boundaries: int
    """Number of document boundaries: one more than documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The positions and lengths of the sequences in a `.bin`."""

    token_dtype: str
    lengths: Array
    """Number of tokens of each sequence: int32 [num_sequences]."""
    pointers: Array
    """Offset in bytes of each sequence in the `.bin`: int64 [num_sequences]."""


def parse_idx(path: str, data: bytes, bin_bytes: int) -> Sequences:
    """Parse a whole `.idx`.

    Args:
        path: path of the `.idx`, for messages.
        bin_bytes: size of the `.bin`, which must contain every sequence.

    Raises: CorruptFileError; UnsupportedFileError for float tokens and the legacy format.
    """
    header = parse_header(path, data[:HEADER_BYTES], len(data))
    num_sequences = header.num_sequences
    num_boundaries = header.num_boundaries
    lengths = np.frombuffer(data, "<i4", num_sequences, HEADER_BYTES)
    pointers = np.frombuffer(data, "<i8", num_sequences, HEADER_BYTES + 4 * num_sequences)
    boundaries = np.frombuffer(data, "<i8", num_boundaries, HEADER_BYTES + 12 * num_sequences)
    boundaries_ascend = (
        num_boundaries > 0
        and boundaries[0] == 0
        and boundaries[-1] == num_sequences
        and (np.diff(boundaries) >= 0).all()
    )
    if not boundaries_ascend:
        raise CorruptFileError(
            path,
            f"document boundaries do not ascend from 0 to {num_sequences} sequences; restore the file",
            offset=HEADER_BYTES + 12 * num_sequences,
        )
    _check_places(path, lengths, pointers, np.dtype(header.token_dtype).itemsize, bin_bytes)
    return Sequences(token_dtype=header.token_dtype, lengths=lengths, pointers=pointers)


def parse_header(path: str, head: bytes, idx_bytes: int) -> Header:
    """Parse the header of an `.idx` of `idx_bytes` bytes, given its first HEADER_BYTES; the lengths
    follow it.

    Raises: CorruptFileError; UnsupportedFileError for float tokens and the legacy format.
    """
    if head.startswith(_LEGACY_MAGIC):
        raise UnsupportedFileError(
            path,
            "is in Megatron's legacy format; recreate it with Megatron's tools/preprocess_data.py",
        )
    if len(head) < HEADER_BYTES:
        raise CorruptFileError(
            path,
            f"has {len(head)} bytes, too few for the {HEADER_BYTES}-byte header; restore the file",
        )
    if not head.startswith(_MAGIC):
        raise CorruptFileError(
            path,
            f"begins with {head[: len(_MAGIC)]!r}, not with {_MAGIC!r}: not an .idx file; restore it",
            offset=0,
        )
    version = int.from_bytes(head[9:17], "little")
    if version != 1:
        raise UnsupportedFileError(
            path,
            f"has version {version}, expected 1; recreate it with Megatron's tools/preprocess_data.py",
            offset=9,
        )
    code = head[17]
    if code not in _DTYPES:
        raise CorruptFileError(
            path, f"has the unknown dtype code {code}; restore the file", offset=17
        )
    if _DTYPES[code].startswith("float"):
        raise UnsupportedFileError(
            path, f"contains {_DTYPES[code]} values, expected integers", offset=17
        )
    num_sequences = int.from_bytes(head[18:26], "little")
    num_boundaries = int.from_bytes(head[26:34], "little")
    plain_bytes = HEADER_BYTES + 12 * num_sequences + 8 * num_boundaries
    # Multimodal files have a one-byte mode for each sequence
    if idx_bytes not in (plain_bytes, plain_bytes + num_sequences):
        raise CorruptFileError(
            path,
            f"has {idx_bytes} bytes, but {num_sequences} sequences and {num_boundaries} document "
            f"boundaries take {plain_bytes}: {UNFINISHED}",
            offset=18,
        )
    return Header(
        token_dtype=_DTYPES[code], num_sequences=num_sequences, num_boundaries=num_boundaries
    )


def _check_places(
    path: str, lengths: Array, pointers: Array, itemsize: int, bin_bytes: int, first: int = 0
) -> None:
    """Check that sequences, from number `first` on, are within the `.bin`.
    Raises: CorruptFileError."""
    sizes = lengths.astype(np.int64) * itemsize
    inside = (
        (lengths >= 0) & (pointers >= 0) & (pointers <= bin_bytes) & (sizes <= bin_bytes - pointers)
    )
    if not inside.all():
        i = int(np.argmin(inside))
        number = first + i
        raise CorruptFileError(
            path,
            f"sequence {number} ({lengths[i]} tokens of {itemsize} bytes at byte {pointers[i]}) is outside "
            f"the .bin of {bin_bytes} bytes: one of the two files is truncated or belongs to another pair; restore the pair",
            offset=HEADER_BYTES + 4 * number,
        )


def check_last_place(path: str, header: Header, length: int, pointer: int, bin_bytes: int) -> None:
    """Check that the last sequence of an `.idx` is within the `.bin`: if copying the `.bin` was
    interrupted, it is not.

    Args:
        path: path of the `.idx`, for messages.
        length: length of the last sequence in tokens.
        pointer: its first byte in the `.bin`.

    Raises: CorruptFileError.
    """
    _check_places(
        path,
        np.array([length]),
        np.array([pointer]),
        np.dtype(header.token_dtype).itemsize,
        bin_bytes,
        header.num_sequences - 1,
    )


def describe_unused_bytes(bin_path: str, idx_path: str, used: int, bin_bytes: int) -> str:
    """Return the warning about bytes at the end of a `.bin` that belong to no sequence. (Megatron
    accepts such a pair silently.)"""
    return (
        f"{bin_path}: has {bin_bytes:,} bytes, of which {idx_path} describes the first {used:,}; the rest is never read; "
        "check that the two files belong together"
    )


def block_starts(sequences: Sequences, block_bytes: int) -> Array:
    """Split the sequences into contiguous blocks of about `block_bytes`.

    Contiguous sequences are divided into windows of `block_bytes`; a block contains the sequences
    that begin within one window, each as a whole. If a sequence does not begin where the previous
    one ends, a new block begins.

    Returns: int64 [num_blocks + 1], the first sequence of each block, followed by the number of
        sequences.
    """
    num_sequences = len(sequences.lengths)
    if not num_sequences:
        return np.zeros(1, np.int64)
    pointers = sequences.pointers
    ends = pointers + sequences.lengths.astype(np.int64) * np.dtype(sequences.token_dtype).itemsize
    # Runs of contiguous sequences, each divided into windows of `block_bytes`
    begins_run = np.concatenate([[True], pointers[1:] != ends[:-1]])
    run_starts = pointers[begins_run][np.cumsum(begins_run) - 1]
    window = (pointers - run_starts) // block_bytes
    begins_block = begins_run | np.concatenate([[True], window[1:] != window[:-1]])
    return np.append(np.flatnonzero(begins_block), num_sequences).astype(np.int64)
