"""Kernels for CPUs as machine code, made with llvmlite and called by XLA on its own threads."""
