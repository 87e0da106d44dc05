"""The arms of staleness: the config fields that each one changes, by question."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from specrl_jax.config import LOSSES, Config
from specrl_jax.training.trainer import Trainer

from .staleness_account import PLAIN

FROZEN = "frozen"
NEVER = 1e9  # a threshold that no fall reaches: the head stays frozen while it is measured
BUGS = {f"lossy_{name}": f"studies.lossy:{name.upper()}" for name in (
    "greedy", "shared_noise", "default_sampling", "accept_all", "retrospective")}


class Question(NamedTuple):
    """Arms besides plain and frozen, and the arm that they are compared with."""

    arms: Mapping[str, Mapping[str, Mapping[str, Any]]]  # name -> section -> changed fields
    reference: str = FROZEN
    one_batch: bool = False  # all answers of a step at once, where seconds do not matter


def _every(k: int, late: bool = False) -> dict[str, dict[str, Any]]:
    """As many updates in the whole run, whatever the interval."""
    many = {"interval": k, "updates": k} if k > 1 else {}
    return {"distill": {"when": "interval", "overlap": late, **many}}


QUESTIONS = types.MappingProxyType({
    "modes": Question({
        "every_step": _every(1),
        "every_5": _every(5),
        "once": {"distill": {"when": "once", "rollouts": 5, "updates": 10}},
        "trigger": {"distill": {"when": "trigger", "updates": 5}},
        "watched": {"distill": {"when": "trigger", "threshold": NEVER}},
        "overlap": _every(1, late=True)}),
    "losses": Question(
        {loss: {"distill": {"when": "interval", "loss": loss}} for loss in LOSSES},
        reference="forward_kl"),
    "intervals": Question(
        {f"every_{k}": _every(k) for k in (1, 3, 5)}
        | {f"late_{k}": _every(k, late=True) for k in (1, 3, 5)}, reference="every_1"),
    "bugs": Question(
        {arm: {"spec": {"rule": rule}} for arm, rule in {
            "rejection": "rejection", "rejection_drawn": "rejection_drawn", **BUGS}.items()}
        | {"rejection_every_step": {"spec": {"rule": "rejection"}} | _every(1)},
        reference=PLAIN, one_batch=True),
})


def configs(config: Config, question: str, head: str) -> dict[str, Config]:
    """Returns the config of each arm of a question, plain and frozen first.

    Args:
      head: directory of the head that all arms start from.
    """
    question_arms = QUESTIONS[question]
    if question_arms.one_batch:
        rows = config.prompts_per_step * config.group_size
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, batch_size=rows, min_batch=rows))
    frozen = dataclasses.replace(config, draft=dataclasses.replace(config.draft, path=head))
    arms = {PLAIN: plain(config), FROZEN: frozen}
    for name, sections in question_arms.arms.items():
        changed = {section: dataclasses.replace(getattr(frozen, section), **fields)
                   for section, fields in sections.items()}
        arms[name] = dataclasses.replace(frozen, **changed)
    return arms


def plain(config: Config) -> Config:
    """Returns `config` without speculation."""
    return dataclasses.replace(config, spec=dataclasses.replace(config.spec, drafter="off"))


def build(config: Config, question: str, name: str, head: str = "") -> None:
    """Builds an arm's trainer without compiling, to find errors early.

    Args:
      head: directory of the head; "" is a random one.

    Raises:
      ConfigError: the arm cannot run.
    """
    _built(configs(dataclasses.replace(config, seed=0), question, head)[name])


@functools.cache
def _built(config: Config) -> None:
    Trainer.from_config(config)


def place(config: Config, question: str, name: str) -> str:
    """Returns the directory of an arm, shared by all arms that are the same run."""
    mine = configs(config, question, "")[name]
    return next(f"{each}/{other}" for each in QUESTIONS
                for other, arm in configs(config, each, "").items() if arm == mine)
