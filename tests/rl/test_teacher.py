"""On-policy distillation: a teacher's log-probabilities become advantages of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro_config, moments, stepping, stepping_to_compile

from specrl_jax.config import Config, LearnerConfig, RewardConfig
from specrl_jax.model.tiny import TINY
from specrl_jax.rl import learner, losses, programs

NO_REWARD = RewardConfig(weights=(0.0,))


def config_of(**fields: Any) -> Config:
    return micro_config(reward=NO_REWARD, learner=LearnerConfig(
        learning_rate=3e-3, micro_batch=16), **({"rl__teacher": "random:tiny"} | fields))


@functools.cache
def update(config: Config) -> Any:
    return jax.jit(functools.partial(learner.update, TINY, config))


def batch_and_state() -> tuple[Any, ...]:
    trainer = stepping_to_compile(config_of(rl__teacher=""), num_layers=2)
    rollout = programs.blank_rollout(trainer.config)
    rng = np.random.default_rng(0)
    rollout = rollout.replace(
        length=np.full_like(rollout.length, 3),
        tokens=rng.integers(0, 256, rollout.tokens.shape).astype(np.int32))
    config = config_of()
    advantage = np.zeros(len(rollout.length), np.float32)
    return trainer.state.learner, *programs.host_batches(config, rollout, advantage)[0]


def test_advantage_is_weight_times_teacher_minus_policy() -> None:
    """A teacher c nats above the policy everywhere acts as an advantage of c."""
    state, batch, totals = batch_and_state()
    old = jnp.full_like(batch.rollout_logprob, -5.0)
    config, plain = config_of(rl__teacher_weight=2.0, rl__loss="reinforce"), config_of(
        rl__teacher="", rl__loss="reinforce")
    taught, metrics = update(config)(state, batch, totals, old, None, None, old + 0.25)
    given = batch.replace(advantage=np.where(batch.length > 0, np.float32(0.5), 0))
    want, _ = update(plain)(state, given, totals, old, None, None, None)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7),
                 moments(taught.optimizer), moments(want.optimizer))
    assert metrics["kl/teacher"] == pytest.approx(-0.25)
    both, _ = update(config)(state, given, totals, old, None, None, old - 0.25)  # 0.5 - 2 x 0.25
    assert all(np.abs(leaf).max() < 1e-7 for leaf in jax.tree.leaves(moments(both.optimizer)))


@pytest.mark.ci
@pytest.mark.parametrize("minibatches", [1, 2])
def test_policy_that_is_its_own_teacher_learns_nothing(minibatches: int) -> None:
    config = config_of(rl__minibatches=minibatches)
    trainer = stepping(config, num_layers=2)  # random:tiny itself
    metrics, _ = trainer.step()
    assert abs(metrics["kl/teacher"]) < 1e-4 and metrics["grad_norm"] < 1e-3
    assert metrics["applied"] == 1


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo"])
def test_expected_gradient_is_that_of_the_reverse_kl(loss: str) -> None:
    """Over every token of a vocabulary of 5, each as likely as the policy finds it."""
    teacher = jax.nn.log_softmax(jnp.asarray([2.0, 0.0, -1.0, 0.5, 1.0]))
    function, mask = losses.LOSSES.resolve(loss), jnp.ones(5, bool)

    def kl(logits: Any) -> Any:
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - teacher)).sum()

    @jax.jit
    def gradient(logits: Any) -> Any:
        acted = jax.nn.log_softmax(logits)

        def objective(logits: Any) -> Any:
            terms, _ = function(
                logprob=jax.nn.log_softmax(logits), old_logprob=acted, advantage=teacher - acted,
                mask=mask, clip_low=0.2, clip_high=0.2)
            return (jnp.exp(acted) * terms).sum()

        return jax.grad(objective)(logits)

    logits = jnp.asarray([0.0, 1.0, 0.3, -0.5, 0.0])
    np.testing.assert_allclose(gradient(logits), jax.grad(kl)(logits), atol=1e-6)
    before = float(kl(logits))
    for _ in range(60):
        logits = logits - 0.5 * gradient(logits)
    assert float(kl(logits)) < 0.05 * before
