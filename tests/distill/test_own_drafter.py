"""A drafter that distill/ does not know is named in a config, trained online and verified."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import micro_config, micro_trainer_to_compile

from specrl_jax.config import (
    ConfigError,
    ControlConfig,
    DistillConfig,
    DraftConfig,
    LearnerConfig,
    SpecOptions,
)

SPEC = SpecOptions(drafter="bigram:bigram", depth=2, branch=1, nodes=3, max_depth=2,
                   max_branch=1, max_nodes=3)


def config(spec: SpecOptions = SPEC, **distill: Any) -> Any:
    base = micro_config(spec=spec, control=ControlConfig(policy="fixed", min_survival=0.0))
    return dataclasses.replace(
        base, rollout=dataclasses.replace(base.rollout, temperature=0.0),
        learner=LearnerConfig(learning_rate=0.0, micro_batch=16),
        distill=DistillConfig(**(dict(when="interval", batch=8, micro_batch=8, updates=4, unroll=2,
                                      loss="forward_kl", learning_rate=0.3, probe_tokens=4)
                                 | distill)))


def test_bigram_drafter_learns_online() -> None:
    trainer = micro_trainer_to_compile(config())
    trainer.compile(lambda text: None)
    rows = [trainer.step()[0] for _ in range(5)]
    assert rows[-1]["distill/loss"] < rows[0]["distill/loss"]
    assert rows[-1]["distill/alpha/0"] > rows[0]["distill/alpha/0"] + 0.05
    assert rows[-1]["rollout/accept_length"] > rows[0]["rollout/accept_length"] + 0.1
    assert [row["version/drafter"] for row in rows] == [0, 1, 2, 3, 4] and not trainer.warnings
    spoiled = {**trainer.sampler.drafter_weights[0], "vocab": np.zeros(512, np.int32)}
    trainer.sampler.publish_drafter((spoiled,), trainer.sampler.drafter_version)
    assert trainer.drafter.before_rollout(5)["drafter/fault"] == "not as published"


@pytest.mark.parametrize("changes, message", [
    ({"spec": dataclasses.replace(SPEC, drafter="bigram")},
     "spec.drafter = 'bigram': choose one of off, history, .*merge, or name your own as package"),
    ({"spec": dataclasses.replace(SPEC, drafter="bigram:trigram")},
     "spec.drafter = 'bigram:trigram': .*trigram"),
    ({"spec": dataclasses.replace(SPEC, drafter="merge"),
      "draft": DraftConfig(parts=("history", "bigram"))},
     "draft.parts = 'bigram': choose one of history, eagle"),
    ({"distill": DistillConfig(when="trigger", batch=8)},
     "distill.when = 'trigger': needs a trainable drafter with outputs and logits"),
])
def test_drafter_names_and_needs_are_checked(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        micro_trainer_to_compile(dataclasses.replace(config(), **changes))
