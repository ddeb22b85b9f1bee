"""Computations of numpy and megatron-core with the same results, byte for byte, but faster: checks
of input, choice of kernels, division of work."""
