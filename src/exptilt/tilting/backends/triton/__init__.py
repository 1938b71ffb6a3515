"""The sweeps as Triton kernels, for GPUs."""
