"""Texts to tokens: by Hugging Face's `tokenizers`, which decides what is right, or by gigatoken,
thirty times as fast, where it is proved to give the same."""

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
"""For words that gigatoken has seen: a third of a byte for each of natural text, and of words that
never repeat seven. Where it has no limit of its own, what the process grows is counted."""
_REFERENCE_CHARACTERS = 1 << 20
_COMMON = 0x20000
"""Code points up to which most text has none others."""
_WORD_END = re.compile(r"(?<=\S)\n(?=[A-Za-z\u0410-\u044f\u3041-\u3096\u4e00-\u9fa5\uac00-\ud7a3])")
_PARALLELISM = "TOKENIZERS_PARALLELISM"
Ids = npt.NDArray[np.int32]


class Tokens(NamedTuple):
    """Tokens of several texts."""

    ids: Ids
    """int32 [total]"""
    counts: Int64s
    """int64 [n]: tokens of each text"""

    @classmethod
    def join(cls, texts: Sequence[Ids]) -> Tokens:
        """Of the tokens of each text."""
        counts = np.array([len(each) for each in texts], np.int64)
        return cls(np.concatenate([np.empty(0, np.int32), *texts]), counts)

    def of(self, texts: Iterable[int]) -> list[Ids]:
        """The tokens of single texts, by their numbers."""
        ends = np.cumsum(self.counts)
        return [self.ids[ends[i] - self.counts[i] : ends[i]] for i in texts]

    def replace(self, texts: Sequence[int], other: Tokens) -> Tokens:
        """With other tokens of single texts, whose numbers ascend."""
        counts = self.counts.copy()
        counts[texts] = other.counts
        ends = np.cumsum(self.counts)
        pieces = list[Ids]()
        done = 0
        for i, ids in zip(texts, other.of(range(len(texts))), strict=True):
            pieces += [self.ids[done : ends[i] - self.counts[i]], ids]
            done = ends[i]
        return Tokens(np.concatenate([*pieces, self.ids[done:]]), counts)


class Engine:
    """Tokenises texts. Not picklable; each process makes its own."""

    name = "tokenizers"

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self.tokenizer = tokenizer
        self._model = make_reference(tokenizer)

    def renew(self) -> None:
        """Forget what is cached."""

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Tokens of each text, without special tokens around it."""
        found = list[Ids]()
        for batch in _divide(texts):
            encoded = self._model.encode_batch_fast(batch, add_special_tokens=False)
            found += (np.array(each.ids, np.int32) for each in encoded)
        return Tokens.join(found)


class GigatokenEngine(Engine):
    """See Engine. Unicode normalisation is that of `tokenizers`, and so are the tokens of documents
    with code points that versions of Unicode may see differently: gigatoken's own is another one,
    whose results differ in ways that no list of code points foresees."""

    name = "gigatoken"

    def __init__(self, tokenizer: TokenizerFile) -> None:
        """Raises: ValueError, or whatever gigatoken does, for a kind that it refuses."""
        super().__init__(tokenizer)
        data = json.loads(tokenizer.definition)
        # With byte fallback, text is not split by classes of characters
        self._is_byte_level = not data["model"].get("byte_fallback")
        if self._is_byte_level:
            data["normalizer"] = None
        self._added = [each["content"] for each in data.get("added_tokens") or ()]
        pre = data.get("pre_tokenizer") or {}
        # A blank is put before a text's first word, which would be put before each piece's, too
        adds_blank = pre.get("type") == "ByteLevel" and bool(pre.get("add_prefix_space", True))
        self._is_cuttable = not adds_blank and not any("\n" in token for token in self._added)
        self._definition = json.dumps(data)
        self._gigatoken = import_module("gigatoken")
        self.renew()

    def renew(self) -> None:
        """See Engine.renew."""
        self._fast: Any = self._gigatoken.Tokenizer.from_json(self._definition)
        self._is_limited = hasattr(self._fast.backend, "set_max_cache_bytes")
        if self._is_limited:
            self._fast.backend.set_max_cache_bytes(MAX_CACHE_BYTES)
        self._renewed_at = _count_resident()

    def encode(self, texts: Sequence[str]) -> Tokens:
        """See Engine.encode. gigatoken 0.10 keeps every word that it has ever seen, which is worth
        more the longer it is kept, until it takes too much."""
        if not self._is_limited and _count_resident() > self._renewed_at + MAX_CACHE_BYTES:
            self.renew()
        if not self._is_byte_level:
            return self._encode(texts)
        texts = list(texts)
        is_normalized = not self.tokenizer.has_normalizer
        slow = list[int]()
        for i, text in enumerate(texts):
            if text.isascii():
                continue
            if _has_unassigned(text):
                slow.append(i)
            elif is_normalized or unicodedata.is_normalized("NFC", text):
                continue
            elif any(token in text for token in self._added):
                slow.append(i)  # a mark after an added token is composed with it
            else:
                texts[i] = self._model.normalizer.normalize_str(text)
        tokens = self._encode(texts)
        if not slow:
            return tokens
        return tokens.replace(slow, self._encode_slowly([texts[i] for i in slow]))

    def _encode_slowly(self, texts: Sequence[str]) -> Tokens:
        """By `tokenizers`, which holds no more of a long text at a time than it must."""
        pieces = [list(self._cut(text)) for text in texts]
        tokens = super().encode([piece for each in pieces for piece in each])
        ends = np.cumsum([0, *map(len, pieces)])
        return Tokens(tokens.ids, np.add.reduceat(tokens.counts, ends[:-1]))

    def _cut(self, text: str) -> Iterator[str]:
        """A text in pieces that are split into words as the whole is: none of the expressions that
        gigatoken knows lets a word go on from a line break, alone between what is no blank and a
        letter, nor does one depend on what is before it."""
        start = 0
        if self._is_cuttable:
            while found := _WORD_END.search(text, start + _REFERENCE_CHARACTERS):
                yield text[start : found.end()]
                start = found.end()
        yield text[start:]

    def _encode(self, texts: Sequence[str]) -> Tokens:
        # Never its thread pool: workers are processes, and a pool does not survive a fork
        layout = self._fast.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Tokens(ids.view(np.int32), np.diff(offsets))


def _divide(texts: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive texts, about a megabyte at a time: `tokenizers` takes 117 bytes for each byte."""
    batch = list[str]()
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= _REFERENCE_CHARACTERS:
            yield batch
            batch = []
            held = 0
    if batch:
        yield batch


