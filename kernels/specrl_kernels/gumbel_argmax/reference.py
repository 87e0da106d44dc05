"""The oracle: numpy in float64, one position at a time, every token sorted; shares no code."""

from typing import Any

import jax
import numpy as np


def gumbel_argmax_reference(logits: jax.Array, temperature: jax.Array, key: jax.Array,
                            position: jax.Array, threshold: Any, *, count: int, axis: str | None
                            ) -> Any:
    """See `api.gumbel_argmax`. It runs on the host, whatever the device."""
    from specrl_kernels.dispatch import Unsupported
    from specrl_kernels.gumbel_argmax.drawn import Drawn

    if axis is not None:
        raise Unsupported(f"axis = {axis!r}: it needs the whole vocabulary")
    width = logits.shape[0]
    if threshold is None:
        nothing = np.full(width, -np.inf, np.float32)
        threshold = (nothing, np.zeros(width, np.int32), np.ones(width, np.float32))
    shape = jax.ShapeDtypeStruct((width, count), np.float32)
    shapes = (jax.ShapeDtypeStruct((width, count), np.int32), shape, shape, shape)
    return Drawn(*jax.pure_callback(
        lambda *args: _draw(*(np.asarray(x) for x in args), count=count), shapes,
        logits, temperature, key, position, *threshold))


def _draw(logits: np.ndarray, temperature: np.ndarray, key: np.ndarray, position: np.ndarray,
          edge: np.ndarray, last: np.ndarray, kept_mass: np.ndarray, count: int
          ) -> tuple[np.ndarray, ...]:
    """(token, perturbed, logprob, raw_logprob) of `count` tokens at each position."""
    draws = []
    for w in range(len(logits)):
        row, ids = logits[w].astype(np.float32), np.arange(logits.shape[1])
        inverse = np.float32(1) / (temperature[w] or np.float32(1))
        raw = row.astype(np.float64) / (float(temperature[w]) or 1.0)
        raw = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        perturbed = raw.copy()
        if temperature[w] > 0:
            perturbed += _gumbel(key[w], int(position[w]), ids)
        score = row * inverse
        kept = (score > edge[w]) | ((score == edge[w]) & (ids <= last[w]))
        perturbed[~kept] = -np.inf
        best = np.lexsort((ids, -perturbed))[:count]
        logprob = np.where(kept[best], raw[best] - np.log(float(kept_mass[w])), -np.inf)
        if temperature[w] == 0:
            logprob = np.where(np.arange(count) == 0, 0.0, -np.inf)
        draws.append((best, perturbed[best], logprob, raw[best]))
    return tuple(np.stack(x).astype(dtype) for x, dtype in zip(
        zip(*draws, strict=True), (np.int32, np.float32, np.float32, np.float32), strict=True))


def _gumbel(key: np.ndarray, position: int, ids: np.ndarray) -> np.ndarray:
    """f64[V] by the definition in noise.py."""
    first = _mix(int(key[0]) ^ _mix(position * 0x9E3779B1 + 0x2545F491))
    second = _mix(int(key[1]) + first)
    word = _mix(_mix(ids.astype(object) * 0x9E3779B1 + second) ^ first)
    u = np.minimum((word.astype(np.float64) + 0.5) / 2.0**32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def _mix(h: Any) -> Any:
    """MurmurHash3's finaliser of integers, or of an array of them."""
    h = h % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16
