"""Drafters that replay what is recorded, for spec.drafter.

    --config.spec.drafter=studies.replay:perfect
"""

from specrl_jax.draft.registry import DrafterContext, DrafterPart
from studies.recorded import replay, replay_params


def perfect(context: DrafterContext) -> DrafterPart:
    """Returns the drafter that proposes the recorded tokens as they are."""
    return replaying(context, 0.0)


def replaying(context: DrafterContext, corruption: float) -> DrafterPart:
    """Returns the drafter that replaces recorded tokens with probability `corruption`."""
    spec = context.config.spec
    drafter = replay(depth=spec.max_depth, nodes=spec.max_nodes, vocab=context.arch.vocab_size,
                     origin=context.origin)
    return DrafterPart("replay", drafter, replay_params(corruption), versioned=False)
