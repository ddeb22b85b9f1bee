"""One process's work on text: parts are read, tokenised, watched and written, each to its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megablend.errors import CHANGED_REMEDY, ChangedFileError, CorruptFileError, DataError
from megablend.storage.base import Storage
from megablend.text.documents import REMEDY, BadCounts, BadDocument, Portion, TextFields
from megablend.text.engine import (
    Engine,
    GigatokenEngine,
    Ids,
    Tokens,
    find_added,
    find_version,
    surround,
)
from megablend.text.parts import PART_BYTES, OpenPart, Task, count_lines_before, open_parts
from megablend.text.prove import MIN_CHECKED, choose_checked, first_difference
from megablend.text.token_file import LAYOUT, TokenFileWriter, make_key, read_footer
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import TokenizerFile

_NAMING = ("number", "name")
"""What of a part its file's name says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all tasks of a source. Picklable."""

    source: str
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
    part_bytes: int = PART_BYTES

    def name_part(self, file: str, number: int, lines: str) -> str:
        """The name of a part's token file, by the digest of its lines."""
        key = make_key(lines, self.tokenizer.digest, self.options)
        return f"{self.folder_of(file)}/{number:05d}-{key}.parquet"

    def folder_of(self, file: str) -> str:
        """The folder of a text file's token files."""
        return f"{self.tokenizer.digest}/{file}"


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What became of a part; kept in the record of its text file, and in the token file's footer."""

    number: int
    name: str
    start: int
    stop: int
    lines: int
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of its documents."""
    special: int
    """Documents in which the text of a special token occurs."""
    bad: dict[str, Any]
    difference: str = ""
    """Where gigatoken gave other tokens than `tokenizers`, which then tokenised the part."""


@dataclass(slots=True)
class TaskResult:
    """The parts of a task, in order."""

    parts: list[PartResult] = field(default_factory=list)
    unreadable: str = ""
    """Why the file was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task of a source, with what is known of its parts. Picklable."""

    setup: int
    """Number of the source's `Setup`."""
    task: Task
    done: tuple[PartResult, ...] = ()
    """Parts whose token files were made from this version of the text."""
    twins: tuple[str, ...] = ()
    """Token files that may be of the same lines: the text is then hashed first."""


Report = Callable[[int, int, int], None]
"""Called with numbers of bytes, documents and tokens, as they are done."""


