"""Truncation thresholds and results of the perturbed argmax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TINY = 1e-36  # of exp(score - highest): below, and E over it, float32 under- and overflows


class Threshold(NamedTuple):
    """The tokens that truncation keeps: score above `score`, or equal to it with id up to `last`.

    Scores are float32 logits times the float32 inverse of the temperature.
    """

    score: jax.Array  # f32[W]
    last: jax.Array  # i32[W]
    kept_mass: jax.Array  # f32[W] the probability that is kept

    def keeps(self, score: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns which tokens i32[1 or W, n] with scores f32[W, n] are kept: bool[W, n]."""
        return is_kept(score, ids, self.score[:, None], self.last[:, None])


def is_kept(score: jax.Array, ids: jax.Array, edge: jax.Array, last: jax.Array) -> jax.Array:
    """Applies the rule of `Threshold`; arguments broadcast."""
    return (score > edge) | ((score == edge) & (ids <= last))


class Drawn(NamedTuple):
    """The K tokens of highest perturbed score at each position, best first.

    Where truncation keeps fewer, the rest are some tokens with a perturbed score of -inf.
    """

    token: jax.Array  # i32[W, K]
    perturbed: jax.Array  # f32[W, K] raw_logprob + G; without G at temperature 0
    logprob: jax.Array  # f32[W, K] truncated, renormalised; a point mass at 0
    raw_logprob: jax.Array  # f32[W, K] at the temperature (1 at temperature 0), no truncation


def first_id(vocab: int, axis: str | None) -> jax.Array:
    """Returns the first token i32[] of this device's part, of `vocab` tokens as all parts are."""
    return jnp.int32(0 if axis is None else vocab * jax.lax.axis_index(axis))


def scale_of(temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factor of the logits f32[W], and where the draw is greedy bool[W]."""
    greedy = temperature == 0
    return 1 / jnp.where(greedy, 1.0, temperature), greedy


def log_rank(exponential: jax.Array, mass: jax.Array, score: jax.Array) -> jax.Array:
    """Returns log(E / exp(score)), where exp(score) underflows too.

    The first candidate never lies that low; the others may, at low temperatures.
    """
    normal = mass > TINY
    return (jnp.log(exponential / jnp.where(normal, mass, jnp.float32(1)))
            - jnp.where(normal, jnp.float32(0), score))


def finish(raced: jax.Array, token: jax.Array, score: jax.Array, total: jax.Array,
           greedy: jax.Array, kept_mass: jax.Array | None) -> Drawn:
    """
    Args:
      raced: f32[W, K] perturbed scores above the highest score, -inf for none.
      score: f32[W, K] scores above the highest one.
      total: f32[W] sum of exp of them over the vocabulary.
      kept_mass: f32[W]; None is 1.
    """
    log_total = jnp.log(total)[:, None]
    raw = score - log_total
    logprob = raw if kept_mass is None else raw - jnp.log(kept_mass)[:, None]
    logprob = jnp.where(jnp.isneginf(raced), -jnp.inf, logprob)
    first = jnp.arange(token.shape[1])[None] == 0
    point = jnp.where(first, jnp.float32(0), -jnp.inf)
    return Drawn(token, raced - log_total, jnp.where(greedy[:, None], point, logprob), raw)
