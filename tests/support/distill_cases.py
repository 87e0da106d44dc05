"""Runs of a few milliseconds a step with a drafter that may learn."""

from typing import Any

from helpers import micro_config

from specrl_jax.config import Config

LEARN = dict(batch=8, micro_batch=8, updates=2, unroll=2, learning_rate=3e-3, probe_tokens=4)
INVARIANT = dict(num_heads=4, num_kv_heads=2, head_dim=16)  # heads that machine code can take


def config(when: str, **fields: Any) -> Config:
    """`fields` are those of `distill`, or of others as mesh__data."""
    own = {name if "__" in name else f"distill__{name}": value
           for name, value in (LEARN | fields).items()}
    return micro_config(**dict(
        steps=4, checkpoint_every=2, spec__drafter="eagle", draft__vocab=256, distill__when=when,
        control__min_survival=0.0, model__numerics="invariant", reward__terms=("helpers:even",),
        learner__learning_rate=1e-2, learner__max_grad_norm=1.0) | own)
