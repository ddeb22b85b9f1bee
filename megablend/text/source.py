"""A source's text: its files, and what is known of those that are tokenised.

That is in one small file for each source, its record: of text that is as it was, nothing is read. A
record can be lost: token files say themselves what they were made from.
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
from megablend.storage.base import Storage
from megablend.storage.location import find_root, join, make_relative
from megablend.storage.parallel_map import parallel_map
from megablend.text.documents import TextFields
from megablend.text.parts import ALL_SUFFIXES, MAX_PLACES, PART_BYTES, Entry, Part, TextFile
from megablend.text.tables import is_table
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import load_tokenizer
from megablend.text.work import Setup

OPTIONS = ("text", "key", "bos", "add_special_tokens", "max_document")
"""What `Setup.options` lists of the config."""
_PREFIX = ".text-"
_MAX_DOCUMENT = 64 << 20
_MAX_DOCUMENT_SLOW = 16 << 20
"""Of tokenizers that only `tokenizers` reads, which takes 117 bytes of memory for each byte."""


@dataclass(slots=True)
class TextSource:
    """A source of text."""

    spec: SourceSpec
    setup: Setup
    root: str
    """The folder that names of text files are relative to."""
    files: list[TextFile]
    unreadable: list[str]
    """Files that are left out, and why."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """Of the files that are tokenised, by name."""

    @property
    def pending(self) -> list[TextFile]:
        """The files that are not known as they are now."""
        return [
            file
            for file in self.files
            if (entry := self.entries.get(file.name)) is None
            or (entry.size, entry.etag) != (file.size, file.etag)
            or (entry.unreadable and not self.setup.skips_unreadable)
        ]

    @property
    def parts(self) -> list[Part]:
        """The parts of all files that are tokenised."""
        return [part for entry in self.entries.values() for part in entry.parts]

    def save(self) -> None:
        """Replace the record. Raises: CacheError."""
        files = {name: asdict(entry) for name, entry in sorted(self.entries.items())}
        data = json.dumps({"layout": 1, "root": self.root, "files": files}).encode()
        name = _name_record(self.setup, self.spec.patterns)
        if self.setup.folder.read(name) != data:
            self.setup.folder.replace(name, data)

    def make_spec(self, notes: Iterable[str] = ()) -> SourceSpec:
        """The source as the index takes it: its token files, as if they had been found."""
        read = self.spec.read
        counted = read.count_documents or self.spec.kind.documents_known
        unreadable = [entry.unreadable for entry in self.entries.values() if entry.unreadable]
        return replace(
            self.spec,
            root=self.setup.folder.location,
            paths=tuple(sorted({self.setup.folder.path(part.name) for part in self.parts})),
            read=replace(read, count_documents=counted),
            skipped=(*self.unreadable, *unreadable),
            note="; ".join(filter(None, (*notes, *self._describe_parts()))) or None,
        )

    def _describe_parts(self) -> list[str]:
        """What was noticed about the documents."""
        name = self.spec.name
        notes = list[str]()
        if bad := gather_bad(self.entries, self.root):
            notes.append(f"source {name!r}: documents left out: {', '.join(map(str, bad))}")
        if special := sum(part.special for part in self.parts):
            notes.append(
                f"source {name!r}: {special:,} documents contain the text of a special token, which became that token"
            )
        documents = sum(part.documents for part in self.parts)
        if documents and documents == sum(part.unkeyed for part in self.parts):
            notes.append(
                f"source {name!r}: no document has the key {self.setup.fields.key!r}; correct `key`, and build "
                "again"
            )
        return notes + [part.difference for part in self.parts if part.difference]

    def check_bad(self, config: Config) -> None:
        """Raises: DataError if there are more bad documents than the config allows."""
        bad = gather_bad(self.entries, self.root)
        num_bad = sum(each.count for each in bad)
        total = num_bad + sum(part.documents for part in self.parts)
        allowed = config.max_bad if self.setup.skips_bad else 0
        if num_bad > allowed * total:
            raise DataError(
                self.root,
                f"source {self.spec.name!r} has {num_bad:,} bad documents of {total:,} ({', '.join(map(str, bad))}), expected at "
                f"most {float(allowed):g} of them; fix them, or allow more with `on_bad_document: skip` and `max_bad`",
            )


@dataclass(frozen=True, slots=True)
class BadKind:
    """Documents of a source that were left out for one reason."""

    kind: str
    count: int
    first: tuple[str, ...]
    """Path, place and reason of the first ones."""

    def __str__(self) -> str:
        return f"{self.count:,} {self.kind} (the first: {self.first[0]})"


def gather_bad(entries: Mapping[str, Entry], root: str) -> list[BadKind]:
    """The documents of a source that were left out, by kind.

    Args:
        entries: of its files, by name.
        root: the folder that names are relative to.
    """
    counts = Counter[str]()
    places = dict[str, list[str]]()
    for name, entry in entries.items():
        unit = "row" if is_table(name) else "byte"
        for kind, found in (pair for part in entry.parts for pair in part.bad.items()):
            counts[kind] += found["count"]
            places.setdefault(kind, []).extend(
                f"{join(root, name)} at {unit} {offset} {reason}"
                for offset, _, reason in found["first"]
            )
    return [
        BadKind(kind, counts[kind], tuple(places[kind][:MAX_PLACES])) for kind in sorted(counts)
    ]


def list_bad(config: Config, name: str, storage: Storage) -> list[BadKind]:
    """The documents of a source of text that the last build left out. Raises: ConfigError,
    CacheError."""
    patterns = config.all_sources[name].path
    known = _load_record(make_setup(config, name, storage), patterns)
    return gather_bad(known, find_root(patterns))


def find_text(config: Config, spec: SourceSpec, storage: Storage) -> TextSource:
    """A source's text, and what is known of it. Raises: ConfigError, DataError."""
    setup = make_setup(config, spec.name, storage)
    files, unreadable = _list_files(spec, storage)
    root = find_root(spec.patterns)
    known = _load_record(setup, spec.patterns)
    entries = {file.name: known[file.name] for file in files if file.name in known}
    return TextSource(spec, setup, root, files, unreadable, entries)


