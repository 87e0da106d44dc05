"""Answers to single prompts, streamed."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax import sharding
from specrl_jax.config import Config, check, override
from specrl_jax.io import data
from specrl_jax.model.source import Actor
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.rollout.prompts import PromptBatch
from specrl_jax.rollout.sampler import Sampler

PROMPT_MULTIPLE = 64  # prompts of similar length share their compiled programs


@dataclasses.dataclass(frozen=True)
class Generation:
    """An answer and its cost."""

    text: str
    tokens: int
    seconds: float  # prefill included
    accept_length: float
    stopped: bool  # by a stop token, not by the limit
    drafter: str


class Generator:
    """A model that is compiled once and then answers one prompt after another.

    Args:
      config: its rollout, spec, control and mesh sections are read, and its seed.
      longest: tokens of the longest prompt, system message and chat template included.
      say: called with lines about what happens before the first token.
    """

    def __init__(self, config: Config, actor: Actor, *, longest: int, say: Callable[[str], None]
                 ) -> None:
        mesh = sharding.make_mesh(config.mesh)
        self._shards = sharding.shard_count(mesh)
        self.config = one_prompt(config, longest, self._shards)
        self.tokenizer = actor.source.tokenizer
        say(f"loading {actor.name}")
        self.sampler = Sampler(self.config, actor.source.arch, self.tokenizer.stop_ids, mesh,
                               prompts=self._shards, group=1)
        self.sampler.publish(actor.params(mesh), actor.step)
        self.sampler.compile(say)
        self._answers = 0

    def answer(self, prompt: str, system: str, *, write: Callable[[str], None]) -> Generation:
        """Answers `prompt`, sampled with config.rollout; other noise for each answer. Calls `write`
        with each piece of text as soon as it is known. An empty `system` adds no message.

        Raises ConfigError if the model has no chat template, or the prompt exceeds `longest`.
        """
        tokens = encode(self.tokenizer, prompt, system)
        most = self.config.rollout.max_prompt_tokens
        check(len(tokens) <= most, "--prompt", f"{prompt[:20]}...",
              f"has {len(tokens)} tokens with the system message, at most {most} fit; raise "
              "--config.rollout.max_prompt_tokens")
        stream = Stream(self.tokenizer.stream(skip_special=True), write)
        shards = self._shards
        batch = PromptBatch([tokens] * shards, np.arange(shards), np.zeros(shards, np.int32))
        rollout, result = self.sampler.generate(
            batch, "generate", self._answers, on_chunk=stream.write_new)
        self._answers += 1
        counters, policy = result.counters, self.config.control.policy
        return Generation(
            text=stream.text, tokens=int(rollout.length[0]), seconds=result.seconds,
            accept_length=counters["committed"] / counters["row_rounds"],
            stopped=bool(rollout.stopped[0]),
            drafter="off" if policy == "off" else self.config.spec.drafter)


def generate(config: Config, actor: Actor, prompt: str, system: str, *,
             write: Callable[[str], None], say: Callable[[str], None]) -> Generation:
    """Answers one prompt with shapes that just hold it; see `Generator`. Raises ConfigError if the
    model has no chat template, or too few positions."""
    longest = len(encode(actor.source.tokenizer, prompt, system))
    return Generator(config, actor, longest=longest, say=say).answer(prompt, system, write=write)


def encode(tokenizer: Tokenizer, prompt: str, system: str) -> list[int]:
    """Returns the tokens of a question in the model's chat template. Raises ConfigError if the
    model has no chat template, or there are no tokens."""
    tokens = tokenizer.encode(tokenizer.chat(data.messages({"question": prompt}, system)))
    check(len(tokens) > 0, "--prompt", prompt, "has no tokens; ask something")
    return tokens


def one_prompt(config: Config, tokens: int, shards: int) -> Config:
    """Returns `config` with the smallest shapes that hold one prompt on each data shard."""
    width = -(-tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    return override(config, {
        "rollout.batch_size": shards, "rollout.min_batch": 1, "rollout.max_prompt_tokens": width,
        "rollout.order": "sorted",
        "rollout.rounds_per_launch": 1})  # the host sees the tokens of each round


class Stream:
    """Writes the text of the first sequence as it grows."""

    def __init__(self, decode: Callable[[int], str], write: Callable[[str], None]) -> None:
        """Args: decode, from the next token id to the text it completes; write, gets that text."""
        self._decode, self._write = decode, write
        self._seen, self.text = 0, ""

    def write_new(self, tokens: np.ndarray, length: Sequence[int] | np.ndarray) -> None:
        """Writes what is new. Args: tokens i32[Q, T] and lengths i32[Q] so far."""
        new = tokens[0, self._seen : length[0]]
        self._seen = int(length[0])
        text = "".join(self._decode(int(token)) for token in new)
        if text:
            self.text += text
            self._write(text)
