"""The work of one process: read parts, tokenise them, check gigatoken, and write token files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megablend.errors import (
    NOT_ONE_FILE,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MissingFileError,
)
from megablend.storage.local import without_inodes
from megablend.text.documents import REMEDY, BadDocument, Portion, count_bytes
from megablend.text.engine import (
    Engine,
    GigatokenEngine,
    Ids,
    Tokens,
    find_added,
    find_version,
    surround,
)
from megablend.text.open_parts import OpenPart
from megablend.text.parts import Entry, Part
from megablend.text.prove import MIN_CHECKED, choose_checked, first_difference
from megablend.text.setup import Setup, load_part
from megablend.text.tables import is_table
from megablend.text.tasks import Task
from megablend.text.text_file import TextFile, count_line_ends
from megablend.text.token_file import LAYOUT, TokenFileWriter, copy_token_file
from megablend.text.token_names import TokenName

MAX_CHECKED = 1 << 20
"""The maximum number of characters at the beginning of a document that both engines tokenise:
`tokenizers` takes 117 bytes of memory for each byte."""
_NAMED_FIELDS = ("number", "name")
"""The fields of a part that are not in the footer of its token file, since they are in the name."""


Report = Callable[[int, int, int], None]
"""A function that is called with the number of bytes, documents and tokens that were processed
since the last call."""


class Worker:
    """A worker that runs the tasks of one source, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        tokenizer = setup.tokenizer
        self._reference = Engine(tokenizer)
        self._fast = GigatokenEngine(tokenizer) if setup.engine == "gigatoken" else None
        self._around = find_added(tokenizer, bos=setup.bos, special=setup.add_special_tokens)
        added = json.loads(tokenizer.definition).get("added_tokens") or ()
        ids = [token["id"] for token in added if token.get("special")]
        self._special: Ids = np.array(sorted(ids), np.int32)

    def do(self, task: Task, report: Report) -> Entry:
        """Run a task: write the token files of its parts that do not exist yet.

        Args:
            report: called after each portion.

        Returns: the entry of the text file, with the task's parts.
        Raises: DataError if the text has changed or cannot be read; CacheError if a token file
            cannot be written; ConfigError if the source's settings cannot be used.
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
        except DataError as error:
            self._check_unchanged(file)  # text that was replaced may look damaged
            if not isinstance(error, self._setup.skipped_errors):
                raise
            return Entry(size=file.size, etag=file.etag, unreadable=str(error))
        self._check_unchanged(file)
        made = tuple(parts[number] for number in sorted(parts))
        return Entry(size=file.size, etag=file.etag, parts=made)

    def _check_unchanged(self, file: TextFile) -> None:
        """Check that the text has not changed since it was listed, perhaps by another rank. Raises:
        ChangedFileError, MissingFileError."""
        etag = self._setup.storage.for_checking().stat(file.path).etag
        if without_inodes(etag) != without_inodes(file.etag):
            raise ChangedFileError(
                file.path, f"changed while it was being tokenised, {NOT_ONE_FILE}"
            )

    def _make_missing(self, task: Task, parts: dict[int, Part], report: Report) -> None:
        for part in self._setup.open_parts(task):
            if part.number not in parts:
                parts[part.number] = self._make(task, part, report)
                continue
            for portion in part.portions:
                report(portion.num_bytes, 0, 0)

    def _find_twins(self, task: Task) -> dict[int, Part]:
        """Return the parts that other token files already contain. A token file of another text
        file is copied under the name for this text file. The text is hashed, but not tokenised."""
        setup = self._setup
        twins = {TokenName.parse(name).digest: name for name in task.twins}
        parts = dict[int, Part]()
        for part in setup.open_parts(task):
            part.pass_over()
            name = setup.name_part(task.file.name, part)
            twin = twins.get(TokenName.parse(name).digest)
            if twin is not None and (twin == name or self._copy(task, twin, name)):
                parts[part.number] = load_part(setup, name)
        return parts

    def _copy(self, task: Task, twin: str, name: str) -> bool:
        """Write the token file `name` as a copy of `twin`, which was made from the same lines of
        another text file. Returns: False if `twin` is damaged, or was removed in the meantime."""
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
        """Tokenise a part, and write its token file."""
        folder = self._setup.folder
        with folder.writing(self._setup.folder_of(task.file.name)) as path:
            made = Part(number=part.number, start=part.start)
            engine = self._fast or self._reference
            difference = self._write(task, part, path, engine, made, report)
            if difference:
                engine.renew()
                path.unlink()
                made = Part(number=part.number, start=part.start, difference=difference)
                again = self._setup.open_part(task, part.number)
                assert again is not None
                self._write(task, again, path, self._reference, made, report)
            folder.commit(path, made.name)
        return made

    def _write(
        self, task: Task, part: OpenPart, path: Path, engine: Engine, made: Part, report: Report
    ) -> str:
        """Write a token file, and fill the fields of `made`.

        Returns: a note on the first document for which gigatoken and `tokenizers` give different
            tokens, in which case the file is unfinished; "" if there is no difference.
        """
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
                    num_checked = 0 if number else MIN_CHECKED
                    difference = self._find_difference(task, portion, tokens, num_checked)
                    if difference:
                        part.pass_over()  # the next part of a compressed file follows
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

    def _find_difference(self, task: Task, portion: Portion, tokens: Tokens, num: int) -> str:
        """Compare gigatoken's tokens with those of `tokenizers` for at least `num` documents. Of
        long documents, only the beginning is compared. Returns: a note on the first difference; ""
        if there is none."""
        texts = portion.texts
        seed = int.from_bytes(task.file.name.encode()[-8:], "little") + int(portion.offsets[0])
        chosen = choose_checked(texts, seed, num)
        chosen.sort(key=lambda i: len(texts[i]))
        checked = [texts[i][:MAX_CHECKED] for i in chosen]
        num_whole = sum(len(texts[i]) <= MAX_CHECKED for i in chosen)
        ids = tokens.of(chosen[:num_whole])
        cut = checked[num_whole:]
        if cut:
            assert self._fast is not None
            ids += self._fast.encode(cut).of(range(len(cut)))
        at = first_difference(Tokens.join(ids), self._reference.encode(checked))
        if at is None:
            return ""
        return (
            f"{task.file.path}: gigatoken {find_version('gigatoken')} and tokenizers give different tokens for the document "
            f"at byte {portion.offsets[chosen[at]]}; this part was tokenised with tokenizers"
        )

    def _count_special(self, tokens: Tokens) -> int:
        """Return the number of documents that contain the text of a special token."""
        if not len(self._special):
            return 0
        # Special tokens are few, and usually consecutive: most tokens are out of their range
        is_in_range = (tokens.ids >= self._special[0]) & (tokens.ids <= self._special[-1])
        candidates = np.flatnonzero(is_in_range)
        special_positions = candidates[np.isin(tokens.ids[candidates], self._special)]
        return len(
            np.unique(np.searchsorted(np.cumsum(tokens.counts), special_positions, side="right"))
        )


def _make_footer(
    setup: Setup, task: Task, part: Part, lines_digest: str, engine: Engine
) -> dict[str, Any]:
    """Return the footer of a token file. It does not depend on the process that wrote the file."""
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
        "part": {key: value for key, value in asdict(part).items() if key not in _NAMED_FIELDS},
    }


def explain_bad(setup: Setup, task: Task, bad: BadDocument) -> DataError:
    """Return the error for a document that cannot be read, with the file, place, reason and
    remedy."""
    file = task.file
    if is_table(file.path):
        return DataError(file.path, f"row {bad.place.offset:,}: {bad.reason}; {REMEDY}")
    line = count_line_ends(file, setup.storage, 0, bad.place.offset) + 1
    reason = f"line {line:,}: {bad.reason}; {REMEDY}"
    return DataError(file.path, reason, offset=bad.place.offset)
