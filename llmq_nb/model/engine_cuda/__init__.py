"""The cuda engine's operations: Numba CUDA kernels and cuBLASLt products on one stream."""
