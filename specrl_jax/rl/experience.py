"""Scored rollouts of a step, and the part of them that the update reads. Host functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.config import Config
from specrl_jax.data import prompt_order
from specrl_jax.rl import overlong
from specrl_jax.structs import Json, Metrics, Rollout


class Scored(NamedTuple):
    """A rollout with its rewards; Q sequences in groups of M.

    Attributes:
      rollout: without greedy responses.
      samples: what samples.jsonl holds, one a sequence.
      unlearned: records of answers that no step learns from, and a term of whose reward failed.
      rewards: f32[Q] of the reward's terms alone.
      shaped: f32[Q] less a penalty on length and less the KL; advantages come from these.
      baseline: f32[groups] those of greedy responses, if rl.advantage asks for them.
      terms: metrics, means over the rollout; counts of failures.
      advantage: f32[Q] of the rewards alone, 0 for responses that the update does not see: a group
        without any is what rl.filter replaces.
    """

    rollout: Rollout
    samples: list[Json]
    unlearned: list[Json]
    rewards: np.ndarray
    shaped: np.ndarray
    baseline: np.ndarray | None
    terms: Metrics
    advantage: np.ndarray

    def groups(self, values: np.ndarray) -> np.ndarray:
        """Returns values [Q] as [groups, M]."""
        return values.reshape(-1, int(self.rollout.sample_id.max()) + 1)

    @property
    def useful(self) -> int:
        """How many groups have an advantage."""
        return int(prompt_order.useful(self.groups(self.advantage)).sum())


def split(config: Config, rollout: Rollout) -> tuple[Rollout, Rollout | None]:
    """Returns the sampled responses, and the greedy ones if there are any."""
    if not config.rl.greedy:
        return rollout, None
    sampled = rollout.sample_id < config.group_size
    return take(rollout, np.flatnonzero(sampled)), take(rollout, np.flatnonzero(~sampled))


def failing(samples: Iterable[Json]) -> list[Json]:
    """Returns the records of answers whose reward failed, marked as not learned from."""
    return [sample | {"learned": False} for sample in samples if "failures" in sample]


def shaped(config: Config, rollout: Rollout, rewards: np.ndarray,
           sequence_kl: Callable[[Rollout], np.ndarray]) -> tuple[np.ndarray, Metrics]:
    """Returns rewards f32[Q] less a penalty on length and less the KL to the reference, which is
    computed if rl.kl_in asks for it; and metrics of both."""
    metrics: Metrics = {}
    if config.rl.overlong == "soft":
        penalty = overlong.penalty(config, rollout)
        rewards, metrics["reward/overlong"] = rewards + penalty, float(penalty.mean())
    if config.rl.kl_in_reward:
        kl = sequence_kl(rollout)
        rewards = rewards - np.float32(config.rl.kl) * kl
        metrics["kl/reference"] = float(kl.sum() / rollout.length.sum())
    return rewards, metrics


def take(rollout: Rollout, at: np.ndarray) -> Rollout:
    """Returns the sequences at these indices."""
    return jax.tree.map(lambda a: a[at], rollout)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Returns the sequences of all rollouts, one after the other."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rollouts)


def merge(scored: Sequence[Scored], config: Config, drawn: Sequence[tuple[int, int]]
          ) -> tuple[Scored, Metrics]:
    """Returns the groups that a step learns from, in canonical order, and metrics of all.

    Args:
      drawn: id and occurrence of all prompts of the step in the order in which they were drawn,
        which decides who fills the batch; in the rollouts they are sorted by id.
    """
    def joined(name: str) -> Any:
        return np.concatenate([getattr(one, name) for one in scored])

    whole, rewards, advantage = join([s.rollout for s in scored]), joined("rewards"), joined(
        "advantage")
    size = config.group_size
    rank = {key: i for i, key in enumerate(drawn)}
    by_draw = np.argsort([rank[key] for key in zip(
        whole.prompt_id[::size].tolist(), whole.occurrence[::size].tolist(), strict=True)])
    groups = by_draw[prompt_order.chosen(
        advantage.reshape(-1, size)[by_draw], config.prompts_per_step)]
    order = np.lexsort((whole.occurrence[groups * size], whole.prompt_id[groups * size]))
    groups = groups[order]
    at = (groups[:, None] * size + np.arange(size)).reshape(-1)
    samples = [sample for one in scored for sample in one.samples]
    dropped = sorted(set(range(len(samples))) - set(at.tolist()))
    unlearned = [sample for one in scored for sample in one.unlearned]
    kept = Scored(take(whole, at), [samples[i] for i in at],
                  unlearned + failing(samples[i] for i in dropped), rewards[at],
                  joined("shaped")[at],
                  None if scored[0].baseline is None else joined("baseline")[groups], {},
                  advantage[at])
    counts = {name: sum(one.terms[name] for one in scored) for name in ("reward/failures",)}
    means = {name: float(np.mean([one.terms[name] for one in scored])) for name in scored[0].terms}
    return kept, means | counts | {
        "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std()),
        "reward/nonzero_advantage_fraction": float(
            prompt_order.useful(advantage.reshape(-1, size)).mean())}


def rates(scored: Sequence[Scored], place: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of all groups' prompts, i64[groups], and their rewards f32[groups, M]."""
    groups = [one.groups(one.rewards) for one in scored]
    ids = [one.rollout.prompt_id[:: group.shape[1]] for one, group in
           zip(scored, groups, strict=True)]
    return np.asarray([place[int(i)] for i in np.concatenate(ids)]), np.concatenate(groups)
