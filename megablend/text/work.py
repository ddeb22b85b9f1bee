"""One process's work on text: parts are read, tokenised, watched and written, each to its file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
)
from megablend.storage.base import Storage
from megablend.text.documents import REMEDY, BadDocument, Portion, TextFields, count_bytes
from megablend.text.engine import (
    Engine,
    GigatokenEngine,
    Ids,
    Tokens,
    find_added,
    find_version,
    surround,
)
from megablend.text.parts import (
    Entry,
    OpenPart,
    Part,
    Task,
    count_line_ends,
    open_parts,
)
from megablend.text.prove import MIN_CHECKED, choose_checked, first_difference
from megablend.text.tables import is_table
from megablend.text.token_file import (
    LAYOUT,
    TokenFileWriter,
    copy_token_file,
    read_footer,
)
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import TokenizerFile

MAX_CHECKED = 1 << 20
"""Characters of a document that are tokenised by both engines, since `tokenizers` takes 117 bytes
of memory for each byte."""
_NAMING = ("number", "name")
"""What of a part its file's name says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all tasks of a source. Picklable."""

    tokenizer: TokenizerFile
    engine: str
    """The name of the engine: proved, if it is not `tokenizers`."""
    fields: TextFields
    bos: bool
    add_special_tokens: bool
    options: str
    """What of these changes tokens, for names of files."""
    skips_bad: bool
    skips_unreadable: bool
    storage: Storage
    folder: TokenFolder
    part_bytes: int

    @property
    def left_out(self) -> tuple[type[CorruptFileError], ...]:
        """Errors of files that are left out."""
        return (CorruptFileError,) if self.skips_unreadable else ()

    def name_part(self, file: str, part: OpenPart) -> str:
        """The name of a part's token file, which says what it was made from: the digest of its
        lines and where they begin, the tokenizer, and what else changes tokens."""
        start = [part.start] if part.start else []
        text = json.dumps([LAYOUT, part.digest, self.tokenizer.digest, self.options, *start])
        key = blake2b(text.encode(), digest_size=12).hexdigest()
        return f"{self.folder_of(file)}/{part.number:05d}-{key}.parquet"

    def folder_of(self, file: str) -> str:
        """The folder of a text file's token files."""
        return f"{self.tokenizer.digest}/{file}"

    def open_parts(self, task: Task) -> Iterator[OpenPart]:
        """See `parts.open_parts`."""
        return open_parts(task, self.storage, self.fields, self.part_bytes)


Report = Callable[[int, int, int], None]
"""Called with numbers of bytes, documents and tokens, as they are done."""


