"""Computations of numpy and megatron-core, byte for byte but faster: checks of input, choice of
kernels, division of work."""
