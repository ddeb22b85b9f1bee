"""A corpus laid out by topic, as crawled data is: this machine's own text, one topic after the other.

A document is a file, a topic the package or folder that it is from. Pages of the Parquet file hold equal numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from corpus.texts import SOURCES, Text, candidates, texts
from make_corpus import TRAINING_BYTES, train_tokenizer, training_sample

END_OF_DOCUMENT = 0
MAX_CHARACTERS = 32 << 10
"""Of a document: longer files are mostly tables, and one would be a good part of the corpus."""
HELD_OUT = 20
"""Every how manieth document is kept for validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens, and where documents and topics begin."""

    tokens: npt.NDArray[np.int32]
    """int32 [num_tokens], end-of-document tokens included."""
    documents: npt.NDArray[np.int64]
    """int64 [num_documents], each one's first token."""
    topics: npt.NDArray[np.int64]
    """int64 [num_documents], the topic's number; ascending."""
    validation: npt.NDArray[np.int64]
    """int64 [num_sequences, sequence_length + 1], of other documents of the same topics."""

    def documents_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which document each token is of."""
        return np.searchsorted(self.documents, positions, side="right") - 1

    def save(self, path: Path) -> None:
        """Write all to one `.npz`."""
        arrays = {
            name: getattr(self, name) for name in ("tokens", "documents", "topics", "validation")
        }
        np.savez(path, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: Path) -> Corpus:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return Corpus(**arrays)


def topic_of(source: str, path: str, roots: Iterable[Path]) -> str:
    """The folder below the root that a file lies in, of its source."""
    inside = max(
        (root for root in roots if path.startswith(f"{root}/")), key=lambda root: len(str(root))
    )
    return f"{source}/{Path(path).relative_to(inside).parts[0]}"


def make_corpus(
    *,
    num_tokens: int,
    vocab_size: int,
    sequence_length: int,
    folders: list[Path],
    max_validation: int = 512,
) -> Corpus:
    """Collect, sort by topic, tokenise; about `num_tokens` tokens for training, an equal part of each source where it has it.

    Raises: ValueError where the folders hold less text than that, or what is held out is shorter than a sequence.
    """
    files = candidates(folders, seed=0)
    tokenizer = train_tokenizer(
        training_sample(files, min(TRAINING_BYTES, 4 * num_tokens)), vocab_size
    )
    roots = [folder.resolve() for folder in folders] + folders
    seen: set[bytes] = set()
    train: list[tuple[str, Text, list[int]]] = []
    held_out: list[tuple[str, Text, list[int]]] = []
    left = num_tokens
    for place, source in enumerate(SOURCES):
        budget = left // (len(SOURCES) - place)
        for text in texts(files[source], seen):
            if budget <= 0:
                break
            if len(text.text) > MAX_CHARACTERS:
                continue
            ids = tokenizer.encode(text.text, add_special_tokens=False).ids
            chosen = held_out if len(train) >= (HELD_OUT - 1) * (len(held_out) + 1) else train
            chosen.append((topic_of(source, text.path, roots), text, [*ids, END_OF_DOCUMENT]))
            if chosen is train:
                budget = budget - len(ids) - 1
                left = left - len(ids) - 1
    if left > num_tokens // 10:
        raise ValueError(
            f"this machine has {num_tokens - left:,} tokens of text; ask for fewer (--tokens)"
        )
    for documents in (train, held_out):
        documents.sort(key=lambda document: (document[0], document[1].path))
    others = np.concatenate(
        [np.empty(0, np.int64), *(np.array(ids, np.int64) for _, _, ids in held_out)]
    )
    count = len(others) // (sequence_length + 1)
    if not count:
        raise ValueError(
            f"{len(held_out)} documents of {len(others)} tokens are held out, less than a sequence; ask for more text (--tokens)"
        )
    sequences = others[: count * (sequence_length + 1)].reshape(count, -1)
    lengths = [len(ids) for _, _, ids in train]
    _, topics = np.unique([topic for topic, _, _ in train], return_inverse=True)
    return Corpus(
        tokens=np.concatenate([np.array(ids, np.int32) for _, _, ids in train]),
        documents=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[:-1],
        topics=topics.astype(np.int64),
        validation=sequences[
            np.linspace(0, count - 1, min(count, max_validation)).astype(np.int64)
        ],
    )


def write_pages(corpus: Corpus, path: Path, page_tokens: int) -> None:
    """The tokens as a flat Parquet column of pages of `page_tokens` each."""
    pq.write_table(
        pa.table({"tokens": corpus.tokens}),
        path,
        use_dictionary=False,
        compression="zstd",
        write_batch_size=page_tokens,
        data_page_size=4 * page_tokens,
        write_page_index=True,
    )
