"""Checks of the perturbed argmax's arguments: of shapes and dtypes always, of values on demand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_static(logits: Any, temperature: Any, key: Any, position: Any, threshold: Any, *,
                 count: int) -> None:
    """Checks shapes and dtypes. Raises ValueError with the name of the argument."""
    if len(logits.shape) != 2:
        raise ValueError(f"logits = {logits.shape}, expected [W, V]")
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"logits is {logits.dtype}, expected float32 or bfloat16")
    w, vocab = logits.shape
    wanted = {"temperature": (temperature, (w,), jnp.float32), "key": (key, (w, 2), jnp.uint32),
              "position": (position, (w,), jnp.int32)}
    if threshold is not None:
        wanted |= {"threshold.score": (threshold.score, (w,), jnp.float32),
                   "threshold.last": (threshold.last, (w,), jnp.int32),
                   "threshold.kept_mass": (threshold.kept_mass, (w,), jnp.float32)}
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} = {array.shape}, expected {shape}: logits are [W, V] = "
                             f"{logits.shape}")
        if array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype}, expected {jnp.dtype(dtype)}: cast it")
    if not 1 <= count <= vocab:
        raise ValueError(f"count = {count}, expected 1 to {vocab}: there are no more tokens")


def check_values(logits: Any, temperature: Any, key: Any, position: Any, threshold: Any) -> None:
    """Checks values, for tests and debugging: it waits for them.

    Raises:
      ValueError: the first value out of its range, or a call from inside of jit.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(
            (logits, temperature, position, threshold))):
        raise ValueError("checked = True inside of jit: values are known outside of it only")
    highest = np.asarray(logits, np.float32).max(1)
    _all("temperature", temperature, lambda x: (x >= 0) & np.isfinite(x), "0 or above")
    _all("position", position, lambda x: x >= 0, "0 or above")
    _all("logits", highest, np.isfinite, "a finite highest logit at each position")
    if threshold is not None:
        _all("threshold.kept_mass", threshold.kept_mass, lambda x: (x > 0) & (x <= 1.001),
             "above 0, at most 1")
        inverse = 1 / np.where(np.asarray(temperature) == 0, 1, temperature).astype(np.float32)
        _all("threshold.score", np.asarray(threshold.score) - highest * inverse, lambda x: x <= 0,
             "at most the highest score, lest nothing is kept")


def _all(name: str, values: Any, good: Any, wanted: str) -> None:
    values = np.asarray(values)
    wrong = np.flatnonzero(~good(values))
    if wrong.size:
        raise ValueError(f"{name}[{wrong[0]}] = {values[wrong[0]]}, expected {wanted}")
