"""Several drafters in one: each proposes its own tree, and the likeliest nodes of all are kept.

Nodes with the same tokens from the root are one node. Its survival is the higher of the two
estimates; its origin is the drafter that came first.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from specrl_jax.config import check
from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.tree import map_nodes, roots
from specrl_jax.sharding import either, straight_line
from specrl_jax.structs import Array, DraftTree


def merge(drafters: Sequence[Drafter], nodes: int) -> Drafter:
    """Returns one drafter made of several, with N = `nodes`.

    The origins of its parts must be their indices in `drafters`; its state and parameters are
    tuples over the parts. `SpecConfig.mix` multiplies the survival of each part's nodes; a part
    with factor 0 does no work. Raises a ConfigError if more than one taps the actor.
    """
    readers = [i for i, d in enumerate(drafters) if d.taps]
    check(len(readers) <= 1, "draft.parts", len(readers), "only one drafter may read the actor")

    def each(call: Callable[..., object], *of_parts: Iterable) -> tuple:
        return tuple(map(call, drafters, *of_parts))

    return Drafter(
        nodes=nodes, depth=max(d.depth for d in drafters), branch=max(d.branch for d in drafters),
        propose=functools.partial(_propose, tuple(drafters), nodes),
        init=lambda info: each(lambda d: d.init(info)),
        prefill=lambda states, fill, tokens, features: each(
            lambda d, s: d.prefill(s, fill, tokens, features if d.taps else None), states),
        copy_prompt=lambda states, fill: each(lambda d, s: d.copy_prompt(s, fill), states),
        observe=lambda params, states, frontier, verdict, path: each(
            lambda d, p, s: d.observe(p, s, frontier, verdict, path), params, states),
        select_rows=lambda states, rows: each(lambda d, s: d.select_rows(s, rows), states),
        needs_catch_up=any(d.needs_catch_up for d in drafters),
        catch_up=lambda params, states, frontier: each(
            lambda d, p, s: d.catch_up(p, s, frontier), params, states),
        skip_to=lambda states, context: each(lambda d, s: d.skip_to(s, context), states),
        names=tuple(name for d in drafters for name in d.names),
        bind=lambda actor, own: each(lambda d, o: d.bind(actor, o), own),
        taps=drafters[readers[0]].taps if readers else (),
        project=lambda params, taps, decode=False: drafters[readers[0]].project(
            params[readers[0]], taps, decode))


def _propose(drafters: tuple[Drafter, ...], nodes: int, params: tuple, states: tuple,
             request: DraftRequest) -> tuple[DraftTree, tuple]:
    frontier, spec = request.frontier, request.spec
    trees, after = [], []
    for i, (drafter, own, state) in enumerate(zip(drafters, params, states, strict=True)):
        used = spec.replace(depth=jnp.where(spec.mix[i] > 0, spec.depth, 0))
        tree, state = drafter.propose(own, state, request.replace(spec=used))
        inner = jnp.arange(tree.live.shape[1]) > 0
        trees.append(tree.replace(
            survival=jnp.where(inner[None], tree.survival * spec.mix[i], tree.survival)))
        after.append(state)
    deepest = max(drafter.depth for drafter in drafters)
    return either(
        spec.depth > 0, lambda: likeliest(functools.reduce(
            functools.partial(graft, deepest=deepest), trees,
            roots(frontier.root, frontier.live, 1)), nodes, deepest),
        lambda: roots(frontier.root, frontier.live, nodes)), tuple(after)


def graft(base: DraftTree, tree: DraftTree, deepest: int) -> DraftTree:
    """Joins trees [B, N] and [B, n] with the same roots: `base`'s nodes, then `tree`'s new ones.

    The result has fields [B, N + n - 1]. No node is deeper than `deepest`.
    """
    size, count = base.live.shape[1], tree.live.shape[1]
    alone = jnp.where(jnp.arange(count) > 0, size - 1 + jnp.arange(count), 0)[None]

    def level(depth: Array, index: Array) -> Array:
        """Maps the nodes down to `depth` to their equals in `base`, if there are any."""
        parent = jnp.take_along_axis(index, tree.parent, 1)
        same = (base.live[:, None] & (base.parent[:, None] == parent[..., None])
                & (base.tokens[:, None] == tree.tokens[..., None])).at[..., 0].set(False)
        matched = (tree.depth == depth) & tree.live & same.any(2)
        return jnp.where(matched, same.argmax(2), index)

    last = deepest if straight_line() else tree.depth.max()
    index = jax.lax.fori_loop(1, last + 1, level,
                              jnp.broadcast_to(alone, tree.live.shape).astype(jnp.int32))
    new = tree.replace(parent=jnp.take_along_axis(index, tree.parent, 1),
                       live=tree.live & (index == alone))
    both = map_nodes(lambda a, b: jnp.concatenate([a, b[:, 1:]], 1), base, new)
    rows = jnp.arange(tree.live.shape[0])[:, None]
    survival = jnp.where(tree.live, tree.survival, 0)
    return both.replace(survival=both.survival.at[rows, index].max(survival),
                        broken=base.broken | tree.broken)


def likeliest(tree: DraftTree, nodes: int, deepest: int) -> DraftTree:
    """Keeps the root and the `nodes` - 1 likeliest others, [B, nodes], parents first.

    After grafting a node may be less likely than a descendant and then counts as that, so the kept
    nodes are closed under parent.
    """
    batch, total = tree.live.shape
    rows, last = jnp.arange(batch)[:, None], deepest if straight_line() else tree.depth.max()

    def level(step: Array, survival: Array) -> Array:
        mine = jnp.where(tree.live & (tree.depth == last - step), survival, 0)
        return survival.at[rows, tree.parent].max(mine)

    survival = jax.lax.fori_loop(0, last, level, tree.survival)
    score = jnp.where(tree.live, survival, -1.0).at[:, 0].set(jnp.inf)
    kept = jnp.sort(jax.lax.top_k(score, min(nodes, total))[1], 1)
    index = jnp.zeros((batch, total), jnp.int32).at[rows, kept].set(jnp.arange(kept.shape[1])[None])
    small = map_nodes(lambda a: jnp.take_along_axis(a, kept, 1), tree.replace(survival=survival))
    small = small.replace(parent=jnp.where(
        small.live, jnp.take_along_axis(index, small.parent, 1), 0))
    room = ((0, 0), (0, nodes - kept.shape[1]))
    return map_nodes(lambda a: jnp.pad(a, room), small)
