"""The text files of a source, and the record of the files that are tokenised.

The record is one small file for each source. It shows which text is unchanged and need not be read
again. Losing it does no harm, since the footer of each token file describes the text that the token
file was made from.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from megablend.config import Config
from megablend.config.tokenizer_file import find_named_token
from megablend.errors import CacheError, DataError
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.split_names import list_doubts
from megablend.storage.base import Storage
from megablend.storage.local import without_inodes
from megablend.storage.location import find_root, hint_on_bucket, join, make_relative
from megablend.storage.parallel_map import parallel_map
from megablend.text.documents import TextFields
from megablend.text.parts import MAX_PLACES, Entry, Part
from megablend.text.setup import Setup
from megablend.text.tables import ARROW, PARQUET, is_table
from megablend.text.tasks import PART_BYTES
from megablend.text.text_file import CODECS, TextFile
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import load_tokenizer

OPTIONS = ("text", "key", "bos", "add_special_tokens", "max_document")
"""The names of the settings in `Setup.options`, in the same order."""
_LINE_SUFFIXES = tuple(
    name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", *CODECS)
)
_ALL_SUFFIXES = (*_LINE_SUFFIXES, *PARQUET, *ARROW)
_RECORD_PREFIX = ".text-"
_MAX_DOCUMENT = 64 << 20
_MAX_DOCUMENT_SLOW = 16 << 20
"""The default of `max_document` without gigatoken: `tokenizers` takes 117 bytes of memory for each
byte."""


@dataclass(slots=True)
class TextSource:
    """A text source: its files, and its record of the files that are tokenised."""

    spec: SourceSpec
    setup: Setup
    root: str
    """The folder to which the names of the text files are relative."""
    files: list[TextFile]
    unreadable: list[str]
    """The path of each file that is left out, with the reason."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """The entries of the record, by the name of the text file."""

    @property
    def pending(self) -> list[TextFile]:
        """The files that are new, or have changed since they were tokenised."""
        return [file for file in self.files if not self._is_done(file)]

    def _is_done(self, file: TextFile) -> bool:
        entry = self.entries.get(file.name)
        if entry is None or entry.size != file.size:
            return False
        if without_inodes(entry.etag) != without_inodes(file.etag):
            return False
        return not entry.unreadable or self.setup.skips_unreadable

    @property
    def parts(self) -> list[Part]:
        """The parts of all files that are tokenised."""
        return [part for entry in self.entries.values() for part in entry.parts]

    def save(self) -> None:
        """Replace the record. Raises: CacheError if it cannot be written."""
        files = {name: asdict(entry) for name, entry in sorted(self.entries.items())}
        data = json.dumps({"layout": 1, "root": self.root, "files": files}).encode()
        name = _name_record(self.setup, self.spec.patterns)
        if self.setup.folder.read(name) != data:
            self.setup.folder.replace(name, data)

    def make_spec(self, notes: Iterable[str] = ()) -> SourceSpec:
        """Return a source whose files are the token files, for the index to read."""
        read = self.spec.read
        counts_documents = read.count_documents or self.spec.kind.documents_known
        unreadable = [entry.unreadable for entry in self.entries.values() if entry.unreadable]
        return replace(
            self.spec,
            root=self.setup.folder.location,
            paths=tuple(sorted({self.setup.folder.path(part.name) for part in self.parts})),
            read=replace(read, count_documents=counts_documents),
            skipped=(*self.unreadable, *unreadable),
            note="; ".join(filter(None, (*notes, *self._describe_parts()))) or None,
        )

    def list_doubts(self) -> list[str]:
        """Return notes for users about unusual files that the patterns match. Raises: see
        Storage.find."""
        paths = [file.path for file in self.files]
        doubts = list_doubts(self.root, self.spec.patterns, paths, self.setup.storage)
        return [f"source {self.spec.name!r}: {doubt}" for doubt in doubts]

    def _describe_parts(self) -> list[str]:
        """Return notes for users about the documents."""
        name = self.spec.name
        notes = list[str]()
        if bad := gather_bad(self.entries, self.root):
            notes.append(f"source {name!r}: skipped bad documents: {', '.join(map(str, bad))}")
        if special := sum(part.special for part in self.parts):
            notes.append(
                f"source {name!r}: {special:,} documents contain the text of a special token, which was tokenised as that "
                "token"
            )
        documents = sum(part.documents for part in self.parts)
        if documents and documents == sum(part.unkeyed for part in self.parts):
            notes.append(
                f"source {name!r}: no document has the key {self.setup.fields.key!r}; correct `key` and build again"
            )
        return notes + [part.difference for part in self.parts if part.difference]

    def check_bad(self, config: Config) -> None:
        """Check the share of bad documents. Raises: DataError if the config does not allow it."""
        bad = gather_bad(self.entries, self.root)
        num_bad = sum(bad_kind.count for bad_kind in bad)
        total = num_bad + sum(part.documents for part in self.parts)
        allowed = config.max_bad if self.setup.skips_bad else 0
        if num_bad > allowed * total:
            raise DataError(
                self.root,
                f"source {self.spec.name!r} has {num_bad:,} bad documents out of {total:,} ({', '.join(map(str, bad))}), "
                f"expected at most {float(allowed) * 100:g} % of them; fix them, or set `on_bad_document: skip` and a "
                "larger `max_bad`",
            )


@dataclass(frozen=True, slots=True)
class BadKind:
    """The documents of a source that were skipped because of one kind of error."""

    kind: str
    count: int
    first: tuple[str, ...]
    """The path, place and reason of each of the first few documents."""

    def __str__(self) -> str:
        return f"{self.count:,} of kind {self.kind!r} (the first: {self.first[0]})"


def gather_bad(entries: Mapping[str, Entry], root: str) -> list[BadKind]:
    """Return the documents of a source that were skipped, by kind of error.

    Args:
        entries: the record of the source.
        root: the folder to which the names of the text files are relative.
    """
    counts = Counter[str]()
    examples = dict[str, list[str]]()
    for name, entry in entries.items():
        unit = "row" if is_table(name) else "byte"
        for part in entry.parts:
            for kind, bad in part.bad.items():
                counts[kind] += bad["count"]
                examples.setdefault(kind, []).extend(
                    f"{join(root, name)} at {unit} {offset} {reason}"
                    for offset, _, reason in bad["first"]
                )
    return [
        BadKind(kind, counts[kind], tuple(examples[kind][:MAX_PLACES])) for kind in sorted(counts)
    ]


def list_bad(config: Config, name: str, storage: Storage) -> list[BadKind]:
    """Return the documents of a text source that the last build skipped. Raises: ConfigError if the
    source's settings cannot be used; CacheError if the record cannot be read."""
    patterns = config.all_sources[name].path
    entries = _load_record(make_setup(config, name, storage), patterns)
    return gather_bad(entries, find_root(patterns))


