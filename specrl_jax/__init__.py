"""Reinforcement learning of language models with lossless speculative rollouts."""
