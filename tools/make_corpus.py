"""Make a tokenised corpus, without network, from text that any machine with Python has.

    python tools/make_corpus.py demo/data --tokens 24000000

Four sources of different character, each in a format of its own, and the byte-level BPE that was trained on them:

    OUT/stdlib/*.parquet               the standard library: Parquet with 64 KB pages, page index and checksums
    OUT/packages/*.parquet             installed packages' code: Parquet as pyarrow writes it by default
    OUT/docs/*.arrow                   manuals, descriptions, docstrings: Arrow IPC
    OUT/licences_text_document.*       licences and notices: Megatron .bin/.idx, end-of-document tokens included
    OUT/tokenizer.json, OUT/corpus.json

The folder appears whole or not at all. On an unchanged machine the same arguments make the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from corpus.texts import SOURCES, Candidate, Text, candidates, roots, texts
from corpus.writers import WRITERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
SHARES = {"licences": 1, "docs": 3, "stdlib": 4, "packages": 4}
"""Of the tokens asked for; what a source cannot give passes to the ones after it. Each gives a document at least."""
TRAINING_BYTES = 12 << 20
"""Text that the tokenizer sees at most."""
BATCH_BYTES = 2 << 20
"""Text that is tokenised at once; bounds the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written of one source."""

    name: str
    format: str
    files: int
    documents: int
    tokens: int
    bytes: int


def train_tokenizer(sample: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose token 0 is the end of a document; that name in a text is plain text to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def training_sample(files: dict[str, list[Candidate]], limit: int) -> Iterator[str]:
    """The first texts of each source, in the proportions of SHARES, up to about `limit` bytes."""
    seen: set[bytes] = set()
    for name, share in SHARES.items():
        left = limit * share // sum(SHARES.values())
        for text in texts(files[name], seen):
            if left <= 0:
                break
            left -= len(text.text)
            yield text.text


def write_source(
    name: str, found: Iterator[Text], tokenizer: Tokenizer, out: Path, budget: int
) -> Written:
    """Tokenise texts until `budget` tokens are there or the texts end, and write them in the source's format."""
    format_name, open_writer = WRITERS[name]
    writer = open_writer(out)
    num_documents = num_tokens = 0
    while num_tokens < budget:
        batch = list(batch_of(found, min(BATCH_BYTES, 4 * (budget - num_tokens))))
        if not batch:
            break
        encodings = tokenizer.encode_batch_fast(
            [text.text for text in batch], add_special_tokens=False
        )
        documents = [np.array(encoding.ids, np.int32) for encoding in encodings]
        num_wanted = (
            int(
                np.searchsorted(
                    np.cumsum([len(tokens) for tokens in documents]), budget - num_tokens
                )
            )
            + 1
        )
        documents = documents[:num_wanted]
        writer.write([text.path for text in batch[:num_wanted]], documents)
        num_documents += len(documents)
        num_tokens += sum(map(len, documents))
    writer.close()
    return Written(
        name=name,
        format=format_name,
        files=len(writer.files),
        documents=num_documents,
        tokens=num_tokens,
        bytes=sum(file.stat().st_size for file in writer.files),
    )


def batch_of(found: Iterator[Text], num_bytes: int) -> Iterator[Text]:
    """The next texts, until they have `num_bytes` together; at least one, where there is one."""
    while num_bytes > 0 and (head := list(islice(found, 1))):
        num_bytes -= len(head[0].text)
        yield head[0]


def make_corpus(
    out: Path, *, num_tokens: int, vocab_size: int, seed: int, folders: Iterable[Path]
) -> list[Written]:
    """Write tokenizer and sources into the folder `out`, which appears when all is done.

    Raises: FileExistsError where `out` is there already.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already: remove it, or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as unfinished:
        folder = Path(unfinished, "data")
        folder.mkdir()
        files = candidates(folders, seed)
        tokenizer = train_tokenizer(
            training_sample(files, min(TRAINING_BYTES, 8 * num_tokens)), vocab_size
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        written: list[Written] = []
        seen: set[bytes] = set()
        for i, name in enumerate(SOURCES):
            left = num_tokens - sum(source.tokens for source in written)
            budget = max(1, left * SHARES[name] // sum(SHARES[later] for later in SOURCES[i:]))
            written.append(write_source(name, texts(files[name], seen), tokenizer, folder, budget))
        facts = {
            "seed": seed,
            "vocab_size": tokenizer.get_vocab_size(),
            "sources": [asdict(source) for source in written],
        }
        (folder / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        folder.rename(out)
    return written


def table(written: Iterable[Written]) -> str:
    """The sources and what they hold, a line each."""
    rows: list[tuple[str, ...]] = [("source", "format", "files", "documents", "tokens", "bytes")]
    rows += [
        (w.name, w.format, *(f"{n:,}" for n in (w.files, w.documents, w.tokens, w.bytes)))
        for w in written
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        description="Make a tokenised corpus from the text that this machine has."
    )
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument(
        "--tokens", type=int, default=24_000_000, help="tokens to aim at (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=16_384,
        help="size of the vocabulary, 257 to 65536 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="decides which files are taken first (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if not 257 <= options.vocab <= 65_536:
        parser.error(
            f"--vocab {options.vocab} is not from 257 (the bytes and the end of a document) to 65536 (uint16)"
        )
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens} is not positive")
    start = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        written = make_corpus(
            options.out,
            num_tokens=options.tokens,
            vocab_size=options.vocab,
            seed=options.seed,
            folders=roots(),
        )
    except FileExistsError as error:
        parser.error(str(error))
    print(table(written))
    num_tokens = sum(source.tokens for source in written)
    if num_tokens < options.tokens:
        print(f"This machine has less text than {options.tokens:,} tokens: all of it is used.")
    print(f"{num_tokens:,} tokens in {options.out}, made in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
