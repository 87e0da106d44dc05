"""What a checkpoint holds of a run's state, and how a run goes on from it."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.checkpoint.checkpoints import BEST, CheckpointReader
from specrl_jax.control.acceptance import Acceptance
from specrl_jax.data.prompt_order import PromptHistory
from specrl_jax.draft.response_cache import ResponseCache
from specrl_jax.model import layers
from specrl_jax.rl.learner import LearnerState
from specrl_jax.runtime.compilation import abstract
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.structs import Json, PyTree, Rollout
from specrl_jax.training import passes
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer

NODES = {"acceptance": Acceptance, "responses": ResponseCache, "prompts": PromptHistory,
         "in_flight": Rollout}


class Saved(NamedTuple):
    """The saved part of a TrainState; what can be derived from the rest is left out.

    `arrays` are `actor` and `optimizer` (the policy's learner), `control`, `acceptance` and
    `responses` (speculation), `prompts` (their order), `in_flight` (with rollout.quota), and of the
    drafter `drafter_seconds`, `drafter`, `drafter_optimizer`, `drafter_features`,
    `drafter_staleness` and, where updates overlap, `drafter_ahead`. `meta` has the step, the
    drafter's version and faults, identities of other models, seconds of plain rounds, and the best
    evaluation. Published weights are made from the learners' again.
    """

    arrays: dict[str, PyTree]
    meta: Json  # JSON values


def to_save(trainer: Trainer, state: TrainState) -> Saved:
    """Returns what a checkpoint holds of a state."""
    speculation, drafter = state.speculation, trainer.drafter
    nodes = {"acceptance": speculation.acceptance, "responses": speculation.responses,
             "prompts": state.prompts}
    if state.in_flight is not None:
        config = trainer.config
        padded = passes.pad(state.in_flight, config.groups_in_flight * config.responses)
        nodes["in_flight"] = padded.replace(prompt=None)  # the run has its text
    return Saved(
        {"actor": state.learner.params, "optimizer": state.learner.optimizer,
         "control": jax.tree.map(np.asarray, speculation.control)}
        | {name: _fields(node) for name, node in nodes.items()} | drafter.arrays(state.drafter),
        {"step": state.step, "bad_steps": state.bad_steps, "drafter": drafter.meta(state.drafter),
         "plain_round_seconds": list(speculation.plain_round_seconds.items())}
        | trainer.policy.frozen.identities | ({} if state.best is None else {BEST: state.best}))


def restore(trainer: Trainer, state: TrainState, checkpoints: CheckpointReader,
            renewed: Collection[str] | None = None, warn: Callable[[str], None] = loud
            ) -> TrainState | None:
    """Returns a state resumed from the newest intact checkpoint; None if there is none.

    Args:
      state: an initial one. What the checkpoint lacks starts as it is there.
      renewed: None asks for a checkpoint of this very config. Else what is named here ("control",
        "acceptance", "drafter"), and what has other shapes, starts anew.
      warn: called with a line about parts with other shapes.

    Raises:
      CheckpointError: the checkpoint is of another configuration or version.
      ConfigError: model.path or rl.teacher holds another model than when the run was started.
    """
    whole, drafter = to_save(trainer, state).arrays, trainer.drafter.arrays(state.drafter).keys()
    anew = {*(renewed or ()), *(drafter if "drafter" in (renewed or ()) else ())}
    wanted = abstract({name: a for name, a in whole.items() if name not in anew})
    latest = checkpoints.restore_latest(wanted, None if renewed is None else ("actor", "optimizer"))
    if latest is None:
        return None
    _, arrays, meta = latest
    if reshaped := sorted(wanted.keys() - arrays.keys()):
        warn("parts of the checkpoint have other shapes and start anew: " + ", ".join(reshaped))
    without: dict[str, Json] = {"in_flight": {"prompt": None}}  # see to_save
    _check_identities(trainer, meta)
    learner = LearnerState(arrays["actor"], arrays["optimizer"])
    policy = trainer.publish(learner, state.policy, meta["step"])
    nodes = {name: kind(**without.get(name, {}) | {
        field: np.asarray(a) for field, a in arrays[name].items()})
        for name, kind in NODES.items() if name in arrays}
    speculation = state.speculation.replace(
        **{name: node for name, node in nodes.items() if name in ("acceptance", "responses")},
        **({"control": arrays["control"], "fresh": False} if "control" in arrays else {}),
        plain_round_seconds=dict(map(tuple, meta["plain_round_seconds"])))
    restored = trainer.drafter.restore(state.drafter, policy, arrays, meta["drafter"]) if (
        drafter <= arrays.keys()) else trainer.drafter.bind(state.drafter, policy)
    return state.replace(
        step=meta["step"], bad_steps=meta["bad_steps"], learner=learner, policy=policy,
        drafter=restored, speculation=speculation, prompts=nodes.get("prompts", state.prompts),
        best=meta.get(BEST), in_flight=trainer.with_prompts(passes.unpad(nodes["in_flight"]))
        if "in_flight" in nodes else state.in_flight)


def _check_identities(trainer: Trainer, meta: Json) -> None:
    config, mine = trainer.config, trainer.policy.frozen.identities
    for name, (field, path) in {"base": ("model.path", config.model.path),
                                "teacher": ("rl.teacher", config.rl.teacher)}.items():
        layers.check_identity(field, path, meta.get(name), mine.get(name))


def _fields(node: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a node by field."""
    return {name: np.asarray(value) for name, value in vars(node).items() if value is not None}
