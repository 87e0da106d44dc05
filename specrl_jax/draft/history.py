"""Drafts from earlier text: the row itself, its siblings, earlier responses to its prompt.

The longest suffix of the row that occurs in this corpus is looked up on the device; the occurrences
with the longest match vote on each next token, as in the suffix trees of DAS (arXiv 2511.13841,
section 2.1 of its method) and SRT (arXiv 2601.09083), here without a tree: corpora of RL groups are
small enough to compare directly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from specrl_jax.config import check
from specrl_jax.draft.protocol import Drafter, DraftRequest, RolloutInfo
from specrl_jax.draft.tree import attach, roots
from specrl_jax.sharding import either
from specrl_jax.structs import (
    Array,
    DrafterParams,
    DraftTree,
    Frontier,
    Path,
    TreeNodes,
    Verdict,
    carrier,
)

MATCH = 6  # longest suffix, in tokens, that is looked up
VOTERS = 8  # occurrences that vote
_SEPARATOR = -1  # never equal to a token


class History(struct.PyTreeNode):
    """The corpus of one data shard; -1 is padding."""

    prompt: Array  # i32[Q / M, P]
    prompt_length: Array  # i32[Q / M]
    past: Array  # i32[Q / M, past, T] earlier responses, most recent first
    current: Array  # i32[Q, T] this step's responses, grouped by prompt


@dataclasses.dataclass(frozen=True)
class _Static:
    depth: int  # D
    branch: int  # K
    nodes: int  # N
    match: int  # longest suffix, in tokens
    group: int  # M
    origin: int  # for DraftTree.origin


def history(*, depth: int, branch: int, nodes: int, match: int, group: int, origin: int = 0
            ) -> Drafter:
    """Returns the drafter with D = `depth`, K = `branch`, N = `nodes` for `group` = M samples.

    It looks up suffixes of at most `match` tokens. Raises a ConfigError if N does not hold a root
    and K chains of D nodes.
    """
    check(nodes >= 1 + depth * branch, "spec.max_nodes", nodes,
          f"must be at least 1 + spec.max_depth * spec.max_branch = {1 + depth * branch}")
    static = _Static(depth, branch, nodes, match, group, origin)
    return Drafter(
        nodes=nodes, depth=depth, branch=branch, init=_init, names=("history",),
        propose=functools.partial(_propose, static), observe=_observe,
        select_rows=lambda state, rows: state)  # the corpus counts sequences, not slots


def _init(info: RolloutInfo) -> History:
    return carrier(History, prompt=info.prompt, prompt_length=info.prompt_length, past=info.past,
                   current=info.response)


def _observe(params: DrafterParams, state: History, frontier: Frontier, verdict: Verdict,
             path: Path) -> History:
    """Adds the committed tokens to the corpus, at unique indices: see verify.commit.record."""
    total, buffer = state.current.shape
    batch, width = verdict.tokens.shape
    within = jnp.arange(width)[None]
    column = jnp.where(within < verdict.count[:, None], frontier.generated[:, None] + within,
                       buffer + within)
    seq = jnp.where(frontier.live, frontier.seq, total + jnp.arange(batch))[:, None]
    return state.replace(current=state.current.at[seq, column].set(
        verdict.tokens, mode="drop", unique_indices=True))


def _propose(static: _Static, params: DrafterParams, state: History, request: DraftRequest
             ) -> tuple[DraftTree, History]:
    frontier = request.frontier
    return either(
        (request.spec.depth > 0) & frontier.live.any(),
        lambda: _grow(static, *_occurrences(static, state, frontier), request),
        lambda: roots(frontier.root, frontier.live, static.nodes)), state


def _occurrences(static: _Static, state: History, frontier: Frontier) -> tuple[Array, Array]:
    """Returns weights f32[B, C] and continuations i32[B, C, D] of the best matches of suffixes."""
    depth, seq = static.depth, jnp.minimum(frontier.seq, len(state.current) - 1)
    prompt = seq // static.group
    corpus = _corpus(state, prompt, static.group)
    length = _match_lengths(corpus, _suffix(state, frontier, seq, prompt, static.match))
    following = jnp.pad(corpus, ((0, 0), (0, depth)), constant_values=_SEPARATOR)
    length = jnp.where(following[:, 1 : corpus.shape[1] + 1] >= 0, length, 0)
    length, at = jax.lax.top_k(length, min(VOTERS, corpus.shape[1]))
    index = at[..., None] + 1 + jnp.arange(depth)[None, None]
    rows = jnp.arange(index.shape[0])[:, None, None]
    weight = jnp.where(length > 0, 4.0 ** length.astype(jnp.float32), 0)
    return weight, following[rows, index]


def _corpus(state: History, prompt: Array, group: int) -> Array:
    """Returns i32[B, C]: siblings and the row itself, earlier responses, the prompt; separated."""
    siblings = state.current.reshape(-1, group, state.current.shape[1])[prompt]
    responses = jnp.concatenate([siblings, state.past[prompt]], 1)
    responses = jnp.pad(responses, ((0, 0), (0, 0), (0, 1)), constant_values=_SEPARATOR)
    real = jnp.arange(state.prompt.shape[1])[None] < state.prompt_length[prompt][:, None]
    question = jnp.where(real, state.prompt[prompt], _SEPARATOR)
    return jnp.concatenate([responses.reshape(prompt.shape[0], -1), question], 1)


def _suffix(state: History, frontier: Frontier, seq: Array, prompt: Array, match: int) -> Array:
    """Returns i32[B, match]: the row's last tokens, prompt included, newest first."""
    back = frontier.generated[:, None] - 1 - jnp.arange(match)[None]
    response = state.current[seq[:, None], jnp.maximum(back, 0)]
    in_prompt = state.prompt_length[prompt][:, None] + back
    question = state.prompt[prompt[:, None], jnp.maximum(in_prompt, 0)]
    question = jnp.where(in_prompt >= 0, question, -2)
    return jnp.where(back >= 0, response, question)


