"""Faster versions of computations of numpy and megatron-core, with the same results byte for byte.
The loops themselves are kernels; this room checks inputs, chooses kernels and divides work among
threads."""
