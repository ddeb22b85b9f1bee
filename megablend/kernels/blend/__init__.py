"""Kernels of the plan and the orders."""
