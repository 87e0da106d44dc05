"""Mesh, logical axis -> mesh axis rules, and the shardings of a described tree.

Rows are split over `data` x `fsdp` together; `tensor` splits heads, hidden units and vocabulary.
The learner also splits the model width over `fsdp`; the rollout keeps it whole, so that no round
waits for a gather of weights.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specrl_jax.config import MeshConfig, check

ROWS = ("data", "fsdp")  # mesh axes that split rows, in both learner and rollout
LEARNER_RULES: Mapping[str, str] = {
    "vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "fsdp",
}
ROLLOUT_RULES: Mapping[str, str] = {"vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh ("data", "fsdp", "tensor") over all devices of all processes.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices used.
    """
    devices = jax.devices()
    shape = (config.data, config.fsdp, config.tensor)
    wanted, name = math.prod(shape), "x".join(map(str, shape))
    check(wanted <= len(devices), "mesh", name,
          f"needs {wanted} devices, {len(devices)} are there")
    check(wanted == len(devices) or jax.process_count() == 1, "mesh", name,
          f"with several processes all {len(devices)} devices must be used")
    grid = np.asarray(devices[:wanted]).reshape(shape)
    return Mesh(grid, (*ROWS, "tensor"), axis_types=(AxisType.Auto,) * 3)


def shard_count(mesh: Mesh) -> int:
    """Data shards: the groups that rows are dealt to."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows(mesh: Mesh) -> NamedSharding:
    """Leading axis split over the data shards."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def on_any_shard(flag: jax.Array) -> jax.Array:
    """bool[] whether a flag is up on any data shard; outside of shard_map, the flag itself.

    Where a branch or a loop holds collectives over `tensor`, what selects it must be this: data
    shards that go different ways would wait for each other for ever.
    """
    manual = tuple(axis for axis in ROWS if axis in jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.pmax(flag.astype(jnp.int32), manual) > 0 if manual else flag


def unsplit(x: jax.Array) -> jax.Array:
    """`x` as it is, whole on every device of a data shard; outside of shard_map, `x`.

    What is computed from it alone then needs no collectives, and data shards may go their own ways.
    """
    if not jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def spec_of(shape: tuple[int, ...], axes: tuple[str | None, ...], rules: Mapping[str, str],
            mesh: Mesh) -> PartitionSpec:
    """The partition of one array; an axis that its mesh dimension does not divide is replicated."""
    names = [rules.get(axis) if axis else None for axis in axes]
    return PartitionSpec(*(name if name and size % mesh.shape[name] == 0 else None
                           for size, name in zip(shape, names, strict=True)))


def shardings(described: Any, rules: Mapping[str, str], mesh: Mesh, is_leaf: Any) -> Any:
    """NamedSharding of each leaf of a tree of descriptions with `shape` and `axes`."""
    return jax.tree.map(lambda p: NamedSharding(mesh, spec_of(p.shape, p.axes, rules, mesh)),
                        described, is_leaf=is_leaf)


def replicated_axes(described: Any, rules: Mapping[str, str], mesh: Mesh, is_leaf: Any) -> set[str]:
    """Logical axes that a mesh dimension should split but does not divide: to be reported."""
    found = set()
    for param in jax.tree.leaves(described, is_leaf=is_leaf):
        for size, axis in zip(param.shape, param.axes, strict=True):
            name = rules.get(axis) if axis else None
            if name and size % mesh.shape[name]:
                found.add(f"{axis} = {size} over {name} = {mesh.shape[name]}")
    return found


def put(place: Any, value: Any) -> Any:
    """Global arrays from host values that every process holds whole.

    Args:
      place: NamedSharding of all of `value`, or a tree of them that `value` begins like.
      value: host arrays; in one call, since JAX takes half as long for them as one by one.
    """
    value = jax.tree.map(np.asarray, value)
    if jax.process_count() == 1:
        return jax.device_put(value, place)
    return jax.tree.map(lambda to, part: jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, to, lambda index: a[index]), part),
        place, value)


def arguments(place: Any, value: Any) -> Any:
    """Small host arrays as arguments of a compiled program that wants them at `place`, as in `put`.

    It places arrays of one process itself, and much faster than `put`, which takes as long as a
    hundred operations of a launch.
    """
    return value if jax.process_count() == 1 else put(place, value)
