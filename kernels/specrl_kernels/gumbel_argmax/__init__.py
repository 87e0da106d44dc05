"""The perturbed argmax over a vocabulary, its noise made inside."""

from specrl_kernels.gumbel_argmax.api import IMPLEMENTATIONS, gumbel_argmax, refusals
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold, scale_of

__all__ = ["IMPLEMENTATIONS", "Drawn", "Threshold", "gumbel_argmax", "refusals", "scale_of"]
