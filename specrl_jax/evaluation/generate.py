"""One prompt, one answer, streamed."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax import sharding
from specrl_jax.config import Config, check
from specrl_jax.io import data
from specrl_jax.model.source import Actor
from specrl_jax.rollout.prompts import PromptBatch
from specrl_jax.rollout.sampler import Sampler

PROMPT_MULTIPLE = 64  # prompts of similar length share their compiled programs
ROUNDS_PER_LAUNCH = 1  # the host sees the tokens of each round


@dataclasses.dataclass(frozen=True)
class Generation:
    """An answer and what it cost."""

    text: str
    tokens: int
    seconds: float  # prefill included
    accept_length: float
    stopped: bool  # by a stop token, not by the limit
    drafter: str


def generate(
    config: Config,
    actor: Actor,
    prompt: str,
    system: str,
    *,
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> Generation:
    """Answers `prompt`, sampled as config.rollout says.

    Args:
      config: its rollout, spec, control and mesh sections are read, and its seed.
      system: the system message; "" is none.
      write: called with each piece of text as soon as it is known.
      say: told, in a line each, what happens before the first token.

    Raises:
      ConfigError: the model has no chat template, or too few positions.
    """
    tokenizer = actor.source.tokenizer
    text = tokenizer.chat(data.messages({"question": prompt}, system))
    tokens = tokenizer.encode(text)
    check(len(tokens) > 0, "--prompt", prompt, "has no tokens; say something")
    mesh = sharding.make_mesh(config.mesh)
    shards = sharding.shard_count(mesh)
    say(f"loading {actor.name}")
    sampler = Sampler(one_prompt(config, len(tokens), shards), actor.source.arch,
                      tokenizer.stop_ids, mesh, prompts=shards, group=1)
    sampler.publish(actor.params(mesh), actor.step)
    sampler.compile(say, profile=False)
    stream = Stream(tokenizer.stream(skip_special=True), write)
    prompts, places = [tokens] * shards, np.arange(shards)
    rollout, result = sampler.generate(
        PromptBatch(prompts, places, np.zeros(shards, np.int32)), "generate", 0, peek=stream.peek)
    c = result.counters
    return Generation(text=stream.text, tokens=int(rollout.length[0]), seconds=result.seconds,
                accept_length=c["committed"] / c["row_rounds"], stopped=bool(rollout.stopped[0]),
                drafter="off" if config.control.policy == "off" else config.spec.drafter)


def one_prompt(config: Config, tokens: int, shards: int) -> Config:
    """`config` with the smallest shapes that hold one prompt, on each data shard."""
    width = -(-tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    return dataclasses.replace(config, rollout=dataclasses.replace(
        config.rollout, batch_size=shards, min_batch=1, max_prompt_tokens=width, order="sorted",
        rounds_per_launch=ROUNDS_PER_LAUNCH))


class Stream:
    """Writes the text of the first sequence as it grows."""

    def __init__(self, decode: Callable[[int], str], write: Callable[[str], None]) -> None:
        """Args: decode, from the next token id to the text it completes; write, told that text."""
        self._decode, self._write = decode, write
        self._seen, self.text = 0, ""

    def peek(self, tokens: np.ndarray, length: Sequence[int]) -> None:
        """Args: tokens i32[Q, T] and lengths i32[Q] so far."""
        new = tokens[0, self._seen : length[0]]
        self._seen = int(length[0])
        text = "".join(self._decode(int(token)) for token in new)
        if text:
            self.text += text
            self._write(text)
