"""The output head's product and the perturbed argmax over its logits, which are never stored."""

from specrl_kernels.head_argmax.api import IMPLEMENTATIONS, head_argmax

__all__ = ["IMPLEMENTATIONS", "head_argmax"]
