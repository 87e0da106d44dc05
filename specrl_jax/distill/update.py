"""One update of a drafter on the actor's own sequences, and the jitted programs of training.

Nothing here has a gradient with respect to the actor. Shapes as in distill/teacher.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import DistillOptions
from specrl_jax.distill import metrics, teacher
from specrl_jax.distill.losses import LOSSES
from specrl_jax.distill.teacher import Batch, FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.model.architecture import Architecture, is_param
from specrl_jax.rl import learner
from specrl_jax.rl.learner import LearnerState
from specrl_jax.structs import Array, DrafterParams, Metrics, PyTree


class UpdateResult(NamedTuple):
    """The outcome of some updates in a row."""

    learner: LearnerState
    metrics: list[Metrics]  # of each update, on the host
    seconds: float


def make_optimizer(options: DistillOptions) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by global norm; warm-up, then constant or a linear decay."""
    rate, warm = options.learning_rate, options.warmup_steps
    then = (optax.linear_schedule(rate, 0.0, options.decay_steps - warm) if options.decay_steps
            else optax.constant_schedule(rate))
    schedule = optax.join_schedules([optax.linear_schedule(rate / (warm + 1), rate, warm), then],
                                    [warm])
    return optax.chain(optax.clip_by_global_norm(options.max_grad_norm), optax.adamw(
        schedule, b1=0.9, b2=0.95, weight_decay=0.0))


def init_state(options: DistillOptions, params: DrafterParams) -> LearnerState:
    return LearnerState(params, make_optimizer(options).init(params))


def state_shardings(drafter: TrainableDrafter, options: DistillOptions, mesh: Mesh
                    ) -> LearnerState:
    """Returns the shardings of a drafter's learner state, or a prefix of them: as the actor's.

    Moments are split over all data shards. What the drafter does not describe is replicated.
    """
    whole: PyTree = sharding.replicated(mesh)
    if drafter.described is None:
        return LearnerState(whole, whole)
    params, moments = (sharding.shardings(drafter.described, rules, mesh)
                       for rules in (sharding.LEARNER_RULES, sharding.MOMENT_RULES))
    optimizer = make_optimizer(options)
    state = jax.eval_shape(optimizer.init, jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), drafter.described, is_leaf=is_param))
    return LearnerState(params, optax.tree.map_params(
        optimizer, lambda _, to: to, state, moments, transform_non_params=lambda _: whole))


def micro_loss(drafter: TrainableDrafter, options: DistillOptions, params: DrafterParams,
               frozen: FrozenParams, batch: Batch, share: tuple[Array, Array]
               ) -> tuple[Array, Metrics]:
    """Returns a micro-batch's share of the loss f32[], and sums of its metrics.

    `share` is the live anchors of each depth in the whole batch, f32[J], and the weight of each
    sequence of the micro-batch, f32[b].
    """
    frozen, batch = jax.lax.stop_gradient((frozen, batch))
    return drafter.loss(params, teacher.inputs_of(frozen, batch),
                        teacher.targets_of(options, frozen, batch, share))


