"""Kernels: for each a formula, a plain torch reference, and a Triton version for CUDA."""
