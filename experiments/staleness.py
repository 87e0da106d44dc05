"""Does a drafter fall behind an actor that learns, what brings it back, and what does that cost?

    python experiments/staleness.py --config=staleness
    python experiments/staleness.py --config=staleness --question=losses --seeds=0,1,2,3,4

A head is trained for the actor as it starts. Then every arm is a whole RL run from there: without
speculation, with the head as it is, and with each way of training it. Under the match rule and with
invariant numerics all arms of a seed must say the same tokens; that they do is checked. `losses`
compares losses at equal updates, and `intervals` how often the head learns. Arms are runs in
WORKDIR/SEED/ARM: the same command again goes on where it was, and adds arms and seeds to the file.

Acceptance is that of the rollouts: drafts accepted of the config.spec.steps asked for in each round
of a row. Seconds saved are against the run without speculation of the same seed, step by step.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import config_flags
from absl import flags
from bench import results
from bench.staleness import account, draw, summarize

from specrl_jax.actor import open_actor
from specrl_jax.config import Config, ConfigError
from specrl_jax.drafter_options import LOSSES
from specrl_jax.drafter_training import DRAFTER, DrafterTraining, train_drafter
from specrl_jax.host.compilation import use_persistent_cache
from specrl_jax.run import train

PLAIN, FROZEN = "plain", "frozen"
QUESTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "modes": {
        "every_step": {"when": "every_step"},
        "every_5": {"when": "every_k", "every": 5, "updates": 5},
        "once": {"when": "once", "rollouts": 5, "updates": 10},
        "trigger": {"when": "trigger", "updates": 5}, "overlap": {"when": "overlap"}},
    "losses": {loss: {"when": "every_step", "loss": loss} for loss in LOSSES},
    "intervals": {f"every_{k}": {"when": "every_k", "every": k, "updates": k}
                  for k in (1, 3, 5)},
}
QUESTION = flags.DEFINE_enum("question", "modes", list(QUESTIONS), "which arms besides plain and "
                             "frozen")
ARMS = flags.DEFINE_list("arms", [], "only these of them")
SEEDS = flags.DEFINE_list("seeds", ["0"], "seeds of the runs")
HEAD_UPDATES = flags.DEFINE_integer("head_updates", 300, "updates of the head before RL",
                                    lower_bound=1)
OUT = flags.DEFINE_string("out", None, "JSON file (default: results/staleness_QUESTION.json in "
                          "experiments); the figure lies beside it as .png")


def main(config: Config, workdir: Path) -> int:
    out = results.destination(OUT.value, f"staleness_{QUESTION.value}.json")
    seeds, _ = _seeds(), _asked()  # refused before anything runs
    use_persistent_cache()
    made = results.blank(config)
    for seed in seeds:
        made["cases"][str(seed)] = one_seed(dataclasses.replace(config, seed=seed),
                                            workdir / str(seed))
        made["summary"] = summarize(made["cases"])
        results.write(out, made)
        draw(made["cases"], out.with_suffix(".png"))
    for name, found in made["summary"].items():
        _say(f"{name:22} acceptance at the end {found['acceptance_end'][0]:.3f}  net "
             f"{found['net_seconds'][0]:+.1f} s")
    print(f"wrote {out}")
    return 0


def _seeds() -> list[int]:
    try:
        return [int(seed) for seed in SEEDS.value]
    except ValueError as error:
        raise ConfigError(f"--seeds={','.join(SEEDS.value)}: give whole numbers") from error


def _asked() -> dict[str, dict[str, Any]]:
    """The arms of the question that learn."""
    arms = QUESTIONS[QUESTION.value]
    unknown = [name for name in ARMS.value if name not in arms]
    if unknown:
        raise ConfigError(f"--arms={unknown[0]}: choose some of {', '.join(arms)}")
    return {name: arms[name] for name in ARMS.value or arms}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def one_seed(config: Config, workdir: Path) -> dict[str, Any]:
    """Runs what is missing of a seed; what its arms did."""
    head = workdir / "head"
    plain = dataclasses.replace(config, spec=dataclasses.replace(config.spec, drafter="off"))
    train_drafter(plain, open_actor(plain), _training(config), head)
    drafted = dataclasses.replace(config, draft=dataclasses.replace(
        config.draft, path=str(head / DRAFTER)))
    arms = {PLAIN: plain, FROZEN: drafted}
    for name, changes in _asked().items():
        distill = dataclasses.replace(config.distill, **changes)
        arms[name] = dataclasses.replace(drafted, distill=distill)
    for name, arm in arms.items():
        _say(f"seed {config.seed}, {name}")
        train(arm, workdir / name)
    return {name: account(workdir / name, workdir / PLAIN, config) for name in arms}


def _training(config: Config) -> DrafterTraining:
    """The head's training before RL, on the run's own prompts and the actor's own answers."""
    return DrafterTraining(
        rollout_prompts=config.data.examples, samples=4, eval_prompts=8, eval_every=100,
        draft_vocab=0, steps=HEAD_UPDATES.value, batch_tokens=2048, micro_batch_tokens=1024,
        unroll=config.distill.unroll, checkpoint_every=100)


if __name__ == "__main__":
    config_flags.run(main)
