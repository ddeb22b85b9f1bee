"""Engines that turn text into tokens: Hugging Face's `tokenizers`, which is the reference, and
gigatoken, which is thirty times as fast. gigatoken is used only if it is proved to give the same
tokens."""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s
from megablend.config.tokenizer_file import find_named_token
from megablend.errors import ConfigError
from megablend.text.tokenizer import TokenizerFile

MISSING = "tokenising text needs the packages tokenizers and msgspec: pip install 'megablend[text]'"
MAX_CACHE_BYTES = 512 << 20
"""The maximum size of gigatoken's cache of words. The cache takes a third of a byte for each byte
of natural text, and seven bytes for each byte of words that never repeat. Some versions of
gigatoken cannot limit their cache; they are loaded again when the process has grown by this
size."""
_BATCH_CHARACTERS = 1 << 20
"""The number of characters that `tokenizers` gets at a time: it takes 117 bytes of memory for each
byte of text."""
_COMMON = 0x20000
"""Most texts contain only code points below this one."""
_LINE_BREAK = re.compile(
    r"(?<=\S)\n(?=[A-Za-z\u0410-\u044f\u3041-\u3096\u4e00-\u9fa5\uac00-\ud7a3])"
)
"""Matches a single line break between a non-blank character and a letter."""
_PARALLELISM = "TOKENIZERS_PARALLELISM"
Ids = npt.NDArray[np.int32]


class Tokens(NamedTuple):
    """The tokens of several texts."""

    ids: Ids
    """The tokens of all texts, one text after the other (int32 [total])."""
    counts: Int64s
    """The number of tokens of each text (int64 [n])."""

    @classmethod
    def join(cls, texts: Sequence[Ids]) -> Tokens:
        """Return the tokens of several texts, given the tokens of each text."""
        counts = np.array([len(ids) for ids in texts], np.int64)
        return cls(np.concatenate([np.empty(0, np.int32), *texts]), counts)

    def of(self, texts: Iterable[int]) -> list[Ids]:
        """Return the tokens of the texts with the given numbers."""
        ends = np.cumsum(self.counts)
        return [self.ids[ends[i] - self.counts[i] : ends[i]] for i in texts]

    def replace(self, texts: Sequence[int], other: Tokens) -> Tokens:
        """Return a copy of these tokens in which a few texts have new tokens.

        Args:
            texts: the numbers of the texts.
            other: the new tokens of these texts.
        """
        ids = self.of(range(len(self.counts)))
        for i, replacement in zip(texts, other.of(range(len(texts))), strict=True):
            ids[i] = replacement
        return Tokens.join(ids)


class Engine:
    """An engine that tokenises texts with `tokenizers`. It cannot be pickled: each process creates
    its own."""

    name = "tokenizers"

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self.tokenizer = tokenizer
        self._model = make_reference(tokenizer)

    def renew(self) -> None:
        """Clear the engine's cache of words, if it has one."""

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of each text, without special tokens before or after the text."""
        ids = list[Ids]()
        for batch in _divide(texts):
            encodings = self._model.encode_batch_fast(batch, add_special_tokens=False)
            ids += (np.array(encoding.ids, np.int32) for encoding in encodings)
        return Tokens.join(ids)


class GigatokenEngine(Engine):
    """An engine that tokenises most texts with gigatoken, and a few with `tokenizers`.

    Versions of Unicode normalise and classify some code points differently, in ways that no list
    foresees. So `tokenizers` normalises all texts, and also tokenises the texts with code points
    that one of the two packages may not know.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: TokenizerFile) -> None:
        """Load a tokenizer. Raises: an error of gigatoken, such as ValueError, if gigatoken refuses
        the tokenizer."""
        super().__init__(tokenizer)
        data = json.loads(tokenizer.definition)
        # With byte fallback, text is not split by classes of characters, so Unicode does not matter
        self._is_byte_level = not data["model"].get("byte_fallback")
        if self._is_byte_level:
            data["normalizer"] = None
        self._added = [token["content"] for token in data.get("added_tokens") or ()]
        pre = data.get("pre_tokenizer") or {}
        # This pre-tokenizer puts a blank before a text: each piece would also get one
        adds_blank = pre.get("type") == "ByteLevel" and bool(pre.get("add_prefix_space", True))
        self._is_cuttable = not adds_blank and not any("\n" in token for token in self._added)
        self._definition = json.dumps(data)
        self._gigatoken = import_module("gigatoken")
        self.renew()

    def renew(self) -> None:
        """Clear the cache of words, by loading the tokenizer again."""
        self._fast: Any = self._gigatoken.Tokenizer.from_json(self._definition)
        self._is_limited = hasattr(self._fast.backend, "set_max_cache_bytes")
        if self._is_limited:
            self._fast.backend.set_max_cache_bytes(MAX_CACHE_BYTES)
        self._renewed_at = _count_resident()

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of each text, without special tokens before or after the text.

        A larger cache of words makes it faster. So if this version of gigatoken cannot limit its
        cache, gigatoken is loaded again, but only when the process has grown too much.
        """
        if not self._is_limited and _count_resident() > self._renewed_at + MAX_CACHE_BYTES:
            self.renew()
        if not self._is_byte_level:
            return self._encode(texts)
        texts = list(texts)
        normalizes = self.tokenizer.has_normalizer
        for_reference = list[int]()
        for i, text in enumerate(texts):
            if text.isascii():
                continue
            if _has_unassigned(text):
                for_reference.append(i)
            elif not normalizes or unicodedata.is_normalized("NFC", text):
                continue
            elif any(token in text for token in self._added):
                # `normalize_str` would compose an added token with a mark after it
                for_reference.append(i)
            else:
                texts[i] = self._model.normalizer.normalize_str(text)
        tokens = self._encode(texts)
        if not for_reference:
            return tokens
        replacement = self._encode_by_reference([texts[i] for i in for_reference])
        return tokens.replace(for_reference, replacement)

    def _encode_by_reference(self, texts: Sequence[str]) -> Tokens:
        """Tokenise texts with `tokenizers`; long texts are cut into pieces to save memory."""
        pieces = [list(self._cut(text)) for text in texts]
        tokens = super().encode([piece for pieces_of_text in pieces for piece in pieces_of_text])
        starts = np.cumsum([0, *map(len, pieces)])[:-1]
        return Tokens(tokens.ids, np.add.reduceat(tokens.counts, starts))

    def _cut(self, text: str) -> Iterator[str]:
        """Cut a text into pieces that together have the same tokens as the whole text. In all
        expressions that gigatoken knows, a word ends at a `_LINE_BREAK`, and the words after it do
        not depend on the text before it."""
        start = 0
        if self._is_cuttable:
            while line_break := _LINE_BREAK.search(text, start + _BATCH_CHARACTERS):
                yield text[start : line_break.end()]
                start = line_break.end()
        yield text[start:]

    def _encode(self, texts: Sequence[str]) -> Tokens:
        """Tokenise texts with gigatoken."""
        # Without gigatoken's thread pool: workers are processes, and a pool does not survive a fork
        layout = self._fast.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Tokens(ids.view(np.int32), np.diff(offsets))


def _divide(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divide texts into batches of about _BATCH_CHARACTERS; a longer text is a batch of its own."""
    batch = list[str]()
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch


