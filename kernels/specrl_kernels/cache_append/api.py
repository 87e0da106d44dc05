"""The signatures of the appends, and the choice of an implementation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from specrl_kernels import dispatch
from specrl_kernels.cache_append import xla
from specrl_kernels.dispatch import Interpret, anywhere, kernel

CACHE = {"pallas": kernel("cache_append", "pallas", "tpu"), "xla": anywhere(xla.cache_append_xla)}
ROW = {"pallas": kernel("cache_append", "pallas", "tpu", "row_append_pallas"),
       "xla": anywhere(xla.row_append_xla)}
"""In the order in which they are tried."""


def cache_append(
    caches: Sequence[jax.Array],  # C of f[B, L, G, E, S]
    new: jax.Array,  # f[n, L, C, G, E, B]
    start: jax.Array,  # i32[B]; start[b] + count[b] <= S
    count: jax.Array,  # i32[B], at most n
    *,
    implementation: str | None = None,
    interpret: Interpret = False,
    platform: str | None = None,
    config: Mapping[str, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the caches with new[:count[b], ..., b] in row b's slots from start[b] on.

    Slots below start[b] keep their bits; those at and beyond start[b] + count[b] hold garbage, as
    they did before. Mesh axes that the compiler may split arrays over divide the heads G; where
    they cannot, every device writes all of them.

    Args:
      implementation: "pallas" or "xla"; None takes the first that can.
      interpret: as in `tree_attention`.
      platform: "cpu", "gpu" or "tpu": if not that of the mesh in scope, see
        `dispatch.traced_for`.
      config: settings of the named implementation; None takes its heuristic.

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation.
      Unsupported: a named implementation cannot do this.
      ExceptionGroup: none can; it holds each one's reason.
    """
    n, shape = new.shape[0], caches[0].shape
    wanted = (n, shape[1], len(caches), *shape[2:4], shape[0])
    if new.shape != wanted or any(cache.shape != shape for cache in caches):
        raise ValueError(f"new is {new.shape}, caches are {[c.shape for c in caches]}: new must be "
                         f"[n, L, C, G, E, B] for C caches [B, L, G, E, S]")
    target = dispatch.target(implementation, platform, interpret, config)
    return _everywhere(dispatch.choose(CACHE, implementation), P(None, None, "heads"),
                       P(None, None, None, "heads"), shape[2])(
        tuple(caches), new.astype(caches[0].dtype), start, count, target=target)


def row_append(
    array: jax.Array,  # f[B, S, F]
    new: jax.Array,  # f[B, n, F]
    start: jax.Array,  # i32[B]; start[b] + count[b] <= S
    count: jax.Array,  # i32[B], at most n
    *,
    implementation: str | None = None,
    interpret: Interpret = False,
    platform: str | None = None,
) -> jax.Array:
    """Returns the array with new[b, :count[b]] in row b's entries from start[b] on.

    For the rest see `cache_append`.
    """
    wanted = (array.shape[0], new.shape[1], array.shape[2])
    if new.shape != wanted:
        raise ValueError(f"new is {new.shape}, the array is {array.shape}: new must be {wanted}")
    target = dispatch.target(implementation, platform, interpret)
    return _everywhere(dispatch.choose(ROW, implementation), P(), P())(
        array, new.astype(array.dtype), start, count, target=target)


def _everywhere(function: Callable[..., Any], old: P, new: P, heads: int = 1
                ) -> Callable[..., Any]:
    """Wraps a kernel, which the compiler cannot split, so that each device runs it on its part.

    Specs name what may be split "heads"; that is done where the devices divide `heads`.
    """
    names, devices = dispatch.automatic_axes()
    if not names:
        return function
    by = names if heads % devices == 0 else None
    old, new = (P(*(by if axis == "heads" else axis for axis in spec)) for spec in (old, new))

    def call(*args: Any, **options: Any) -> Any:
        return jax.shard_map(lambda *parts: function(*parts, **options),
                             in_specs=(old, new, P(), P()), out_specs=old,
                             axis_names=set(names), check_vma=False)(*args)

    return call
