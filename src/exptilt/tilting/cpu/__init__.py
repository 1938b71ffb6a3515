"""Fused kernels for the CPU, compiled by numba: the four sweeps, what they are made of, and how torch tensors get to them."""
