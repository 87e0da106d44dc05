"""The actor's draw at real shapes: noise made for each node or kept for siblings; truncation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.gumbel_argmax import xla

from specrl_jax.prng import exponential
from specrl_jax.structs import Array
from specrl_jax.verify import sampling

from .timing import alternate, ratio, seconds_of, spread

TRUNCATIONS = {"top_p": (0, 0.95), "top_k": (50, 1.0), "top_k and top_p": (50, 0.95)}
FLAT, PEAKED = 2.5, 6.0  # deviations of normal logits: top-p 0.95 keeps thousands, or a few


class Shape(NamedTuple):
    """Packed nodes of a verification, and how many (row, position) pairs they lie at."""

    name: str
    nodes: int
    pairs: int


SHAPES = (Shape("1 row, plain", 1, 1), Shape("1 row, 4x2x8", 8, 5), Shape("1 row, 4x4x12", 16, 5),
          Shape("4 rows, 2x1x3", 16, 12), Shape("4 rows, 4x2x8", 32, 20),
          Shape("16 rows, plain", 16, 16), Shape("16 rows, 2x1x3", 64, 48))


def measure(shape: Shape, vocab: int, repeats: int) -> dict[str, Any]:
    """Seconds of the draw: as it is, with stored noise, without noise, and truncated."""
    rng = np.random.default_rng(0)
    n = shape.nodes
    flat = jnp.asarray(rng.standard_normal((vocab, n), np.float32) * FLAT)
    pair = np.arange(n) % shape.pairs
    key, position = np.zeros((n, 2), np.uint32) + pair[:, None].astype(np.uint32), pair
    fixed = (jnp.asarray(key), jnp.asarray(position, jnp.int32))
    ones = jnp.ones(n)

    def at(top_k: int, top_p: float) -> tuple[Array, ...]:
        return ones, jnp.full(n, top_k, jnp.int32), ones * top_p, *fixed

    draws: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
        "draw": (sampling.draw, (flat, *at(0, 1.0))),
        "noise kept for siblings": (functools.partial(with_noise, pair), (flat, *at(0, 1.0))),
        "no noise": (functools.partial(with_noise, None), (flat, *at(0, 1.0)))}
    draws |= {f"{name}{how}": (sampling.draw, (logits, *at(*values)))
              for name, values in TRUNCATIONS.items()
              for how, logits in (("", flat), (", peaked", flat * (PEAKED / FLAT)))}
    tasks = {}
    for name, (run, args) in draws.items():
        compiled = jax.jit(run).lower(*args).compile()
        tasks[name] = functools.partial(
            seconds_of, functools.partial(compiled, *args), jax.block_until_ready)
        token = compiled(*args).token
        if name == "draw":
            want = token
        elif name == "noise kept for siblings" and not (token == want).all():
            raise AssertionError("kept noise drew other tokens")
    alternate(tasks, 2)
    found = alternate(tasks, repeats)
    return {"shape": shape._asdict(), "seconds": {name: spread(s) for name, s in found.items()},
            "over draw": {name: ratio(s, found["draw"]) for name, s in found.items()
                          if name != "draw"}}


def with_noise(pair: np.ndarray | None, logits: Array, temperature: Array, top_k: Array,
               top_p: Array, key: Array, position: Array) -> sampling.Draw:
    """`sampling.draw` by XLA, with noise made once for each pair and looked up, or with none.

    Args:
      pair: i32[W] of each position, 0 .. pairs; None is no noise.
    """
    vocab = logits.shape[0]
    if pair is None:
        noise, pair = jnp.ones((1, vocab)), np.zeros(logits.shape[1], np.int32)
    else:
        first = np.unique(pair, return_index=True)[1]
        noise = exponential(key[first], position[first], jnp.arange(vocab))

    def kept(key: Array, position: Array, ids: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(noise, ids[0], ids.shape[0], 1)[pair]

    with mock.patch.object(xla, "exponential", kept):
        return sampling.draw(logits, temperature, top_k, top_p, key, position)
