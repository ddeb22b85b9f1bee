"""Files that are checked while others read them: through descriptors of their own, so that readers keep what they opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megablend.storage.base import FileStat
from megablend.storage.descriptors import DescriptorPool
from megablend.storage.local import LocalStorage, data_error, file_stat

_POOL = DescriptorPool(capacity=16)
os.register_at_fork(after_in_child=_POOL.unlock_after_fork)


@dataclass(frozen=True, slots=True)
class SeparateStorage(LocalStorage):
    """Local files; asking for a file's state changes nothing for those who read it."""

    pool = _POOL

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        try:
            state = Path(path).stat()
        except OSError as error:
            raise data_error(path, error) from error
        self.pool.invalidate_if_replaced(path, state)
        return file_stat(state)
