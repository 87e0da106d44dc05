"""Root-mean-square norms of few tokens, as a verification makes them."""

from specrl_kernels.rms_norm.api import IMPLEMENTATIONS, rms_norm

__all__ = ["IMPLEMENTATIONS", "rms_norm"]
