"""Whether token files are what their text gives: documents are read and tokenised again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megablend.config import Config
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.text.engine import Engine, find_added, surround
from megablend.text.parts import Part, TextFile, plan_tasks
from megablend.text.source import find_text
from megablend.text.token_file import open_token_file
from megablend.text.work import Setup

_MOST_PARTS = 16
"""Parts that documents are chosen from, of each source: each is read from its beginning."""


def verify_text(
    config: Config, specs: Sequence[SourceSpec], storage: Storage, number: int
) -> Iterator[str]:
    """Tokenise documents of each text source again, by `tokenizers`.

    Args:
        specs: of all sources.
        number: of documents of each source, at most.

    Yields: a line for each problem.
    Raises: ConfigError, DataError.
    """
    for spec in specs:
        if config.all_sources[spec.name].text is None:
            continue
        found = find_text(config, spec, storage)
        for file in found.pending:
            yield f"{file.path}: changed since it was tokenised, or is new; `megablend build CONFIG` tokenises it"
        chosen = random.Random(number)
        files = {file.name: file for file in found.files}
        parts = [
            (files[name], part)
            for name, entry in sorted(found.entries.items())
            if files[name] not in found.pending
            for part in entry.parts
            if part.documents
        ]
        parts = chosen.sample(parts, min(len(parts), _MOST_PARTS, number))
        for file, part in parts:
            rows = chosen.sample(
                range(part.documents), min(part.documents, -(-number // len(parts)))
            )
            yield from _verify_rows(found.setup, file, part, sorted(rows))


def _verify_rows(setup: Setup, file: TextFile, part: Part, rows: Sequence[int]) -> Iterator[str]:
    path = setup.folder.path(part.name)
    table = open_token_file(setup.storage, path).read(columns=["tokens", "offset"])
    tokens = table.column("tokens").combine_chunks()
    offsets = table.column("offset").to_pylist()
    wanted = {offsets[row]: row for row in rows}
    engine = Engine(setup.tokenizer)
    around = find_added(setup.tokenizer, bos=setup.bos, special=setup.add_special_tokens)
    for task in plan_tasks(file, setup.storage, setup.fields, setup.part_bytes):
        if task.part not in (None, part.number):
            continue
        for each in setup.open_parts(task):
            for portion in each.portions:
                if each.number != part.number:
                    continue
                places = zip(portion.offsets.tolist(), portion.texts, strict=True)
                mine = {offset: text for offset, text in places if offset in wanted}
                again = surround(engine.encode(list(mine.values())), *around)
                for offset, ids in zip(mine, again.of(range(len(mine))), strict=True):
                    row = wanted.pop(offset)
                    if ids.tolist() != tokens[row].as_py():
                        yield (
                            f"{path}: row {row} has other tokens than the text of {file.path} at byte {offset} "
                            f"gives; remove the file, and build again under another name (`run:`)"
                        )
    for offset, row in wanted.items():
        yield f"{path}: row {row} is of byte {offset} of {file.path}, where no document begins; restore the text"
