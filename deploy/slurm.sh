#!/usr/bin/env bash
# Runs on the GPUs of a Slurm job, one process a GPU. Not yet run on a cluster.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 deploy/slurm.sh --config=...
#
# experiments/deploy.py prints the whole command. Submit it in a checkout that all nodes mount, with
# a virtual environment in .venv, or PYTHON=... . A process uses the GPU with its number on the node
# (SLURM_LOCALID), so there are as many tasks as GPUs, and no --gpus-per-task, which would hide the
# others. Slurm sends SIGTERM five minutes before the time limit: the run ends its step, saves and
# ends with status 130, and goes back into the queue.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
set -euo pipefail

status=0
# Processes end one after the other when they have saved, so the first to end must not kill the rest.
srun --kill-on-bad-exit=0 "${PYTHON:-.venv/bin/python}" experiments/train.py --distributed "$@" \
  || status=$?
if ((status == 130)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
