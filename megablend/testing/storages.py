"""The contract of every storage: files are found by patterns as on a local disk, and ranges of
their bytes are exact.

class TestMyStorage(StorageContract):
    def write_files(self, folder, files):
        ...
        return "myscheme://files"

    def make_storage(self):
        return MyStorage()
"""

from __future__ import annotations

from megablend.testing.storage_finding import StorageFinding
from megablend.testing.storage_reading import StorageReading


class StorageContract(StorageFinding, StorageReading):
    """The tests of a storage. Subclass this class, override `write_files` and `make_storage`, and
    set what differs from the defaults of `StorageFiles`."""
