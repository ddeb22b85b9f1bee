"""Megatron `.bin/.idx` pairs: a block is a span of whole sequences."""

from megablend.formats.megatron.reader import MEGATRON

__all__ = ["MEGATRON"]
