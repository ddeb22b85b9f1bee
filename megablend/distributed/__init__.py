"""Processes that work together: one process, MPI, torch.distributed."""