class Worker:
    """Does tasks of one source, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        tokenizer = setup.tokenizer
        self._reference = Engine(tokenizer)
        self._fast = GigatokenEngine(tokenizer) if setup.engine == "gigatoken" else None
        added = find_added(tokenizer, bos=setup.bos, special=setup.add_special_tokens)
        self._before, self._after = added
        special = json.loads(tokenizer.definition).get("added_tokens")
        ids = [each["id"] for each in special or () if each.get("special")]
        self._difference = ""
        self._since_renewed = 0
        self._special: Ids = np.array(sorted(ids), np.int32)

    def do(self, job: Job, report: Report) -> TaskResult:
        """Make what is missing of a task's parts. Raises: DataError, CacheError, ConfigError.

        Args:
            report: called after each portion.
        """
        task = job.task
        parts = {part.number: part for part in job.done}
        try:
            if job.twins:
                parts |= self._find_twins(task, job.twins)
            if task.part is None or task.part not in parts:
                self._make_missing(task, parts, report)
            else:
                report(task.cost, 0, 0)
        except CorruptFileError as error:
            if not self._setup.skips_unreadable:
                raise
            return TaskResult(unreadable=str(error))
        if self._setup.storage.for_checking().stat(task.file.path).etag != task.file.etag:
            raise ChangedFileError(
                task.file.path, f"changed while it was tokenised; {CHANGED_REMEDY}"
            )
        return TaskResult(parts=[parts[number] for number in sorted(parts)])

    def _make_missing(self, task: Task, parts: dict[int, PartResult], report: Report) -> None:
        for part in self._open(task):
            if part.number not in parts:
                parts[part.number] = self._make(task, part, report)
                continue
            for portion in part.portions:
                report(portion.num_bytes, 0, 0)

    def _open(self, task: Task) -> Iterator[OpenPart]:
        setup = self._setup
        return open_parts(task, setup.storage, setup.fields, setup.part_bytes)

    def _find_twins(self, task: Task, twins: Sequence[str]) -> dict[int, PartResult]:
        """The parts whose token files exist, here or under another text file's name, by their
        lines. The text is read and not tokenised."""
        setup = self._setup
        by_key = {name.rpartition("-")[2]: name for name in twins}
        found = dict[int, PartResult]()
        for part in self._open(task):
            for _ in part.portions:
                pass
            name = setup.name_part(task.file.name, part.number, part.digest)
            twin = by_key.get(name.rpartition("-")[2])
            if twin is not None:
                if twin != name:
                    setup.folder.copy(twin, name)
                found[part.number] = load_result(setup, name)
        return found

    def _make(self, task: Task, part: OpenPart, report: Report) -> PartResult:
        """Tokenise a part, and write its file."""
        setup = self._setup
        with setup.folder.writing(setup.folder_of(task.file.name)) as path:
            engine = self._reference if self._fast is None else self._fast
            result = self._write(task, part, path, engine, report)
            if result is None:
                assert self._fast is not None
                self._fast.renew()
                path.unlink()
                again = self._open_again(task, part.number)
                result = self._write(task, again, path, self._reference, report)
                assert result is not None
            setup.folder.commit(path, result.name)
        self._since_renewed += result.text_bytes
        if self._fast is not None and self._since_renewed >= PART_BYTES:
            self._fast.renew()
            self._since_renewed = 0
        return result

    def _open_again(self, task: Task, number: int) -> OpenPart:
        for part in self._open(task):
            if part.number == number:
                return part
            for _ in part.portions:
                pass
        raise AssertionError("a part that was read")

    def _write(
        self, task: Task, part: OpenPart, path: Path, engine: Engine, report: Report
    ) -> PartResult | None:
        """Returns: None if gigatoken differs from `tokenizers` somewhere."""
        setup = self._setup
        bad = BadCounts()
        documents = 0
        tokens = 0
        text_bytes = 0
        special = 0
        with TokenFileWriter(path, has_keys=setup.fields.key is not None) as writer:
            for number, portion in enumerate(part.portions):
                self._count_bad(task, portion, bad)
                if not portion.documents:
                    report(portion.num_bytes, 0, 0)
                    continue
                texts = [each.text for each in portion.documents]
                found = engine.encode(texts)
                if engine is not self._reference and self._differs(task, portion, found, number):
                    for _ in part.portions:
                        pass
                    return None
                special += self._count_special(found)
                found = surround(found, self._before, self._after)
                writer.write(portion.documents, found)
                documents += len(texts)
                tokens += len(found.ids)
                text_bytes += sum(len(t) if t.isascii() else len(t.encode()) for t in texts)
                report(portion.num_bytes, len(texts), len(found.ids))
            result = PartResult(
                number=part.number,
                name=setup.name_part(task.file.name, part.number, part.digest),
                start=part.start,
                stop=part.stop,
                lines=part.num_lines,
                documents=documents,
                tokens=tokens,
                text_bytes=text_bytes,
                special=special,
                bad=bad.record(),
                difference=self._difference if engine is self._reference else "",
            )
            self._difference = ""
            writer.close(_make_footer(setup, task, part, result, engine))
        return result

    def _count_bad(self, task: Task, portion: Portion, bad: BadCounts) -> None:
        for each in portion.bad:
            if not self._setup.skips_bad:
                raise explain_bad(self._setup, task, each)
            bad.add(each)

    def _differs(self, task: Task, portion: Portion, found: Tokens, number: int) -> bool:
        """Whether gigatoken's tokens of some documents are others than those of `tokenizers`."""
        texts = [each.text for each in portion.documents]
        seed = (
            int.from_bytes(task.file.name.encode()[-8:], "little")
            + portion.documents[0].place.offset
        )
        chosen = choose_checked(texts, seed, 0 if number else MIN_CHECKED)
        expected = self._reference.encode([texts[i] for i in chosen])
        ends = np.cumsum(found.counts)
        ids = [found.ids[ends[i] - found.counts[i] : ends[i]] for i in chosen]
        picked = Tokens(np.concatenate([np.empty(0, np.int32), *ids]), found.counts[chosen])
        at = first_difference(picked, expected)
        if at is None:
            return False
        document = portion.documents[chosen[at]]
        self._difference = (
            f"{task.file.path}: gigatoken {find_version('gigatoken')} gives other tokens than tokenizers for the document at "
            f"byte {document.place.offset}; its part was tokenised by tokenizers"
        )
        return True

    def _count_special(self, tokens: Tokens) -> int:
        """Documents that have special tokens, which in a text are written out."""
        if not len(self._special):
            return 0
        is_near = (tokens.ids >= self._special[0]) & (tokens.ids <= self._special[-1])
        near = np.flatnonzero(is_near)
        places = near[np.isin(tokens.ids[near], self._special)]
        return len(np.unique(np.searchsorted(np.cumsum(tokens.counts), places, side="right")))


def _make_footer(
    setup: Setup, task: Task, part: OpenPart, result: PartResult, engine: Engine
) -> dict[str, Any]:
    """What a token file says of itself. Nothing in it depends on who made it."""
    return {
        "layout": LAYOUT,
        "text": task.file.path,
        "etag": task.file.etag,
        "options": setup.options,
        "tokenizer": setup.tokenizer.digest,
        "engine": engine.name,
        "versions": {
            name: find_version(name)
            for name in ("tokenizers", "gigatoken")
            if name in ("tokenizers", engine.name)
        },
        "lines_digest": part.digest,
        "part": {key: each for key, each in asdict(result).items() if key not in _NAMING},
    }


def load_result(setup: Setup, name: str, footer: dict[str, Any] | None = None) -> PartResult:
    """What a token file says of its part. Raises: as `read_footer`."""
    footer = footer or read_footer(setup.storage, setup.folder.path(name))
    number = int(name.rpartition("/")[2].partition("-")[0])
    return PartResult(number=number, name=name, **footer["part"])


def explain_bad(setup: Setup, task: Task, bad: BadDocument) -> DataError:
    """The error for a document that cannot be read: file, line, byte, reason, remedy."""
    file = task.file
    if file.is_table:
        return DataError(file.path, f"row {bad.place.offset:,}: {bad.reason}; {REMEDY}")
    line = count_lines_before(file, setup.storage, bad.place.offset) + 1
    reason = f"line {line:,}: {bad.reason}; {REMEDY}"
    return DataError(file.path, reason, offset=bad.place.offset)
