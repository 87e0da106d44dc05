"""The models on which controllers are compared: a small one of random weights, and config.model."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.io import data
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import Actor
from specrl_jax.model.tiny import byte_tokenizer, random_tensors
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.weights import Source
from specrl_jax.rollout.prompts import make_prompts

from .controller_shape import Shape

SMALL = Architecture(vocab_size=8192, hidden_size=768, intermediate_size=2048, num_layers=4,
                     num_heads=12, num_kv_heads=4, head_dim=64, max_position=4096)
SMALL_TOKENS = {1: 192, 4: 96, 16: 48, 64: 24}  # of a uniform row, by rows
LOADS = {"small": 8, "smollm2": 32}  # other noise, and prompts where there are as many
SMOLLM2_TOKENS = {1: 96, 4: 96, 16: 64, 64: 128}  # half of what a row of another length may have
STOPPED_TOKENS = 256  # half of what a row may have that ends at a stop token


class Bench:
    """A model, its prompts, and how shapes of it are made.

    Args:
      prompts: those of at least so many tokens; None is one of as many bytes for all rows.
      tokens: of a uniform row, by rows.
      policies: that shapes have engines of.
    """

    def __init__(self, config: Config, source: Source, params: Any, stop: Sequence[int],
                 drafter: str, prompts: Callable[[int], Iterable[list[int]]] | None,
                 tokens: Mapping[int, int], policies: Sequence[str]) -> None:
        self.config, self.source, self.params, self.stop = config, source, params, stop
        self.drafter, self.prompts, self.counter = drafter, prompts, CompilationCounter()
        self.tokens, self.policies = tokens, policies

    def shape(self, rows: int, contexts: Sequence[int], stops: bool,
              policies: Sequence[str] | None = None) -> Shape:
        """Its policies are those of the bench if not given. If `stops`, rows end at stop tokens."""
        config = dataclasses.replace(self.config, rollout=dataclasses.replace(
            self.config.rollout, max_new_tokens=STOPPED_TOKENS if stops else self.tokens[rows]))
        return Shape(config, self.source, self.params,
                     {context: self._loads(rows, context) for context in contexts}, self.stop,
                     self.drafter, self.policies if policies is None else policies, self.counter,
                     stops)

    def _loads(self, rows: int, context: int) -> list[list[list[int]]]:
        """One prompt for all rows, or real ones, cut to the last 2 * `context` tokens.

        Raises:
          ConfigError: there are too few.
        """
        if self.prompts is None:
            return [[[(7 * i) % 256 for i in range(context)]] * rows] * LOADS["small"]
        some = itertools.islice(self.prompts(context // 2), LOADS["smollm2"] * rows)
        found = [prompt[-2 * context:] for prompt in some]
        loads = [found[i:i + rows] for i in range(0, len(found) - rows + 1, rows)]
        if len(loads) < 2:
            raise ConfigError(
                f"data.split = {self.config.data.split!r}, data.examples = "
                f"{self.config.data.examples}: {len(found)} prompts are too few for two "
                f"rollouts of {rows} rows and context {context}; take a larger split, or all of "
                f"its examples with --config.data.examples=0")
        return loads


def small(config: Config, policies: Sequence[str]) -> Bench:
    """Random weights; everything but sizes and policies' options is fixed."""
    source = Source(SMALL, byte_tokenizer(), random_tensors(SMALL, 0), "random")
    rollout = dataclasses.replace(config.rollout, temperature=1.0, top_k=0, top_p=1.0)
    config = dataclasses.replace(config, rollout=rollout)
    return Bench(config, source, jax.device_put(source.params()), (), "replay", None, SMALL_TOKENS,
                 policies)


def real(config: Config, actor: Actor, policies: Sequence[str], say: Callable[[str], None]
         ) -> Bench:
    tokenizer = actor.source.tokenizer
    examples = make_prompts(config, tokenizer, say).examples
    prompts = functools.partial(long_prompts, tokenizer, examples, config.data.system)
    return Bench(config, actor.source, actor.params(sharding.make_mesh(config.mesh)),
                 tokenizer.stop_ids, config.spec.drafter, prompts, SMOLLM2_TOKENS, policies)


def long_prompts(tokenizer: Tokenizer, examples: Sequence[data.Example], system: str, least: int
                 ) -> Iterator[list[int]]:
    """Tokens of prompts that have at least `least` of them, by as many other questions in the
    system message as that takes; no question is in two prompts.

    As turns without answers, arithmetic questions had the actor end its rows after 4 tokens, and
    with their solutions after some 30, where a cell's rows are to have up to 57.
    """
    others: list[str] = []
    for example in examples:
        before = [*([system] if system else []), "Problems of other people:", *others]
        asked = data.messages(example, "\n".join(before) if others else system)
        prompt = tokenizer.encode(tokenizer.chat(asked))
        if len(prompt) < least:
            others.append(example["question"])
        else:
            yield prompt
            others = []
