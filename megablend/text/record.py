"""Which text files are tokenised, in one small file for each source: of a file that is as it was,
nothing is read. It can be lost: token files say themselves what they were made from."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

from megablend.config import Config, Source
from megablend.errors import DataError
from megablend.index.build.source_spec import SourceSpec
from megablend.storage.base import Storage
from megablend.storage.location import find_root, join, make_relative
from megablend.storage.parallel_map import parallel_map
from megablend.text.documents import TextFields
from megablend.text.parts import ALL_SUFFIXES, TextFile
from megablend.text.token_folder import TokenFolder
from megablend.text.tokenizer import TokenizerFile
from megablend.text.work import PartResult, Setup

_PREFIX = ".text-"
_MAX_DOCUMENT = 64 << 20
_MAX_DOCUMENT_SLOW = 16 << 20
"""Of tokenizers that only `tokenizers` reads, which takes 117 bytes of memory for each byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A text file that is tokenised, or cannot be read."""

    size: int
    etag: str
    parts: tuple[PartResult, ...]
    unreadable: str = ""
    """Why it was left out."""


def make_setup(
    config: Config, name: str, source: Source, tokenizer: TokenizerFile, storage: Storage
) -> Setup:
    """How a text source is tokenised, by `tokenizers` for the time being."""
    assert source.text is not None
    default = _MAX_DOCUMENT if tokenizer.is_listed else _MAX_DOCUMENT_SLOW
    longest = default if config.max_document is None else config.max_document
    fields = TextFields(text=source.text, key=source.key, max_bytes=longest)
    options = [source.text, source.key, source.bos, source.add_special_tokens, longest]
    return Setup(
        source=name,
        tokenizer=tokenizer,
        engine="tokenizers",
        fields=fields,
        bos=source.bos,
        add_special_tokens=source.add_special_tokens,
        options=json.dumps(options),
        skips_bad=config.on_bad_document == "skip",
        skips_unreadable=config.on_unreadable == "skip",
        storage=storage,
        folder=TokenFolder(source.token_folder, config.storage),
    )


def list_texts(spec: SourceSpec, storage: Storage) -> tuple[list[TextFile], list[str]]:
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
            f"{other} is no file of text that megablend reads ({', '.join(ALL_SUFFIXES)}); rename it, or leave it out of `path`"
        )
    root = find_root(spec.patterns)
    stats = parallel_map(storage.stat, listed, threads)
    files = [
        TextFile(make_relative(path, root), path, stat.size, stat.etag)
        for path, stat in zip(listed, stats, strict=True)
    ]
    return files, unreadable


def _name_of(setup: Setup, root: str) -> str:
    """The name of a source's record."""
    key = blake2b(json.dumps([setup.options, root]).encode(), digest_size=8).hexdigest()
    return f"{setup.tokenizer.digest}/{_PREFIX}{key}.json"


def load_record(setup: Setup, root: str) -> dict[str, Entry]:
    """The tokenised files of a source, by name. A record that is damaged counts as none.

    Args:
        root: the folder that names of text files are relative to.
    """
    return parse_record(setup.folder.read(_name_of(setup, root)))


def parse_record(data: bytes | None) -> dict[str, Entry]:
    """See `load_record`."""
    try:
        files = json.loads(data or b"{}").get("files", {})
        return {
            name: Entry(
                size=each["size"],
                etag=each["etag"],
                parts=tuple(PartResult(**part) for part in each["parts"]),
                unreadable=each.get("unreadable", ""),
            )
            for name, each in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def is_record(name: str) -> bool:
    """Whether a file of a token folder is a record."""
    return name.rpartition("/")[2].startswith(_PREFIX)


def save_record(setup: Setup, root: str, entries: Mapping[str, Entry]) -> None:
    """Replace the record of a source. Raises: CacheError."""
    files = {name: asdict(entry) for name, entry in sorted(entries.items())}
    data = json.dumps({"layout": 1, "root": root, "files": files}).encode()
    name = _name_of(setup, root)
    if setup.folder.read(name) != data:
        setup.folder.replace(name, data)


def make_spec(
    spec: SourceSpec, setup: Setup, entries: Iterable[Entry], skipped: Iterable[str] = ()
) -> SourceSpec:
    """The source as the index takes it: its token files, as if they had been found."""
    listed = list(entries)
    left_out = [entry.unreadable for entry in listed if entry.unreadable]
    paths = sorted({setup.folder.path(part.name) for entry in listed for part in entry.parts})
    counted = spec.read.count_documents or spec.kind.documents_known
    return replace(
        spec,
        root=setup.folder.location,
        paths=tuple(paths),
        read=replace(spec.read, count_documents=counted),
        skipped=(*skipped, *left_out),
        note="; ".join(describe_parts(spec.name, listed)) or None,
    )


def describe_parts(name: str, entries: Iterable[Entry]) -> list[str]:
    """What was noticed about the documents of a source."""
    parts = [part for entry in entries for part in entry.parts]
    notes = list[str]()
    if bad := count_bad(parts):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
        notes.append(f"source {name!r}: documents left out: {kinds}; the first: {first_bad(parts)}")
    if special := sum(part.special for part in parts):
        notes.append(
            f"source {name!r}: {special:,} documents contain the text of a special token, which became that token"
        )
    notes += [part.difference for part in parts if part.difference]
    return notes


def count_bad(parts: Iterable[PartResult]) -> dict[str, int]:
    """Numbers of bad documents by kind."""
    counts = dict[str, int]()
    for part in parts:
        for kind, found in part.bad.items():
            counts[kind] = counts.get(kind, 0) + found["count"]
    return dict(sorted(counts.items()))


def first_bad(parts: Iterable[PartResult]) -> str:
    """The first bad document of parts: its token file's folder is its text file's name."""
    for part in parts:
        for found in part.bad.values():
            offset, _, reason = found["first"][0]
            return f"{part.name.partition('/')[2].rpartition('/')[0]} at byte {offset:,} {reason}"
    return ""


def check_bad(config: Config, name: str, root: str, entries: Mapping[str, Entry]) -> None:
    """Raises: DataError if a source has more bad documents than the config allows."""
    parts = [part for entry in entries.values() for part in entry.parts]
    bad = count_bad(parts)
    if not bad:
        return
    num_bad = sum(bad.values())
    total = num_bad + sum(part.documents for part in parts)
    if config.on_bad_document == "skip" and num_bad <= config.max_bad * total:
        return
    where = first_bad(parts)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
    limit = float(config.max_bad) if config.on_bad_document == "skip" else 0
    raise DataError(
        join(root, where),
        f"source {name!r} has {num_bad:,} bad documents of {total:,} ({kinds}), expected at most {limit:g} of them; mend them, "
        "or allow more by `on_bad_document: skip` and `max_bad`",
    )
