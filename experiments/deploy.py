"""Prints what starts a run on a cluster: a JobSet manifest for TPUs, an sbatch command for GPUs.

    python experiments/deploy.py --config=qwen2_5_7b --target=v6e:4x4 --image=IMAGE \\
        --workdir=/mnt/shared/runs/qwen2_5_7b >run.yaml
    python experiments/deploy.py --config=qwen2_5_7b --target=h100:8

A mesh of several targets asks for as many TPU slices, or nodes with GPUs. What it prints is made
from files in deploy/. None of it has run on a cluster yet: docs/guides/pods.md.
"""

import sys
from pathlib import Path

import config_flags
from absl import flags
from compile import targets
from manifests import MOUNT, jobset, sbatch

from specrl_jax.config import Config, check

TARGET = flags.DEFINE_string("target", None, "a TPU slice, such as v6e:4x4, or the GPUs of one "
                             "node, such as h100:8")
IMAGE = flags.DEFINE_string("image", None, "TPUs: the container image, from deploy/tpu.Dockerfile")
CLAIM = flags.DEFINE_string("claim", "shared", "TPUs: the PersistentVolumeClaim that is mounted "
                            f"at {MOUNT}")


def main(config: Config, workdir: Path) -> int:
    target = targets.parse(TARGET.value or "")
    arguments = (f"--config={config_flags.chosen_preset(sys.argv)}", *overrides(),
                 f"--workdir={workdir}")
    if target.platform == "gpu":
        check(IMAGE.value is None, "--image", IMAGE.value, "Slurm runs the checkout; drop it")
        print(sbatch(config, target, arguments))
    else:
        check(bool(IMAGE.value), "--image", IMAGE.value, "name the image of deploy/tpu.Dockerfile "
              "in a registry that the cluster reads")
        check(workdir.is_relative_to(MOUNT), "--workdir", str(workdir),
              f"a pod's own files are lost with it; choose a directory in {MOUNT}")
        print(jobset(config, target, arguments, IMAGE.value or "", CLAIM.value), end="")
    return 0


def overrides() -> list[str]:
    """Returns the fields that the command line sets, as flags."""
    flag = flags.FLAGS["config"]
    return [f"--config.{name}={value}" for name, value in flag.override_values.items()]


if __name__ == "__main__":
    with config_flags.one_line_errors():
        sys.argv = targets.with_target(sys.argv)
    config_flags.run(main)
