"""Attention of packed tree nodes to a row's committed prefix and to their own ancestors."""

from specrl_kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
