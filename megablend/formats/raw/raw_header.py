"""Find the offset, the number and the dtype of a raw file's tokens, from its header or from the
config.

Known headers (all integers little-endian):

    .npy           93 NUMPY, version, length, a Python dict as text: descr, fortran_order, shape
    llm.c          256 int32: magic, version, number of tokens; also by modded-nanogpt
    lit-gpt        LITPKDS, version (uint64), code of the dtype (uint8), number of tokens (uint64)

Nothing in a header is evaluated: an `.npy` header is matched as text, and every count is checked
against the file's size.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import numpy as np

from megablend.errors import ConfigError, CorruptFileError, UnsupportedFileError
from megablend.formats.raw.raw_options import DTYPES, RawOptions
from megablend.storage.base import Storage

HEAD_BYTES = 1024
"""Number of bytes that are read of each file: the longest header of fixed size, and enough for
nearly all `.npy` headers."""
_NPY = b"\x93NUMPY"
_NPY_TEXT = {1: ("<H", 10), 2: ("<I", 12), 3: ("<I", 12)}
"""By major version of an `.npy` header: the format of the field with its text's length, and the byte
at which the text begins."""
_MAX_NPY_TEXT = 1 << 16
_LIT = b"LITPKDS"
_LIT_BYTES = 24
_LIT_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float32",
    7: "float64",
    8: "uint16",
}
_LLMC_BYTES = 1024
_LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""The version and the dtype of an llm.c file, by its magic number."""
_MAGIC_AT_BOTH_ENDS = {"Parquet": b"PAR1", "Arrow": b"ARROW1"}
"""Magic numbers with which files of a format both begin and end."""
_MAGIC = {
    b"\xfd7zXZ\0": "xz",
    b"BZh91AY&SY": "bzip2",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"SQLite format 3\0": "a SQLite database",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "a PyTorch file",
    b"Obj\x01": "Avro",
    b"GGUF": "GGUF",
    b"\x04\x22\x4d\x18": "lz4",
    b"MMIDIDX\0\0": "Megatron's .idx, whose tokens are in a .bin",
}
"""Formats by their magic numbers, which are too long for tokens to begin like them by chance."""
_MIN_CONTAINER_BYTES = 30
"""Number of bytes of a zip's first header, the longest of the headers below."""
_GZIP_RESERVED = 0xE0
"""Bits of the flags that RFC 1952 requires to be 0."""
_ZSTD_RESERVED = 0x08
"""The bit of the frame's descriptor that RFC 8878 requires to be 0."""
_ZIP_RESERVED = 0xD780
"""Bits of the flags that APPNOTE 4.4.4 leaves unused, or reserves."""
_ZIP_METHODS = (0, 8, 9, 12, 14, 93, 95)
"""Compression methods that programs actually write."""
_NPY_DTYPES = {f"<{np.dtype(name).str[1:]}": name for name in DTYPES}
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([^'"]{1,20})['"]""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([0-9,\sL]{0,100})\)""")


class Layout(NamedTuple):
    """The layout of a raw file."""

    dtype: str
    """One of DTYPES."""
    header_bytes: int
    num_tokens: int

    @property
    def token_bytes(self) -> int:
        """Size of a token in bytes."""
        return np.dtype(self.dtype).itemsize


class _Header(NamedTuple):
    """The contents of a file's header."""

    kind: str
    header_bytes: int
    dtype: str
    num_tokens: int


def read_layout(
    path: str, size: int, options: RawOptions, storage: Storage
) -> tuple[Layout, bytes]:
    """Read the layout of a file of `size` bytes. Returns the layout, and the bytes of the header
    (if it is long, only its beginning).

    Raises: CorruptFileError if the file's size does not match its header, or it ends in the middle
        of a token; UnsupportedFileError for a header of another dtype, version or shape;
        ConfigError if the dtype is unknown, or the config contradicts the header; MissingFileError.
    """
    if not size:
        raise CorruptFileError(path, "is empty; restore or remove it")
    head = storage.read(path, 0, min(size, HEAD_BYTES))
    header = None if options.header_bytes == 0 else _find_header(path, head, size, options, storage)
    if header is not None and options.header_bytes in (None, header.header_bytes):
        if options.dtype not in (None, header.dtype):
            raise ConfigError(
                f"{path}: its {header.kind} header has dtype {header.dtype}, but format_options has {options.dtype}; "
                "remove the latter"
            )
        layout = Layout(header.dtype, header.header_bytes, header.num_tokens)
        missing = layout.num_tokens * layout.token_bytes - (size - layout.header_bytes)
        if missing:
            cause = (
                "truncated, or still being written"
                if missing > 0
                else "something was appended, or the header is wrong"
            )
            raise CorruptFileError(
                path,
                f"has {size - layout.header_bytes:,} bytes of tokens, but its {header.kind} header states {layout.num_tokens:,} "
                f"tokens of {layout.dtype} ({cause}); restore it",
            )
    else:
        layout = _layout_by_options(path, size, options)
    try:
        options.check_fit(layout.dtype)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return layout, head[: layout.header_bytes]


def find_container(path: str, size: int, header_bytes: int | None, storage: Storage) -> str | None:
    """Return the kind of file that the content appears to be, such as gzip, or None if the bytes
    may be token ids.

    Since a few tokens may look like a magic number, other bytes must also fit: the end of the file,
    or a header's reserved bits.

    Args:
        header_bytes: the option with this name, or None. If it is the size of the file's `.npy`
            header, the tokens follow the header, and the file is not reported as an `.npy` file.

    Raises: see Storage.read.
    """
    head = storage.read(path, 0, min(size, HEAD_BYTES))
    for name, magic in _MAGIC_AT_BOTH_ENDS.items():
        begins_like_it = size >= 2 * len(magic) and head.startswith(magic)
        if begins_like_it and storage.read(path, size - len(magic), len(magic)) == magic:
            return name
    if len(head) < _MIN_CONTAINER_BYTES:
        return None
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head.startswith(b"\x1f\x8b\x08") and not head[3] & _GZIP_RESERVED:
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd") and not head[4] & _ZSTD_RESERVED:
        return "zstd"
    if head.startswith(b"PK\x03\x04"):
        _, flags, method = struct.unpack_from("<3H", head, 4)
        name_bytes, extra_bytes = struct.unpack_from("<2H", head, 26)
        fits = name_bytes and 30 + name_bytes + extra_bytes <= size
        if fits and not flags & _ZIP_RESERVED and method in _ZIP_METHODS:
            return "a zip file (such as PyTorch's .pt or NumPy's .npz)"
    if head.startswith(_NPY) and header_bytes is not None and head[6] in _NPY_TEXT:
        field, start = _NPY_TEXT[head[6]]
        end = start + int(struct.unpack_from(field, head, 8)[0])
        if header_bytes != end <= size and head[start : start + 1] == b"{":
            return f"an .npy file whose header ends at byte {end}"
    # As llm.c writes it, but with the magic number of another program
    magic_number, _, header_count = struct.unpack_from("<3i", head)
    states_count = size - _LLMC_BYTES in (2 * header_count, 4 * header_count) and header_count > 0
    is_header = magic_number not in _LLMC and states_count and not any(head[12:])
    if is_header and header_bytes != _LLMC_BYTES:
        return (
            f"a file with a header of {_LLMC_BYTES} bytes that states its number of tokens (set "
            f"`header_bytes: {_LLMC_BYTES}`)"
        )
    # The number of samples, where each begins, and where the last one ends: at the file's end
    count, first = struct.unpack_from("<2I", head)
    last_at = 4 * (count + 1)
    if count and last_at + 4 <= first <= size:
        (end,) = struct.unpack("<I", storage.read(path, last_at, 4))
        if end == size:
            return "a LitData chunk or a MosaicML Streaming shard"
    return None


def _layout_by_options(path: str, size: int, options: RawOptions) -> Layout:
    if options.dtype is None:
        raise ConfigError(
            f"{path}: the dtype of its tokens is unknown: it has no .npy, llm.c or lit-gpt header (OLMo's .npy files "
            f"have none); set `format_options: {{dtype: uint16}}` (or {', '.join(DTYPES[1:])})"
        )
    header_bytes = options.header_bytes or 0
    token_bytes = np.dtype(options.dtype).itemsize
    if size < header_bytes or (size - header_bytes) % token_bytes:
        raise CorruptFileError(
            path,
            f"has {size:,} bytes, expected header_bytes {header_bytes} plus a multiple of {token_bytes}, the size of a "
            f"{options.dtype}: truncated, or the dtype is wrong; correct `dtype`, or restore the file",
        )
    return Layout(options.dtype, header_bytes, (size - header_bytes) // token_bytes)


def _find_header(
    path: str, head: bytes, size: int, options: RawOptions, storage: Storage
) -> _Header | None:
    """Parse the header of a file; return None if it has no known header. Raises: see
    `read_layout`."""
    # A file that is shorter than the magic number may be a truncated .npy file, or, if the config
    # gives a dtype, a few tokens
    if head.startswith(_NPY) or (options.dtype is None and _NPY.startswith(head)):
        return _npy_header(path, head, size, storage)
    if head.startswith(_LIT) and len(head) >= _LIT_BYTES:
        return _lit_header(path, head)
    magic = int.from_bytes(head[:4], "little")
    if len(head) >= 12 and magic in _LLMC:
        return _llmc_header(path, head, magic)
    return None


def _npy_header(path: str, head: bytes, size: int, storage: Storage) -> _Header:
    """Parse the header of an `.npy` file. Raises: CorruptFileError, UnsupportedFileError."""
    major = head[6] if len(head) > 6 else 0
    field, start = _NPY_TEXT.get(major, ("", 0))
    if not field or len(head) < start:
        raise CorruptFileError(
            path, f"its .npy header has version {major} or is truncated; rewrite it with numpy.save"
        )
    (length,) = struct.unpack_from(field, head, 8)
    if length > _MAX_NPY_TEXT or start + length > size:
        raise CorruptFileError(
            path,
            f"its .npy header has an invalid length of {length} bytes; restore the file",
            offset=8,
        )
    if start + length > len(head):
        head = storage.read(path, 0, start + length)
    text = head[start : start + length].decode("latin-1")
    descr = _DESCR.search(text)
    shape = _SHAPE.search(text)
    if descr is None or shape is None:
        raise UnsupportedFileError(
            path,
            f"its .npy header is {text.strip()[:200]!r}; expected a one-dimensional array of integers",
        )
    if descr[1] not in _NPY_DTYPES:
        raise UnsupportedFileError(
            path,
            f"contains {descr[1]} according to its .npy header; write it as one of {', '.join(DTYPES)}, "
            "little-endian",
        )
    # "5" or "5,": an array of one dimension
    sizes = [size.strip(" L\n") for size in shape[1].split(",")]
    num_dimensions = len(sizes) - (sizes[-1] == "")
    if num_dimensions != 1 or not sizes[0].isdigit() or len(sizes[0]) > 18:
        raise UnsupportedFileError(
            path,
            f"has shape ({shape[1]}) according to its .npy header; write a one-dimensional array "
            "(tokens.reshape(-1))",
        )
    return _Header(".npy", start + length, _NPY_DTYPES[descr[1]], int(sizes[0]))


def _lit_header(path: str, head: bytes) -> _Header:
    version, code, count = struct.unpack_from("<QBQ", head, len(_LIT))
    dtype = _LIT_DTYPES.get(code, f"code {code}")
    if version != 1 or dtype not in DTYPES:
        raise UnsupportedFileError(
            path,
            f"is a lit-gpt packed dataset of version {version} with dtype {dtype}; expected version 1 and one of "
            f"{', '.join(DTYPES)}",
        )
    return _Header("lit-gpt", _LIT_BYTES, dtype, count)


def _llmc_header(path: str, head: bytes, magic: int) -> _Header | None:
    version, count = struct.unpack_from("<2i", head, 4)
    expected_version, dtype = _LLMC[magic]
    if version != expected_version or count < 0 or len(head) < _LLMC_BYTES:
        raise UnsupportedFileError(
            path,
            f"begins like an llm.c file (magic {magic}), but with version {version} and {count} tokens, and {len(head)} bytes of "
            "header; if it is not an llm.c file, set header_bytes: 0 and dtype in format_options",
        )
    return _Header("llm.c", _LLMC_BYTES, dtype, count)
