"""Supervised fine-tuning: chats as sequences of the policy update, with advantage 1.

With `rl.loss=reinforce` an advantage of 1 makes the update's loss the mean negative log-probability
of response tokens. Packing, optimiser, adapters, sharding and precision are the same as in RL.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import Config, ConfigError, check, override
from specrl_jax.data.chats import conversation, template_variables
from specrl_jax.data.datasets.jsonl import files
from specrl_jax.data.prompt_order import step_prompts
from specrl_jax.model import layers, lora
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.weights import Source
from specrl_jax.rl import policy, programs
from specrl_jax.rl.experience import Experience
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.policy import Policy
from specrl_jax.runtime.compilation import Compiler, abstract
from specrl_jax.runtime.json_lines import read_json_lines
from specrl_jax.structs import Json, Metrics, Params, PyTree, ignore

FORMS = "needs messages that the assistant has a part in, or a prompt and a completion"
# Of the RL algorithm and the layout; speculation, rollouts and rewards are not read.
VALUES = {"rl.loss": "reinforce", "rl.correction": "none", "rl.kl": 0.0, "rl.entropy": 0.0,
          "rl.teacher": "", "rl.normalize": "token", "rl.updates": 1, "rl.minibatches": 1,
          "learner.packing": "sequence", "learner.old_logprob": "learner",
          "rollout.temperature": 1.0}


class Turn(NamedTuple):
    """A message of the assistant, and the messages before it, as tokens."""

    prompt: list[int]
    response: list[int]  # which alone has a loss


def settle(config: Config) -> Config:
    """Returns `config` with the values that supervised fine-tuning needs. Raises ConfigError if
    others do not go with them."""
    return override(config, VALUES)


def read_turns(paths: str, config: Config, tokenizer: Tokenizer, say: Callable[[str], None]
               ) -> list[Turn]:
    """Reads files of JSON lines, gzipped or not, with chats.

    An object has "messages" (or ShareGPT's "conversations"), or "prompt" and "completion". Each
    message of the assistant is one turn, rendered as RL renders prompts and answers: the chat
    template up to the opening of the assistant's turn, then the text and the template's stop token.

    Raises:
      ConfigError: a file cannot be read, a line holds something else, or a turn is too long, unless
        data.long_prompts drops such turns.
    """
    turns, long = [], 0
    for path in files(paths):
        for number, row in read_json_lines(path):
            for turn in _turns(row, config, tokenizer, f"{path}:{number}"):
                fits = _fits(turn, config, f"{path}:{number}")
                turns += [turn] * fits
                long += not fits
    if long:
        say(f"dropped {long} turns that are longer than rollout.max_prompt_tokens or "
            f"max_new_tokens; {len(turns)} are left")
    check(bool(turns), "data.path", paths, "holds nothing to learn from")
    return turns


def _fits(turn: Turn, config: Config, where: str) -> bool:
    """Returns whether a turn fits into a row; raises ConfigError if it must."""
    drop = config.data.long_prompts == "drop"
    for name, tokens in (("max_prompt_tokens", turn.prompt), ("max_new_tokens", turn.response)):
        most = getattr(config.rollout, name)
        check(drop or len(tokens) <= most, f"rollout.{name}", most,
              f"{where} has {len(tokens)}; raise it, or set data.long_prompts = drop")
        if len(tokens) > most:
            return False
    return True


def _turns(row: Any, config: Config, tokenizer: Tokenizer, where: str) -> Iterator[Turn]:
    row = row if isinstance(row, dict) else {}
    chat = row.get("messages") or row.get("conversations")
    if chat is None and isinstance(row.get("prompt"), str | list) and "completion" in row:
        chat = _messages("user", row["prompt"]) + _messages("assistant", row["completion"])
    if not isinstance(chat, list):
        raise ConfigError(f"data.path = {where}: {FORMS}; it has {', '.join(row) or 'no fields'}")
    chat = conversation(chat, "data.path", where, config.data.system)
    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant" and i]
    check(bool(answers), "data.path", where, FORMS)
    variables = template_variables(config.data)
    for i in answers:
        prompt = tokenizer.encode(tokenizer.chat(chat[:i], **variables))
        yield Turn(prompt, tokenizer.encode(chat[i]["content"]) + list(tokenizer.turn_end))


def _messages(role: str, given: Any) -> list[Any]:
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def as_experience(config: Config, turns: Sequence[Turn]) -> Experience:
    """Returns at most `config.sequences` turns as sequences of an update; the rest is empty."""
    rollout = jax.tree.map(np.array, programs.blank_rollout(config))
    rollout.length[:] = 0
    for i, (prompt, response) in enumerate(turns):
        rollout.prompt[i, : len(prompt)], rollout.prompt_length[i] = prompt, len(prompt)
        rollout.tokens[i, : len(response)], rollout.length[i] = response, len(response)
    advantage = (rollout.length > 0).astype(np.float32)
    return Experience(rollout, rollout, advantage, advantage, [], {})


class Supervised:
    """The state and programs of supervised fine-tuning, without its files.

    Args:
      config: from `settle`; a step learns prompts_per_step x group_size turns.
    """

    def __init__(self, config: Config, source: Source, turns: Sequence[Turn],
                 heldout: Sequence[Turn] = ()) -> None:
        self.config, self.turns, self.heldout = config, turns, heldout
        self.mesh, self.step_number, self.bad_steps = sharding.make_mesh(config.mesh), 0, 0
        self.frozen, params = policy.load(config, source, self.mesh, ignore)
        self._policy = Policy(config, source.arch, self.mesh, self.frozen)
        self.state = self._policy.init(params)
        with Compiler() as compiler:
            self._policy.add_programs(compiler)
            logprobs = compiler.add(programs.compute_logprobs(config, source.arch, self.mesh))
        self._policy.finish_compiling()
        self._logprobs = logprobs.result()

    def step(self) -> tuple[Metrics, list[Json]]:
        """Runs one update; returns metrics, and which turns it learned."""
        began, step = time.perf_counter(), self.step_number
        chosen = step_prompts(len(self.turns), self.config.seed, step, self.config.sequences)
        self.state, metrics = self._policy.update(
            self.state, as_experience(self.config, [self.turns[i] for i in chosen]))
        kept = ("loss", "grad_norm", "applied", "learning_rate", "policy/entropy",
                "learn/tokens_per_second", "learn/mfu")
        self.bad_steps = 0 if metrics["applied"] else self.bad_steps + 1
        self.step_number += 1
        return {"step": step, "time/step": time.perf_counter() - began} | {
            name: metrics[name] for name in kept if name in metrics}, [
                {"prompt_id": int(i)} for i in chosen]

    def heldout_loss(self) -> float:
        """Returns the mean negative log-probability of the held-out turns' response tokens."""
        total, size, tokens = 0.0, self.config.sequences, 0
        for first in range(0, len(self.heldout), size):
            (batch, totals), = self._policy.minibatches(
                as_experience(self.config, self.heldout[first : first + size]))
            logprobs = np.asarray(self._logprobs(
                self.state.params, batch, totals, self.frozen.base), np.float64)
            lengths = np.asarray(batch.length).sum(-1)
            mask = np.arange(logprobs.shape[-1]) < lengths[..., None]
            total, tokens = total - logprobs[mask].sum(), tokens + int(lengths.sum())
        return total / tokens

    def weights(self) -> Params:
        """Returns the trained weights, float32; adapters are merged."""
        base = self.frozen.base
        return self.state.params if base is None else lora.overlay(
            base, lora.merge(self.config.learner, np.float32, base, self.state.params))

    # Persistence.

    def arrays(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {"actor": self.state.params, "optimizer": self.state.optimizer}

    def meta(self) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {"step": self.step_number, "bad_steps": self.bad_steps} | self.frozen.identities

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continues from the newest intact checkpoint; returns whether there is one."""
        restored = checkpoints.restore_latest(abstract(self.arrays()))
        if restored is None:
            return False
        _, arrays, meta = restored
        layers.check_identity("model.path", self.config.model.path, meta.get("base"),
                              self.frozen.identities.get("base"))
        self.state = LearnerState(arrays["actor"], arrays["optimizer"])
        self.step_number, self.bad_steps = meta["step"], meta["bad_steps"]
        return True