def find_text(config: Config, spec: SourceSpec, storage: Storage) -> TextSource:
    """Find a source's text files, and load its record. Raises: ConfigError if the source's settings
    cannot be used; DataError if a file cannot be read."""
    setup = make_setup(config, spec.name, storage)
    files, unreadable = _list_files(spec, storage)
    root = find_root(spec.patterns)
    record = _load_record(setup, spec.patterns)
    entries = {file.name: record[file.name] for file in files if file.name in record}
    return TextSource(spec, setup, root, files, unreadable, entries)


def find_tokenised(
    config: Config, specs: Sequence[SourceSpec], storage: Storage
) -> list[SourceSpec]:
    """Replace each text source by a source whose files are its token files, which must exist.

    Raises: CacheError if any text is not tokenised; the same errors as `find_text`.
    """
    token_specs = list[SourceSpec]()
    configured = config.all_sources
    for spec in specs:
        if configured[spec.name].text is None:
            token_specs.append(spec)
            continue
        source = find_text(config, spec, storage)
        pending = source.pending
        if pending:
            raise CacheError(
                f"source {spec.name!r}: {len(pending):,} of {len(source.files):,} text files are not tokenised (the first "
                f"is {pending[0].path}); tokenise them with `megablend build CONFIG`"
            )
        token_specs.append(source.make_spec())
    return token_specs


