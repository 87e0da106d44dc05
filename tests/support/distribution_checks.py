"""Toy models with known distributions, a round of each rule on them, and a chi-square test.

A model is a table f[V+1, V] of logits: row t is what follows token t, row V what follows the
prompt. The first two tokens have the distribution p[V, a] p[a, b]. A shape is a tree that is fixed
before any token is drawn.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.prng import gumbel
from specrl_jax.structs import Array, Frontier, Sampling
from specrl_jax.verify import match as verify
from specrl_jax.verify import rejection, sampling
from specrl_jax.verify.protocol import Nodes, Target

VOCAB = 5


class Shape(NamedTuple):
    """A tree's nodes, root first, and their ranks."""

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    depth: tuple[int, ...]


CHAIN = Shape((0, 0, 1), (0, 0, 0), (0, 1, 2))
TREE = Shape((0, 0, 0, 1, 1), (0, 0, 1, 0, 1), (0, 1, 1, 2, 2))
PLAIN = Shape((0,), (0,), (0,))
DEPTH = 2


class Round(NamedTuple):
    """What a rule sees of one round; N rows, n nodes."""

    tokens: Array  # i32[N, n]
    shape: Shape
    live: Array  # bool[N, n]
    logits: Array  # f32[N, n, V] the target's, before processing
    settings: Array  # f32[N, 3] temperature, top_k, top_p
    logp: Array  # f32[N, n, V]
    logq: Array  # f32[N, n, V]
    key: Array  # u32[N, 2]
    generated: Array  # i32[N]


Rule = Callable[[Round], tuple[Array, Array]]
"""-> tokens i32[N, D+1], how many of them were emitted i32[N]"""

SETTINGS = np.asarray(
    [(t, k, p) for t in (0.6, 1.0, 1.7) for k, p in ((0, 1.0), (3, 1.0), (0, 0.8), (4, 0.9))]
    + [(0.0, 0, 1.0)], np.float32)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The processed distribution, f64[V], by sorting."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    setting = float(temperature), int(top_k), float(top_p)
    return np.exp(ProcessedDistribution(logits, *setting).logprob)


