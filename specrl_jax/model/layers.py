"""The layers of a model: a list that programs unroll, or stacked arrays that they scan.

`params["layers"]` has one of two forms. A list holds each layer's parameters; a program then holds
each layer's operations. A dict of arrays holds all layers', stacked along a leading axis; a program
then holds one layer's operations in a `jax.lax.scan`, and compiles in a fraction of the time.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.config import check
from specrl_jax.runtime import checksum
from specrl_jax.structs import Array, Params, PyTree

Layers: TypeAlias = list[Params] | Params
Index: TypeAlias = int | Array
Out = TypeVar("Out")


def is_stacked(params: Params) -> bool:
    """Returns whether the layers of `params`, arrays or descriptions, are stacked."""
    return isinstance(params["layers"], dict)


def are_scanned(platform: str) -> bool:
    """Returns whether programs for a platform, "cpu", "gpu" or "tpu", scan stacked layers.

    Unrolled, 28 layers take a TPU's compiler minutes for each program. A CPU and a GPU run the
    unrolled ones with fewer operations, and a scan on a GPU copies each layer's weights.
    """
    return platform == "tpu"


def arrange(params: Params, stacked: bool) -> Params:
    """Returns `params` with stacked layers or with a list of them; no copy if they are so already.

    Leaves are arrays of the host or of a device; the latter may be traced.
    """
    if is_stacked(params) == stacked:
        return params
    layers = params["layers"]
    if stacked:
        return params | {"layers": jax.tree.map(_stack, *layers)}
    return params | {"layers": [layer_of(layers, i) for i in range(count(layers))]}


def _stack(*arrays: Any) -> Any:
    return (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)


def identity(params: Params) -> str:
    """Returns dtype and checksum of weights as one string, the same for both forms."""
    return f"{jax.tree.leaves(params)[0].dtype} {int(_checksum(params)):08x}"


def check_identity(field: str, path: str, saved: str | None, current: str | None) -> None:
    """Raises ConfigError unless frozen weights are the ones that a checkpoint was trained with.

    Args:
      field: config field that names the weights at `path`.
      saved: their `identity` in the checkpoint.
      current: the identity of the weights in use; None if nothing reads them.
    """
    check(saved == current, field, path, "its weights are not the ones that the run "
          "was trained with; restore its files, or start in another workdir")


@jax.jit
def _checksum(params: Params) -> Array:
    return checksum.sums(arrange(params, stacked=False))[0]


def count(layers: Layers) -> int:
    """Returns the number of layers."""
    return len(layers) if isinstance(layers, list) else len(jax.tree.leaves(layers)[0])


def layer_of(layers: Layers, index: int) -> Params:
    """Returns the parameters of one layer; a negative index counts from the last."""
    return layers[index] if isinstance(layers, list) else jax.tree.map(lambda a: a[index], layers)


def run(layers: Layers, step: Callable[[Params, Index, Array], tuple[Array, Out]], x: Array,
        taps: tuple[int, ...] = ()) -> tuple[Array, list[Out] | PyTree, Array | None]:
    """Runs x, out = step(layer, index, x) for all layers; stacked layers are scanned.

    Args:
      taps: layers whose x is returned, 0-based, ascending.

    Returns:
      x after the last layer; a list of the layers' `out`, or one of stacked arrays where layers are
      stacked; and x after each of `taps`, joined along the first axis, None if there are none.
    """
    if not isinstance(layers, list):
        return _scan(layers, step, x, taps)
    outs, tapped = [], []
    for index, layer in enumerate(layers):
        x, out = step(layer, index, x)
        outs.append(out)
        if index in taps:
            tapped.append(x)
    return x, outs, jnp.concatenate(tapped) if taps else None


def _scan(layers: Params, step: Callable[[Params, Index, Array], tuple[Array, Out]], x: Array,
          taps: tuple[int, ...]) -> tuple[Array, PyTree, Array | None]:
    """Scans stacked layers. Each writes x to its tap's slot, or to a spare one after the last.

    The index is carried: as an array that is scanned, each layer would slice it.
    """
    tap_count = len(taps)

    def body(carry: tuple[Array, Array, Array | None], layer: Params
             ) -> tuple[tuple[Array, Array, Array | None], Out]:
        index, x, tapped = carry
        x, out = step(layer, index, x)
        if tapped is not None:
            slot = jnp.int32(tap_count)
            for i, tap in enumerate(taps):
                slot = jnp.where(index == tap, i, slot)
            tapped = jax.lax.dynamic_update_index_in_dim(tapped, x, slot, 0)
        return (index + 1, x, tapped), out

    tapped = jnp.zeros((tap_count + 1, *x.shape), x.dtype) if taps else None
    (_, x, tapped), outs = jax.lax.scan(body, (jnp.int32(0), x, tapped), layers)
    return x, outs, None if tapped is None else tapped[:tap_count].reshape(-1, *x.shape[1:])
