# What .ci/run and .ci/full share; sourced by both from the root of the checkout.
# Nothing is left outside a temporary directory but what pip and pytest leave in the checkout.
set -euo pipefail

work=$(mktemp -d)
stage="start"
passed=0 skipped=0
job=""
finish() {
  local code=$?
  [ -z "$job" ] || kill -- "-$job" 2>/dev/null || true
  [ "$code" = 0 ] || echo "FAILED in stage: $stage (exit status $code)" >&2
  rm -rf "$work"
}
trap finish EXIT
pip_cache=$(python3 -m pip cache dir 2>/dev/null || true)
[ -z "$pip_cache" ] || export PIP_CACHE_DIR=$pip_cache  # wheels may be reused, nothing else
export XDG_CACHE_HOME=$work/cache TFDS_DATA_DIR=$work/tensorflow_datasets
export IPYTHONDIR=$work/ipython JUPYTER_RUNTIME_DIR=$work/jupyter
export JAX_COMPILATION_CACHE_DIR=$work/xla  # what one test compiled, others need not

# Tests trace more than they compile, which is one thread's work, so two processes run them.
pair=(python -m pytest -n 2 --dist loadfile --durations=20 --cpu-limit=4)
cpu="not gpu and not tpu"  # the markers of tests that this machine can run
# Tests compile quicker and less well than users do; with these flags they compile as users do.
as_users=(env XLA_FLAGS=--xla_force_host_platform_device_count=8)

# run NAME COMMAND...: runs the command, prints its seconds and keeps its output in $work/log.
run() {
  stage=$1
  shift
  local began=$SECONDS
  echo "== $stage"
  "$@" 2>&1 | tee "$work/log"
  echo "== $stage: $((SECONDS - began)) s"
}

# tests NAME COMMAND...: runs pytest and adds its counts to the totals. Fails without a summary.
tests() {
  run "$@"
  local summary
  summary=$(grep -E '[0-9]+ passed.* in [0-9.]+s' "$work/log" | tail -n 1)
  passed=$((passed + $(grep -oE '[0-9]+ passed' <<<"$summary" | cut -d' ' -f1)))
  skipped=$((skipped + $(grep -oE '[0-9]+ skipped' <<<"$summary" | cut -d' ' -f1 || true) + 0))
}

# background COMMAND...: starts the command; its output goes to $work/background.log.
background() {
  set -m  # else the job has no process group
  "$@" >"$work/background.log" 2>&1 &
  job=$!
  set +m
}

# join NAME: waits for the background command, shows its output and fails if it failed.
join() {
  local code=0
  wait "$job" || code=$?
  job=""
  run "$1" bash -c "cat '$work/background.log'; exit $code"
}

# find_python VERSION: prints the path of an interpreter that starts, or nothing.
find_python() {
  local candidate
  for candidate in "$(command -v "python$1" || true)" \
      "$( (pyenv root) 2>/dev/null || true)"/versions/"$1"*/bin/python"$1"; do
    if [ -x "$candidate" ] && "$candidate" -c 'import venv' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

# enter NAME: puts a virtual environment first on PATH.
enter() {
  export VIRTUAL_ENV=$work/$1 PATH=$work/$1/bin:$PATH
  hash -r
}

# readme_command WORD: prints the README's command with that word.
readme_command() {
  grep -ohE "pip install [^\`]*$1[^\`]*" README.md | head -n 1 \
    || { echo "README.md has no command with $1" >&2; exit 1; }
}

python=$(find_python 3.11)
python=${python:-$(command -v python3)}
"$python" -m venv "$work/main"
