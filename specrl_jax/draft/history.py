"""Drafts from what was said before: the row itself, its siblings, earlier responses to its prompt.

The longest suffix of the row that occurs in this corpus is looked up on the device; the occurrences
with the longest match vote on each next token, as in the suffix trees of DAS (arXiv 2511.13841,
section 2.1 of its method) and SRT (arXiv 2601.09083), here without a tree: corpora of RL groups are
small enough to compare directly.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specrl_jax.config import check
from specrl_jax.draft.protocol import Drafter, RolloutInfo, Survive
from specrl_jax.draft.tree import attach, roots
from specrl_jax.structs import Array, DraftTree, Frontier, Path, Sampling, SpecConfig, Verdict

VOTERS = 8  # occurrences that vote
_SEPARATOR = -1  # never equal to a token


@struct.dataclass
class History:
    """The corpus of one data shard; `-1` fills what is not written."""

    prompt: Array  # i32[Q / M, P]
    prompt_length: Array  # i32[Q / M]
    past: Array  # i32[Q / M, past, T] earlier responses, most recent first
    current: Array  # i32[Q, T] this step's responses; the M of a prompt lie together


def history(*, depth: int, branch: int, nodes: int, match: int, group: int, origin: int = 0
            ) -> Drafter:
    """The drafter with D = `depth`, K = `branch`, N = `nodes`; suffixes up to `match` tokens.

    Args:
      origin: what DraftTree.origin says of its nodes.

    Raises:
      ConfigError: N does not hold a root and K chains of D nodes.
    """
    check(nodes >= 1 + depth * branch, "spec.max_nodes", nodes,
          f"must be at least 1 + spec.max_depth * spec.max_branch = {1 + depth * branch}")
    return Drafter(
        nodes=nodes, depth=depth, branch=branch,
        init=_init,
        propose=functools.partial(_propose, depth, branch, nodes, match, group, origin),
        observe=_observe,
        take=lambda state, rows: state,
        names=("history",))


def _init(info: RolloutInfo) -> History:
    total = info.prompt.shape[0] * info.group
    return History(
        prompt=info.prompt, prompt_length=info.prompt_length, past=info.past,
        current=np.full((total, info.buffer), _SEPARATOR, np.int32))


def _observe(
    params: Any, state: History, frontier: Frontier, verdict: Verdict, path: Path
) -> History:
    total, buffer = state.current.shape
    within = jnp.arange(verdict.tokens.shape[1])[None]
    column = jnp.where(
        within < verdict.count[:, None], frontier.generated[:, None] + within, buffer
    )
    seq = jnp.where(frontier.live, frontier.seq, total)
    current = state.current.at[seq[:, None], column].set(verdict.tokens, mode="drop")
    return state.replace(current=current)


def _propose(depth: int, branch: int, nodes: int, match: int, group: int, origin: int,
             params: Any, state: History, frontier: Frontier, rows: Sampling, spec: SpecConfig,
             survive: Survive) -> tuple[DraftTree, History]:
    def search(_: None) -> DraftTree:
        weight, following = _occurrences(state, frontier, depth, match, group)
        return _grow(weight, following, frontier, spec, survive, branch, nodes, origin)

    wanted = (spec.steps > 0) & frontier.live.any()
    tree = jax.lax.cond(wanted, search, lambda _: roots(frontier.root, frontier.live, nodes), None)
    return tree, state


def _occurrences(state: History, frontier: Frontier, depth: int, match: int, group: int
                 ) -> tuple[Array, Array]:
    """The best occurrences of each row's suffix: weights f32[B, C], continuations i32[B, C, D]."""
    total = state.current.shape[0]
    seq = jnp.minimum(frontier.seq, total - 1)
    prompt = seq // group
    corpus = _corpus(state, prompt, group)
    suffix = _suffix(state, frontier, seq, prompt, match)
    length = _match_lengths(corpus, suffix)
    following = jnp.pad(corpus, ((0, 0), (0, depth)), constant_values=_SEPARATOR)
    length = jnp.where(following[:, 1 : corpus.shape[1] + 1] >= 0, length, 0)
    length, at = jax.lax.top_k(length, min(VOTERS, corpus.shape[1]))
    index = at[..., None] + 1 + jnp.arange(depth)[None, None]
    rows = jnp.arange(index.shape[0])[:, None, None]
    weight = jnp.where(length > 0, 4.0 ** length.astype(jnp.float32), 0)
    return weight, following[rows, index]


def _corpus(state: History, prompt: Array, group: int) -> Array:
    """i32[B, C]: siblings and the row itself, earlier responses, the prompt; separated."""
    siblings = state.current.reshape(-1, group, state.current.shape[1])[prompt]
    answers = jnp.concatenate([siblings, state.past[prompt]], 1)
    gap = ((0, 0), (0, 0), (0, 1))
    answers = jnp.pad(answers, gap, constant_values=_SEPARATOR).reshape(prompt.shape[0], -1)
    column = jnp.arange(state.prompt.shape[1])[None]
    question = jnp.where(column < state.prompt_length[prompt][:, None], state.prompt[prompt],
                         _SEPARATOR)
    return jnp.concatenate([answers, question], 1)


