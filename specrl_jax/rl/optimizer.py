"""Optimisers and learning-rate schedules by name, from optax."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from specrl_jax.config import LearnerConfig
from specrl_jax.structs import Array, PyTree

B1, B2 = 0.9, 0.999  # decays of AdamW, also of Muon's
# Axes of the weights that Muon takes as matrices, from the last one: input, output. Others are a
# stack of matrices; all other parameters, the embedding among them, are AdamW's.
MATRICES = {"qkv": MuonDimensionNumbers(-1, (-4, -3, -2)),
            "o": MuonDimensionNumbers((-3, -2, -1), -4),
            "gate_up": MuonDimensionNumbers(-1, -2), "down": MuonDimensionNumbers(-1, -2)}


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Returns `learner.optimizer` behind clipping by global norm.

    It does not depend on `steps`, so that a run can be extended.
    """
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm),
                       OPTIMIZERS[config.optimizer](config, make_schedule(config)))


def make_schedule(config: LearnerConfig) -> optax.Schedule:
    """Returns the learning rate by the number of updates: a linear warm-up, and from there on
    constant, or down to 0 within `learner.decay_steps` updates, linearly or as a cosine."""
    warmup = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate,
        config.warmup_steps)
    if config.schedule == "constant":
        return warmup
    decay = (optax.linear_schedule(config.learning_rate, 0.0, config.decay_steps)
             if config.schedule == "linear"
             else optax.cosine_decay_schedule(config.learning_rate, config.decay_steps))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def learning_rate(config: LearnerConfig, state: optax.OptState) -> Array:
    """Returns the rate f32[] of the next update."""
    count = optax.tree.get_all_with_path(state, "count")[0][1]
    return jax.numpy.asarray(make_schedule(config)(count), jax.numpy.float32)


def _matrices(params: PyTree) -> PyTree:
    """Returns MATRICES' entry at each parameter that has one, None at others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: MATRICES.get(getattr(path[-1], "key", "")), params)


OPTIMIZERS: dict[str, Callable[[LearnerConfig, Any], optax.GradientTransformation]] = {
    # Loshchilov and Hutter, arXiv:1711.05101.
    "adamw": lambda config, rate: optax.adamw(
        rate, b1=B1, b2=B2, weight_decay=config.weight_decay),
    # Chen et al., arXiv:2302.06675, with its decays of 0.9 and 0.99.
    "lion": lambda config, rate: optax.lion(
        rate, b1=0.9, b2=0.99, weight_decay=config.weight_decay),
    # Jordan et al. (kellerjordan.github.io/posts/muon); updates are scaled as in Moonlight,
    # arXiv:2502.16982, equation 4, so that AdamW's rates fit.
    "muon": lambda config, rate: muon(
        rate, weight_decay=config.weight_decay, adam_weight_decay=config.weight_decay,
        adam_b1=B1, adam_b2=B2, consistent_rms=0.2, muon_weight_dimension_numbers=_matrices),
    # Shazeer and Stern, arXiv:1804.04235, without momentum and without a rate relative to the
    # weights.
    "adafactor": lambda config, rate: optax.adafactor(
        rate, multiply_by_parameter_scale=False,
        weight_decay_rate=lambda count: config.weight_decay * rate(count))}
