"""The cases of the table of kernels: one file an operation, with a list `CASES`."""
