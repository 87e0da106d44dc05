"""Mesh, logical axis -> mesh axis rules, and the shardings of a described tree.

Rows are split over `data` x `fsdp` together; `tensor` splits heads, hidden units and vocabulary.
The learner also splits the model width over `fsdp`; the rollout keeps it whole, so that no round
waits for a gather of weights.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specrl_jax.config import ConfigError, MeshConfig, check
from specrl_jax.structs import PyTree

ROWS = ("data", "fsdp")  # mesh axes that split rows, in both learner and rollout
LEARNER_RULES: Mapping[str, str] = {
    "vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "fsdp",
}
ROLLOUT_RULES: Mapping[str, str] = {"vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


def devices() -> list[Any]:
    """Returns all devices of all processes.

    Raises:
      ConfigError: JAX finds none, or is set up in a way that no program of this package allows.
    """
    settings: Any = jax.config
    for name, wanted in (("jax_enable_x64", False), ("jax_numpy_dtype_promotion", "standard")):
        check(getattr(settings, name) == wanted, name.upper(), getattr(settings, name),
              f"programs here are written for {wanted}; unset it")
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked, line = settings.jax_platforms, " ".join(str(error).split())
        raise ConfigError(f"JAX_PLATFORMS = {asked!r}: JAX finds no such device ({line[:160]}); "
                          f"unset it, set cpu, or install JAX for the device") from error


def make_mesh(config: MeshConfig) -> Mesh:
    """Returns the mesh ("data", "fsdp", "tensor") over all devices of all processes.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices used.
    """
    found = devices()
    shape = (config.data, config.fsdp, config.tensor)
    size, name = math.prod(shape), "x".join(map(str, shape))
    check(size <= len(found), "mesh", name, f"needs {size} devices, {len(found)} are there")
    check(size == len(found) or jax.process_count() == 1, "mesh", name,
          f"with several processes all {len(found)} devices must be used")
    grid = np.asarray(found[:size]).reshape(shape)
    return Mesh(grid, (*ROWS, "tensor"), axis_types=(AxisType.Auto,) * 3)


def shard_count(mesh: Mesh) -> int:
    """Returns the number of data shards, which split the rows."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding whose leading axis is split over the data shards."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding with a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def on_any_shard(flag: jax.Array) -> jax.Array:
    """Returns bool[], whether `flag` is set on any data shard; outside of shard_map, the flag.

    It must select every branch and end every loop that holds collectives over `tensor`: data shards
    that take different branches would wait for each other for ever.
    """
    manual = tuple(axis for axis in ROWS if axis in jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.pmax(flag.astype(jnp.int32), manual) > 0 if manual else flag


def unsplit(x: jax.Array) -> jax.Array:
    """Returns `x`, whole on every device of its data shard; outside of shard_map, `x`.

    Computations from it alone need no collectives, so data shards may take different branches.
    """
    if not jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def spec_of(shape: tuple[int, ...], axes: tuple[str | None, ...], rules: Mapping[str, str],
            mesh: Mesh) -> PartitionSpec:
    """Returns the partition of one array; an axis that the mesh does not divide is replicated."""
    names = [rules.get(axis) if axis else None for axis in axes]
    return PartitionSpec(*(name if name and size % mesh.shape[name] == 0 else None
                           for size, name in zip(shape, names, strict=True)))


def shardings(described: PyTree, rules: Mapping[str, str], mesh: Mesh,
              is_leaf: Callable[[PyTree], bool]) -> PyTree:
    """Returns the NamedSharding of each leaf of a tree of descriptions with `shape`, `axes`."""
    return jax.tree.map(lambda p: NamedSharding(mesh, spec_of(p.shape, p.axes, rules, mesh)),
                        described, is_leaf=is_leaf)


def replicated_axes(described: PyTree, rules: Mapping[str, str], mesh: Mesh,
                    is_leaf: Callable[[PyTree], bool]) -> set[str]:
    """Returns the logical axes that a mesh dimension should split but does not divide."""
    found = set()
    for param in jax.tree.leaves(described, is_leaf=is_leaf):
        for size, axis in zip(param.shape, param.axes, strict=True):
            name = rules.get(axis) if axis else None
            if name and size % mesh.shape[name]:
                found.add(f"{axis} = {size} over {name} = {mesh.shape[name]}")
    return found


def put(place: PyTree, value: PyTree) -> PyTree:
    """Makes global arrays of host values that every process holds whole.

    Args:
      place: NamedSharding of all of `value`, or a tree of them that is a prefix of `value`.
      value: host arrays; one call for many takes half the time of many calls.
    """
    arrays = jax.tree.map(np.asarray, value)
    if jax.process_count() == 1:
        return jax.device_put(arrays, place)
    return jax.tree.map(lambda to, part: jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, to, lambda index: a[index]), part),
        place, arrays)


def arguments(place: PyTree, value: PyTree) -> PyTree:
    """Prepares small host arrays as arguments of a compiled program with shardings `place`.

    With one process the program places them itself, which saves the cost of `put`: as much as a
    hundred operations of a launch.
    """
    return value if jax.process_count() == 1 else put(place, value)
