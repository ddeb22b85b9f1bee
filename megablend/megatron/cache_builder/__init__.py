"""Build Megatron-core's dataset cache."""
