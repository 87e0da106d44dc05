"""Times a verification of several tokens against one token, and bare matrix products.

    python experiments/bench.py forward
    python experiments/bench.py forward --packed=1,4,8,16 --context=512

Writes results/bench_forward.json. One row with a chain of drafts: the forward is what a round runs
(embedding, layers with tree attention, head), the products are those of its weights alone, in their
fastest orientation. `excess` is the forward's ratio to one token over that of the products.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from specrl_kernels.narrow_matmul import narrow_matmul

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import Actor
from specrl_jax.model.transformer import Packing, Params
from specrl_jax.structs import Array, Cache

from . import results
from .roofline import MATRICES
from .timing import alternate, ratio, seconds_of, spread

NEEDS_MODEL = True
FLAGS = flags.FLAGS
MOST = 64  # nodes of a tree
ORIENTATIONS: dict[str, Callable[[Array, Array], Array]] = {  # w [O, K], x [K, W]
    "w @ x": lambda w, x: w @ x,
    "x.T @ w.T": lambda w, x: x.T @ w.T,
    "narrow_matmul": narrow_matmul,
}


def define_flags() -> None:
    """Defines the flags of `bench.py forward`."""
    results.define_flags(repeats=30)
    flags.DEFINE_list("packed", ["1", "8", "16"], "tokens of a forward; ratios are to the first")
    flags.DEFINE_integer("context", 256, "cached tokens", lower_bound=1)


def main(config: Config, actor: Actor) -> int:
    """Runs the benchmark; returns the exit status."""
    out = results.destination(FLAGS.out, "bench_forward.json")
    packed = results.positive("packed", FLAGS.packed)
    if max(packed) > MOST:
        raise ConfigError(f"--packed={max(packed)}: give numbers from 1 to {MOST}")
    params = actor.params(sharding.make_mesh(config.mesh))
    found = measure(actor.source.arch, params, packed, FLAGS.context, FLAGS.repeats)
    results.write(out, results.blank(config) | {"context": FLAGS.context} | found)
    for count, one in found["cases"].items():
        print(f"{count} tokens: forward {one['forward']['median'] * 1e3:.1f} ms, products "
              f"{one['products']['median'] * 1e3:.1f} ms as {one['orientation']}; over "
              f"{packed[0]}: {one['forward_ratio']['median']:.2f} and "
              f"{one['products_ratio']['median']:.2f}, excess {one['excess']['median']:.2f}")
    print(f"wrote {out}")
    return 0


def measure(arch: Architecture, params: Params, packed: Sequence[int], context: int, repeats: int
            ) -> dict[str, Any]:
    """Returns seconds and ratios of each of `packed`; ratios are to the first.

    Args:
      params: float32, in the layout of Actor.params.
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
    """Returns a call that computes the logits of a chain of n nodes after `context` tokens."""
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
    """Returns a call that computes all products of the layers and the head, of n columns."""
    weights = weights_of(arch, params)
    rng = np.random.default_rng(0)
    columns = {k: jnp.asarray(rng.standard_normal((k, n), np.float32))
               for k in {w.shape[1] for w in weights}}

    @jax.jit
    def run(weights: list[Array], columns: dict[int, Array]) -> list[Array]:
        return [ORIENTATIONS[orientation](w, columns[w.shape[1]]) for w in weights]

    return lambda: run(weights, columns)


def weights_of(arch: Architecture, params: Params) -> list[Array]:
    """Returns the matrices f[O, K] of all products of a forward."""
    head = params["embed"] if arch.tied else params["head"]
    return [w.reshape(-1, _inner(name, w)) for layer in params["layers"]
            for name, w in layer.items() if name in MATRICES] + [head]


def _inner(name: str, weight: Array) -> int:
    """Returns the length of the sums; `o` sums over heads and their dimensions."""
    return int(np.prod(weight.shape[1:])) if name == "o" else weight.shape[-1]
