"""The match rule: walk from the root along the actor's own draws while the tree holds them.

`y = argmax_v(logp[v] + G[v])` after each node depends on the node's prefix and on noise that is a
function of indices, so the emitted tokens are those of plain decoding whatever the tree.
reference.py has the whole rule in plain Python.
"""

import jax.numpy as jnp

from specrl_jax.structs import Array, Verdict
from specrl_jax.verify import sampling
from specrl_jax.verify.protocol import Nodes, Rule, Target, cut_at_stop
from specrl_jax.verify.sampling import Draw


def verify(nodes: Nodes, target: Target, depth: int) -> tuple[Verdict, Array]:
    """Draws a token after every node and walks along the draws; see protocol.Verify."""
    if target.head is not None:
        draw = sampling.draw_from_head(target.head, target.processing[0], target.key,
                                       target.position)
    else:
        assert target.logits is not None
        draw = sampling.draw(target.logits, *target.processing, target.key, target.position,
                             min_p=target.min_p)
    return judge(nodes, draw, target, depth), draw.token[target.place]


def walk(nodes: Nodes, drawn: Array, depth: int) -> tuple[Array, Array, Array]:
    """Walks each row's tree along the actor's draw i32[B, n] after each node, D = `depth` steps.

    Returns:
      path i32[B, D+1] of walked nodes (the last one repeats), emitted i32[B, D+1] the draws along
      it, and count i32[B] >= 1 how many were emitted.
    """
    tokens, parent, size = nodes.tokens, nodes.parent, nodes.tokens.shape[1]
    longest = min(depth, size - 1) + 1
    fits = (nodes.live[:, None] & (parent[:, None] == jnp.arange(size)[None, :, None])
            & (tokens[:, None] == drawn[..., None])).at[:, :, 0].set(False)  # [B, node, child]
    follow = jnp.where(fits.any(2), fits.argmax(2), -1)
    path, taken = [jnp.zeros(tokens.shape[0], jnp.int32)], [jnp.ones(tokens.shape[0], bool)]
    for _ in range(longest - 1):  # few steps: a loop would take longer than what it does
        to = jnp.take_along_axis(follow, path[-1][:, None], 1)[:, 0]
        taken.append(to >= 0)
        path.append(jnp.where(to >= 0, to, path[-1]))
    walked = jnp.pad(jnp.stack(path, 1), ((0, 0), (0, depth + 1 - longest)), mode="edge")
    return (walked, jnp.take_along_axis(drawn, walked, 1),
            jnp.stack(taken, 1).sum(1, dtype=jnp.int32))


def judge(nodes: Nodes, draw: Draw, target: Target, depth: int) -> Verdict:
    """Returns the Verdict of a draw at the W packed positions. Reads no logits of `target`."""
    path, emitted, count = walk(nodes, draw.token[target.place], depth)
    at = jnp.take_along_axis(target.place, path, 1)
    count, stopped = cut_at_stop(emitted, count, target.frontier, target.sampling)
    return Verdict(tokens=emitted, logprob=draw.logprob[at], raw_logprob=draw.raw_logprob[at],
                   top_p_mass=draw.top_p_mass[at], path=path, count=count, stopped=stopped)


RULE = Rule(verify, lossless=True, draws_from_head=True)
