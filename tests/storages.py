"""Storages that tests read from."""

from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.wrapper import WrapperStorage

STORAGE = make_storage().for_checking()
"""Reads the files that are there at the last `stat`: tests replace them."""


class CountingStorage(WrapperStorage):
    """Counts the bytes of fetched ranges, those between neighbouring ranges included."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.bytes = 0

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        size = int(sizes.sum())  # before the addition: several threads read
        self.bytes += size
        return super().read_ranges(path, offsets, sizes, allocate)
