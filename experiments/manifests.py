"""What starts a run on a cluster, as text: a JobSet manifest, an sbatch command.

The mesh of a run, divided by a target's devices, is the number of TPU slices or nodes with GPUs.
"""

import json
import re
import shlex
import string
from collections.abc import Sequence
from pathlib import Path

from compile import targets
from compile.targets import Target

from specrl_jax.config import Config, MeshConfig, check

TEMPLATE = Path(__file__).resolve().parents[1] / "deploy" / "jobset.yaml"
MOUNT = "/mnt/shared"  # of the claim in every pod
ACCELERATORS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice",
                "v6e": "tpu-v6e-slice"}  # GKE's names
ALONE = ("--coordinator=localhost:8482", "--processes=1", "--process=0")
LONGEST = 40  # letters of a JobSet's name; a pod's has 63 at most


def jobset(config: Config, target: Target, arguments: Sequence[str], image: str, claim: str
           ) -> str:
    """Returns the manifest of a run on TPUs.

    Args:
      arguments: of train.py.
      image: of the container.
      claim: the PersistentVolumeClaim that is mounted at MOUNT.

    Raises:
      ConfigError: the mesh does not fit the slices, GKE has no such topology, or the run's name
        makes no name of a JobSet.
    """
    hosts = targets.hosts(target)
    slices, *_ = [copies(config.mesh, mesh, target) for mesh in config.mesh.choices]
    check(slices == 1 or hosts > 1, "target", target.name,
          f"GKE joins no slices of one host, and the mesh needs {slices}; give a larger topology")
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    check(re.fullmatch(rf"[a-z][a-z0-9-]{{,{LONGEST - 1}}}", name) is not None, "name", config.name,
          f"a JobSet's begins with a letter and has at most {LONGEST} letters and digits")
    alone = ALONE if hosts == 1 else ()  # GKE tells only several hosts of each other
    command = ["python", "experiments/train.py", "--distributed", *alone, *arguments]
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=name, slices=slices, hosts=hosts, chips=target.size // hosts,
        accelerator=ACCELERATORS[target.chip.name], topology=target.topology,
        image=json.dumps(image), command=json.dumps(command), claim=json.dumps(claim), mount=MOUNT)


def sbatch(config: Config, target: Target, arguments: Sequence[str]) -> str:
    """Returns the command that starts a run on GPUs by Slurm, on as many nodes as one of its
    meshes has. Raises ConfigError if a mesh is not one of whole nodes."""
    nodes = sorted({copies(config.mesh, mesh, target) for mesh in config.mesh.choices})
    return shlex.join([
        "sbatch", f"--job-name={config.name}", f"--nodes={','.join(map(str, nodes))}",
        f"--ntasks-per-node={target.size}", f"--gpus-per-node={target.size}", "deploy/slurm.sh",
        *arguments])


def copies(wanted: MeshConfig, mesh: MeshConfig, target: Target) -> int:
    """Returns how many of the target a run's mesh, or one of its fallbacks, needs. Raises
    ConfigError unless it fills them, and splits only `data` over TPU slices."""
    field, count = "mesh" if mesh == wanted else "mesh.fallback", mesh.size // target.size
    check(mesh.size % target.size == 0, field, mesh.name, f"has {mesh.size} devices, and "
          f"{target.name} has {target.size}: give a mesh of {target.size}, or of a multiple, as "
          "experiments/plan.py prints it")
    check(target.platform == "gpu" or mesh.data % count == 0, field, mesh.name,
          f"has {count} slices of {target.name}, which only `data` may span: give a mesh.data "
          f"that is a multiple of {count}")
    return count