class ProcessedDistribution:
    """`distribution` in logarithms, and the distance of its nearest token to truncation's edge."""

    def __init__(self, logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
        wide = np.asarray(logits, np.float64)
        scores = wide / (temperature or 1.0)
        order = np.lexsort((np.arange(len(scores)), -scores))
        p = np.exp(scores - scores.max())
        p /= p.sum()
        keep = order[: top_k or None]
        ahead = np.cumsum(p[keep]) - p[keep]
        target = top_p * p[keep].sum()
        kept = keep[ahead < target] if top_p < 1 else keep
        margins = [1.0]
        if top_p < 1:
            margins.append(np.abs(ahead[1:] - target).min(initial=1.0))
        if len(kept) < len(scores):
            margins.append(scores[kept].min() - np.delete(scores, kept).max())
        self.boundary = min(margins)
        self.kept = p[kept].sum()
        self.raw = np.log(p)
        self.logprob = np.full(len(scores), -np.inf)
        self.logprob[kept] = np.log(p[kept] / self.kept)
        if temperature == 0:
            self.logprob[:] = 0


def distributions(model: np.ndarray, settings: np.ndarray) -> np.ndarray:
    """f64[settings, V+1, V]."""
    return np.stack([[distribution(row, *setting) for row in model] for setting in settings])


def models(quality: str) -> tuple[np.ndarray, np.ndarray]:
    """The target's and the drafter's logits f32[V+1, V].

    useless: unrelated to the target; decent: the target and noise; perfect: the target.
    """
    rng = np.random.default_rng(7)
    target = rng.normal(size=(VOCAB + 1, VOCAB)) * 1.2
    noise = rng.normal(size=target.shape)
    draft = {"useless": 1.5 * noise, "decent": target + 0.7 * noise, "perfect": target}[quality]
    return target.astype(np.float32), draft.astype(np.float32)


def sampled(scores: Array, noise: Array) -> Array:
    """Children are drawn from q without replacement: the highest of logq + noise (Gumbel top-k)."""
    return scores + noise


def grow(shape: Shape, logq: Array, context: Array, noise: Callable[[int], Array],
         order_of: Callable[[Array, Array], Array] = sampled) -> tuple[Array, Array, Array]:
    """The tree of each row.

    Args:
      logq: f32[N, V+1, V] processed.
      context: i32[N] the root's token, V for the prompt.
      noise: of a node's depth -> f32[N, V], that of its children.
      order_of: logq f32[N, V] and noise -> f32[N, V], by which children are ranked.

    Returns:
      tokens i32[N, n], live bool[N, n] (a token of probability 0 is none), logq f32[N, n, V].
    """
    rows, order = jnp.arange(len(context)), {}
    tokens, live, at = [context], [jnp.ones(len(context), bool)], [logq[rows, context]]
    for parent, rank, depth in list(zip(*shape, strict=True))[1:]:
        if rank == 0:
            order[parent] = jnp.argsort(-order_of(at[parent], noise(depth - 1)), axis=1)
        token = order[parent][:, rank].astype(jnp.int32)
        tokens.append(token)
        live.append(live[parent] & (at[parent][rows, token] > -jnp.inf))
        at.append(logq[rows, token])
    return jnp.stack(tokens, 1), jnp.stack(live, 1), jnp.stack(at, 1)


VERIFY = jax.jit(verify.verify, static_argnums=2)


def match(r: Round) -> tuple[Array, Array]:
    """The match rule, on real draws."""
    batch, nodes = r.tokens.shape
    depth = jnp.asarray(r.shape.depth)[None]
    flat = jnp.arange(batch * nodes)
    target = Target(logits=r.logits.reshape(batch * nodes, -1).T, place=flat.reshape(batch, nodes),
                    row=flat // nodes, position=(r.generated[:, None] + depth).reshape(-1),
                    frontier=frontier(r), sampling=options(r))
    verdict, _ = VERIFY(tree_of(r), target, DEPTH)
    return verdict.tokens, verdict.count


def by_walk(rule: rejection.Walk) -> Rule:
    """A rule of `rejection` or `lossy`."""

    jitted = jax.jit(rule, static_argnums=4)

    def of(r: Round) -> tuple[Array, Array]:
        noise = rejection.Noise(r.key, r.generated)
        _, emitted, count = jitted(tree_of(r), r.logp, r.logq, noise, DEPTH)
        return emitted, count

    return of


REJECTION = by_walk(rejection.walk)


def points(r: Round) -> tuple[Array, Array]:
    """Rejection that takes every draft for a point mass, as spec.rule=rejection does."""
    return REJECTION(r._replace(logq=jnp.full_like(r.logq, -jnp.inf)))


def tree_of(r: Round) -> Nodes:
    """The nodes of every row, [N, n]."""
    parent, rank, depth = (jnp.broadcast_to(jnp.asarray(a)[None], r.tokens.shape)
                           for a in (r.shape.parent, r.shape.rank, r.shape.depth))
    return Nodes(tokens=r.tokens, parent=parent, depth=depth, rank=rank, live=r.live)


def frontier(r: Round) -> Frontier:
    rows = jnp.arange(len(r.generated))
    return Frontier(root=r.tokens[:, 0], seq=rows, generated=r.generated, context=rows,
                    live=rows >= 0)


def options(r: Round) -> Sampling:
    temperature, top_k, top_p = r.settings.T
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k.astype(jnp.int32),
                    limit=r.generated + 100, key=r.key, stop=jnp.asarray([-1]))


class World(NamedTuple):
    """What rows stand on; arrays, so that a program is compiled once a rule and shape."""

    model: Array  # f32[V+1, V] the target's logits
    logp: Array  # f32[S, V+1, V] of each setting
    logq: Array  # f32[S, V+1, V]
    settings: Array  # f32[S, 3]


