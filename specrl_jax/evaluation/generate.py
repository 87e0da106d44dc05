"""Answers to single prompts, streamed."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax import sharding
from specrl_jax.config import Config, DataConfig, check, override
from specrl_jax.data.chats import messages, template_variables
from specrl_jax.data.prompts import PromptBatch
from specrl_jax.model.source import Actor, open_actor
from specrl_jax.model.tokenizer import TextStream, Tokenizer
from specrl_jax.rollout.sampler import Sampler

PROMPT_MULTIPLE = 64  # prompts of similar length share their compiled programs


@dataclasses.dataclass(frozen=True)
class Generation:
    """An answer and its cost."""

    text: str
    tokens: int
    seconds: float  # prefill included
    accept_length: float
    stopped: bool  # by a stop token or a stop string, not by the limit
    drafter: str


def _ignore(text: str) -> None:
    pass


class Generator:
    """A model that is compiled once and then answers one prompt after another.

    Args:
      config: its rollout, spec, control and mesh sections are read, and its seed.
      longest: tokens of the longest prompt, system message and chat template included.
      say: called with lines about what happens before the first token.
    """

    def __init__(self, config: Config, actor: Actor, *, longest: int,
                 say: Callable[[str], None] = _ignore) -> None:
        self._shards = sharding.shard_count(sharding.make_mesh(config.mesh))
        self.config = one_prompt(config, longest, self._shards)
        self.tokenizer = actor.source.tokenizer
        say(f"loading {actor.name}")
        self.sampler, state = Sampler.from_config(self.config, prompts=self._shards, actor=actor)
        self.state = self.sampler.prepare(state, say)

    def answer(self, prompt: str, system: str = "", number: int = 0, *,
               write: Callable[[str], None] = _ignore) -> Generation:
        """Answers `prompt`, sampled with config.rollout; each `number` has other noise. Calls
        `write` with each piece of text as soon as it is known. An empty `system` adds no message.

        Raises ConfigError if the model has no chat template, or the prompt exceeds `longest`.
        """
        tokens = encode(self.tokenizer, prompt, system, self.config.data)
        longest = self.config.rollout.max_prompt_tokens
        check(len(tokens) <= longest, "--prompt", f"{prompt[:20]}...",
              f"has {len(tokens)} tokens with the system message, at most {longest} fit; raise "
              "--config.rollout.max_prompt_tokens")
        stream = Stream(self.tokenizer.stream(skip_special=True), write, self.config.rollout.stop)
        rollout, _, result = self.sampler.generate(
            PromptBatch.of([tokens] * self._shards), *self.state, "generate", number,
            on_chunk=stream.write_new)
        stream.close()
        policy = self.config.control.policy
        return Generation(
            text=stream.text, tokens=stream.tokens, seconds=result.seconds,
            accept_length=result.accept_length,
            stopped=stream.ended or bool(rollout.stopped[0]),
            drafter="off" if policy == "off" else self.config.spec.drafter)


def generate(
    config: Config,
    prompt: str,
    system: str = "",
    *,
    actor: Actor | None = None,
    write: Callable[[str], None] = _ignore,
    say: Callable[[str], None] = _ignore,
) -> Generation:
    """Answers one prompt with shapes that just hold it; see `Generator`.

    Args:
      actor: see `open_actor`; None is the model at config.model.path.

    Raises:
      ConfigError: the model has no chat template, or too few positions.
    """
    actor = actor or open_actor(config)
    longest = len(encode(actor.source.tokenizer, prompt, system, config.data))
    return Generator(config, actor, longest=longest, say=say).answer(prompt, system, write=write)


def encode(tokenizer: Tokenizer, prompt: str, system: str, config: DataConfig) -> list[int]:
    """Returns the tokens of a question in the model's chat template, with the variables that
    `config` gives it. Raises ConfigError if the model has no chat template, or there are no tokens.
    """
    tokens = tokenizer.encode(tokenizer.chat(
        messages({"question": prompt}, system), **template_variables(config)))
    check(len(tokens) > 0, "--prompt", prompt, "has no tokens; ask something")
    return tokens


def one_prompt(config: Config, tokens: int, shards: int) -> Config:
    """Returns `config` with the smallest shapes that hold one prompt on each data shard."""
    width = -(-tokens // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    return override(config, {
        "rollout.batch_size": shards, "rollout.min_batch": 1, "rollout.max_prompt_tokens": width,
        "rollout.rounds_per_launch": 1})  # the host sees the tokens of each round


class Stream:
    """Writes the text of the first sequence as it grows, up to the first of the stop strings.

    Tokens are read one by one, so that an answer's end does not depend on how many come at once.
    """

    def __init__(self, decode: TextStream, write: Callable[[str], None],
                 stop: Sequence[str] = ()) -> None:
        """Args: write, gets each piece of text that `decode` gives; stop, strings that end it."""
        self._decode, self._write, self._stop = decode, write, stop
        self._held = ""  # what may be the beginning of a stop string
        self.text, self.tokens, self.ended = "", 0, False

    def write_new(self, tokens: np.ndarray, length: Sequence[int] | np.ndarray) -> bool:
        """Writes what is new; returns whether a stop string has ended the answer.

        Args: tokens i32[Q, T] and lengths i32[Q] so far.
        """
        while self.tokens < length[0] and not self.ended:
            self._add(self._decode(int(tokens[0, self.tokens])))
            self.tokens += 1
        return self.ended

    def close(self) -> None:
        """Writes what was held back because a further token could have changed it."""
        if not self.ended:
            self._add(self._decode.end())
        if not self.ended:
            self._give(self._held)

    def _add(self, text: str) -> None:
        """Writes text, except for what is a stop string or may become one."""
        self._held += text
        stops = [at for at in map(self._held.find, self._stop) if at >= 0]
        self.ended = bool(stops)
        keep = 0 if stops else max((n for stop in self._stop for n in range(1, len(stop))
                                    if self._held.endswith(stop[:n])), default=0)
        end = min(stops) if stops else len(self._held) - keep
        ready, self._held = self._held[:end], self._held[end:]
        self._give(ready)

    def _give(self, text: str) -> None:
        if text:
            self.text += text
            self._write(text)
