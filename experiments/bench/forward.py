"""A forward of packed tokens of one row, and the products of its weights alone."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from specrl_kernels.narrow_matmul import narrow_matmul

from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Packing, Params
from specrl_jax.structs import Array, Cache

from .timing import alternate, ratio, seconds_of, spread
from .work import MATRICES

MOST = 64  # nodes of a tree
ORIENTATIONS: dict[str, Callable[[Array, Array], Array]] = {  # w [O, K], x [K, W]
    "w @ x": lambda w, x: w @ x,
    "x.T @ w.T": lambda w, x: x.T @ w.T,
    "narrow_matmul": narrow_matmul,
}


def measure(arch: Architecture, params: Params, packed: Sequence[int], context: int, repeats: int
            ) -> dict[str, Any]:
    """Seconds and ratios of each of `packed`, the first of which is what others are compared with.

    Args:
      params: float32, as Actor.params lays them out.
    """
    tasks: dict[tuple[int, str], Callable[[], Any]] = {}
    for n in packed:
        tasks[n, "forward"] = forward(arch, params, n, context)
        tasks |= {(n, name): products(arch, params, n, name) for name in ORIENTATIONS}
    timed = {key: functools.partial(seconds_of, task, jax.block_until_ready)
             for key, task in tasks.items()}
    alternate(timed, 2)  # compiles
    found = alternate(timed, repeats)
    best = {n: min(ORIENTATIONS, key=lambda name, n=n: statistics.median(found[n, name]))
            for n in packed}
    one, cases = packed[0], {}
    for n in packed:
        whole, part = found[n, "forward"], found[n, best[n]]
        whole_one, part_one = found[one, "forward"], found[one, best[one]]
        over = [(a / b) / (c / d) for a, b, c, d in
                zip(whole, whole_one, part, part_one, strict=True)]
        cases[str(n)] = {
            "forward": spread(whole), "products": spread(part), "orientation": best[n],
            "forward_ratio": ratio(whole, whole_one), "products_ratio": ratio(part, part_one),
            "excess": spread(over),
            "orientations": {name: spread(found[n, name]) for name in ORIENTATIONS}}
    return {"cases": cases}


def forward(arch: Architecture, params: Params, n: int, context: int) -> Callable[[], Any]:
    """Logits of a chain of n nodes behind `context` cached tokens."""
    length = -(-(context + n) // MOST) * MOST
    k = jnp.ones((1, arch.num_kv_heads, arch.head_dim, length), jnp.float32)
    cache = Cache(kv=[([k], [k.swapaxes(2, 3)]) for _ in range(arch.num_layers)],
                  length=jnp.full(1, context, jnp.int32))
    node = jnp.arange(n, dtype=jnp.int32)
    packing = Packing(row=node * 0, node=node, place=node[None],
                      parent=jnp.maximum(node - 1, 0)[None])

    @jax.jit
    def run(params: Params, cache: Cache, packing: Packing) -> Array:
        hidden, fresh, _ = transformer.tree_forward(
            arch, params, cache, packing.node, context + packing.node, packing)
        return transformer.logits(arch, params, hidden, decode=True), fresh

    return lambda: run(params, cache, packing)


def products(arch: Architecture, params: Params, n: int, orientation: str) -> Callable[[], Any]:
    """All layers' products and the head's, each of n columns."""
    weights = weights_of(arch, params)
    rng = np.random.default_rng(0)
    columns = {k: jnp.asarray(rng.standard_normal((k, n), np.float32))
               for k in {w.shape[1] for w in weights}}

    @jax.jit
    def run(weights: list[Array], columns: dict[int, Array]) -> list[Array]:
        return [ORIENTATIONS[orientation](w, columns[w.shape[1]]) for w in weights]

    return lambda: run(weights, columns)


def weights_of(arch: Architecture, params: Params) -> list[Array]:
    """f[O, K] of every product of a forward."""
    head = params["embed"] if arch.tied else params["head"]
    return [w.reshape(-1, _inner(name, w)) for layer in params["layers"]
            for name, w in layer.items() if name in MATRICES] + [head]


def _inner(name: str, weight: Array) -> int:
    """Over how many numbers a row's sum goes: `o` meets heads and their dimensions."""
    return int(np.prod(weight.shape[1:])) if name == "o" else weight.shape[-1]
