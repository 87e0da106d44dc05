"""Trains one model with each algorithm, with adapters, and on generated tasks; makes one table.

    python experiments/bench.py algorithms --config=smollm2
    python experiments/bench.py algorithms --config=smollm2 --arms=dapo,lora

The arms are every algorithm that a preset's colon may name; `grpo` with two further seeds, for the
spread; `lora`, which is grpo with adapters; and two tasks of reasoning-gym (the extra `tasks`),
each a supervised warm start and then grpo. One seed ranks nothing: read differences against the
spread.

Runs are kept in WORKDIR/ARM, and the same command resumes. Writes bench_algorithms_NAME.json.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from bench import results
from bench.tables import console
from rich.table import Table

from specrl_jax.config import Config, as_dict, override
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.data.examples import load_examples
from specrl_jax.metrics.run_files import read_metrics
from specrl_jax.runtime.files import write_atomically
from specrl_jax.runtime.stderr import say

from .subprocess_runner import train_in_subprocess

ARMS = flags.DEFINE_list("arms", [], "only these arms")
OUT = flags.DEFINE_string("out", None, "JSON file (default: bench_algorithms_NAME.json in "
                          "experiments/results)")
LAST = 5  # steps whose mean is reported
SFT = Path(__file__).resolve().parents[1] / "sft.py"
SFT_EXAMPLES, SFT_STEPS = 1024, 32  # two epochs for 64 sequences a step
SFT_SEED = 1  # data.seed; values share no example
TASKS = {"chain_sum": "chain_sum:1,min_terms=2,max_terms=3,min_digits=2,max_digits=2",
         "spell_backward": "spell_backward:1,min_word_len=3,max_word_len=5"}
SEEDS = {"grpo_seed_1": 1, "grpo_seed_2": 2}
LORA = {"learner.lora_rank": 16, "learner.learning_rate": 2e-4}  # ten times that of all weights


def main(config: Config, workdir: Path) -> int:
    """Runs the arms that are not complete; returns the exit status."""
    arms = configs(config, workdir)
    results.among("arms", ARMS.value, arms)
    path = results.destination(OUT.value, f"bench_algorithms_{config.name}.json")
    result = results.blank(config)
    result["cases"] = results.earlier(path, config=as_dict(config))
    for name in ARMS.value or arms:
        say(f"arm {name}")
        if name in TASKS:
            warm_start(arms[name], workdir / name / "sft")
        train_in_subprocess(arms[name], place(workdir, name))
        result["cases"][name] = account(place(workdir, name), arms[name].reward.terms[0])
        results.write(path, result)
    console().print(table(result["cases"]))
    print(f"wrote {path}")
    return 0


def place(workdir: Path, name: str) -> Path:
    """Returns the directory of an arm's run."""
    return workdir / name / "rl"


def configs(config: Config, workdir: Path) -> dict[str, Config]:
    """Returns the config of each arm; all evaluate at the end."""
    config = override(config, {"eval.every": config.steps})
    grpo = override(config, ALGORITHMS["grpo"])
    arms = {name: override(config, fields) for name, fields in ALGORITHMS.items()}
    arms |= {name: dataclasses.replace(grpo, seed=seed) for name, seed in SEEDS.items()}
    arms["lora"] = override(grpo, LORA)
    return arms | {name: override(grpo, of_task(name) | {
        "model.path": str(workdir / name / "sft" / "model")}) for name in TASKS}


def of_task(name: str) -> dict[str, Any]:
    """Returns the fields of a run on a task of reasoning-gym."""
    return {"data.name": "reasoning_gym", "data.task": (TASKS[name],), "data.system": "",
            "data.examples": 256, "reward.terms": ("reasoning_gym",),
            "rollout.max_prompt_tokens": 96}


def warm_start(config: Config, workdir: Path) -> None:
    """Fine-tunes the initial model on answers to other examples of the task."""
    if (workdir / "model").exists():
        return
    chats = workdir.parent / "chats.jsonl"
    task = dataclasses.replace(config.data, seed=SFT_SEED, examples=SFT_EXAMPLES)
    rows = [{"prompt": row["question"], "completion": row["answer"]}
            for row in load_examples(task)]
    chats.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(chats, "".join(json.dumps(row) + "\n" for row in rows))
    asked = [flag for flag in sys.argv[1:] if flag.startswith("--config")]
    subprocess.run([sys.executable, str(SFT), *asked, f"--workdir={workdir}",
                    f"--config.data.path={chats}", f"--config.steps={SFT_STEPS}",
                    "--config.data.system=", "--config.rollout.max_prompt_tokens=96"], check=True)


def account(workdir: Path, term: str) -> dict[str, Any]:
    """Returns what the table says of a complete run; `term` is the reward that it shows."""
    steps = read_metrics(workdir)
    rewards = [one[f"reward/{term}"] for one in steps]
    return {"steps": len(steps), "reward_first": statistics.mean(rewards[:LAST]),
            "reward_last": statistics.mean(rewards[-LAST:]),
            **{name: steps[-1][f"eval/{name}"]
               for name in ("accuracy", "accuracy_low", "accuracy_high")},
            "accept_length": statistics.mean(one["rollout/accept_length"] for one in steps),
            "seconds": sum(one["time/step"] for one in steps)}


def table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns one row an arm."""
    made = Table("arm", f"reward, first {LAST} steps", f"last {LAST}",
                 "held-out accuracy (95 % interval)", "accept length", "seconds",
                 caption="reward: mean of its first term; seconds: of all steps")
    for name, one in cases.items():
        made.add_row(name, f"{one['reward_first']:.3f}", f"{one['reward_last']:.3f}",
                     f"{one['accuracy']:.3f} ({one['accuracy_low']:.3f} to "
                     f"{one['accuracy_high']:.3f})", f"{one['accept_length']:.2f}",
                     f"{one['seconds']:.0f}")
    return made
