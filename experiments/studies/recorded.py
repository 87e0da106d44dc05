"""Drafts from a recorded stream, corrupted on purpose: for tests, and to measure the system alone.

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
from specrl_jax.draft.protocol import Drafter, DraftRequest, RolloutInfo
from specrl_jax.draft.tree import chain
from specrl_jax.prng import bits
from specrl_jax.structs import Array, DraftTree, Frontier, Sampling, carrier

WIDTH = 128  # of the square matrices whose products are a step's cost
_KEY_DOMAIN = 0x0B5E55ED  # turns a row's key into one whose bits the match rule never uses


class ReplayParams(struct.PyTreeNode):
    corruption: Array  # f32[] probability that a token is replaced: 0 is perfect, 1 useless
    cost: Array  # i32[] products of WIDTH x WIDTH matrices in each draft step


def replay_params(corruption: float, cost: int = 0) -> ReplayParams:
    """Returns parameters as host arrays; raises a ConfigError if one is out of range."""
    check(0 <= corruption <= 1, "corruption", corruption, "must lie in [0, 1]")
    at_least(0, cost=cost)
    return carrier(ReplayParams, corruption=np.float32(corruption), cost=np.int32(cost))


def replay(*, depth: int, nodes: int, vocab: int, origin: int = 0) -> Drafter:
    """Returns the drafter of chains with D = `depth`, N = `nodes` and parameters `ReplayParams`.

    Sample m of a prompt drafts from `RolloutInfo.past`[:, m], so K must be M. Replacements are
    drawn from `vocab` tokens. Raises a ConfigError for sizes that cannot work.
    """
    at_least(1, spec__max_depth=depth)
    at_least(2, vocab_size=vocab)
    check(nodes > depth, "spec.max_nodes", nodes,
          f"must be at least 1 + spec.max_depth = {1 + depth}")
    return Drafter(
        nodes=nodes, depth=depth, branch=nodes,  # always chains, whatever branch is planned
        init=_init, propose=functools.partial(_propose, depth, nodes, vocab, origin),
        names=("replay",), select_rows=lambda record, rows: record)  # it counts sequences


def _init(info: RolloutInfo) -> np.ndarray:
    """Returns the recording i32[Q, T], -1 after each end."""
    check(info.past.shape[1] == info.group, "spec.history_past", info.past.shape[1],
          f"replay reads one recording for each of a prompt's samples; give {info.group}")
    return info.past.reshape(-1, info.past.shape[2])


def _propose(depth: int, nodes: int, vocab: int, origin: int, params: ReplayParams, record: Array,
             request: DraftRequest) -> tuple[DraftTree, Array]:
    steps = jnp.where(request.frontier.live.any(), jnp.minimum(request.spec.depth, depth), 0)
    tokens = _corrupted(record, depth, vocab, params, request.frontier, request.sampling)
    tokens = jnp.where(_worked(params.cost * steps), tokens, -1)
    draft_prob = jnp.broadcast_to(jnp.clip(1 - params.corruption, 1e-6, 1.0), tokens.shape)
    return chain(tokens, draft_prob, request, nodes=nodes, origin=origin), record


def _corrupted(record: Array, depth: int, vocab: int, params: ReplayParams, frontier: Frontier,
               rows: Sampling) -> Array:
    """Returns the next tokens i32[D, B], some replaced; -1 where nothing is recorded."""
    total, buffer = record.shape
    place = frontier.generated[None] + jnp.arange(depth, dtype=jnp.int32)[:, None]
    token = record[jnp.minimum(frontier.seq, total - 1)[None], jnp.minimum(place, buffer - 1)]
    token = jnp.where(place < buffer, token, -1)
    key = jnp.broadcast_to((rows.key ^ jnp.uint32(_KEY_DOMAIN))[None], (*place.shape, 2))
    coin, other = jnp.moveaxis(bits(key, place, jnp.arange(2)), -1, 0)
    replace = (coin >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) < params.corruption
    offset = 1 + (other % jnp.uint32(vocab - 1)).astype(jnp.int32)
    return jnp.where(replace & (token >= 0), (token + offset) % vocab, token)


def _worked(products: Array) -> Array:
    """Returns True once `products` matrix products are done, which the compiler cannot foresee."""
    flat = jnp.full((WIDTH, WIDTH), 1 / WIDTH)  # its own square, without rounding
    out = jax.lax.fori_loop(0, products, lambda _, x: x @ x, flat)
    return out[0, 0] > 0
