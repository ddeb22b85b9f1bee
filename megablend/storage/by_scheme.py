"""`make_storage` creates the storage of a config. This storage passes each call on to the storage
for the scheme of the location."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megablend.arrays import Int64s
from megablend.errors import ConfigError
from megablend.storage.base import KnownFiles, Storage
from megablend.storage.file_table import FileTable, find_table
from megablend.storage.hints import DueRanges, Filled, HintedStorage, distrust, takes_hints
from megablend.storage.location import find_scheme
from megablend.storage.object_options import ObjectOptions
from megablend.storage.registry import StorageOptions, explain_scheme, find_storage
from megablend.storage.wrapper import RoutingStorage


def make_storage(
    *, direct: bool = False, max_open_files: int | None = None, objects: ObjectOptions | None = None
) -> Storage:
    """Create the storage of a config, for locations of any scheme.

    Called once by each command or public function; everything else receives the result.

    Args:
        direct: whether to read blocks without the system's page cache.
        max_open_files: the number of descriptors of local files that the process keeps open; None
            for no change.
        objects: the settings for object stores and web servers; None for the environment's
            settings.
    """
    objects = ObjectOptions() if objects is None else objects
    return StorageByScheme(
        StorageOptions(direct=direct, max_open_files=max_open_files, objects=objects)
    )


class StorageByScheme(RoutingStorage):
    """A storage that passes each call on to the storage for the location's scheme, which is created
    on first use. Only the options are pickled.

    Raises, from any call: ConfigError for a location with a scheme that has no storage.
    """

    def __init__(self, options: StorageOptions, *, checking: bool = False) -> None:
        self._options = options
        self._checking = checking
        self._made: dict[str, Storage] = {}

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[StorageOptions]]:
        return partial(StorageByScheme, checking=self._checking), (self._options,)

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return StorageByScheme(self._options, checking=True)

    def for_reading(self) -> Storage:
        """See Storage.for_reading."""
        return StorageByScheme(self._options, checking=self._checking)

    def find_table(self, pattern: str) -> FileTable | None:
        """See TableStorage.find_table."""
        return find_table(self.route(pattern), pattern)

    def known_files(self) -> KnownFiles:
        """Return the results of Storage.known_files in a dict by scheme."""
        known = {
            scheme: storage.known_files()
            for scheme, storage in self._made.items()
            if hasattr(storage, "known_files")  # a storage of another package may lack it
        }
        return {scheme: files for scheme, files in known.items() if files}

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files."""
        for scheme, files in known.items():
            self.route(f"{scheme}://").add_known_files(files)

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        """See HintedStorage.set_due; each storage that takes hints gets its own ranges."""
        for storage, own_ranges in self._divide(ranges):
            storage.set_due(reader, own_ranges)

    def fill(self, ranges: Sequence[DueRanges], *, is_dry: bool) -> Filled:
        """See HintedStorage.fill; each storage that takes hints fetches its own ranges."""
        filled = Filled()
        for storage, own_ranges in self._divide(ranges):
            filled = filled.plus(storage.fill(own_ranges, is_dry=is_dry))
        return filled

    def _divide(
        self, ranges: Sequence[DueRanges]
    ) -> Iterator[tuple[HintedStorage, list[DueRanges]]]:
        """Yield each storage that takes hints, with the ranges that it reads."""
        routes = [(due_ranges, self.route(due_ranges.path)) for due_ranges in ranges]
        for storage in tuple(self._made.values()):
            if takes_hints(storage):
                yield storage, [due_ranges for due_ranges, reader in routes if reader is storage]

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """See HintedStorage.distrust."""
        distrust(self.route(path), path, offsets, sizes)

    def route(self, location: str) -> Storage:
        """See RoutingStorage.route."""
        # Called several times per read
        scheme = "" if location.startswith("/") else find_scheme(location)
        made = self._made.get(scheme)
        if made is not None:
            return made
        if scheme == "file":
            raise ConfigError(f"{location}: write a plain path, without file://")
        factory = find_storage(scheme)
        if factory is None:
            raise ConfigError(f"{location}: {explain_scheme(scheme)}")
        made = factory(self._options)
        if self._checking:
            made = made.for_checking()
        # Another thread may also create one: the first one is used
        return self._made.setdefault(scheme, made)
