"""Several drafters in one: each proposes its own tree, and the likeliest nodes of all are kept.

Nodes with the same tokens from the root are one node, whose survival is the higher of the two
estimates; its origin is the drafter that came first.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.config import check
from specrl_jax.draft.protocol import Drafter, Survive
from specrl_jax.draft.tree import roots
from specrl_jax.structs import Array, DraftTree, Frontier, Sampling, SpecConfig


def merge(drafters: Sequence[Drafter], nodes: int) -> Drafter:
    """One drafter made of several, with N = `nodes`; origins must be their places in `drafters`.

    `SpecConfig.mix` multiplies the survival of each drafter's nodes; one at 0 does no work.

    Raises:
      ConfigError: more than one of them taps the actor.
    """
    readers = [i for i, d in enumerate(drafters) if d.taps]
    check(len(readers) <= 1, "draft.parts", len(readers), "only one drafter may read the actor")
    reader = drafters[readers[0]] if readers else None

    def each(name: str, states: Any, *args: Any) -> tuple:
        return tuple(getattr(d, name)(s, *args) for d, s in zip(drafters, states, strict=True))

    def features_of(d: Drafter, features: Array | None) -> Array | None:
        return features if d is reader else None

    return Drafter(
        nodes=nodes, depth=max(d.depth for d in drafters),
        branch=max(d.branch for d in drafters),
        init=lambda info: tuple(d.init(info) for d in drafters),
        propose=functools.partial(_propose, tuple(drafters), nodes),
        observe=lambda params, states, *round_: tuple(
            d.observe(p, s, *round_) for d, p, s in zip(drafters, params, states, strict=True)),
        take=lambda states, rows: each("take", states, rows),
        fork=lambda states, fill: each("fork", states, fill),
        read_to=lambda states, context: each("read_to", states, context),
        prefill=lambda states, fill, tokens, features: tuple(
            d.prefill(s, fill, tokens, features_of(d, features))
            for d, s in zip(drafters, states, strict=True)),
        bind=lambda actor, own: tuple(
            d.bind(actor, o) for d, o in zip(drafters, own, strict=True)),
        names=tuple(name for d in drafters for name in d.names),
        taps=reader.taps if reader else (),
        project=None if reader is None else (
            lambda params, taps, decode=False: reader.project(params[readers[0]], taps, decode)))


def _propose(
    drafters: tuple[Drafter, ...],
    nodes: int,
    params: Any,
    states: Any,
    frontier: Frontier,
    rows: Sampling,
    spec: SpecConfig,
    survive: Survive,
) -> tuple[DraftTree, Any]:
    trees, after = [], []
    for i, (drafter, own, state) in enumerate(zip(drafters, params, states, strict=True)):
        used = spec.replace(steps=jnp.where(spec.mix[i] > 0, spec.steps, 0))
        tree, state = drafter.propose(own, state, frontier, rows, used, survive)
        inner = jnp.arange(tree.live.shape[1]) > 0
        trees.append(tree.replace(
            survival=jnp.where(inner[None], tree.survival * spec.mix[i], tree.survival)))
        after.append(state)

    def join() -> DraftTree:
        whole = functools.reduce(graft, trees, roots(frontier.root, frontier.live, 1))
        tree, broken = likeliest(whole, nodes), sum(t.logq[:, 0] for t in trees)
        return tree.replace(logq=tree.logq.at[:, 0].set(broken))

    return jax.lax.cond(
        spec.steps > 0, join, lambda: roots(frontier.root, frontier.live, nodes)), tuple(after)


def graft(whole: DraftTree, tree: DraftTree) -> DraftTree:
    """Two trees with the same roots in one, whose nodes are those of `whole` and then new ones.

    Args:
      whole: fields [B, N]; tree: [B, n]; both parents first. The result has [B, N + n - 1].
    """
    size, count = whole.live.shape[1], tree.live.shape[1]
    alone = jnp.where(jnp.arange(count) > 0, size - 1 + jnp.arange(count), 0)[None]

    def level(depth: Array, place: Array) -> Array:
        """Where the nodes down to `depth` stand: those that `whole` has too stand there."""
        parent = jnp.take_along_axis(place, tree.parent, 1)
        same = (whole.live[:, None] & (whole.parent[:, None] == parent[..., None])
                & (whole.tokens[:, None] == tree.tokens[..., None])).at[..., 0].set(False)
        found = (tree.depth == depth) & tree.live & same.any(2)
        return jnp.where(found, same.argmax(2), place)

    place = jax.lax.fori_loop(1, tree.depth.max() + 1, level,
                              jnp.broadcast_to(alone, tree.live.shape).astype(jnp.int32))
    new = tree.replace(parent=jnp.take_along_axis(place, tree.parent, 1),
                       live=tree.live & (place == alone))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, 1:]], 1), whole, new)
    rows = jnp.arange(tree.live.shape[0])[:, None]
    return both.replace(survival=both.survival.at[rows, place].max(
        jnp.where(tree.live, tree.survival, 0)))


def likeliest(tree: DraftTree, nodes: int) -> DraftTree:
    """The root and the `nodes` - 1 likeliest others, [B, nodes], parents first.

    A node counts as its best descendant where that is likelier, as after grafting it may be; so
    what is kept is closed under parent.
    """
    batch, total = tree.live.shape
    survival = _at_least_descendants(tree)
    score = jnp.where(tree.live, survival, -1.0)
    score = score.at[:, 0].set(jnp.inf)
    _, kept = jax.lax.top_k(score, min(nodes, total))
    kept = jnp.sort(kept, 1)
    place = jnp.zeros((batch, total), jnp.int32).at[jnp.arange(batch)[:, None], kept].set(
        jnp.arange(kept.shape[1])[None])
    small = jax.tree.map(lambda a: jnp.take_along_axis(a, kept, 1), tree.replace(survival=survival))
    small = small.replace(parent=jnp.where(
        small.live, jnp.take_along_axis(place, small.parent, 1), 0))
    room = ((0, 0), (0, nodes - kept.shape[1]))
    return jax.tree.map(lambda a: jnp.pad(a, room), small)


def _at_least_descendants(tree: DraftTree) -> Array:
    """f32[B, N]: each node's survival or a descendant's, whichever is higher."""
    rows, deepest = jnp.arange(tree.live.shape[0])[:, None], tree.depth.max()

    def level(step: Array, survival: Array) -> Array:
        mine = jnp.where(tree.live & (tree.depth == deepest - step), survival, 0)
        return survival.at[rows, tree.parent].max(mine)

    return jax.lax.fori_loop(0, deepest, level, tree.survival)