def find_tokenised(
    config: Config, specs: Sequence[SourceSpec], storage: Storage
) -> list[SourceSpec]:
    """The sources of a config with the token files of those that are text; nothing is made.

    Raises: CacheError if some text is not tokenised; as `find_text`.
    """
    found = list[SourceSpec]()
    for spec in specs:
        if config.all_sources[spec.name].text is None:
            found.append(spec)
            continue
        source = find_text(config, spec, storage)
        if pending := source.pending:
            raise CacheError(
                f"source {spec.name!r}: {len(pending):,} of {len(source.files):,} text files are not tokenised (the "
                f"first is {pending[0].path}); `megablend build CONFIG` tokenises them"
            )
        found.append(source.make_spec())
    return found


def make_setup(config: Config, name: str, storage: Storage) -> Setup:
    """How a text source is tokenised, by `tokenizers` for the time being. Raises: ConfigError."""
    source = config.all_sources[name]
    assert source.text is not None
    assert config.tokenizer is not None
    tokenizer = load_tokenizer(config.tokenizer)
    longest = config.max_document
    if longest is None:
        longest = _MAX_DOCUMENT if tokenizer.is_listed else _MAX_DOCUMENT_SLOW
    # A file beside the tokenizer's says which token that is
    bos = source.bos and find_named_token(Path(tokenizer.path), "bos_token")
    options = [source.text, source.key, bos, source.add_special_tokens, longest]
    return Setup(
        tokenizer=tokenizer,
        engine="tokenizers",
        fields=TextFields(text=source.text, key=source.key, max_bytes=longest),
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
    """The text files of a source, each once, sorted; and what could not be read, with the reason.
    Raises: ConfigError if a pattern matches none, or files of another kind; DataError if one cannot
    be read."""
    paths = dict[str, str]()
    unreadable = list[str]()
    for pattern in spec.patterns:
        found = storage.find(pattern)
        unreadable += [f"{path}: {reason}" for path, reason in found.unreadable.items()]
        if not found.files and not found.unreadable:
            is_folder = storage.is_folder(pattern)
            remedy = f"write `{pattern}/*.jsonl`" if is_folder else "correct the path"
            raise spec.complaint(
                f"{pattern} {'is a folder' if is_folder else 'matches no file'}; {remedy}"
            )
        for match in found.files:
            paths.setdefault(match.real, match.path)
    threads = storage.limits(spec.patterns[0]).max_files
    if threads == 1:  # of objects nothing is known before they are read
        denied = {real for real, path in paths.items() if not storage.is_readable(path)}
        unreadable += [f"{paths.pop(real)}: {os.strerror(errno.EACCES)}" for real in sorted(denied)]
    if unreadable and not spec.skip_unreadable:
        path, _, reason = unreadable[0].partition(": ")
        raise DataError(
            path,
            f"cannot be read: {reason}; get permission, or set `on_unreadable: skip` to continue without it",
        )
    listed = sorted(paths.values())
    if not listed:
        raise spec.complaint(
            f"none of its files can be read: {unreadable[0]}; get permission to read them"
        )
    if other := next((path for path in listed if not path.lower().endswith(ALL_SUFFIXES)), None):
        raise spec.complaint(
            f"{other} is not a text file that megablend reads ({', '.join(ALL_SUFFIXES)}); rename it, or leave it "
            "out of `path`"
        )
    root = find_root(spec.patterns)
    stats = parallel_map(storage.stat, listed, threads)
    files = [
        TextFile(make_relative(path, root), path, stat.size, stat.etag)
        for path, stat in zip(listed, stats, strict=True)
    ]
    return files, unreadable


def _name_record(setup: Setup, patterns: Sequence[str]) -> str:
    """Sources that share a folder have records of their own."""
    key = blake2b(json.dumps([setup.options, *patterns]).encode(), digest_size=8).hexdigest()
    return f"{setup.tokenizer.digest}/{_PREFIX}{key}.json"


def is_record(name: str) -> bool:
    """Whether a file of a token folder is a record."""
    return name.rpartition("/")[2].startswith(_PREFIX)


def _load_record(setup: Setup, patterns: Sequence[str]) -> dict[str, Entry]:
    return parse_record(setup.folder.read(_name_record(setup, patterns)))


def parse_record(data: bytes | None) -> dict[str, Entry]:
    """The tokenised files of a source, by name; none if the record is damaged."""
    try:
        files = json.loads(data or b"{}").get("files", {})
        return {
            name: Entry(**(entry | {"parts": tuple(Part(**part) for part in entry["parts"])}))
            for name, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
