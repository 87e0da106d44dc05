"""Supervised fine-tuning: chats as sequences of the policy update, with advantage 1.

With `rl.loss=reinforce` an advantage of 1 makes the update's loss the mean negative log-probability
of response tokens. Packing, optimiser, adapters, sharding and precision are the same as in RL.
"""

import dataclasses
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
from specrl_jax.model import architecture, layers, lora
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.weights import Source
from specrl_jax.rl import programs
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.optimizer import make_optimizer
from specrl_jax.runtime.compilation import Compiler, abstract
from specrl_jax.runtime.json_lines import read_json_lines
from specrl_jax.structs import Json, Metrics, Params, PyTree, Rollout

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


def as_rollout(config: Config, turns: Sequence[Turn]) -> Rollout:
    """Returns at most `config.sequences` turns in the form of a rollout of that many; the rest is
    empty."""
    blank = programs.blank_rollout(config)
    fields = {f.name: np.array(getattr(blank, f.name)) for f in dataclasses.fields(blank)
              if isinstance(getattr(blank, f.name), np.ndarray)}
    fields["length"][:] = 0
    for i, (prompt, response) in enumerate(turns):
        fields["prompt"][i, : len(prompt)], fields["prompt_length"][i] = prompt, len(prompt)
        fields["tokens"][i, : len(response)], fields["length"][i] = response, len(response)
    return dataclasses.replace(blank, **fields)


class Supervised:
    """The state and programs of supervised fine-tuning, without its files.

    Args:
      config: from `settle`; a step learns prompts_per_step x group_size turns.
    """

    def __init__(self, config: Config, source: Source, turns: Sequence[Turn],
                 heldout: Sequence[Turn] = ()) -> None:
        self.config, self.arch, self.turns, self.heldout = config, source.arch, turns, heldout
        self.mesh, self.step_number, self.bad_steps = sharding.make_mesh(config.mesh), 0, 0
        described = architecture.describe(
            self.arch, layers.are_scanned(sharding.platform(self.mesh)))
        loaded = source.params(sharding.shardings(described, sharding.LEARNER_RULES, self.mesh))
        self.base, params = programs.initial(config, self.arch, self.mesh, loaded)
        self._base = None if self.base is None else layers.identity(loaded)
        shardings = jax.tree.map(lambda a: a.sharding, programs.abstract_state(
            config, self.arch, self.mesh).optimizer)
        self.state = LearnerState(params, jax.jit(
            make_optimizer(config.learner).init, out_shardings=shardings)(params))
        wanted = [*programs.programs(config, self.arch, self.mesh),
                  programs.compute_logprobs(config, self.arch, self.mesh)]
        with Compiler() as compiler:
            compiled = {p.name: compiler.add(p) for p in wanted}
        self._programs = {name: future.result() for name, future in compiled.items()}

    def _batch(self, turns: Sequence[Turn]) -> Any:
        """Returns the batch of at most `config.sequences` turns, on the devices."""
        rollout = as_rollout(self.config, turns)
        advantage = (rollout.length > 0).astype(np.float32)
        (batch,) = programs.host_batches(self.config, rollout, advantage)
        return sharding.put(programs.batch_shardings(self.mesh), batch)

    def step(self) -> tuple[Metrics, list[Json]]:
        """Runs one update; returns metrics, and which turns it learned."""
        began, step = time.perf_counter(), self.step_number
        chosen = step_prompts(len(self.turns), self.config.seed, step, self.config.sequences)
        batch, totals = self._batch([self.turns[i] for i in chosen])
        self.state, results = self._programs["update"](
            self.state, batch, totals, None, None, self.base, None)
        metrics: Metrics = jax.tree.map(float, jax.device_get(results))
        seconds = time.perf_counter() - began
        kept = ("loss", "grad_norm", "applied", "learning_rate", "policy/entropy")
        self.bad_steps = 0 if metrics["applied"] else self.bad_steps + 1
        self.step_number += 1
        return {"step": step} | {name: metrics[name] for name in kept} | {
            "time/step": seconds} | programs.speed(
                self.arch, self.mesh, int(totals.columns), seconds), [
                    {"prompt_id": int(i)} for i in chosen]

    def heldout_loss(self) -> float:
        """Returns the mean negative log-probability of the held-out turns' response tokens."""
        total, size, tokens = 0.0, self.config.sequences, 0
        for first in range(0, len(self.heldout), size):
            batch, totals = self._batch(self.heldout[first : first + size])
            logprobs = np.asarray(self._programs["compute_logprobs"](
                self.state.params, batch, totals, self.base), np.float64)
            lengths = np.asarray(batch.length).sum(-1)
            mask = np.arange(logprobs.shape[-1]) < lengths[..., None]
            total, tokens = total - logprobs[mask].sum(), tokens + int(lengths.sum())
        return total / tokens

    def weights(self) -> Params:
        """Returns the trained weights, float32; adapters are merged."""
        if self.base is None:
            return self.state.params
        merged = lora.merge(self.config.learner, np.float32, self.base, self.state.params)
        return lora.overlay(self.base, merged)

    # Persistence.

    def arrays(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        return {"actor": self.state.params, "optimizer": self.state.optimizer}

    def meta(self) -> Json:
        """Returns what else a checkpoint holds, as JSON values."""
        return {"step": self.step_number, "bad_steps": self.bad_steps} | (
            {"base": self._base} if self._base else {})

    def restore(self, checkpoints: Checkpoints) -> bool:
        """Continues from the newest intact checkpoint; returns whether there is one."""
        restored = checkpoints.restore_latest(abstract(self.arrays()))
        if restored is None:
            return False
        _, arrays, meta = restored
        layers.check_identity("model.path", self.config.model.path, meta.get("base"), self._base)
        self.state = LearnerState(arrays["actor"], arrays["optimizer"])
        self.step_number, self.bad_steps = meta["step"], meta["bad_steps"]
        return True
