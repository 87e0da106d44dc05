"""Speed of rollouts: tokens/s, rounds against the machine's bound, parts of a round, and peers.

    python experiments/bench_rollout.py
    python experiments/bench_rollout.py --peer=llamacpp --workload=uniform,heavy
    python experiments/bench_rollout.py --peer=llamacpp,transformers --batch=1 --drafter=off

Every row has its own prompt and slot; temperature 1; no token ends a row. `uniform` rows say
--new_tokens each; `heavy` ones minimum(2 * new_tokens, 16 + default_rng(0).exponential(60)), at 16
and 64 rows. tokens/s count wanted tokens over all seconds, prefill included; rounds are timed
without. The bound of a round is the larger of weights and cache over bandwidth and FLOPs over peak,
for the nodes that were verified; bandwidth and peak are probed right before and after each timed
run. All contenders of a case are timed alternately in this process; ratios are pair by pair.
"""

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import config_flags
import jax
import run_flags
from absl import flags
from bench import hardware, peers, results, show
from bench.case import Setting, run_case
from bench.workload import HEAVY_ROWS, WORKLOADS, Workload, make_workload

from specrl_jax import sharding
from specrl_jax.config import DRAFTERS, Config, ConfigError
from specrl_jax.io.compilation import CompilationCounter, use_persistent_cache
from specrl_jax.io.memory import peak_rss

BATCH = flags.DEFINE_list("batch", ["1", "8", "16", "64"], "rows of each case; heavy runs those of "
                          "16 and 64 that are among them, or all if --workload=heavy alone")
DRAFTER = flags.DEFINE_list("drafter", ["off", "history"], "our own contenders")
WORKLOAD = flags.DEFINE_list("workload", ["uniform"], f"some of {', '.join(WORKLOADS)}")
NEW_TOKENS = flags.DEFINE_integer("new_tokens", 128, "tokens a row; heavy: half the longest row",
                                  lower_bound=8)
REPEATS = flags.DEFINE_integer("repeats", 3, "timed runs of each contender", lower_bound=1)
PEER = flags.DEFINE_list("peer", [], f"some of {', '.join(peers.MODULES)}")
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/bench_rollout.json "
                          "in experiments)")
NEAR_REPEATS = 2  # of each probe next to a timed run
RESUME = flags.DEFINE_boolean("resume", False, "keep the cases that --out already holds")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, "bench_rollout.json")
    check_flags()
    config, actor = run_flags.resolve(config)
    if actor.run is not None and PEER.value:
        raise ConfigError(f"--run={actor.run}: a peer reads the model at --config.model.path; drop "
                          "--peer, or export the run and name the export there")
    use_persistent_cache()
    packages = [name for peer in PEER.value for name in peers.PACKAGES[peer]]
    result = results.blank(config, tuple(packages))
    if RESUME.value:
        result["cases"] = results.earlier(out)
    console = show.console()
    tokenizer = actor.source.tokenizer
    params = actor.params(sharding.make_mesh(config.mesh))
    with tempfile.TemporaryDirectory(prefix="specrl_bench_") as directory:
        setting = Setting(
            config=config, source=actor.source, params=params, drafters=DRAFTER.value,
            peers=PEER.value, repeats=REPEATS.value, directory=Path(directory),
            counter=CompilationCounter(), say=_say,
            probe=functools.partial(hardware.Probes().measure, NEAR_REPEATS))
        for name, rows in cases():
            run_one(setting, make_workload(name, rows, NEW_TOKENS.value, tokenizer), result, out)
            console.print(*show.case_tables(result["cases"][key(name, rows)]))
    print(f"wrote {out}")
    return 0


def check_flags() -> None:
    """
    Raises:
      ConfigError: a flag holds a value that cannot work.
    """
    for flag, known in ((WORKLOAD, WORKLOADS), (DRAFTER, DRAFTERS)):
        for value in flag.value:
            if value not in known:
                raise ConfigError(f"--{flag.name}={value}: choose some of {', '.join(known)}")
    if not DRAFTER.value:
        raise ConfigError("--drafter=: name at least one contender of our own")
    for value in BATCH.value:
        if not (value.isdigit() and int(value)):
            raise ConfigError(f"--batch={value}: give positive numbers, such as 1,8,16,64")
    for name in PEER.value:
        peers.check_installed(name)


def cases() -> list[tuple[str, int]]:
    """(workload, rows) in the order in which they run."""
    rows = [int(value) for value in BATCH.value]
    alone = WORKLOAD.value == ["heavy"] and BATCH.present
    return [(name, count) for name in WORKLOAD.value for count in rows
            if name == "uniform" or alone or count in HEAVY_ROWS]


def key(workload: str, rows: int) -> str:
    return f"{workload}-{rows}"


def run_one(setting: Setting, workload: Workload, result: dict[str, Any], out: Path) -> None:
    """Runs a case unless the result holds it, and writes the result."""
    name = key(workload.name, workload.rows)
    if name in result["cases"]:
        _say(f"{name}: kept from an earlier run")
        return
    found = run_case(setting, workload)
    found["command"] = results.command(sys.argv)
    found["peak_rss_bytes"] = peak_rss()
    result["cases"][name] = found
    results.write(out, result)
    jax.clear_caches()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    config_flags.run(main)
