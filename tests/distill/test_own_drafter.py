"""What is refused of a drafter that distill/ does not know; tests/extending trains one."""

import dataclasses
from typing import Any

import pytest
from helpers import micro_config, micro_trainer_to_compile

from specrl_jax.config import (
    ConfigError,
    ControlConfig,
    DistillConfig,
    DraftConfig,
    SpecOptions,
)

SPEC = SpecOptions(drafter="bigram:bigram", depth=2, branch=1, nodes=3, max_depth=2,
                   max_branch=1, max_nodes=3)


def config() -> Any:
    return micro_config(spec=SPEC, control=ControlConfig(policy="fixed"),
                        distill=DistillConfig(when="interval", batch=8, micro_batch=8))


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
