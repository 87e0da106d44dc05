"""Kernels for speculative rollouts: tree attention and counter-based Gumbel noise."""
