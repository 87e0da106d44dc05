"""Mesh, logical axis -> mesh axis rules, and the shardings of a described tree.

Rows are split over `data` x `fsdp` together; `tensor` splits heads, hidden units and vocabulary.
The learner also splits the model width over `fsdp`; the rollout keeps it whole, so that no round
waits for a gather of weights.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from specrl_kernels.dispatch import traced_for as traced_device

from specrl_jax.config import ConfigError, MeshConfig, check
from specrl_jax.structs import PyTree

T = TypeVar("T")
ROWS = ("data", "fsdp")  # mesh axes that split rows, in both learner and rollout
TENSOR = "tensor"  # the mesh axis that splits a model
HOST = "pinned_host"  # JAX's name of the memory of hosts
FSDP = "fsdp"  # the mesh axis that splits the learner's parameters
Rules: TypeAlias = Mapping[str, str | tuple[str, ...]]
ROLLOUT_RULES: Rules = {"vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
LEARNER_RULES: Rules = ROLLOUT_RULES | {"embed": FSDP}
MOMENT_RULES: Rules = ROLLOUT_RULES | {"embed": ROWS}  # of the optimiser: ZeRO over all data shards


def all_devices() -> list[Any]:
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


def choose_mesh(config: MeshConfig) -> MeshConfig:
    """Returns the first of a mesh and its fallbacks with as many devices as are there; the mesh,
    if it has no fallbacks. Raises ConfigError if none has."""
    if not config.fallback:
        return config
    count = len(all_devices())
    known = ", ".join(f"{mesh.name} has {mesh.size}" for mesh in config.choices)
    fitting = [mesh for mesh in config.choices if mesh.size == count]
    check(bool(fitting), "mesh.fallback", config.fallback, f"{count} devices are there, but "
          f"{known}; start as many, or add a mesh of {count} to mesh.fallback")
    return fitting[0]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh ("data", "fsdp", "tensor") over all devices of all processes.

    Args:
      devices: in place of JAX's, such as those of a topology that is compiled for.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices used.
    """
    there = devices is None
    devices = all_devices() if devices is None else devices
    shape, size, name = (config.data, config.fsdp, config.tensor), config.size, config.name
    check(size <= len(devices), "mesh", name, f"needs {size} devices, {len(devices)} are there")
    check(size == len(devices) or there and jax.process_count() == 1, "mesh", name,
          f"all {len(devices)} devices must be used; "
          "set mesh.data x mesh.fsdp x mesh.tensor to their number")
    grid = np.asarray(devices[:size]).reshape(shape)
    return Mesh(grid, (*ROWS, "tensor"), axis_types=(AxisType.Auto,) * 3)


def traced_for(mesh: Mesh, function: Callable[..., T]) -> Callable[..., T]:
    """Returns `function`, which when traced chooses kernels for the devices of `mesh`.

    Without it the default device decides. `jax.shard_map` needs none: it brings its mesh.
    """
    @functools.wraps(function)
    def call(*args: PyTree) -> T:
        with use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return call


def platform(mesh: Mesh) -> str:
    """Returns the platform of a mesh's devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def shard_count(mesh: Mesh) -> int:
    """Returns the number of data shards, which split the rows."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding whose leading axis is split over the data shards."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding with a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def straight_line() -> bool:
    """Returns whether what is being traced must not loop or branch by values on the device.

    A GPU asks the host for the predicate of each such loop and the index of each branch, which
    takes as long as a small operation. So accelerators compute the few values that a round may
    need, of static sizes, and mask them; a CPU computes what it needs.
    """
    return traced_device().platform != "cpu"


