"""Trains an EAGLE-3 drafter for a model or a run's actor, and measures it on held-out prompts.

    python experiments/train_drafter.py --config=tiny --workdir=runs/tiny_drafter
    python experiments/train_drafter.py --config=smollm2 --config.rollout.temperature=0.6

The model answers prompts of config.data with config.rollout's settings, and the drafter learns from
these answers. Writes drafter/ (safetensors), checkpoints/, metrics.jsonl and the rollouts to the
workdir. The same command resumes.
"""

import dataclasses
import functools
import typing
from pathlib import Path

import config_flags
from absl import flags
from interrupt import stops

from specrl_jax.checkpoint.steps import how_to_go_on
from specrl_jax.config import Config
from specrl_jax.distill.offline import DRAFTER, DrafterTraining, train_drafter
from specrl_jax.model.source import open_actor
from specrl_jax.runtime.compilation import use_persistent_cache
from specrl_jax.runtime.paths import local_path

DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string,
          bool: flags.DEFINE_bool}
TYPES = typing.get_type_hints(DrafterTraining)
OPTIONS = {field.name: DEFINE[TYPES[field.name]](field.name, field.default, field.metadata["help"])
           for field in dataclasses.fields(DrafterTraining)}
ACTOR = flags.DEFINE_string("actor", None, "working directory of a run whose actor to draft "
                            "for; without it, the model at --config.model.path")
ACTOR_STEP = flags.DEFINE_integer("actor_step", None, "with --actor, its weights after this many "
                                  "steps (default: the newest checkpoint)", lower_bound=0)


def main(config: Config, workdir: Path) -> int:
    """Trains the drafter; returns the exit status."""
    with stops(functools.partial(how_to_go_on, workdir, "finished rollouts are kept")):
        options = DrafterTraining(**{name: flag.value for name, flag in OPTIONS.items()})
        run = ACTOR.value and local_path("--actor", ACTOR.value)
        actor = open_actor(config, run, ACTOR_STEP.value)
        use_persistent_cache()
        if not train_drafter(config, options, workdir, actor):
            print(f"{workdir}: the drafter is complete ({options.steps} updates); choose another "
                  f"--workdir")
        print(f"the drafter is in {workdir / DRAFTER}")
    return 0


if __name__ == "__main__":
    config_flags.run(main)
