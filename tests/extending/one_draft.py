"""A verification rule that accepts at most one draft a round, and only the actor's own draw."""

from specrl_jax.structs import Array, Verdict
from specrl_jax.verify import match
from specrl_jax.verify.protocol import Nodes, Rule, Target


def verify(nodes: Nodes, target: Target, depth: int) -> tuple[Verdict, Array]:
    """Applies the match rule to the root and its children alone."""
    shallow = nodes.live & (nodes.depth <= 1)
    return match.verify(nodes.replace(live=shallow), target, depth)


ONE_DRAFT = Rule(verify, lossless=True)
