"""Kernels of our own for GPUs, in Triton. Nothing here is imported before it is wanted: Triton is not everywhere."""