@contextmanager
def without_threads() -> Iterator[None]:
    """Prevent `tokenizers` from starting threads: this process is one of several on its machine,
    and threads would not survive a fork."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[_PARALLELISM]
        if before is not None:
            os.environ[_PARALLELISM] = before


def _count_resident() -> int:
    """Return the number of bytes of memory that this process occupies."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _has_unassigned(text: str) -> bool:
    """Return whether a text has code points that are unassigned in this Python's version of
    Unicode. Such code points may be known to only one of gigatoken and `tokenizers`."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.int32)
    num = _COMMON if codes.max() < _COMMON else sys.maxunicode + 1
    return bool(_find_unassigned(num).take(codes).any())


@lru_cache
def _find_unassigned(num: int) -> Bools:
    """Return whether each of the first `num` code points is unassigned (bool [num]). A million code
    points take 0.1 s."""
    is_unassigned = (unicodedata.category(chr(code)) == "Cn" for code in range(num))
    return np.fromiter(is_unassigned, np.bool_, num)


@lru_cache(maxsize=1)  # several functions in this module need it, and it takes 0.1 s or more
def make_reference(tokenizer: TokenizerFile) -> Any:
    """Load a tokenizer with `tokenizers`. Raises: ConfigError if the package is not installed, or
    refuses the file."""
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"{tokenizer.path}: {MISSING}") from error
    try:
        return tokenizers.Tokenizer.from_str(tokenizer.definition)
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(
            f"{tokenizer.path}: cannot be read by tokenizers {find_version('tokenizers')} ({error}); upgrade tokenizers, or "
            "save the file again with `tokenizer.save`"
        ) from error


def find_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def find_added(tokenizer: TokenizerFile, *, bos: bool, special: bool) -> tuple[Ids, Ids]:
    """Return the tokens to add before and after each document.

    Args:
        bos: whether to add the tokenizer's `bos_token` before each document.
        special: whether to add the tokens that the tokenizer's post-processor adds.

    Raises: ConfigError if these tokens cannot be determined.
    """
    if bos:
        token = find_named_token(Path(tokenizer.path), "bos_token")
        return np.array([token], np.int32), np.empty(0, np.int32)
    if not special:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    model = make_reference(tokenizer)
    plain = model.encode("a", add_special_tokens=False).ids
    whole = model.encode("a").ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            after = whole[start + len(plain) :]
            return np.array(whole[:start], np.int32), np.array(after, np.int32)
    raise ConfigError(
        f"{tokenizer.path}: its post-processor changes tokens within a text, instead of only adding some around it; remove "
        "`add_special_tokens`"
    )


def surround(tokens: Tokens, before: Ids, after: Ids) -> Tokens:
    """Return the tokens of texts, with tokens added at the beginning and the end of each text."""
    if not len(before) and not len(after):
        return tokens
    inner = tokens.of(range(len(tokens.counts)))
    return Tokens.join([np.concatenate((before, ids, after)) for ids in inner])
