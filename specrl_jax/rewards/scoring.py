"""Scoring: finished sequences become text, and text becomes rewards."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specrl_jax.config import ConfigError
from specrl_jax.config.tasks import RewardError
from specrl_jax.data.examples import Example
from specrl_jax.data.prompts import Prompts
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.runtime import processes
from specrl_jax.structs import Json, Rollout, Scores

Reward = Callable[[Sequence[tuple[str, str, Example]]],
                  Sequence[tuple[float, Mapping[str, float], Mapping[str, str]]]]
"""(prompt, completion, example) of each answer -> its reward, terms and failures, see judge.py.
With a true attribute `whole`, it wants all answers at once."""

Sample = Json
"""A sequence as samples.jsonl holds it: prompt_id, occurrence, sample_id, prompt, completion,
tokens, reward, and commits, the tokens of each round; failures, by term, where a reward failed;
with rollout.quota birth, the step in which it began, and versions, [version, tokens] of each
policy that drew any.
`"learned": false` marks a failed answer that the step does not learn from: a greedy one, or one of
a group that rl.filter leaves out; others of those are not there."""


def score_rollout(rollout: Rollout, prompts: Prompts, tokenizer: Tokenizer, reward: Reward,
                  versions: bool = False) -> Scores:
    """Decodes every response without its stop token and rewards it once, in one of the processes.

    Args:
      rollout: the same in all processes; its prompts are among `prompts`; without rounds, samples
        have no commits.
      versions: whether samples have the step in which each began, and whose tokens it has.

    Raises:
      RewardError: `reward` failed, here or in another process; raised in all of them.
    """
    answers = [_answer(rollout, q, prompts, tokenizer) for q in range(len(rollout.length))]
    try:
        judged = processes.share_out("rewards", reward, answers, getattr(reward, "whole", False))
    except ConfigError as error:  # of another process as a ConfigError
        raise RewardError(str(error)) from error
    samples = []
    for q, (answer, (total, _, failures)) in enumerate(zip(answers, judged, strict=True)):
        samples.append({
            "prompt_id": int(rollout.prompt_id[q]), "occurrence": int(rollout.occurrence[q]),
            "sample_id": int(rollout.sample_id[q]), "prompt": answer[0], "completion": answer[1],
            "tokens": rollout.tokens[q, : int(rollout.length[q])].tolist(), "reward": total})
        if failures:
            samples[-1]["failures"] = dict(failures)
        if versions:
            drew, tokens = np.unique(rollout.version[q, : rollout.length[q]], return_counts=True)
            samples[-1] |= {"birth": int(rollout.birth[q]),
                            "versions": np.stack([drew, tokens], 1).tolist()}
        if rollout.rounds is not None:
            samples[-1]["commits"] = rollout.commits[q, : rollout.rounds[q]].tolist()
    rewards = np.asarray([sample["reward"] for sample in samples], np.float32)
    means = {f"reward/{name}": float(np.mean([terms[name] for _, terms, _ in judged]))
             for name in judged[0][1]}
    return Scores(samples, rewards, means | {
        "reward/failures": sum("failures" in sample for sample in samples)})


def _answer(rollout: Rollout, q: int, prompts: Prompts, tokenizer: Tokenizer
            ) -> tuple[str, str, Example]:
    """Returns what a reward reads of one sequence: prompt, completion and example."""
    index = prompts.index_of[int(rollout.prompt_id[q])]
    length = int(rollout.length[q]) - int(rollout.stopped[q])
    completion = tokenizer.decode(rollout.tokens[q, :length].tolist())
    return prompts.texts[index], completion, prompts.examples[index]
