"""Devices to compile for that are not there: TPU topologies by name, GPUs by their description."""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrl_jax.config import ConfigError, check
from specrl_jax.config.load import preset_targets
from specrl_jax.runtime.hardware import CHIPS, Chip, chip_of

from . import machine_code

DESCRIPTIONS = Path(__file__).parent / "gpus"
TPUS = tuple(name for name, chip in CHIPS.items() if chip.platform == "tpu")
GPUS = tuple(name for name, chip in CHIPS.items() if chip.platform == "gpu")
CHIPS_OF_HOST = 4  # of a TPU
PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # v5e, v6e
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # v4, v5p; larger ones have multiples of 4
EXAMPLES = "v5e:2x2, v6e:4x4, v5p:4x4x4, h100 or h100:8"
LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"  # the environment variable that libtpu reads
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# The first keeps JAX from looking for devices, the others libtpu from looking for a TPU host.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Some devices of one kind, by name: a TPU topology, or GPUs of one host."""

    name: str  # "v6e:4x4", "h100:8"
    chip: Chip
    topology: str  # "4x4" chips of a TPU; "1x1x8" of GPUs

    @property
    def platform(self) -> str:
        return self.chip.platform

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(int(size) for size in self.topology.split("x"))


def parse(name: str) -> Target:
    """Returns the target of a name.

    Raises:
      ConfigError: no such target.
    """
    chip, _, rest = name.partition(":")
    known = chip in CHIPS
    if known and CHIPS[chip].platform == "tpu" and re.fullmatch(r"\d+(x\d+)+", rest):
        return Target(name, CHIPS[chip], rest)
    if known and CHIPS[chip].platform == "gpu" and re.fullmatch(r"|[1-9]\d*", rest):
        return Target(name, CHIPS[chip], f"1x1x{rest or 1}")
    raise ConfigError(f"target = {name!r}: give a TPU of {', '.join(TPUS)} with its topology or a "
                      f"GPU of {', '.join(GPUS)} with their number, such as {EXAMPLES}")


def hosts(target: Target) -> int:
    """Returns the hosts of a target, with 4 chips of a TPU each; topologies of one chip and GPUs
    have one. Raises ConfigError if GKE has no such topology.

    cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus; hosts of 8 chips are left out.
    """
    if target.platform == "gpu":
        return 1
    sizes = [int(size) for size in target.topology.split("x")]
    flat = target.chip.name in ("v5e", "v6e")
    known = target.topology in (PLANES if flat else CUBES) or not flat and (
        len(sizes) == 3 and sizes == sorted(sizes) and not any(size % 4 for size in sizes))
    check(known, "target", target.name, "GKE has no such topology; give one of " + (
        ", ".join(PLANES) if flat else f"{', '.join(CUBES)}, or multiples of 4 in rising order"))
    return max(target.size // CHIPS_OF_HOST, 1)


def check_packages(target: Target) -> None:
    """Raises ConfigError if the target's compiler is not installed here."""
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"target = {target.name!r}: the compiler is in libtpu, which is not "
                          'installed; run pip install "jax[tpu]" in an environment of its own')
    if target.platform == "gpu" and not any(map(importlib.util.find_spec, PLUGINS)):
        raise ConfigError(f"target = {target.name!r}: the compiler is in JAX's CUDA plugin, which "
                          'is not installed; run pip install "jax[cuda13]" (or cuda12) in an '
                          "environment of its own")


def devices(target: Target) -> list[Any]:
    """Returns the target's devices, for a mesh. The process needs `ENVIRONMENT` before JAX starts.

    Raises:
      ConfigError: the compiler knows no such topology.
    """
    from jax.experimental import topologies

    try:
        if target.platform == "tpu":
            topology = topologies.get_topology_desc(target.name, "tpu")
        else:
            text = (DESCRIPTIONS / f"{target.chip.name}.txtpb").read_text(encoding="utf-8")
            topology = topologies.get_topology_desc(target.chip.name, "cuda", target_config=text,
                                                    topology=target.topology)
    except RuntimeError as error:  # jax.errors.JaxRuntimeError, too
        raise ConfigError(f"target = {target.name!r}: {str(error).splitlines()[0]}; give a "
                          f"topology of whole hosts, such as {EXAMPLES}") from error
    return list(topology.devices)


def limits(target: Target, device: Any) -> Chip:
    """Returns the figures of one of the target's devices."""
    return chip_of(device) or target.chip


def versions() -> dict[str, str]:
    """Returns the versions of what compiles."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def environment(dump: str = "") -> dict[str, str]:
    """Returns the environment of a process that compiles; `dump`: a directory for machine code."""
    given = os.environ.get(LIBTPU_FLAGS, "")
    flags = {LIBTPU_FLAGS: f"{given} {machine_code.flags(dump)}"} if dump else {}
    return {**os.environ, **ENVIRONMENT, **flags}


def with_target(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with the --target behind --config=NAME:, if the preset has it.

    A target that --config names already stays.
    """
    config, target = (_given(argv, name) for name in ("config", "target"))
    if config is None or target is None:
        return list(argv)
    (where, preset), wanted = config, target[1].replace(":", "_")
    name, _, chosen = preset.partition(":")
    known, others = preset_targets(name), [one for one in chosen.split(",") if one]
    if wanted not in known or not {one.replace(":", "_") for one in others}.isdisjoint(known):
        return list(argv)
    return [*argv[:where.start], f"--config={name}:{','.join([*others, wanted])}",
            *argv[where.stop:]]


def _given(argv: Sequence[str], name: str) -> tuple[slice, str] | None:
    """Returns where a flag stands last, in absl's forms --name=value and --name value."""
    best = None
    for i, argument in enumerate(argv):
        if argument in (f"-{name}", f"--{name}"):
            best = slice(i, i + 2), "".join(argv[i + 1:i + 2])
        elif match := re.fullmatch(rf"--?{name}=(.*)", argument):
            best = slice(i, i + 1), match[1]
    return best