def _match_lengths(corpus: Array, suffix: Array) -> Array:
    """Returns i32[B, C]: the length of the suffix that matches up to each corpus position."""
    width = suffix.shape[1]
    padded = jnp.pad(corpus, ((0, 0), (width, 0)), constant_values=_SEPARATOR)
    length, running = jnp.zeros_like(corpus), jnp.ones(corpus.shape, bool)
    for i in range(width):
        running &= padded[:, width - i : padded.shape[1] - i] == suffix[:, i : i + 1]
        length += running
    return length


def _grow(static: _Static, weight: Array, following: Array, request: DraftRequest) -> DraftTree:
    """Grows up to K chains from the root. At each node the voters that agree so far vote again."""
    frontier, spec, survive = request.frontier, request.spec, request.survive
    branch, origin, (batch, _, depth) = static.branch, static.origin, following.shape
    by_depth = jnp.moveaxis(following, 2, 0)

    def first(free: Array, _: None) -> tuple[Array, tuple[Array, ...]]:
        token, votes, share = _elect(free, by_depth[0], weight.sum(1))
        agree = by_depth[0] == token[:, None]
        return jnp.where(agree, 0, free), (token, votes, share, jnp.where(agree, free, 0))

    _, elected = jax.lax.scan(first, weight, None, length=branch)
    token, votes, share, voters = (jnp.moveaxis(a, 0, 1) for a in elected)  # [B, K], [B, K, C]
    chain = jnp.arange(branch)[None]
    none = jnp.zeros((batch, branch), jnp.int32)
    open_ = frontier.live[:, None] & (votes > 0) & (spec.depth > 0) & (chain < spec.branch)
    survival = survive(jnp.ones((batch, 1)), jnp.where(open_, share, 0), none + 1, none + origin)
    logq = jnp.log(share)
    level = TreeNodes(tokens=token, parent=none, depth=none + 1, rank=none + chain,
                      origin=none + origin, survival=survival, logq=logq, draft_prob=share,
                      score_gap=logq[:, :1] - logq, live=open_)

    def deeper(carry: tuple[Array, TreeNodes], at: tuple[Array, Array]
               ) -> tuple[tuple[Array, TreeNodes], TreeNodes]:
        (voters, above), (d, candidates) = carry, at
        candidates = candidates[:, None]
        token, votes, share = _elect(voters, candidates, voters.sum(-1))
        below = above.replace(
            tokens=token, parent=none + chain * depth + d, depth=above.depth + 1, rank=none,
            survival=survive(*(a[..., None] for a in (
                above.survival, share, above.depth + 1, above.origin)))[..., 0],
            logq=jnp.log(share), draft_prob=share, score_gap=jnp.zeros_like(share),
            live=above.live & (votes > 0) & (d < spec.depth))
        return (jnp.where(candidates == token[..., None], voters, 0), below), below

    _, rest = jax.lax.scan(deeper, (voters, level), (jnp.arange(1, depth), by_depth[1:]))
    children = jax.tree.map(  # [D, B, K] -> [K * D, B]
        lambda top, rest: jnp.moveaxis(jnp.concatenate([top[None], rest]), (2, 0), (0, 1)).reshape(
            branch * depth, batch), level, rest)
    return attach(roots(frontier.root, frontier.live, static.nodes), children)


def _elect(weight: Array, tokens: Array, among: Array) -> tuple[Array, Array, Array]:
    """Returns the token i32[...] with most votes, its votes and their share of `among`, f32[...].

    `weight` and `tokens` [..., C] are the voters'; `among` counts voters without a token too.
    """
    weight = jnp.where(tokens >= 0, weight, 0)
    tokens = jnp.broadcast_to(tokens, weight.shape)
    votes = ((tokens[..., :, None] == tokens[..., None, :]) * weight[..., None, :]).sum(-1)
    votes = jnp.where(weight > 0, votes, 0)
    best = votes.argmax(-1)[..., None]
    token, won = (jnp.take_along_axis(a, best, -1)[..., 0] for a in (tokens, votes))
    share = won / (among + 4.0)  # 4 votes for an unseen token: one match of length 1
    return token, won, jnp.maximum(share, 1e-6)