@functools.cache
def world(quality: str) -> World:
    target, draft = models(quality)
    return World(jnp.asarray(target), process(target, SETTINGS), process(draft, SETTINGS),
                 jnp.asarray(SETTINGS))


def process(model: np.ndarray, settings: np.ndarray) -> Array:
    """f32[S, V+1, V] log-probabilities, by the code under test."""
    many = [np.tile(model, (len(settings), 1)).T, *np.repeat(settings, len(model), 0).T]
    many[2] = many[2].astype(np.int32)
    return PROCESS(*many).logp.reshape(len(settings), *model.shape)


PROCESS = jax.jit(sampling.process)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draft(shape: Shape, order_of: Callable[[Array, Array], Array], w: World, setting: Array,
          key: Array, context: Array, generated: Array) -> tuple[Array, ...]:
    """tokens, live, logits, settings, logp, logq of a Round; the noise is what match draws with.

    Args:
      setting: i32[N] index in the world's settings.
      key: u32[N, 2].
      context: i32[N] the last token, V for the prompt.
      generated: i32[N].
    """
    def noise(depth: int) -> Array:
        return gumbel(key, generated + depth, jnp.arange(VOCAB))

    rows = jnp.arange(len(setting))[:, None]
    tokens, live, logq = grow(shape, w.logq[setting], context, noise, order_of)
    return (tokens, live, w.model[tokens], w.settings[setting], w.logp[setting][rows, tokens], logq)


def two_tokens(rule: Rule, shape: Shape, w: World, setting: np.ndarray, key: np.ndarray,
               order_of: Callable[[Array, Array], Array] = sampled, *, by_round: bool = False
               ) -> tuple[np.ndarray, np.ndarray]:
    """i32[N, 2] the first two tokens, of one round or of two, and i32[N] those of the first; with
    `by_round` each round has noise of its own."""
    def step(*at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mine = key + at[1][:, None].astype(np.uint32) * by_round
        tokens, *rest = draft(shape, order_of, w, setting, mine, *at)
        emitted, count = rule(Round(tokens, shape, *rest, jnp.asarray(mine), jnp.asarray(at[1])))
        return np.asarray(emitted), np.asarray(count)

    zero = np.zeros(len(setting), np.int32)
    first, count = step(zero + VOCAB, zero)
    second, _ = step(first[:, 0], zero + 1)
    return np.stack([first[:, 0], np.where(count > 1, first[:, 1], second[:, 0])], 1), count


def keys(count: int, seed: int) -> np.ndarray:
    """u32[count, 2]."""
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)


def wrong_settings(rule: Rule, shape: Shape, w: World, *, rows: int = 4096, seed: int = 0,
                   order_of: Callable[[Array, Array], Array] = sampled,
                   plain: np.ndarray | None = None, by_round: bool = False) -> list[str]:
    """The settings whose first two tokens do not have the plain joint distribution, of f64[S, V+1,
    V] `plain` or of the world's settings."""
    count = len(SETTINGS)
    setting = np.repeat(np.arange(count), rows)
    got, _ = two_tokens(rule, shape, w, setting, keys(len(setting), seed), order_of,
                        by_round=by_round)
    pair = (got @ (VOCAB, 1)).reshape(count, rows)
    wrong = []
    for s, p in enumerate(distributions(np.asarray(w.model), SETTINGS) if plain is None else plain):
        joint = (p[VOCAB][:, None] * p[:VOCAB]).reshape(-1)
        if not fits(np.bincount(pair[s], minlength=VOCAB**2), joint):
            wrong.append("temperature {:g}, top_k {:g}, top_p {:g}".format(*SETTINGS[s]))
    return wrong


def fits(counts: np.ndarray, p: np.ndarray, deviations: float = 5.0) -> bool:
    """Tests Pearson's chi-square within `deviations` (Wilson-Hilferty); joins rare cells."""
    if counts[p == 0].any():
        return False
    expected = p * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    if degrees < 1:
        return True
    spread = 2 / (9 * degrees)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5 < deviations