def either(condition: jax.Array, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Returns then() if `condition` bool[] holds, else otherwise(); both run in `straight_line`."""
    if not straight_line():
        return jax.lax.cond(condition, then, otherwise)
    return jax.tree.map(functools.partial(jax.lax.select, condition), then(), otherwise())


def on_any_shard(flag: jax.Array) -> jax.Array:
    """Returns bool[], whether `flag` is set on any data shard; outside of shard_map, the flag.

    It must select every branch and end every loop that holds collectives over `tensor`: data shards
    that take different branches would wait for each other for ever.
    """
    return largest(flag.astype(jnp.int32)) > 0


def largest(value: jax.Array) -> jax.Array:
    """Returns the largest `value` of all data shards; outside of shard_map, the value.

    It may end loops that hold collectives over `tensor`, see `on_any_shard`.
    """
    manual = tuple(axis for axis in ROWS if axis in jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.pmax(value, manual) if manual else value


def split_rows(x: jax.Array, axis: int) -> jax.Array:
    """Returns `x` with one axis split over the data shards; without a mesh in scope, `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    left = tuple(name for name in ROWS if name in mesh.axis_names and name not in mesh.manual_axes)
    if not left or x.shape[axis] % _devices(mesh, left):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(None,) * axis, left))


def in_tensor_parts(function: Callable[..., T], size: int, in_specs: PyTree, out_specs: PyTree
                    ) -> Callable[..., T]:
    """Returns `function` of global arrays, run by each device of `tensor` on its own parts.

    A kernel, which the partitioner cannot divide, runs, and nothing is gathered that the function
    does not gather itself. It must run alike on all data shards, see `on_any_shard`.

    Args:
      function: called as function(axis, *args): axis is "tensor" where that splits what the specs
        name, else None.
      size: of the dimensions to split; where it cannot be divided, every device holds all.
      in_specs, out_specs: of `jax.shard_map`, for `args` and the result, with TENSOR or nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or TENSOR in mesh.manual_axes:
        return functools.partial(function, None)
    split = mesh.shape[TENSOR] > 1 and size % mesh.shape[TENSOR] == 0
    if not split:
        in_specs, out_specs = jax.tree.map(lambda spec: PartitionSpec(), (in_specs, out_specs))
    return jax.shard_map(functools.partial(function, TENSOR if split else None),
                         in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR},
                         check_vma=False)


def unsplit(x: jax.Array) -> jax.Array:
    """Returns `x`, whole on every device of its data shard; outside of shard_map, `x`.

    Computations from it alone need no collectives, so data shards may take different branches.
    """
    if not jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def spec_of(shape: tuple[int, ...], axes: tuple[str | None, ...], rules: Rules,
            mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the partition of one array.

    Where a rule names several mesh axes that do not divide a dimension together, the last one may;
    a dimension that the mesh does not divide is replicated.
    """
    def split(size: int, axis: str | None) -> str | tuple[str, ...] | None:
        name = rules.get(axis) if axis else None
        choices = () if name is None else (name,) if isinstance(name, str) else (name, name[-1])
        return next((c for c in choices if size % _devices(mesh, c) == 0), None)

    return PartitionSpec(*(split(*at) for at in zip(shape, axes, strict=True)))


def _devices(mesh: Mesh | AbstractMesh, name: str | tuple[str, ...]) -> int:
    names = (name,) if isinstance(name, str) else name
    return math.prod(mesh.shape[axis] for axis in names)


def _is_described(node: PyTree) -> bool:
    return hasattr(node, "axes")


def constrain(tree: PyTree, described: PyTree, rules: Rules) -> PyTree:
    """Returns `tree`, split over the mesh in scope by rules; without one, as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return tree
    return jax.tree.map(lambda p, a: jax.lax.with_sharding_constraint(
        a, spec_of(p.shape, p.axes, rules, mesh)), described, tree, is_leaf=_is_described)


def shardings(described: PyTree, rules: Rules, mesh: Mesh) -> PyTree:
    """Returns the NamedSharding of each leaf of a tree of descriptions with `shape`, `axes`."""
    return jax.tree.map(lambda p: NamedSharding(mesh, spec_of(p.shape, p.axes, rules, mesh)),
                        described, is_leaf=_is_described)


def replicated_axes(described: PyTree, rules: Rules, mesh: Mesh) -> set[str]:
    """Returns the logical axes that a mesh dimension should split but does not divide."""
    undivided = set()
    for param in jax.tree.leaves(described, is_leaf=_is_described):
        for size, axis in zip(param.shape, param.axes, strict=True):
            name = rules.get(axis) if axis else None
            if name and size % _devices(mesh, name):
                undivided.add(f"{axis} = {size} over {name} = {_devices(mesh, name)}")
    return undivided


def put(to: PyTree, value: PyTree) -> PyTree:
    """Makes global arrays of host values that every process holds whole.

    Args:
      to: a NamedSharding for all of `value`, or a tree of NamedShardings that is a prefix of it.
      value: host arrays; one call for many takes half the time of many calls.
    """
    arrays = jax.tree.map(np.asarray, value)
    if jax.process_count() == 1:
        return jax.device_put(arrays, to)
    return jax.tree.map(lambda sharding, part: jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), part),
        to, arrays)


def arguments(to: PyTree, value: PyTree) -> PyTree:
    """Prepares small host arrays as arguments of a compiled program with shardings `to`.

    With one process the program transfers them itself, which saves the cost of `put`: as much as
    a hundred operations of a launch.
    """
    return value if jax.process_count() == 1 else put(to, value)
