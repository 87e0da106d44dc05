#!/usr/bin/env bash
# Everything that needs a GPU. Each command takes less than 8 minutes:
#
#   experiments/gpu_suite.sh all         what is below "all", the most important first
#   experiments/gpu_suite.sh contract    the kernels' contract tests on the device itself
#   experiments/gpu_suite.sh steps       RL steps with random weights, without and with drafts
#   experiments/gpu_suite.sh rollouts    rollouts with random weights at Qwen2.5's shapes
#   experiments/gpu_suite.sh kernels     kernels at real shapes, against bandwidth and alternatives
#
# "all": rollouts of 16 rows by the default implementation, with command buffers and without; steps;
# then all rollouts, and kernels. They write experiments/results/*.json after every case, and
# continue where they stopped.
# A checkout with jax, flax, optax, orbax, numpy and pytest is enough, without network; what needs
# more is skipped by name. More arguments go to the script: --out=FILE, --seconds=N, --tiny.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

limit=475 python=${PYTHON:-python3} status=0

# Runs a benchmark in what is left of the time; the next one runs even if it fails.
part() {
  local left=$((limit - SECONDS))
  ((left > 30)) || { echo "out of time before $*: run it again"; return; }
  timeout "$left" "$python" "$here/bench.py" "$@" --seconds=$((left > 90 ? left - 60 : left / 3)) \
    || status=1
}

everything() {
  local first=(rollouts --default "--models=Qwen2.5-1.5B,Qwen2.5-7B" --rows=16)
  part "${first[@]}" "$@"
  XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer=" part "${first[@]}" "$@"
  part steps "$@"
  part rollouts "$@"
  part kernels "$@"
  exit $status
}

case "${1:-}" in
  all) script=() ;;
  contract | steps | rollouts | kernels) script=("$here/bench.py" "$1") ;;
  *) sed -n '2,14p' "$0" >&2; exit 2 ;;
esac
shift
# An update's sums in one order; memory as it is needed, so that a benchmark's peak means something.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true"
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
((${#script[@]})) || everything "$@"
exec timeout "$limit" "$python" "${script[@]}" "$@"
