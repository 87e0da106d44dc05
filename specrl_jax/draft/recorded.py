"""A recorded stream as drafts, spoilt at will: for tests, and to measure the system alone.

Each recorded token is replaced by another with a given probability, a function of (key, position),
and each draft step costs a stated amount of work. Both are the drafter's parameters, so changing
them compiles nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import at_least, check
from specrl_jax.draft.protocol import Drafter, RolloutInfo, Survive
from specrl_jax.draft.tree import attach, roots
from specrl_jax.prng import bits
from specrl_jax.structs import Array, DraftTree, Frontier, Sampling, SpecConfig

WIDTH = 128  # of the square matrices whose products are a step's cost
_OWN_DOMAIN = 0x0B5E55ED  # turns a row's key into one whose bits the match rule never uses


@struct.dataclass
class Replaying:
    """The drafter's parameters: what a benchmark changes between rollouts."""

    corruption: Array  # f32[] probability that a token is replaced: 0 is perfect, 1 useless
    cost: Array  # i32[] products of WIDTH x WIDTH matrices in each draft step


def replaying(corruption: float, cost: int = 0) -> Replaying:
    """Host arrays.

    Raises:
      ConfigError: corruption outside [0, 1], or a negative cost.
    """
    check(0 <= corruption <= 1, "draft.corruption", corruption, "must lie in [0, 1]")
    at_least(0, draft__cost=cost)
    return Replaying(np.float32(corruption), np.int32(cost))


def replay(*, depth: int, nodes: int, vocab: int, origin: int = 0) -> Drafter:
    """The drafter of chains with D = `depth`, N = `nodes`; its parameters are `Replaying`.

    What sample m of a prompt will say is taken from `Occasion.past`[:, m], so K must be M.

    Args:
      vocab: V, to replace tokens from.
      origin: what DraftTree.origin says of its nodes.

    Raises:
      ConfigError: sizes that cannot work.
    """
    at_least(1, spec__max_depth=depth)
    at_least(2, vocab_size=vocab)
    check(nodes > depth, "spec.max_nodes", nodes,
          f"must be at least 1 + spec.max_depth = {1 + depth}")
    return Drafter(
        nodes=nodes, depth=depth, branch=nodes,  # chains, whatever is asked
        init=_init,
        propose=functools.partial(_propose, depth, nodes, vocab, origin),
        observe=lambda params, state, frontier, verdict, path: state,
        take=lambda state, rows: state,
        names=("replay",))


def _init(info: RolloutInfo) -> np.ndarray:
    """The recording i32[Q, T], -1 after each end."""
    check(info.past.shape[1] == info.group, "spec.history_past", info.past.shape[1],
          f"replay reads one recording for each of a prompt's samples; give {info.group}")
    return info.past.reshape(-1, info.past.shape[2])


def _propose(depth: int, nodes: int, vocab: int, origin: int, params: Replaying, record: Array,
             frontier: Frontier, rows: Sampling, spec: SpecConfig, survive: Survive
             ) -> tuple[DraftTree, Array]:
    level = jnp.arange(1, depth + 1, dtype=jnp.int32)[:, None]  # [D, 1]
    steps = jnp.where(frontier.live.any(), jnp.minimum(spec.steps, depth), 0)
    token = _spoilt(record, vocab, params, frontier, rows, level)
    live = jnp.cumprod((token >= 0) & (level <= steps), 0) > 0
    live &= frontier.live[None] & _worked(params.cost * steps)
    draft_prob = jnp.broadcast_to(jnp.clip(1 - params.corruption, 1e-6, 1.0), token.shape)
    whole, none = jnp.broadcast_to(level, token.shape), jnp.zeros_like(token)
    chain = DraftTree(
        tokens=token,
        parent=whole - 1,
        depth=whole,
        rank=none,
        origin=none + origin,
        survival=_survival(survive, draft_prob, whole, origin),
        logq=jnp.log(draft_prob),
        draft_prob=draft_prob,
        gap=jnp.zeros(token.shape),
        live=live,
    )
    return attach(roots(frontier.root, frontier.live, nodes), chain), record


def _spoilt(
    record: Array, vocab: int, params: Replaying, frontier: Frontier, rows: Sampling, level: Array
) -> Array:
    """The next tokens i32[D, B], some replaced by others; -1 where nothing is recorded."""
    total, buffer = record.shape
    place = frontier.generated[None] + level - 1
    said = record[jnp.minimum(frontier.seq, total - 1)[None], jnp.minimum(place, buffer - 1)]
    said = jnp.where(place < buffer, said, -1)
    key = jnp.broadcast_to((rows.key ^ jnp.uint32(_OWN_DOMAIN))[None], (*place.shape, 2))
    coin, other = jnp.moveaxis(bits(key, place, jnp.arange(2)), -1, 0)
    spoil = (coin >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) < params.corruption
    away = 1 + (other % jnp.uint32(vocab - 1)).astype(jnp.int32)
    return jnp.where(spoil & (said >= 0), (said + away) % vocab, said)


def _survival(survive: Survive, draft_prob: Array, level: Array, origin: int) -> Array:
    """f32[D, B] along a chain."""

    def step(above: Array, node: tuple[Array, Array]) -> tuple[Array, Array]:
        draft_prob, level = node
        survival = survive(*(a[:, None] for a in (
            above, draft_prob, level, jnp.full_like(level, origin))))[:, 0]
        return survival, survival

    return jax.lax.scan(step, jnp.ones_like(draft_prob[0]), (draft_prob, level))[1]


def _worked(products: Array) -> Array:
    """True, once that many matrix products are done; the compiler cannot know it beforehand."""
    flat = jnp.full((WIDTH, WIDTH), 1 / WIDTH)  # its own square, without rounding
    out = jax.lax.fori_loop(0, products, lambda _, x: x @ x, flat)
    return out[0, 0] > 0
