"""Prompts of a run, rendered and tokenized, and the batches of them that one rollout gets."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrl_jax.config import Config, check
from specrl_jax.io import data
from specrl_jax.model.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The examples of a run and their prompts as text and tokens."""

    examples: Any  # Sequence of {"id", "question", "answer", ...}
    texts: list[str]
    tokens: list[list[int]]


def make_prompts(config: Config, tokenizer: Tokenizer, say: Callable[[str], None]) -> Prompts:
    """Loads the data and renders every prompt with the chat template.

    Raises:
      ConfigError: unknown or empty data, or a prompt that is longer than the cache's part for it.
    """
    examples = data.load_examples(config.data, say)
    texts = [tokenizer.chat(data.messages(e, config.data.system)) for e in examples]
    tokens = [tokenizer.encode(text) for text in texts]
    longest = max(range(len(tokens)), key=lambda i: len(tokens[i]))
    check(len(tokens[longest]) <= config.rollout.max_prompt_tokens, "rollout.max_prompt_tokens",
          config.rollout.max_prompt_tokens,
          f"the prompt of example {examples[longest]['id']} has {len(tokens[longest])} tokens; "
          f"raise it to at least that")
    return Prompts(examples, texts, tokens)


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts of one rollout, in any order."""

    prompts: Sequence[Sequence[int]]  # token ids
    prompt_id: np.ndarray  # i32[prompts]
    occurrence: np.ndarray  # i32[prompts] how often the prompt came before


def prompt_batches(prompts: Prompts, at_once: int) -> list[PromptBatch]:
    """All prompts in rollouts of `at_once`. The last is filled with repeats: occurrence > 0."""
    total = len(prompts.tokens)
    index = np.arange(-(-total // at_once) * at_once)
    ids = np.asarray([prompts.examples[i]["id"] for i in range(total)], np.int32)[index % total]
    return [PromptBatch([prompts.tokens[i % total] for i in part], ids[part],
                  (part // total).astype(np.int32)) for part in index.reshape(-1, at_once)]
