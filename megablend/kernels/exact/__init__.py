"""Kernels that reproduce Megatron's and NumPy's results bit for bit."""
