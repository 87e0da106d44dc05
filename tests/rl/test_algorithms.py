"""The algorithms that a preset's colon names: how they differ, and that drafts change no token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro_config, stepping

from specrl_jax.config import Config, ControlConfig, ModelSource, RewardConfig, override
from specrl_jax.config.rl import ALGORITHMS
from specrl_jax.config.tasks import RewardError
from specrl_jax.rl import experience, losses
from specrl_jax.rl.advantage import ADVANTAGES
from specrl_jax.rl.losses import CORRECTIONS
from specrl_jax.training.saving import restore

LENGTHS = np.array([[5, 2], [3, 6]])
REWARDS = np.array([[1.0, 0.0], [0.2, 0.3]], np.float32)
T = 6
RNG = np.random.default_rng(0)
OLD = -RNG.gamma(2.0, 1.0, (2, 2, T)).astype(np.float32)
MOVED = OLD + RNG.normal(size=OLD.shape).astype(np.float32) * 0.5


def direction(algorithm: str, logprob: np.ndarray) -> np.ndarray:
    """The gradient of a step's loss by the log-probability of each token, with norm 1: what
    clipping by norm and Adam leave of it."""
    rl = override(Config(), ALGORITHMS[algorithm]).rl
    more = {"baseline": np.float32([0.1, 0.1])} if rl.greedy else {}
    advantage = ADVANTAGES.resolve(rl.advantage)(REWARDS, **more)
    mask = np.arange(T) < LENGTHS[..., None]

    def one(logprob: Any, old: Any, advantage: Any, mask: Any) -> Any:
        terms, _ = losses.sequence_terms(
            loss=losses.LOSSES.resolve(rl.loss), correction=CORRECTIONS.resolve(rl.correction),
            logprobs=losses.SequenceLogprobs(logprob, old, old), advantage=advantage, mask=mask,
            rl=rl)
        weights = losses.token_weights(mask=mask, normalize=rl.normalize, total_tokens=16.0,
                                       total_sequences=4.0, max_new_tokens=T)
        return (weights * terms).sum()

    def total(logprob: Any) -> Any:
        return jax.vmap(jax.vmap(one))(logprob, OLD, advantage, mask).sum()

    slopes = np.asarray(jax.grad(total)(jnp.asarray(logprob)))
    return slopes / np.linalg.norm(slopes)


# Whether the first and the second update on a rollout differ from GRPO's: the first by advantage
# and normaliser alone, because its ratios are 1; gspo's differ only afterwards.
DIFFERS = {"grpo": (False, False), "dr_grpo": (True, True), "dapo": (True, True),
           "gspo": (False, True), "cispo": (True, True), "rloo": (True, True),
           "reinforce_pp": (True, True), "remax": (True, True)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_differ_from_those_of_grpo_as_intended(name: str) -> None:
    actual = [not np.allclose(direction(name, at), direction("grpo", at), atol=1e-5)
              for at in (OLD, MOVED)]
    assert tuple(actual) == DIFFERS[name]


def config_of(name: str, **more: Any) -> Config:
    config = override(micro_config(reward=RewardConfig(terms=("helpers:even",)),
                                   model=ModelSource(path="random:tiny", numerics="invariant")),
                      {**ALGORITHMS[name], **more})
    return config


def steps(config: Config, count: int = 2) -> tuple[list[Any], list[Any], Any]:
    """Metrics and tokens of some steps, and the last weights."""
    trainer = stepping(config, head_dim=16)  # as model.numerics=invariant needs
    actual = [trainer.step() for _ in range(count)]
    tokens = [[s["tokens"] for s in samples] for _, samples in actual]
    return [m for m, _ in actual], tokens, trainer.params


VARIANTS = [
    *[(name, {}) for name in ALGORITHMS],
    ("grpo", {"rl.correction": "truncated"}), ("grpo", {"rl.correction": "masked"}),
    ("grpo", {"rl.kl": 0.1, "rl.kl_in": "reward", "rl.kl_estimator": "k1"}),
    ("dapo", {"reward.terms": ("rewards:starts_even",)}),
    ("dapo", {"rl.curriculum": "pass_rate", "reward.terms": ("rewards:starts_even",)})]
CORE = ("dapo", "gspo", "remax")  # others are ci's variants, which .ci/full runs


@pytest.mark.parametrize("name, more", [
    pytest.param(name, more, id="-".join([name, *map(str, more.values())]),
                 marks=pytest.mark.ci if name in CORE and "rl.curriculum" not in more
                 else pytest.mark.full) for name, more in VARIANTS])
def test_drafts_change_no_token_and_no_weight(name: str, more: dict[str, Any]) -> None:
    config = config_of(name, **more)
    drafted, tokens, params = steps(config)
    assert sum(m["rollout/accepted"] for m in drafted) > 0
    plain, same, params_of_plain = steps(dataclasses.replace(
        config, control=ControlConfig(policy="off")))
    assert not any(m["rollout/drafted"] for m in plain) and all(m["applied"] for m in plain)
    assert tokens == same
    assert [m["rollout/batches"] for m in drafted] == [m["rollout/batches"] for m in plain]
    jax.tree.map(np.testing.assert_array_equal, params, params_of_plain)


@pytest.mark.ci
def test_filter_learns_from_groups_that_differ_and_resumes() -> None:
    config = config_of("dapo", **{"reward.terms": ("rewards:starts_even",),
                                  "rl.curriculum": "pass_rate", "model.numerics": "default"})
    first, second = stepping(config), stepping(config)
    metrics, samples = first.step()
    rewards = np.reshape([s["reward"] for s in samples], (8, 2))
    assert metrics["rollout/batches"] > 1 > metrics["reward/nonzero_advantage_fraction"] > 0
    differ = (rewards[:, 0] != rewards[:, 1]).sum()
    assert differ == min(8, round(8 * metrics["rollout/batches"]
                                  * metrics["reward/nonzero_advantage_fraction"]))
    keys = [(s["prompt_id"], s["occurrence"], s["sample_id"]) for s in samples]
    assert keys == sorted(set(keys))
    second.state = restore(second.trainer, second.state, Held(first))
    for one, other in zip(first.step(), second.step(), strict=True):
        mine, theirs = ([{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in part]
                        for part in ([one], [other])) if isinstance(one, dict) else (one, other)
        assert mine == theirs


@pytest.mark.ci
def test_failing_reward_leaves_the_callers_state_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("dapo", **{"reward.terms": ("rewards:starts_even",),
                                  "rl.curriculum": "pass_rate", "model.numerics": "default"})
    trainer = stepping(config)
    before, reward, calls = Held(trainer), trainer.reward, []

    def fails_second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RewardError("down")
        return reward(*args)

    monkeypatch.setattr(trainer.trainer, "reward", fails_second)
    with pytest.raises(RewardError, match="down"):
        trainer.step()
    monkeypatch.setattr(trainer.trainer, "reward", reward)
    after = Held(trainer)
    assert len(calls) == 2 and after.held[0] == before.held[0] and after.held[2] == before.held[2]
    jax.tree.map(np.testing.assert_array_equal, after.held[1], before.held[1])
    metrics, samples = trainer.step()
    assert metrics["rollout/batches"] > 1 and trainer.state.step == 1
    _, unfailed = stepping(config).step()
    assert samples == unfailed


@pytest.mark.ci
def test_greedy_baseline_has_the_penalties_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("remax", **{
        "rl.overlong": "soft", "rl.kl": 0.5, "rl.kl_in": "reward",
        "rl.kl_estimator": "k1", "model.numerics": "default"})
    trainer, seen = stepping(config), []
    policy = trainer.policy
    policy.frozen = policy.frozen._replace(reference=jax.tree.map(lambda a: 1.2 * a,
                                                                  trainer.params))
    monkeypatch.setattr(policy, "update", lambda state, experience: (
        state, seen.append(experience.advantage) or {"applied": 1}))
    rollout, _ = trainer.rollout()  # what the step generates, too
    rewards = trainer.score(rollout).rewards
    values = (rewards + experience.overlong_penalty(config, rollout)).reshape(8, 3)
    for sample in range(3):  # in pairs, which have the shape of a step's rollout
        pairs = np.arange(24).reshape(8, 3)[:, [sample, (sample + 1) % 3]].reshape(-1)
        values[:, sample] -= 0.5 * policy.sequence_kl(
            trainer.state.learner, experience.take(rollout, pairs))[::2]
    metrics, samples = trainer.step()
    np.testing.assert_allclose(seen[0].reshape(8, 2), values[:, :2] - values[:, 2:], atol=1e-5)
    assert metrics["rollout/tokens"] == rollout.length.sum() > sum(
        len(s["tokens"]) for s in samples)
    penalties = values - rewards.reshape(8, 3)
    assert np.ptp(penalties, axis=1).min() > 1e-3  # of one prompt's answers


TIMES = ("time/", "memory/", "learn/", "rollout/tokens_per_second", "control/")


class Held:
    """A state as a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        arrays, meta = trainer.saved()
        self.held = trainer.state.step, jax.tree.map(jnp.copy, arrays), meta

    def restore_latest(self, abstract: Any, required: Any = None) -> Any:
        assert set(abstract) <= set(self.held[1])
        return self.held
