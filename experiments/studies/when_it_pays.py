"""From which accept length on a drafted round pays on a TPU, by the compiler's clock.

    pip install "jax[tpu]==0.10.2"      # the compiler; in an environment of its own
    python experiments/studies/when_it_pays.py --out=experiments/results/when_it_pays.json

A plain and a drafted round of an EAGLE-3 head are compiled at two numbers of rows of a data shard
and one context; what others cost follows by arithmetic. No chip is needed, and nothing is
measured.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dataclasses

from absl import app, flags
from bench import json_file
from compile import compiling, findings, seconds, targets
from compile.programs import model_of
from compile.work import Model

from specrl_jax.config import Config, ConfigError, load_config, override
from specrl_jax.structs import Json

OUT = flags.DEFINE_string("out", "when_it_pays.json", "result file")
CASES = {"qwen2_5_0_5b": "v5e:2x2", "qwen2_5_7b": "v6e:4x4"}
NODES, ROWS = (4, 8), (16, 256)  # ROWS are compiled
TABLE_ROWS, CONTEXTS = (4, 16, 64, 256), (1024, 8192)


def case(preset: str, target: str, rows: int, nodes: int) -> Config:
    """Returns a run with that many rows a data shard, whose drafted rounds verify whole trees.

    A row has 2,048 slots, so that the blocks that attention reads are full.
    """
    config = load_config(f"{preset}:{target.replace(':', '_')}")
    batch = rows * config.mesh.data * config.mesh.fsdp
    return override(config, {
        "rollout.batch_size": batch, "rollout.min_batch": rows, "prompts_per_step": batch,
        "rollout.max_prompt_tokens": 512, "rollout.max_new_tokens": 1500, "spec.nodes": nodes,
        "spec.max_nodes": nodes, "spec.max_packed": rows * nodes, "distill.when": "off",
        "distill.overlap": False})


def compiled(preset: str, target: str) -> Json:
    """Returns the costs of rounds, by "plain" and the number of nodes."""
    costs: Json = {"plain": []}
    for nodes in NODES:
        for rows in ROWS:
            config = case(preset, target, rows, nodes)
            only = ("plain round", "drafted round") if nodes == NODES[0] else ("drafted round",)
            print(f"compiling {preset} for {target}: {rows} rows, {nodes} nodes", flush=True)
            result = compiling.compile_for(config, target, only)
            slots = Model(config, model_of(config).arch).shapes.cache
            for program in result["programs"]:
                if "error" in program:
                    raise ConfigError(f"{preset} {rows} x {nodes}: {findings.failures(program)}")
                name = "plain" if program["program"] == "plain round" else str(nodes)
                costs.setdefault(name, []).append(dataclasses.asdict(seconds.cost(
                    program["clock"], targets.parse(target).chip, rows, slots)))
    return costs


def accept_lengths(preset: str, target: str, costs: Json) -> dict[str, dict[int, float]]:
    """Returns a drafted round over a plain one, which is the tokens that it must commit a row to
    pay, by nodes and context, and by rows."""
    lengths = {}
    for nodes in NODES:
        config = case(preset, target, max(TABLE_ROWS), nodes)
        least = seconds.least_round(Model(config, model_of(config).arch),
                                    targets.parse(target).chip)
        round_of = seconds.clocked_round(least, *(
            [seconds.Cost(**cost) for cost in costs[name]] for name in ("plain", str(nodes))))
        for context in CONTEXTS:
            lengths[f"{nodes} nodes, context {context}"] = {rows: round(
                round_of(rows, rows * context, True) / round_of(rows, rows * context, False), 2)
                for rows in TABLE_ROWS}
    return lengths


def main(argv: list[str]) -> None:
    del argv
    result: Json = {"versions": targets.versions(), "costs": {}, "accept_length": {}}
    for preset, target in CASES.items():
        targets.check_packages(targets.parse(target))
        costs = result["costs"][f"{preset} {target}"] = compiled(preset, target)
        lengths = result["accept_length"][f"{preset} {target}"] = accept_lengths(
            preset, target, costs)
        for name, by_rows in lengths.items():
            print(preset, f"{name}:", by_rows, flush=True)
        json_file.write(Path(OUT.value), result)


if __name__ == "__main__":
    app.run(main)
