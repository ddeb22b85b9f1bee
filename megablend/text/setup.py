"""The settings for the tasks of a source, and the names of token files that follow from these
settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from megablend.errors import CorruptFileError
from megablend.storage.base import Storage
from megablend.text.documents import TextFields
from megablend.text.open_parts import OpenPart, open_parts
from megablend.text.parts import Part
from megablend.text.tasks import Task
from megablend.text.token_file import LAYOUT, read_footer
from megablend.text.token_folder import TokenFolder
from megablend.text.token_names import TokenName
from megablend.text.tokenizer import TokenizerFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings for all tasks of a source. They can be pickled."""

    tokenizer: TokenizerFile
    engine: str
    """The name of the engine that tokenises. It is gigatoken only if gigatoken gives the same
    tokens as `tokenizers`."""
    fields: TextFields
    bos: bool
    add_special_tokens: bool
    options: str
    """The settings that change tokens, as JSON. The names of token files depend on them."""
    skips_bad: bool
    skips_unreadable: bool
    storage: Storage
    folder: TokenFolder
    part_bytes: int

    @property
    def skipped_errors(self) -> tuple[type[CorruptFileError], ...]:
        """The types of errors that cause a file to be left out: none unless `on_unreadable: skip`
        is set."""
        return (CorruptFileError,) if self.skips_unreadable else ()

    def name_part(self, file: str, part: OpenPart) -> str:
        """Return the name of a part's token file. It depends on everything that the tokens depend
        on: the part's lines and their position, the tokenizer, and the options."""
        start = [part.start] if part.start else []
        text = json.dumps([LAYOUT, part.digest, self.tokenizer.digest, self.options, *start])
        key = blake2b(text.encode(), digest_size=12).hexdigest()
        return str(TokenName(self.tokenizer.digest, file, part.number, key))

    def folder_of(self, file: str) -> str:
        """Return the folder of a text file's token files."""
        return f"{self.tokenizer.digest}/{file}"

    def open_parts(self, task: Task) -> Iterator[OpenPart]:
        """See `open_parts.open_parts`."""
        return open_parts(task, self.storage, self.fields, self.part_bytes)

    def open_part(self, task: Task, number: int) -> OpenPart | None:
        """Open one part of a task; return None if the text has fewer parts."""
        for part in self.open_parts(task):
            if part.number == number:
                return part
            part.pass_over()
        return None


def load_part(setup: Setup, name: str, footer: dict[str, Any] | None = None) -> Part:
    """Return the record of the part that a token file contains. Raises: the same errors as
    `read_footer`."""
    footer = footer or read_footer(setup.storage, setup.folder.path(name))
    return Part(number=TokenName.parse(name).number, name=name, **footer["part"])
