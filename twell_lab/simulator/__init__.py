"""The CUDA kernels compiled for the CPU: run, checked, counted and stepped through without a GPU."""