def _suffix(state: History, frontier: Frontier, seq: Array, prompt: Array, match: int) -> Array:
    """i32[B, match]: the row's last tokens, newest first; they may reach into the prompt."""
    back = frontier.generated[:, None] - 1 - jnp.arange(match)[None]
    said = state.current[seq[:, None], jnp.maximum(back, 0)]
    asked_at = state.prompt_length[prompt][:, None] + back
    asked = state.prompt[prompt[:, None], jnp.maximum(asked_at, 0)]
    asked = jnp.where(asked_at >= 0, asked, -2)
    return jnp.where(back >= 0, said, asked)


def _match_lengths(corpus: Array, suffix: Array) -> Array:
    """i32[B, C]: how many tokens ending at each corpus place equal the suffix."""
    width = suffix.shape[1]
    padded = jnp.pad(corpus, ((0, 0), (width, 0)), constant_values=_SEPARATOR)
    length, running = jnp.zeros_like(corpus), jnp.ones(corpus.shape, bool)
    for i in range(width):
        shifted = padded[:, width - i : padded.shape[1] - i]
        running = running & (shifted == suffix[:, i : i + 1])
        length = length + running
    return length


def _grow(weight: Array, following: Array, frontier: Frontier, spec: SpecConfig, survive: Survive,
          branch: int, nodes: int, origin: int) -> DraftTree:
    """Up to `branch` chains from the root; at each node the voters that agree so far vote on."""
    batch, _, depth = following.shape
    by_depth = jnp.moveaxis(following, 2, 0)

    def first(free: Array, _: None) -> tuple[Array, tuple[Array, ...]]:
        token, votes, share = _elect(free, by_depth[0], weight.sum(1))
        agree = by_depth[0] == token[:, None]
        return jnp.where(agree, 0, free), (token, votes, share, jnp.where(agree, free, 0))

    _, elected = jax.lax.scan(first, weight, None, length=branch)
    token, votes, share, voters = (jnp.moveaxis(a, 0, 1) for a in elected)  # [B, K], [B, K, C]
    chain = jnp.arange(branch)[None]
    none = jnp.zeros((batch, branch), jnp.int32)
    open_ = frontier.live[:, None] & (votes > 0) & (spec.steps > 0) & (chain < spec.branch)
    survival = survive(jnp.ones((batch, 1)), jnp.where(open_, share, 0), none + 1, none + origin)
    logq = jnp.log(share)
    level = DraftTree(tokens=token, parent=none, depth=none + 1, rank=none + chain,
                      origin=none + origin, survival=survival, logq=logq, draft_prob=share,
                      gap=logq[:, :1] - logq, live=open_)

    def deeper(carry: tuple[Array, DraftTree], at: tuple[Array, Array]
               ) -> tuple[tuple[Array, DraftTree], DraftTree]:
        (voters, above), (d, candidates) = carry, at
        candidates = candidates[:, None]
        token, votes, share = _elect(voters, candidates, voters.sum(-1))
        below = above.replace(
            tokens=token, parent=none + chain * depth + d, depth=above.depth + 1, rank=none,
            survival=survive(*(a[..., None] for a in (
                above.survival, share, above.depth + 1, above.origin)))[..., 0],
            logq=jnp.log(share), draft_prob=share, gap=jnp.zeros_like(share),
            live=above.live & (votes > 0) & (d < spec.steps))
        return (jnp.where(candidates == token[..., None], voters, 0), below), below

    _, rest = jax.lax.scan(deeper, (voters, level), (jnp.arange(1, depth), by_depth[1:]))
    children = jax.tree.map(  # [D, B, K] -> [K * D, B]
        lambda top, rest: jnp.moveaxis(jnp.concatenate([top[None], rest]), (2, 0), (0, 1)).reshape(
            branch * depth, batch), level, rest)
    return attach(roots(frontier.root, frontier.live, nodes), children)


def _elect(weight: Array, tokens: Array, among: Array) -> tuple[Array, Array, Array]:
    """The token with most votes: (i32[...], its votes f32[...], their share of `among` f32[...]).

    Args:
      weight, tokens: [..., C] of each voter.
    """
    weight = jnp.where(tokens >= 0, weight, 0)
    tokens = jnp.broadcast_to(tokens, weight.shape)
    votes = ((tokens[..., :, None] == tokens[..., None, :]) * weight[..., None, :]).sum(-1)
    votes = jnp.where(weight > 0, votes, 0)
    best = votes.argmax(-1)[..., None]
    won = jnp.take_along_axis(votes, best, -1)[..., 0]
    share = won / (among + 4.0)  # votes for something never said: one match of length 1
    return jnp.take_along_axis(tokens, best, -1)[..., 0], won, jnp.maximum(share, 1e-6)
