"""The accept length from which drafted rounds pay on a TPU, by the compiler's clock.

    pip install "jax[tpu]==0.10.2"      # the compiler; in an environment of its own
    python experiments/bench.py when_it_pays --config=qwen2_5_7b:v6e_4x4 --target=v6e:4x4

Compiles a plain and a drafted round at three numbers of rows of a data shard and one context; what
others cost follows by arithmetic. No chip is needed, no weights are read and nothing is measured.
The result file keeps its cases of other models and targets.
"""

import dataclasses
import json
from pathlib import Path

from absl import flags
from bench import results
from compile import compiling, findings, seconds, targets
from compile.programs import model_of
from compile.work import Model

from specrl_jax.config import Config, ConfigError, check, override
from specrl_jax.structs import Json

TARGET = flags.DEFINE_string("target", None, "the TPU: v5e:2x2, v6e:4x4, v5p:4x4x4, ...")
OUT = flags.DEFINE_string("out", None, "JSON file (default: when_it_pays.json in "
                          "experiments/results)")
NODES, ROWS = (4, 8), (16, 64, 256)  # ROWS are compiled
TABLE_ROWS, CONTEXTS = (4, 16, 64, 256), (1024, 8192)


def main(config: Config, workdir: Path) -> int:
    """Adds the case of a config and a target to the result file."""
    del workdir
    target = targets.parse(TARGET.value or "")
    check(target.platform == "tpu", "--target", TARGET.value, "only a TPU's compiler has a clock")
    check(config.spec.drafter == "eagle", "spec.drafter", config.spec.drafter, "choose eagle")
    out = results.destination(OUT.value, "when_it_pays.json")
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.exists() else {}
    costs = compiled(config, target.name)
    lengths = accept_lengths(config, target, costs)
    for name, by_rows in lengths.items():
        print(f"{name}: " + ", ".join(f"{rows} rows {x}" for rows, x in by_rows.items()))
    cases[f"{config.name} {target.name}"] = {
        "versions": targets.versions(), "accept_length": lengths, "costs": costs}
    results.write(out, {"cases": cases})
    return 0


def case(config: Config, rows: int, nodes: int) -> Config:
    """Returns a run with that many rows a data shard, whose drafted rounds verify whole trees.

    A row has 2,048 slots, so that the blocks that attention reads are full.
    """
    batch = rows * config.mesh.data * config.mesh.fsdp
    return override(config, {
        "rollout.batch_size": batch, "rollout.min_batch": rows, "prompts_per_step": batch,
        "rollout.max_prompt_tokens": 512, "rollout.max_new_tokens": 1500, "spec.nodes": nodes,
        "spec.max_nodes": nodes, "spec.max_packed": rows * nodes, "distill.when": "off",
        "distill.overlap": False})


def compiled(config: Config, target: str) -> Json:
    """Returns the costs of rounds, by "plain" and the number of nodes.

    Raises:
      ConfigError: a round does not compile.
    """
    costs: Json = {"plain": []}
    for nodes in NODES:
        for rows in ROWS:
            one = case(config, rows, nodes)
            only = ("plain round", "drafted round") if nodes == NODES[0] else ("drafted round",)
            print(f"compiling for {target}: {rows} rows, {nodes} nodes", flush=True)
            slots = Model(one, model_of(one).arch).shapes.cache
            for program in compiling.compile_for(one, target, only)["programs"]:
                if "error" in program:
                    raise ConfigError("; ".join(findings.failures(program)))
                name = "plain" if program["program"] == "plain round" else str(nodes)
                costs.setdefault(name, []).append(dataclasses.asdict(seconds.cost(
                    program["clock"], targets.parse(target).chip, rows, slots)))
    return costs


def accept_lengths(config: Config, target: targets.Target, costs: Json
                   ) -> dict[str, dict[int, float]]:
    """Returns a drafted round over a plain one, which is the tokens that it must commit a row to
    pay, by nodes and context, and by rows."""
    lengths = {}
    for nodes in NODES:
        one = case(config, max(TABLE_ROWS), nodes)
        least = seconds.least_round(Model(one, model_of(one).arch), target.chip)
        round_of = seconds.clocked_round(least, *(
            [seconds.Cost(**cost) for cost in costs[name]] for name in ("plain", str(nodes))))
        for context in CONTEXTS:
            lengths[f"{nodes} nodes, context {context}"] = {rows: round(
                round_of(rows, rows * context, True) / round_of(rows, rows * context, False), 2)
                for rows in TABLE_ROWS}
    return lengths
