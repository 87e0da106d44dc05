#!/usr/bin/env bash
# Everything that needs a GPU, in three commands and one that tunes, less than 8 minutes each:
#
#   experiments/gpu_suite.sh contract    the kernels' contract tests on the device itself
#   experiments/gpu_suite.sh kernels     kernels at real shapes, against bandwidth and alternatives
#   experiments/gpu_suite.sh rollouts    rollouts with random weights at Qwen2.5's shapes
#   experiments/gpu_suite.sh tune        block sizes, into kernels/specrl_kernels/tuned/
#
# The first three write experiments/results/*.json after every case, and continue where they stopped.
# A checkout with jax, flax, optax, orbax, numpy and pytest is enough, without network; what needs
# more is skipped by name. More arguments go to the script: --out=FILE, --seconds=N, --tiny.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

case "${1:-}" in
  contract) script=("$here/gpu_contract.py") ;;
  kernels) script=("$here/bench.py" kernels) ;;
  rollouts) script=("$here/gpu_rollouts.py") ;;
  tune) script=("$here/tune_kernels.py") ;;
  *) sed -n '2,11p' "$0" >&2; exit 2 ;;
esac
shift
# An update's sums in one order; memory as it is needed, so that a benchmark's peak means something.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true"
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
exec timeout 475 "${PYTHON:-python3}" "${script[@]}" "$@"