@contextmanager
def without_threads() -> Iterator[None]:
    """`tokenizers` uses this thread only: it is one of several processes, and threads that it has
    started would not survive a fork."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        del os.environ[_PARALLELISM]
        if before is not None:
            os.environ[_PARALLELISM] = before


def _count_resident() -> int:
    """Bytes of memory that this process has."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _has_unassigned(text: str) -> bool:
    """Whether a text has code points that this Python's tables do not know: gigatoken or
    `tokenizers` may, if their Unicode is newer."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.int32)
    num = _COMMON if codes.max() < _COMMON else sys.maxunicode + 1
    return bool(_find_unassigned(num).take(codes).any())


@lru_cache
def _find_unassigned(num: int) -> Bools:
    """Of each of the first code points, whether it is unassigned. Takes 0.1 s for a million."""
    found = (unicodedata.category(chr(code)) == "Cn" for code in range(num))
    return np.fromiter(found, np.bool_, num)


@lru_cache(maxsize=1)  # several here need it, and it takes 0.1 s or more
def make_reference(tokenizer: TokenizerFile) -> Any:
    """The tokenizer as `tokenizers` reads it.
    Raises: ConfigError if that is not installed, or refuses the file."""
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(f"{tokenizer.path}: {MISSING}") from error
    try:
        return tokenizers.Tokenizer.from_str(tokenizer.definition)
    except Exception as error:  # of the library: a bare Exception
        raise ConfigError(
            f"{tokenizer.path}: tokenizers {find_version('tokenizers')} cannot read it ({error}); upgrade "
            "tokenizers, or save the file again with `tokenizer.save`"
        ) from error


def find_version(package: str) -> str:
    """The version of a package that is installed; "" if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def find_added(tokenizer: TokenizerFile, *, bos: bool, special: bool) -> tuple[Ids, Ids]:
    """The tokens before and after each document, int32 [n] each: with `bos` the one that begins a
    text, with `special` what the tokenizer's post-processor adds. Raises: ConfigError."""
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
        f"{tokenizer.path}: its post-processor changes tokens within a text, not only around it; remove add_special_tokens"
    )


def surround(tokens: Tokens, before: Ids, after: Ids) -> Tokens:
    """Add tokens before and after those of each text."""
    if not len(before) and not len(after):
        return tokens
    inner = tokens.of(range(len(tokens.counts)))
    return Tokens.join([np.concatenate((before, ids, after)) for ids in inner])
