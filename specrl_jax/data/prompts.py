"""The prompts of a run, rendered and tokenized, and the batches that one rollout generates from."""

import collections
import dataclasses
import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrl_jax.config import Config, check
from specrl_jax.data.chats import messages, template_variables
from specrl_jax.data.examples import Example, load_examples
from specrl_jax.data.prompt_order import occurrences
from specrl_jax.model.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts of one rollout, in any order."""

    prompts: Sequence[Sequence[int]]  # token ids
    prompt_id: np.ndarray  # i32[prompts]
    occurrence: np.ndarray  # i32[prompts] how often the prompt came before

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "PromptBatch":
        """Returns a batch of token ids; a prompt's id is its place."""
        return cls(prompts, np.arange(len(prompts)), np.zeros(len(prompts), np.int32))

    def part(self, at: slice) -> "PromptBatch":
        """Returns some of the prompts."""
        return PromptBatch(self.prompts[at], self.prompt_id[at], self.occurrence[at])

    def keys(self) -> list[tuple[int, int]]:
        """Returns id and occurrence of each prompt."""
        return list(zip(self.prompt_id.tolist(), self.occurrence.tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The examples of a run, and their prompts as text and tokens."""

    examples: Sequence[Example]  # {"id", "question", "answer", ...}
    texts: list[str]
    tokens: list[list[int]]

    @functools.cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each example by its id."""
        return {self.examples[i]["id"]: i for i in range(len(self.tokens))}

    def select(self, indices: Sequence[int] | np.ndarray) -> "Prompts":
        """Returns the prompts at these indices."""
        return Prompts([self.examples[i] for i in indices], [self.texts[i] for i in indices],
                       [self.tokens[i] for i in indices])

    def batch(self, indices: Sequence[int] | np.ndarray) -> PromptBatch:
        """Returns the prompts at these indices as one rollout's; repeats count up `occurrence`."""
        ids = np.asarray([self.examples[i]["id"] for i in indices], np.int32)
        return PromptBatch([self.tokens[i] for i in indices], ids, occurrences(ids))


def make_prompts(config: Config, tokenizer: Tokenizer, say: Callable[[str], None]) -> Prompts:
    """Loads the data and renders every prompt with the chat template.

    Raises:
      ConfigError: unknown or empty data, a prompt without tokens, or one of more than
        rollout.max_prompt_tokens unless data.long_prompts drops such prompts.
    """
    check(not config.rollout.stop, "rollout.stop", config.rollout.stop,
          "only generate.py ends answers at strings; leave it out")
    check(config.rollout.repetition_penalty == 1, "rollout.repetition_penalty",
          config.rollout.repetition_penalty, "only generate.py penalizes repetition; leave it out")
    examples = load_examples(config.data, say)
    (most, count), = collections.Counter(int(e["id"]) for e in examples).most_common(1)
    check(count == 1, "data.name", config.data.name,
          f"{count} examples have the id {most}; give each its own")
    chats = [messages(e, config.data.system) for e in examples]
    variables = template_variables(config.data)
    texts = [tokenizer.chat(chat, **variables) for chat in chats]
    undated: dict[str, Any] = {"strftime_now": lambda form: ""}
    if texts[0] != tokenizer.chat(chats[0], **undated | variables):
        say("the chat template holds today's date, so that prompts change from day to day; "
            f"data.date={datetime.date.today()} keeps them")
    tokens = [tokenizer.encode(text) for text in texts]
    for text, ids, example in zip(texts, tokens, examples, strict=True):
        check(bool(ids), "data", text, f"the prompt of example {example['id']} has no tokens")
    return _short_enough(config, Prompts(examples, texts, tokens), say)


def _short_enough(config: Config, prompts: Prompts, say: Callable[[str], None]) -> Prompts:
    most, lengths = config.rollout.max_prompt_tokens, [len(ids) for ids in prompts.tokens]
    longest, kept = int(np.argmax(lengths)), np.flatnonzero(np.asarray(lengths) <= most)
    if len(kept) == len(lengths):
        return prompts
    check(config.data.long_prompts == "drop" and len(kept) > 0, "rollout.max_prompt_tokens", most,
          f"the prompt of example {prompts.examples[longest]['id']} has {lengths[longest]} tokens; "
          "raise it to at least that, or leave such prompts out by data.long_prompts=drop")
    say(f"{len(lengths) - len(kept)} of {len(lengths)} prompts have more than "
        f"rollout.max_prompt_tokens = {most} tokens and are left out")
    return prompts.select(kept)


def prompt_batches(prompts: Prompts, at_once: int) -> list[PromptBatch]:
    """Returns all prompts in batches of `at_once`; repeats, with occurrence > 0, fill the last."""
    total = len(prompts.tokens)
    index = np.arange(-(-total // at_once) * at_once)
    return [dataclasses.replace(prompts.batch(part % total),
                                occurrence=(part // total).astype(np.int32))
            for part in index.reshape(-1, at_once)]