def update(drafter: TrainableDrafter, options: DistillOptions, state: LearnerState,
           frozen: FrozenParams, batch: SequenceBatch, targets: TeacherTargets
           ) -> tuple[LearnerState, dict[str, Array]]:
    """Runs one optimiser step over n micro-batches; how they are split changes nothing.

    A loss or gradient that is not finite leaves the state as it was.

    Returns:
      The new state, and metrics: loss, grad_norm, applied (0 or 1), tokens (trained at depth 0),
      accept_length (expected tokens of a round with a chain of depth J, rejection sampling), all
      f32[]; alpha f32[J], the acceptance rate of each depth given that it is reached.
    """
    masks = jax.vmap(teacher.live_anchors, (0, 0, 0, None))(
        batch.length, batch.first, targets.drafted, options.unroll)
    count = jnp.maximum(masks.sum((0, 2, 3), dtype=jnp.float32), 1.0)
    weight = LOSSES[options.loss].weigh(batch.reward, batch.advantage, batch.length > 0)
    grad = jax.value_and_grad(lambda params, batch, weight: micro_loss(
        drafter, options, params, frozen, batch, (count, weight)), has_aux=True)

    def accumulate(total: PyTree, at: tuple[Batch, Array]) -> tuple[PyTree, None]:
        (value, sums), grads = grad(state.params, *at)
        return jax.tree.map(jnp.add, total, ((value, sums), split_like_moments(grads))), None

    def split_like_moments(tree: DrafterParams) -> DrafterParams:
        return tree if drafter.described is None else sharding.constrain(
            tree, drafter.described, sharding.MOMENT_RULES)

    micro = ((batch, targets), weight)
    shapes = jax.eval_shape(grad, state.params, *jax.tree.map(lambda a: a[0], micro))
    sums, grads = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    ((value, sums), grads), _ = jax.lax.scan(accumulate, (sums, split_like_moments(grads)), micro)
    state, applied, norm = learner.apply(make_optimizer(options), state, grads, value)
    alpha = sums["alpha"] / count
    # Where verification was recorded, an anchor has the later depths only if drafts reached them.
    chain = jnp.where((targets.drafted == teacher.EVERY).all(), sums["chain"] / count[0],
                      jnp.cumprod(alpha).sum())
    return state, {"loss": value, "grad_norm": norm, "applied": applied, "tokens": count[0],
                   "accept_length": 1.0 + chain, "alpha": alpha}


class Programs:
    """Jitted functions of n micro-batches; rows lie over data shards.

    Attributes:
      compute_targets: (T, actor, batch) -> TeacherTargets.
      from_records: (T, actor, batch, states, drafted, raw_logprob) -> TeacherTargets.
      update: (state, frozen, batch, targets) -> (state, metrics). The old state stays readable,
        because rollouts may still draft with it.
      shardings: of the learner state, see `state_shardings`.
      evaluate: (params, frozen, batch, targets, key, scale) -> Evaluation, fields [n, J, b, T].
    """

    def __init__(self, drafter: TrainableDrafter, arch: Architecture, options: DistillOptions,
                 mesh: Mesh, targets: NamedSharding | None = None) -> None:
        """`arch` is the actor's; without a sharding of `targets` the compiler chooses it."""
        self.arch, self.mesh, self.options = arch, mesh, options
        self.shardings = state_shardings(drafter, options, mesh)
        on_mesh = functools.partial(sharding.traced_for, mesh)
        self.compute_targets = jax.jit(
            on_mesh(lambda window, actor, batch: jax.lax.map(functools.partial(
                teacher.compute_targets, arch, drafter.taps, window, actor), batch)),
            static_argnums=0, out_shardings=targets)
        self.from_records = jax.jit(
            on_mesh(lambda window, actor, batch, *recorded: jax.lax.map(lambda at: (
                teacher.from_records(arch, window, actor, *at)), (batch, *recorded))),
            static_argnums=0, out_shardings=targets)
        self.update = jax.jit(on_mesh(functools.partial(update, drafter, options)),
                              out_shardings=(self.shardings, sharding.replicated(mesh)))
        self.evaluate = jax.jit(on_mesh(
            lambda params, frozen, *batch: jax.lax.map(lambda at: metrics.evaluate_drafter(
                drafter, options, params, frozen, at[:2], at[2:]), batch)), out_shardings=targets)

    def init(self, params: DrafterParams) -> LearnerState:
        """Returns the state before the first update; `params` have shardings.params."""
        return LearnerState(params, jax.jit(make_optimizer(self.options).init,
                                            out_shardings=self.shardings.optimizer)(params))

    def rows(self, values: PyTree) -> PyTree:
        """Puts host arrays [n, b, ...] on the devices, the rows over data shards."""
        return sharding.put(NamedSharding(self.mesh, P(None, sharding.ROWS)), values)

    def replicate(self, values: PyTree) -> PyTree:
        """Puts host arrays on every device."""
        return sharding.put(sharding.replicated(self.mesh), values)
