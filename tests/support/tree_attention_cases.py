"""Inputs of tree attention, and what it must return: float64 numpy, query by query."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tolerances import TOLERANCE
from specrl_kernels.tree_attention import Prefix, tree_attention

INTERPRET = jax.default_backend() == "cpu"
"""On its own device a kernel runs as it is, on a CPU by interpretation."""

KERNELS = {"cpu": ("pallas", "pallas_triton"), "gpu": ("triton", "pallas_triton"),
           "tpu": ("pallas",)}[jax.default_backend()]
"""The kernels that the contract is run against here."""

# A GPU has its own compiler's level; a CPU's compiles twice as fast without optimisation.
COMPILER = {"xla_backend_optimization_level": 0} if INTERPRET else None

Case = dict[str, Any]


def make(lengths: Sequence[int] = (5,), nodes: int = 4, groups: int = 2, repeats: int = 2,
         size: int = 16, cache: int = 32, slots: int | None = None, packed: int | None = None,
         parent: Any = None, segments: Sequence[int] | None = None,
         prefix: Sequence[int] | None = None, members: Any = None, dtype: str = "float32",
         seed: int = 0) -> Case:
    """Random inputs; all nodes are packed, in any order, unless `packed` asks for fewer.

    Args:
      segments: sizes of the cache's arrays instead of one of `cache` slots.
      prefix: length of each shared prefix, which has 40 slots; `members` are its rows.
    """
    rng = np.random.default_rng(seed)
    b = len(lengths)
    normal = functools.partial(_normal, rng, dtype)
    if parent is None:
        parent = [[0] + [int(rng.integers(0, i)) for i in range(1, nodes)] for _ in range(b)]
    order = rng.permutation(b * nodes)[: packed or b * nodes]
    count, sizes = slots or b, segments or (cache,)
    shared = None if prefix is None else Prefix(
        normal(len(prefix), groups, size, 40), normal(len(prefix), groups, 40, size),
        jnp.asarray(prefix, jnp.int32), jnp.asarray(members, jnp.int32))
    return {
        "q": normal(len(order), groups * repeats, size),
        "row": jnp.asarray(order // nodes, jnp.int32),
        "node": jnp.asarray(order % nodes, jnp.int32),
        "tree_k": normal(b, nodes, groups, size), "tree_v": normal(b, nodes, groups, size),
        "parent": jnp.asarray(parent, jnp.int32),
        "cache_k": [normal(count, groups, size, s) for s in sizes],
        "cache_v": [normal(count, groups, s, size) for s in sizes],
        "length": jnp.asarray(lengths, jnp.int32),
        "slot": None if slots is None else jnp.asarray(rng.permutation(slots)[:b], jnp.int32),
        "prefix": shared}


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def call(case: Case, implementation: str | None, window: int | None = None,
         config: dict[str, int] | None = None) -> np.ndarray:
    """f32[W, H, E], Pallas kernels by interpretation on a CPU."""
    options = None if config is None else tuple(config.items())
    out = _jitted(case, window=window, implementation=implementation, config=options)
    assert out.dtype == case["q"].dtype
    return np.asarray(out, np.float32)


@functools.partial(jax.jit, static_argnames=("window", "implementation", "config"),
                   compiler_options=COMPILER)
def _jitted(case: Case, window: int | None, implementation: str | None, config: Any) -> jax.Array:
    return tree_attention(
        **case, scale=case["q"].shape[2] ** -0.5, window=window, implementation=implementation,
        interpret=INTERPRET and implementation is not None,
        config=None if config is None else dict(config))


def assert_near(actual: np.ndarray, wanted: np.ndarray, case: Case) -> None:
    """Equal up to the rounding of the case's dtype."""
    atol = TOLERANCE["tree_attention", str(case["q"].dtype)]
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)


def oracle(case: Case, window: int | None = None) -> np.ndarray:
    """f64[W, H, E]: every query's keys and values are collected one by one."""
    c = jax.tree.map(lambda x: np.asarray(x, np.float64 if x.ndim > 2 else None), case)
    c |= {"cache_k": np.concatenate(c["cache_k"], 3), "cache_v": np.concatenate(c["cache_v"], 2)}
    heads, groups = c["q"].shape[1], c["tree_k"].shape[2]
    out = np.zeros_like(c["q"])
    for w, (row, node) in enumerate(zip(c["row"], c["node"], strict=True)):
        for g in range(groups):
            keys, values = _seen(c, row, node, g, window)
            for h in range(g * heads // groups, (g + 1) * heads // groups):
                score = keys @ c["q"][w, h] * c["q"].shape[2] ** -0.5
                weight = np.exp(score - score.max())
                out[w, h] = weight @ values / weight.sum()
    return out


def _seen(c: Case, b: int, node: int, g: int, window: int | None
          ) -> tuple[np.ndarray, np.ndarray]:
    """f64[keys, E] twice: what one query sees, oldest first."""
    path = [node]
    while path[-1] != 0:
        path.append(c["parent"][b, path[-1]])
    path.reverse()
    slot, length = b if c["slot"] is None else c["slot"][b], c["length"][b]
    keys = [c["cache_k"][slot, g].T[:length], c["tree_k"][b, path, g]]
    values = [c["cache_v"][slot, g, :length], c["tree_v"][b, path, g]]
    for i in range(0 if c["prefix"] is None else len(c["prefix"].length)):
        if b in c["prefix"].rows[i]:
            keys.insert(0, c["prefix"].k[i, g].T[: c["prefix"].length[i]])
            values.insert(0, c["prefix"].v[i, g, : c["prefix"].length[i]])
    first = 0 if window is None else -window
    return np.concatenate(keys)[first:], np.concatenate(values)[first:]


def need_devices(count: int) -> None:
    """Skips where there are fewer accelerators; a CPU has as many devices as conftest.py makes."""
    if not INTERPRET and len(jax.devices()) < count:
        pytest.skip(f"shards over {count} devices; this machine has {len(jax.devices())}")
