"""The match rule: walk from the root along the actor's own draws while the tree holds them.

`y = argmax_v(logp[v] + G[v])` at each node depends on the node's prefix and on noise that is a
function of indices, so the emitted stream is that of plain decoding whatever the tree.
"""

import jax.numpy as jnp

from specrl_jax.structs import Array, Frontier, Sampling, Verdict
from specrl_jax.verify.sampling import Draw


def walk(tokens: Array, parent: Array, live: Array, drawn: Array, depth: int
         ) -> tuple[Array, Array, Array]:
    """The accepted path of each row.

    Args:
      tokens, parent: i32[B, n]; live: bool[B, n].
      drawn: i32[B, n] the actor's draw at each node.
      depth: D; at most D + 1 tokens are emitted.

    Returns:
      path i32[B, D+1] of nodes walked (the last one repeats), emitted i32[B, D+1] = draws along it,
      and how many were emitted, i32[B] >= 1.
    """
    nodes, longest = tokens.shape[1], min(depth, tokens.shape[1] - 1) + 1
    fits = (live[:, None] & (parent[:, None] == jnp.arange(nodes)[None, :, None])
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


def judge(tokens: Array, parent: Array, live: Array, draw: Draw, place: Array, frontier: Frontier,
          sampling: Sampling, depth: int) -> Verdict:
    """The Verdict of a packed draw.

    Args:
      tokens, parent, live: [B, n], the bucket's tree.
      draw: at W packed positions.
      place: i32[B, n] index in W.
    """
    path, emitted, count = walk(tokens, parent, live, draw.token[place], depth)
    at = jnp.take_along_axis(place, path, 1)
    count, stopped = truncate(emitted, count, frontier, sampling)
    return Verdict(tokens=emitted, logprob=draw.logprob[at], raw_logprob=draw.raw_logprob[at],
                   top_p_mass=draw.top_p_mass[at], path=path, count=count, stopped=stopped)


def truncate(
    emitted: Array, count: Array, frontier: Frontier, sampling: Sampling
) -> tuple[Array, Array]:
    """Cuts what was emitted behind the first stop token and at the limit; dead rows emit nothing.

    Args:
      emitted: i32[B, D+1].
      count: i32[B] how many of them were emitted.

    Returns:
      count i32[B], and bool[B]: a stop token or the limit was reached.
    """
    within = jnp.arange(emitted.shape[1])[None]
    stop = (emitted[..., None] == sampling.stop[None, None]).any(-1) & (within < count[:, None])
    stopped = stop.any(1)
    count = jnp.where(stopped, stop.argmax(1) + 1, count)
    left = sampling.limit - frontier.generated
    stopped = (stopped & (count <= left)) | (count >= left)
    return jnp.where(frontier.live, jnp.minimum(count, left), 0), stopped & frontier.live
