"""verify: check that a cache has not changed since it was built, and that the data has not changed
since it was indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megablend.caches.base import SKIPS, SNAPSHOTS, CacheStore, OvertakenError
from megablend.errors import REBUILD_REMEDY, CacheError, ConfigError
from megablend.index.build.build import Progress
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.verify.verify import verify as verify_index
from megablend.index.verify.verify_data import SnapshotUse
from megablend.operations.results import Record
from megablend.operations.session import ConfigLike, Session
from megablend.operations.snapshot_users import find_uses
from megablend.operations.source_specs import has_text, list_specs
from megablend.run.ledger_file import load_ledger, run_names
from megablend.run.skips import lacks_checksum, load_skips
from megablend.storage.base import Storage
from megablend.system.failures import translating


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyResult(Record):
    """The result of `verify`."""

    cache: str
    """The cache's absolute path."""
    data: bool
    """Whether the data files were also read."""
    problems: tuple[str, ...]
    """A line for each problem, with the file and the position in the file."""
    notes: tuple[str, ...]
    """A line if the cache has no index yet, and a line for each record that is valid but that this
    release would write differently."""

    def __bool__(self) -> bool:
        """Raise an error if the result is used as a condition. Up to release 0.1, the result was a
        list of problems, which was false if there were none.

        Raises: TypeError, since `if verify(cache):` would now silently mean something else.
        """
        raise TypeError("a result of verify cannot be used as a condition; check its `problems`")


@translating("verify")
def verify(
    cache: ConfigLike,
    *,
    data: bool = False,
    progress: Callable[[Progress], None] | None = None,
    storage: Storage | None = None,
    text: int = 0,
) -> VerifyResult:
    """Check a whole cache: the index's fragments and snapshots, and the runs' ledgers.

    Args:
        cache: folder or URL of the cache, or a config that names it. With a config, the files of
            its run are looked for at the config's paths.
        data: also read every block of every data file, and compare counts and checksums.
        progress: called as data files are read (with `data`).
        storage: the storage that reads data files, instead of the config's storage.
        text: number of documents of each text source that are tokenised again, by Hugging Face's
            tokenizers library.

    Raises: CacheError if there is no cache; ConfigError if `text` is given without a config that
        has text.
    """
    session = Session(cache, storage=storage)
    config = session.config if session.is_config else None
    if text and config is None:
        raise ConfigError(
            f"{cache}: found a cache, expected a config, which says where the text is"
        )
    if text and config is not None and not has_text(config):
        raise ConfigError(
            f"{cache}: found no text source whose documents `text` ({text}) could tokenise again; leave out `text`"
        )
    store = session.cache
    uses = dict[str, SnapshotUse]()
    problems = list[str]()
    try:
        uses = find_uses(store, config)
    except CacheError as error:
        problems.append(str(error))
    problems += verify_index(
        store, data=data, storage=session.storage, progress=progress, uses=uses
    )
    if config is not None and text:
        from megablend.text.verify_text import verify_text  # imported only if it is needed

        problems += verify_text(config, list_specs(config), session.storage, text)
    notes = list[str]()
    problems += _check_runs(store, notes)
    return VerifyResult(
        cache=store.location, data=data, problems=tuple(problems), notes=tuple(notes)
    )


def _check_runs(cache: CacheStore, notes: list[str]) -> Iterator[str]:
    """Yield the problems of ledgers and of records of skipped samples. Notes are appended to
    `notes`."""
    indices = list_snapshots(cache)
    if not indices:
        notes.append(f"{cache.location}: holds no index yet; run `megablend build CONFIG`")
    for name in run_names(cache):
        try:
            ledger = load_ledger(cache, name)
            if ledger is not None:
                load_skips(cache, ledger)
        except OvertakenError:  # renamed or removed just now
            continue
        except CacheError as error:
            yield str(error)
            continue
        if ledger is not None and lacks_checksum(cache, name):
            notes.append(
                f"{cache.describe_record(SKIPS, name)}: has no checksum, since an earlier release wrote it; the next "
                "`megablend skip` of the run writes one"
            )
        for index in [] if ledger is None else ledger.indices:
            # A build may have committed both just now
            if index not in indices and not cache.has_folder(SNAPSHOTS, index):
                yield f"{cache.location}: run {name!r} uses index {index}, which does not exist; {REBUILD_REMEDY}"
