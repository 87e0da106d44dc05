"""Products of a weight matrix with few columns, as verification makes them."""

from specrl_kernels.narrow_matmul.api import IMPLEMENTATIONS, narrow_matmul

__all__ = ["IMPLEMENTATIONS", "narrow_matmul"]
