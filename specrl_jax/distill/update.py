"""One update of a drafter: it learns the actor's distribution on the actor's own sequences.

Nothing here has a gradient with respect to the actor. Shapes as in distill/teacher.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from specrl_jax.config import DistillOptions
from specrl_jax.distill.losses import LOSSES
from specrl_jax.distill.teacher import (
    FrozenParams,
    SequenceBatch,
    TeacherTargets,
    inputs_of,
    live_anchors,
    targets_of,
)
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.rl import learner
from specrl_jax.structs import Array, DrafterParams, Metrics


class DistillState(struct.PyTreeNode):
    """What an update reads and writes; no part of it is the actor's."""

    params: DrafterParams  # float32
    optimizer: optax.OptState


class UpdateResult(NamedTuple):
    """The outcome of some updates in a row."""

    state: DistillState
    metrics: list[dict[str, Any]]  # of each update, on the host
    seconds: float


def make_optimizer(options: DistillOptions) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by global norm; warm-up, then constant or a linear decay."""
    rate, warm = options.learning_rate, options.warmup_steps
    parts = [optax.linear_schedule(rate / (warm + 1), rate, warm)]
    parts += [optax.linear_schedule(rate, 0.0, options.decay_steps - warm)
              if options.decay_steps else optax.constant_schedule(rate)]
    return optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adamw(optax.join_schedules(parts, [warm]), b1=options.b1, b2=options.b2,
                    weight_decay=options.weight_decay))


def init_state(options: DistillOptions, params: DrafterParams) -> DistillState:
    """Returns the state before the first update."""
    return DistillState(params, make_optimizer(options).init(params))


def micro_loss(drafter: TrainableDrafter, options: DistillOptions, params: DrafterParams,
               frozen: FrozenParams, count: Array, batch: SequenceBatch, teacher: TeacherTargets,
               weight: Array) -> tuple[Array, Metrics]:
    """Returns a micro-batch's share of the loss f32[], and sums of its metrics.

    Args:
      count: f32[J], live anchors of each depth in the whole batch.
      weight: f32[b].
    """
    frozen, teacher = jax.lax.stop_gradient((frozen, teacher))
    return drafter.loss(params, inputs_of(frozen, batch, teacher), targets_of(
        options, options.unroll, frozen, batch, teacher, count, weight))


def update(drafter: TrainableDrafter, options: DistillOptions, state: DistillState,
           frozen: FrozenParams, batch: SequenceBatch, teacher: TeacherTargets
           ) -> tuple[DistillState, dict[str, Array]]:
    """Runs one optimiser step over n micro-batches; how they are split changes nothing.

    A loss or gradient that is not finite leaves the state as it was.

    Returns:
      The new state, and metrics: loss, grad_norm, applied (0 or 1), tokens (response tokens), and
      accept_length (expected tokens of a round with a chain of depth J, rejection sampling), all
      f32[]; alpha f32[J], the acceptance rate of each depth given that it is reached.
    """
    window = teacher.hidden.shape[3]
    masks = jax.vmap(live_anchors, (0, 0, None, None))(
        batch.length, batch.first, window, options.unroll)
    count = jnp.maximum(masks.sum((0, 2, 3), dtype=jnp.float32), 1.0)
    weight = LOSSES[options.loss].weigh(batch.reward, batch.advantage, batch.length > 0)
    grad = jax.value_and_grad(
        lambda params, *at: micro_loss(drafter, options, params, frozen, count, *at), has_aux=True)

    def accumulate(total: Any, at: tuple[SequenceBatch, TeacherTargets, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(state.params, *at)), None

    micro = (batch, teacher, weight)
    shapes = jax.eval_shape(grad, state.params, *jax.tree.map(lambda a: a[0], micro))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    ((value, metrics), grads), _ = jax.lax.scan(accumulate, zeros, micro)
    old = learner.LearnerState(state.params, state.optimizer)
    new, applied, norm = learner.apply(make_optimizer(options), old, grads, value)
    return DistillState(new.params, new.optimizer), {
        "loss": value, "grad_norm": norm, "applied": applied, "tokens": count[0],
        "accept_length": 1.0 + metrics["chain"] / count[0], "alpha": metrics["alpha"] / count}
