"""Rewards that depend on the process that judges, or want a whole step, for runs of several."""

from collections.abc import Sequence
from pathlib import Path

import jax

from specrl_jax.rewards.reward import batched


def recorded(prompt: str, completion: str, example: object) -> float:
    """Differs between processes, and leaves a line in the working directory for each call."""
    with open(Path.cwd() / f"calls.{jax.process_index()}", "a") as file:
        print(len(completion), file=file)
    return jax.process_index() + len(set(completion)) / 100


def starts_even(prompt: str, completion: str, example: object) -> float:
    """1 or 0, so that random answers to a prompt often agree."""
    return float(ord(completion[0]) % 2 == 0) if completion else 0.0


def fails_in_process_1(prompt: str, completion: str, example: object) -> float:
    if jax.process_index() == 1:
        raise RuntimeError("judge is down")
    return float(len(completion))


@batched
def distinct(prompts: Sequence[str], completions: Sequence[str], examples: Sequence[object]
             ) -> list[float]:
    """The share of different answers of the step, which must come at once."""
    return [len(set(completions)) / len(completions)] * len(completions)
