"""Servers, and other fixtures of the rooms whose messages are tried here."""

from tests.megatron.conftest import distributed

__all__ = ["distributed"]
