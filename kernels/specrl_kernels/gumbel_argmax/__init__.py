"""The perturbed argmax over a vocabulary, its noise made inside."""

from specrl_kernels.gumbel_argmax.api import IMPLEMENTATIONS, gumbel_argmax
from specrl_kernels.gumbel_argmax.drawn import Drawn, Threshold, first_id, is_kept, scale_of

__all__ = ["IMPLEMENTATIONS", "Drawn", "Threshold", "first_id", "gumbel_argmax", "is_kept",
           "scale_of"]
