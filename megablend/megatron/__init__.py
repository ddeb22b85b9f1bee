"""Megatron-LM's datasets: its cache files, byte for byte, without waiting for one rank to make them."""

from megablend.megatron.api import prepare

__all__ = ["prepare"]
