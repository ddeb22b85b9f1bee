"""Servers, and other fixtures of the rooms whose messages are tried here."""

from tests.caches.conftest import container, remote
from tests.storage.objects.conftest import azurite, environments, obstore, swift, swift_server

__all__ = ["azurite", "container", "environments", "obstore", "remote", "swift", "swift_server"]
