"""The sweeps as kernels for the CPU, compiled with numba on the machine that they run on."""
