"""Which prompts each step uses. Host functions.

The order depends on the seed and on rewards alone, so that speculation, batch order and a resume
change nothing.
"""

import collections
from collections.abc import Sequence

import numpy as np
from flax import struct

from specrl_jax.config import Config, check
from specrl_jax.structs import AnyArray

FLOOR = 0.02  # weight of a prompt that is always or never solved; one half has 0.25
RANKING = 2**63  # keys of rankings lie above those of epochs


class PromptHistory(struct.PyTreeNode):
    """What the order of later prompts depends on, on the host. N examples."""

    drawn: AnyArray  # i32[] prompts drawn so far
    tried: AnyArray  # f32[N] groups of each prompt
    passed: AnyArray  # f32[N] sums of their mean rewards, each within 0 and 1


class PromptOrder:
    """The order in which a run uses its prompts (rl.curriculum).

    `uniform` goes through epochs, permutations of all prompts, from where the last step ended.
    `pass_rate` draws each step anew, without repeats: most often prompts whose pass rate so far is
    near one half, those not tried yet among them, because groups that agree teach nothing.
    """

    def __init__(self, config: Config, prompts: int) -> None:
        check(config.rl.filter == "none" or prompts > 1, "rl.filter", config.rl.filter,
              "chooses among prompts, but the data has one; leave it out")
        self.by_pass_rate, self.seed = config.rl.curriculum == "pass_rate", config.seed
        self.prompts = prompts

    def init(self) -> PromptHistory:
        """Returns the history of a run without steps."""
        zero = np.zeros(self.prompts, np.float32)
        return PromptHistory(drawn=np.zeros((), np.int32), tried=zero, passed=zero)

    def indices(self, history: PromptHistory, step: int, count: int) -> np.ndarray:
        """Returns the indices of the first `count` prompts of a step, i64[count]."""
        if self.by_pass_rate:
            return self._ranking(history, step)[np.arange(count) % self.prompts]
        return prompts_from(self.prompts, self.seed, int(history.drawn), count)

    def _ranking(self, history: PromptHistory, step: int) -> np.ndarray:
        """Returns all prompts as drawn one by one with their weights: the order of exponential
        variables over them (Efraimidis and Spirakis, 2006)."""
        rate = (np.asarray(history.passed, np.float64) + 0.5) / (history.tried + 1.0)
        words = np.random.Philox(key=np.array([self.seed, RANKING + step], np.uint64)).random_raw(
            len(rate))
        uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
        return np.argsort(-np.log(uniform) / (rate * (1 - rate) + FLOOR), kind="stable")


def advance(history: PromptHistory, count: int) -> PromptHistory:
    """Returns the history after `count` further prompts were drawn."""
    return history.replace(drawn=np.asarray(history.drawn + count, np.int32))


def observe(history: PromptHistory, indices: np.ndarray, rewards: np.ndarray) -> PromptHistory:
    """Returns the history after responses to the prompts at `indices` i64[groups] had rewards
    f32[groups, M]."""
    tried, passed = np.array(history.tried), np.array(history.passed)
    np.add.at(tried, indices, 1)
    np.add.at(passed, indices, np.clip(rewards, 0, 1).mean(1).astype(np.float32))
    return history.replace(tried=tried, passed=passed)


def step_prompts(num_examples: int, seed: int, step: int, prompts_per_step: int) -> np.ndarray:
    """Returns the indices of the examples that `step` uses, i64[prompts_per_step]."""
    return prompts_from(num_examples, seed, step * prompts_per_step, prompts_per_step)


def prompts_from(num_examples: int, seed: int, first: int, count: int) -> np.ndarray:
    """Returns the indices of `count` examples after the first `first` ones of all epochs.

    Each epoch is a permutation of all examples, keyed by (seed, epoch). A step may span the end of
    an epoch; only there can a prompt occur twice in a step. NumPy guarantees the raw words of
    Philox across versions, but not the results of its shuffles.
    """
    epochs, offsets = np.divmod(np.arange(first, first + count), num_examples)
    orders = {epoch: np.argsort(np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(
        num_examples), kind="stable") for epoch in np.unique(epochs)}
    return np.array([orders[e][i] for e, i in zip(epochs, offsets, strict=True)], np.int64)


def occurrences(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns how often each id occurred earlier in `ids`, i32[len(ids)]."""
    seen: collections.Counter[int] = collections.Counter()
    result = np.zeros(len(ids), np.int32)
    for index, prompt_id in enumerate(int(x) for x in ids):
        result[index] = seen[prompt_id]
        seen[prompt_id] += 1
    return result
