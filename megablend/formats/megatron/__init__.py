"""Megatron `.bin/.idx` pairs, spans of whole sequences as blocks."""

from megablend.formats.megatron.reader import MEGATRON

__all__ = ["MEGATRON"]
