#!/usr/bin/env bash
# Asks for TPU slices, and starts one run on all of their hosts. Not yet run on hardware.
#
#   export TPU=my-slice ZONE=us-east5-a
#   deploy/tpu_pod.sh request --accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --spot
#   deploy/tpu_pod.sh run --config=qwen2_5_7b:v6e_4x4 --workdir=/mnt/shared/runs/qwen2_5_7b
#   deploy/tpu_pod.sh delete
#
# request creates a queued resource and waits until it is there. run starts the command on every
# host by ssh with --distributed, by which they find each other; the same command resumes it. A
# spot slice that was taken away is SUSPENDED: delete it, request it and run again. SLICES=2 asks
# for two slices. The mesh must cover all chips, and the workdir must be one directory that all
# hosts mount. Before the first run, on every host: a checkout in $CHECKOUT, with the package in
# .venv:
#   python3.11 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e ".[tpu]"
set -euo pipefail

: "${TPU:?name of the queued resource}" "${ZONE:?its zone}"
checkout=${CHECKOUT:-specrl_jax} slices=${SLICES:-1}
queue=(gcloud compute tpus queued-resources)

request() {
  local nodes=(--node-id="$TPU") state=""
  ((slices == 1)) || nodes=(--node-count="$slices" --node-prefix="$TPU")
  "${queue[@]}" create "$TPU" --zone="$ZONE" "${nodes[@]}" "$@"
  until [ "$state" = ACTIVE ]; do
    case "$state" in
      FAILED | SUSPEND*) echo "error: $TPU is $state: delete it and request it again" >&2; exit 2 ;;
    esac
    sleep 30
    state=$("${queue[@]}" describe "$TPU" --zone="$ZONE" --format="value(state.state)")
  done
}

run() {
  local command
  command="cd $(printf '%q' "$checkout") &&"
  command+=" .venv/bin/python experiments/train.py --distributed $(printf '%q ' "$@")"
  exec "${queue[@]}" ssh "$TPU" --zone="$ZONE" --node=all --worker=all --command="$command"
}

case "${1:-}" in
  request | run) "$@" ;;
  delete) exec "${queue[@]}" delete "$TPU" --zone="$ZONE" --force --quiet ;;
  *) sed -n '2,17p' "$0" >&2; exit 2 ;;
esac
