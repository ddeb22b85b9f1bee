from __future__ import annotations

from tests.caches.conftest import environments, moto, obstore, remote_moto

__all__ = ["environments", "moto", "obstore", "remote_moto"]
