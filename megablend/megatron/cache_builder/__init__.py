"""Builds Megatron-core's dataset cache."""
