"""Computations of numpy and megatron-core, faster but with the same results, byte for byte: checks
of input, choice of kernels, division of work."""
