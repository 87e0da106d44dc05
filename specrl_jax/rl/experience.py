"""What a step learns from: responses with rewards and advantages, in canonical order.

Each rollout of a step is rewarded (`Rewarded`), and further ones while rl.filter asks for them. All
of them make one `Experience`. Host functions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specrl_jax.config import Config
from specrl_jax.rl.algorithm import Algorithm
from specrl_jax.structs import Json, Metrics, Rollout, Scores

Key = tuple[int, int, int]
"""Step in which a group began, id of its prompt, and occurrence of the prompt in that step."""


class Rewarded(NamedTuple):
    """A rollout with its rewards: G groups of M sequences, Q in all.

    Attributes:
      rollout: the sampled responses, without greedy ones.
      scores: of the sampled responses.
      greedy: samples of the greedy responses, if there are any.
      shaped: f32[Q] rewards less a penalty on length and less the KL.
      baseline: f32[G] shaped rewards of the greedy responses, if rl.advantage asks for them.
      filter_advantage: f32[Q] advantages of the rewards alone, 0 for masked responses. rl.filter
        replaces a group without any; the update learns from `Experience.advantage`.
      metrics: means over the rollout; counts of failures.
    """

    rollout: Rollout
    scores: Scores
    greedy: list[Json]
    shaped: np.ndarray
    baseline: np.ndarray | None
    filter_advantage: np.ndarray
    metrics: Metrics

    @property
    def useful(self) -> int:
        """How many groups rl.filter would not replace."""
        return int(has_advantage(self.groups(self.filter_advantage)).sum())

    def groups(self, values: np.ndarray) -> np.ndarray:
        """Returns values [Q] as [G, M]."""
        return values.reshape(-1, int(self.rollout.sample_id.max()) + 1)


class Experience(NamedTuple):
    """The groups that a step learns from: P groups of M sequences, Q in all, in canonical order.

    Attributes:
      rollout: the sequences as they were generated.
      learned: the same as the update reads them: masked responses have no tokens, and versions
        count from that of the policy to update, which is 0.
      rewards: f32[Q] of the reward's terms alone.
      advantage: f32[Q] of the shaped rewards, 0 for masked responses.
      samples: what samples.jsonl holds of the step; answers without learning are marked.
      metrics: of all responses of the step, those that were filtered out included.
    """

    rollout: Rollout
    learned: Rollout
    rewards: np.ndarray
    advantage: np.ndarray
    samples: list[Json]
    metrics: Metrics


def reward_rollout(config: Config, algorithm: Algorithm, rollout: Rollout,
                   score: Callable[[Rollout], Scores],
                   sequence_kl: Callable[[Rollout], np.ndarray]) -> Rewarded:
    """Returns a rollout with its rewards.

    Args:
      score: applies the reward's terms.
      sequence_kl: KL to the reference of each sequence, f32[Q]; called if rl.kl_in is reward.
    """
    mine, greedy = _split(config, rollout)
    scores = score(mine)
    shaped, metrics = _shape(config, mine, scores.rewards, sequence_kl)
    metrics |= scores.metrics
    answers, greedy_rewards, baseline = [], None, None
    if greedy is not None:
        others = score(greedy)
        answers, greedy_rewards = others.samples, others.rewards
        baseline, _ = _shape(config, greedy, greedy_rewards, sequence_kl)
        metrics["reward/failures"] += others.metrics["reward/failures"]
    filter_advantage = algorithm.advantages(scores.rewards, config.group_size, greedy_rewards)
    return Rewarded(mine, scores, answers, shaped, baseline,
                    _masked(config, mine, filter_advantage), metrics)


def keys_of(rollout: Rollout, size: int) -> list[Key]:
    """Returns the key of each group of `size` sequences."""
    fields = (rollout.birth, rollout.prompt_id, rollout.occurrence)
    return list(zip(*(field[::size].tolist() for field in fields), strict=True))


def build_experience(config: Config, algorithm: Algorithm, rewarded: Sequence[Rewarded],
                     drawn: Sequence[Key], version: int) -> Experience:
    """Returns what a step learns from.

    Args:
      rewarded: the step's rollouts, in the order in which they were generated.
      drawn: all groups of the step in the order in which they fill the batch.
      version: of the policy that will be updated.
    """
    size, whole = config.group_size, join([one.rollout for one in rewarded])
    filter_advantage = np.concatenate([one.filter_advantage for one in rewarded]).reshape(-1, size)
    keys = keys_of(whole, size)
    rank = {key: i for i, key in enumerate(drawn)}
    by_draw = np.argsort([rank[key] for key in keys])
    groups = np.asarray(sorted(
        by_draw[choose_groups(filter_advantage[by_draw], config.prompts_per_step)],
        key=keys.__getitem__))
    at = (groups[:, None] * size + np.arange(size)).reshape(-1)
    shaped, rewards = (np.concatenate(values) for values in (
        [one.shaped for one in rewarded], [one.scores.rewards for one in rewarded]))
    baseline = None if rewarded[0].baseline is None else np.concatenate(
        [one.baseline for one in rewarded if one.baseline is not None])[groups]
    rollout = take(whole, at)
    return Experience(
        rollout=rollout, rewards=rewards[at],
        learned=_without_masked(config, rollout).replace(version=rollout.version - version),
        advantage=_masked(config, rollout, algorithm.advantages(shaped[at], size, baseline)),
        samples=_samples(rewarded, at),
        metrics=_metrics(rewarded) | {
            "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std()),
            "reward/nonzero_advantage_fraction": float(has_advantage(filter_advantage).mean())})


def choose_groups(advantage: np.ndarray, wanted: int) -> np.ndarray:
    """Returns the indices of the groups that a step learns from, i64[wanted], ascending.

    The first groups with an advantage; if they are too few, the first of the others fill up.
    DAPO's dynamic sampling, arXiv:2503.14476, equation 11.

    Args:
      advantage: f32[groups, M] in the order in which their prompts were drawn.
    """
    return np.sort(np.argsort(~has_advantage(advantage), kind="stable")[:wanted])


def has_advantage(advantage: np.ndarray) -> np.ndarray:
    """Returns which groups f32[groups, M] have an advantage other than 0, bool[groups]."""
    return (advantage != 0).any(1)


def _split(config: Config, rollout: Rollout) -> tuple[Rollout, Rollout | None]:
    """Returns the sampled responses, and the greedy ones if there are any."""
    if not config.rl.greedy:
        return rollout, None
    sampled = rollout.sample_id < config.group_size
    return take(rollout, np.flatnonzero(sampled)), take(rollout, np.flatnonzero(~sampled))


def _shape(config: Config, rollout: Rollout, rewards: np.ndarray,
           sequence_kl: Callable[[Rollout], np.ndarray]) -> tuple[np.ndarray, Metrics]:
    """Returns rewards f32[Q] less a penalty on length and less the KL, and metrics of both."""
    metrics: Metrics = {}
    if config.rl.overlong == "soft":
        penalty = overlong_penalty(config, rollout)
        rewards, metrics["reward/overlong"] = rewards + penalty, float(penalty.mean())
    if config.rl.kl_in_reward:
        kl = sequence_kl(rollout)
        rewards = rewards - np.float32(config.rl.kl) * kl
        metrics["kl/reference"] = float(kl.sum() / rollout.length.sum())
    return rewards, metrics


def overlong_penalty(config: Config, rollout: Rollout) -> np.ndarray:
    """Returns what rl.overlong=soft adds to the reward of each response, f32[Q], from 0 to -1.

    From `overlong_tokens` before the limit on it falls in a line, to -1 at the limit: DAPO,
    arXiv:2503.14476, equation 13. A response that stops by itself counts by its length, too.
    """
    within, most = config.overlong_tokens, config.rollout.max_new_tokens
    return -np.maximum(0, rollout.length - (most - within)).astype(np.float32) / within


def _masked(config: Config, rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """Returns values f32[Q], with rl.overlong=mask 0 for responses without a stop token (DAPO,
    section 3.4: overlong filtering)."""
    return np.where(rollout.stopped, values, np.float32(0)) if (
        config.rl.overlong == "mask") else values


def _without_masked(config: Config, rollout: Rollout) -> Rollout:
    """Returns the rollout in which the responses of `_masked` have no tokens."""
    return rollout.replace(length=np.where(rollout.stopped, rollout.length, 0)) if (
        config.rl.overlong == "mask") else rollout


def _samples(rewarded: Sequence[Rewarded], at: np.ndarray) -> list[Json]:
    """Returns the samples of the sequences at the indices `at`, then those of failed answers that
    the step does not learn from, marked."""
    samples = [sample for one in rewarded for sample in one.scores.samples]
    left_out = sorted(set(range(len(samples))) - set(at.tolist()))
    others = [*(sample for one in rewarded for sample in one.greedy),
              *(samples[i] for i in left_out)]
    return [samples[i] for i in at] + [
        sample | {"learned": False} for sample in others if "failures" in sample]


def _metrics(rewarded: Sequence[Rewarded]) -> Metrics:
    sizes = [len(one.rollout.length) for one in rewarded]
    means = {name: float(np.average([one.metrics[name] for one in rewarded], weights=sizes))
             for name in rewarded[0].metrics}
    return means | {"reward/failures": sum(one.metrics["reward/failures"] for one in rewarded)}


def take(rollout: Rollout, at: np.ndarray) -> Rollout:
    """Returns the sequences at these indices."""
    return jax.tree.map(lambda a: a[at], rollout)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Returns the sequences of all rollouts, one after the other."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rollouts)
