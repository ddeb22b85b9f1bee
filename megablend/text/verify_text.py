"""Verify token files: tokenise documents again and compare the tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megablend.config import Config
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.text.documents import Portion
from megablend.text.engine import Engine, find_added, surround
from megablend.text.parts import Part
from megablend.text.setup import Setup
from megablend.text.source import find_text
from megablend.text.tasks import plan_tasks
from megablend.text.text_file import TextFile
from megablend.text.token_file import read_columns

_MAX_PARTS = 16
"""The maximum number of parts of each source from which documents are chosen. A part has to be read
from the beginning to reach a document in it."""


def verify_text(
    config: Config, specs: Sequence[SourceSpec], storage: Storage, number: int
) -> Iterator[str]:
    """Tokenise a few documents of each text source again, with `tokenizers`, and compare the
    tokens.

    Args:
        specs: all sources of the config.
        number: the maximum number of documents of each source.

    Yields: a line of text for each problem.
    Raises: ConfigError if the settings of a source cannot be used; DataError if a file cannot be
        read.
    """
    configured = config.all_sources
    for spec in specs:
        if configured[spec.name].text is None:
            continue
        source = find_text(config, spec, storage)
        pending = source.pending
        for file in pending:
            yield f"{file.path}: is new, or has changed since it was tokenised; tokenise it with `megablend build CONFIG`"
        generator = random.Random(number)  # the same documents each time
        files = {file.name: file for file in source.files if file not in pending}
        parts = [
            (files[name], part)
            for name, entry in sorted(source.entries.items())
            if name in files
            for part in entry.parts
            if part.documents
        ]
        parts = generator.sample(parts, min(len(parts), _MAX_PARTS, number))
        for file, part in parts:
            num_rows = min(part.documents, -(-number // len(parts)))
            rows = generator.sample(range(part.documents), num_rows)
            yield from _verify_rows(source.setup, file, part, sorted(rows))


def _verify_rows(setup: Setup, file: TextFile, part: Part, rows: Sequence[int]) -> Iterator[str]:
    """Verify a few rows of a token file. Yields: a line of text for each problem."""
    path = setup.folder.path(part.name)
    table = read_columns(setup.storage, path, ["tokens", "offset"])
    tokens = table.column("tokens").combine_chunks()
    offsets = table.column("offset").to_pylist()
    remaining = {offsets[row]: row for row in rows}
    engine = Engine(setup.tokenizer)
    around = find_added(setup.tokenizer, bos=setup.bos, special=setup.add_special_tokens)
    for portion in _read_again(setup, file, part.number):
        pairs = zip(portion.offsets.tolist(), portion.texts, strict=True)
        texts = {offset: text for offset, text in pairs if offset in remaining}
        again = surround(engine.encode(list(texts.values())), *around)
        for offset, ids in zip(texts, again.of(range(len(texts))), strict=True):
            row = remaining.pop(offset)
            if ids.tolist() != tokens[row].as_py():
                yield (
                    f"{path}: the tokens of row {row} differ from those of the text at byte {offset} of {file.path}; remove "
                    "the token file, and build under another name (`run:`)"
                )
    for offset, row in remaining.items():
        yield (
            f"{path}: row {row} was made from the document at byte {offset} of {file.path}, but no document begins "
            "there; restore the text"
        )


def _read_again(setup: Setup, file: TextFile, number: int) -> Iterator[Portion]:
    """Read a part of a text file again; yield nothing if the text has fewer parts now."""
    for task in plan_tasks(file, setup.storage, setup.fields, setup.part_bytes):
        if task.part in (None, number):
            part = setup.open_part(task, number)
            if part is not None:
                yield from part.portions