def make_setup(config: Config, name: str, storage: Storage) -> Setup:
    """Return the setup of a text source. Its engine is `tokenizers` until another engine is chosen.
    Raises: ConfigError if the source's settings cannot be used."""
    source = config.all_sources[name]
    assert source.text is not None
    assert config.tokenizer is not None
    tokenizer = load_tokenizer(config.tokenizer)
    max_bytes = config.max_document
    if max_bytes is None:
        max_bytes = _MAX_DOCUMENT if tokenizer.is_listed else _MAX_DOCUMENT_SLOW
    # The token's id is an option, since a file next to tokenizer.json decides it
    bos = source.bos and find_named_token(Path(tokenizer.path), "bos_token")
    options = [source.text, source.key, bos, source.add_special_tokens, max_bytes]
    return Setup(
        tokenizer=tokenizer,
        engine="tokenizers",
        fields=TextFields(text=source.text, key=source.key, max_bytes=max_bytes),
        bos=source.bos,
        add_special_tokens=source.add_special_tokens,
        options=json.dumps(options),
        skips_bad=config.on_bad_document == "skip",
        skips_unreadable=config.on_unreadable == "skip",
        storage=storage,
        folder=TokenFolder(source.token_folder, config.storage),
        part_bytes=PART_BYTES,
    )


def _list_files(spec: SourceSpec, storage: Storage) -> tuple[list[TextFile], list[str]]:
    """Return the text files of a source, sorted and without duplicates; and the paths of files that
    cannot be read, each with the reason.

    Raises: ConfigError if a pattern matches no file, or a file that is not a text file; DataError
        if a file cannot be read.
    """
    paths, unreadable = _match_patterns(spec, storage)
    threads = storage.limits(spec.patterns[0]).max_files
    if threads == 1:  # files of a file system; objects show no permissions before they are read
        for path in paths:
            if not storage.is_readable(path):
                unreadable[path] = os.strerror(errno.EACCES)
    listed = [path for path in paths if path not in unreadable]
    left_out = [f"{path}: {reason}" for path, reason in unreadable.items()]
    if unreadable and not spec.skip_unreadable:
        path, reason = next(iter(unreadable.items()))
        raise DataError(
            path,
            f"cannot be read: {reason}; make it readable, or set `on_unreadable: skip` to build without it",
        )
    if not listed:
        raise spec.complaint(
            f"none of its files can be read: {left_out[0]}; make them readable, or replace them with regular files"
        )
    for path in listed:
        if not path.lower().endswith(_ALL_SUFFIXES):
            raise spec.complaint(
                f"{path} is not a text file that megablend reads ({', '.join(_ALL_SUFFIXES)}); rename it, or leave it "
                "out of `path`"
            )
    root = find_root(spec.patterns)
    stats = parallel_map(storage.stat, listed, threads)
    files = [
        TextFile(make_relative(path, root), path, stat.size, stat.etag)
        for path, stat in zip(listed, stats, strict=True)
    ]
    return files, left_out


def _match_patterns(spec: SourceSpec, storage: Storage) -> tuple[list[str], dict[str, str]]:
    """Return the files that a source's patterns match, and those that cannot be read.

    Returns: a sorted list with one path for each file, even if several links lead to it; and the
        paths that cannot be read, each with the reason.
    Raises: ConfigError if a pattern matches nothing.
    """
    paths = dict[str, str]()
    """The real path of each file -> the path that was matched first."""
    unreadable = dict[str, str]()
    for pattern in spec.patterns:
        matches = storage.find(pattern)
        unreadable |= matches.unreadable
        if not matches.files and not matches.unreadable:
            is_folder = storage.is_folder(pattern)
            if is_folder:
                raise spec.complaint(f"{pattern} is a folder; write `{pattern}/*.jsonl`")
            hint = hint_on_bucket(pattern) or "; correct the path"
            raise spec.complaint(f"{pattern} matches no file{hint}")
        for match in matches.files:
            paths.setdefault(match.real, match.path)
    return sorted(paths.values()), unreadable


def _name_record(setup: Setup, patterns: Sequence[str]) -> str:
    """Return the name of a source's record. It is different for each source, since sources may
    share a folder."""
    key = blake2b(json.dumps([setup.options, *patterns]).encode(), digest_size=8).hexdigest()
    return f"{setup.tokenizer.digest}/{_RECORD_PREFIX}{key}.json"


def is_record(name: str) -> bool:
    """Return whether a file of a token folder is a record, given its name."""
    return name.rpartition("/")[2].startswith(_RECORD_PREFIX)


def _load_record(setup: Setup, patterns: Sequence[str]) -> dict[str, Entry]:
    return parse_record(setup.folder.read(_name_record(setup, patterns)))


def parse_record(data: bytes | None) -> dict[str, Entry]:
    """Return the entries of a record by the names of the text files; an empty dict if the record
    does not exist, or is damaged."""
    try:
        files = json.loads(data or b"{}").get("files", {})
        return {
            name: Entry(**(entry | {"parts": tuple(Part(**part) for part in entry["parts"])}))
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