class Worker:
    """Does tasks of one source, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        tokenizer = setup.tokenizer
        self._reference = Engine(tokenizer)
        self._fast = GigatokenEngine(tokenizer) if setup.engine == "gigatoken" else None
        self._around = find_added(tokenizer, bos=setup.bos, special=setup.add_special_tokens)
        special = json.loads(tokenizer.definition).get("added_tokens")
        ids = [each["id"] for each in special or () if each.get("special")]
        self._special: Ids = np.array(sorted(ids), np.int32)

    def do(self, task: Task, report: Report) -> Entry:
        """Make what is missing of a task's parts. Raises: DataError, CacheError, ConfigError.

        Args:
            report: called after each portion.

        Returns: the task's parts.
        """
        file = task.file
        parts = {part.number: part for part in task.done}
        try:
            if task.twins:
                parts |= self._find_twins(task)
            if task.part is None or task.part not in parts:
                self._make_missing(task, parts, report)
            else:
                report(task.cost, 0, 0)
        except self._setup.left_out as error:
            return Entry(size=file.size, etag=file.etag, unreadable=str(error))
        if self._setup.storage.for_checking().stat(file.path).etag != file.etag:
            raise ChangedFileError(
                file.path, f"changed while it was being tokenised; {CHANGED_REMEDY}"
            )
        made = tuple(parts[number] for number in sorted(parts))
        return Entry(size=file.size, etag=file.etag, parts=made)

    def _make_missing(self, task: Task, parts: dict[int, Part], report: Report) -> None:
        for part in self._setup.open_parts(task):
            if part.number not in parts:
                parts[part.number] = self._make(task, part, report)
                continue
            for portion in part.portions:
                report(portion.num_bytes, 0, 0)

    def _find_twins(self, task: Task) -> dict[int, Part]:
        """The parts whose token files exist, here or under another text file's name, by their
        lines. The text is read and not tokenised."""
        setup = self._setup
        by_key = {name.rpartition("-")[2]: name for name in task.twins}
        found = dict[int, Part]()
        for part in setup.open_parts(task):
            part.pass_over()
            name = setup.name_part(task.file.name, part)
            twin = by_key.get(name.rpartition("-")[2])
            if twin is not None and (twin == name or self._copy(task, twin, name)):
                found[part.number] = load_part(setup, name)
        return found

    def _copy(self, task: Task, twin: str, name: str) -> bool:
        """Make the token file `name` from that of the same lines of another text. Returns: whether
        that was possible; not if the other one is damaged, or has gone meanwhile."""
        folder = self._setup.folder
        made_from = {"text": task.file.path, "etag": task.file.etag}
        with (
            contextlib.suppress(CorruptFileError, MissingFileError),
            folder.writing(self._setup.folder_of(task.file.name)) as path,
        ):
            copy_token_file(self._setup.storage, folder.path(twin), path, made_from)
            folder.commit(path, name)
            return True
        return False

    def _make(self, task: Task, part: OpenPart, report: Report) -> Part:
        """Tokenise a part, and write its file."""
        folder = self._setup.folder
        with folder.writing(self._setup.folder_of(task.file.name)) as path:
            made = Part(number=part.number, start=part.start)
            engine = self._fast or self._reference
            if difference := self._write(task, part, path, engine, made, report):
                engine.renew()
                path.unlink()
                made = Part(number=part.number, start=part.start, difference=difference)
                again = self._open_again(task, part.number)
                self._write(task, again, path, self._reference, made, report)
            folder.commit(path, made.name)
        return made

    def _open_again(self, task: Task, number: int) -> OpenPart:
        for part in self._setup.open_parts(task):
            if part.number == number:
                return part
            part.pass_over()
        raise AssertionError("a part that was read")

    def _write(
        self, task: Task, part: OpenPart, path: Path, engine: Engine, made: Part, report: Report
    ) -> str:
        """Write a token file, and say in `made` what is in it.
        Returns: "", or where gigatoken differs from `tokenizers`; the file is no good then."""
        setup = self._setup
        with TokenFileWriter(path, has_keys=setup.fields.key is not None) as writer:
            for number, portion in enumerate(part.portions):
                for bad in portion.bad:
                    if not setup.skips_bad:
                        raise explain_bad(setup, task, bad)
                    made.add_bad(bad)
                texts = portion.texts
                if not texts:
                    report(portion.num_bytes, 0, 0)
                    continue
                tokens = engine.encode(texts)
                if engine is not self._reference:
                    least = 0 if number else MIN_CHECKED
                    if difference := self._find_difference(task, portion, tokens, least):
                        part.pass_over()
                        return difference
                made.special += self._count_special(tokens)
                tokens = surround(tokens, *self._around)
                writer.write(portion, tokens)
                if setup.fields.key is not None:
                    made.unkeyed += portion.keys.count(None)
                made.documents += len(texts)
                made.tokens += len(tokens.ids)
                made.text_bytes += count_bytes(texts)
                report(portion.num_bytes, len(texts), len(tokens.ids))
            made.name = setup.name_part(task.file.name, part)
            made.stop = part.stop
            made.lines = part.num_lines
            writer.close(_make_footer(setup, task, made, part.digest, engine))
        return ""

    def _find_difference(self, task: Task, portion: Portion, found: Tokens, least: int) -> str:
        """Where gigatoken's tokens are others than those of `tokenizers`, of at least so many
        documents; "" if they are not. Of long documents the beginnings are tokenised by both."""
        texts = portion.texts
        name = int.from_bytes(task.file.name.encode()[-8:], "little")
        chosen = choose_checked(texts, name + int(portion.offsets[0]), least)
        chosen.sort(key=lambda i: len(texts[i]))
        checked = [texts[i][:MAX_CHECKED] for i in chosen]
        num_whole = sum(len(texts[i]) <= MAX_CHECKED for i in chosen)
        tokens = found.of(chosen[:num_whole])
        if cut := checked[num_whole:]:
            assert self._fast is not None
            tokens += self._fast.encode(cut).of(range(len(cut)))
        at = first_difference(Tokens.join(tokens), self._reference.encode(checked))
        if at is None:
            return ""
        return (
            f"{task.file.path}: gigatoken {find_version('gigatoken')} gives other tokens than tokenizers for the document at "
            f"byte {portion.offsets[chosen[at]]}; its part was tokenised by tokenizers"
        )

    def _count_special(self, tokens: Tokens) -> int:
        """Documents that have special tokens, which in a text are written out."""
        if not len(self._special):
            return 0
        is_near = (tokens.ids >= self._special[0]) & (tokens.ids <= self._special[-1])
        near = np.flatnonzero(is_near)
        places = near[np.isin(tokens.ids[near], self._special)]
        return len(np.unique(np.searchsorted(np.cumsum(tokens.counts), places, side="right")))


def _make_footer(
    setup: Setup, task: Task, part: Part, lines_digest: str, engine: Engine
) -> dict[str, Any]:
    """What a token file says of itself. Nothing in it depends on who made it."""
    packages = dict.fromkeys(("tokenizers", engine.name))
    return {
        "layout": LAYOUT,
        "text": task.file.path,
        "etag": task.file.etag,
        "options": setup.options,
        "tokenizer": setup.tokenizer.digest,
        "engine": engine.name,
        "versions": {name: find_version(name) for name in packages},
        "lines_digest": lines_digest,
        "part": {key: each for key, each in asdict(part).items() if key not in _NAMING},
    }


def load_part(setup: Setup, name: str, footer: dict[str, Any] | None = None) -> Part:
    """What a token file says of its part. Raises: as `read_footer`."""
    footer = footer or read_footer(setup.storage, setup.folder.path(name))
    number = int(name.rpartition("/")[2].partition("-")[0])
    return Part(number=number, name=name, **footer["part"])


def explain_bad(setup: Setup, task: Task, bad: BadDocument) -> DataError:
    """The error for a document that cannot be read: file, line, byte, reason, remedy."""
    file = task.file
    if is_table(file.path):
        return DataError(file.path, f"row {bad.place.offset:,}: {bad.reason}; {REMEDY}")
    line = count_line_ends(file, setup.storage, 0, bad.place.offset) + 1
    reason = f"line {line:,}: {bad.reason}; {REMEDY}"
    return DataError(file.path, reason, offset=bad.place.offset)
