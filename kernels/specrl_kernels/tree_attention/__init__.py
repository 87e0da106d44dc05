"""Attention of packed tree nodes to a row's committed prefix and to their own ancestors."""

from specrl_kernels.tree_attention.api import plan, refusals, tree_attention
from specrl_kernels.tree_attention.operands import Prefix

__all__ = ["Prefix", "plan", "refusals", "tree_attention"]
