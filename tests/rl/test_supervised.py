"""Supervised fine-tuning: what of a chat has a loss, that it learns, and that it goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro_config

from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import Config, ConfigError, LearnerConfig
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.transformer import forward
from specrl_jax.model.weights import Source
from specrl_jax.rl import supervised
from specrl_jax.rl.supervised import Supervised, Turn

ARCH = dataclasses.replace(TINY, num_layers=1)
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]


def config_of(**changes: Any) -> Config:
    learner = LearnerConfig(learning_rate=1e-2, micro_batch=16, max_grad_norm=1e9, lora_rank=0)
    return supervised.settle(micro_config(**({"learner": learner} | changes)))


def written(folder: Path, *rows: Any) -> str:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, **fields: Any) -> list[Turn]:
    config = config_of(rollout__max_prompt_tokens=80, **fields)
    return supervised.read_turns(path, config, byte_tokenizer(), lambda text: None)


def test_every_message_of_the_assistant_is_a_turn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    first, second = read(written(tmp_path, {"messages": CHAT}))
    assert tokenizer.decode(first.prompt) == tokenizer.chat(CHAT[:1])
    assert tokenizer.decode(second.prompt) == tokenizer.chat(CHAT[:3])
    assert first.response == [*b"bc", *tokenizer.turn_end] and second.response[:-1] == [*b"e"]


def test_prompt_and_completion_are_a_chat_of_two(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "bc"}
    assert read(written(tmp_path, row)) == read(written(tmp_path, {"messages": CHAT[:2]}))
    lists = {"prompt": CHAT[:1], "completion": CHAT[1:2]}
    assert read(written(tmp_path, lists)) == read(written(tmp_path, row))


@pytest.mark.parametrize("row, error", [
    ({"text": "a"}, r"data.path = .*chats.jsonl:1: needs messages .*; it has text"),
    ({"messages": CHAT[:1]}, "needs messages that the assistant has a part in"),
    ({"messages": [{"role": "cat", "content": ""}]}, "must have a role among"),
    ({"prompt": "a", "completion": 3}, "a text as its content"), (3, "it has no fields"),
    ({"prompt": "a", "completion": "b" * 9}, r"rollout.max_new_tokens = 8: .*:1 has 10; raise")])
def test_line_that_is_no_chat_is_named(tmp_path: Path, row: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(written(tmp_path, row))


def turns(count: int = 16) -> list[Turn]:
    rng = np.random.default_rng(0)
    return [Turn([1, 2, 3, int(x)], [int(x), 7][: 1 + int(x) % 2]) for x in
            rng.integers(4, 250, count)]


def trainer_of(config: Config, heldout: list[Turn] | None = None) -> Supervised:
    source = Source(ARCH, byte_tokenizer(), random_tensors(ARCH, 0), "micro")
    return Supervised(config, source, turns(), heldout or [])


def nll(params: Any, given: list[Turn]) -> float:
    """By a plain forward, one turn at a time."""
    total = []
    for prompt, response in given:
        row = np.asarray([prompt + response], np.int32)
        logp = jax.nn.log_softmax(forward(ARCH, params, row, jnp.asarray([row.shape[1]])))[0]
        total += [-float(logp[len(prompt) + i - 1, token]) for i, token in enumerate(response)]
    return float(np.mean(total))


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.ci)])
def test_loss_is_that_of_response_tokens_and_falls(tmp_path: Path, rank: int) -> None:
    config = config_of(learner__lora_rank=rank, learner__tokens_per_row=36)
    trainer = trainer_of(config, turns()[:5])
    before = trainer.heldout_loss()
    assert before == pytest.approx(nll(trainer.weights(), turns()[:5]), rel=1e-4)
    want = nll(trainer.weights(), turns())
    first, samples = trainer.step()  # the whole set is a step
    assert first["loss"] == pytest.approx(want, rel=1e-4)
    assert sorted(sample["prompt_id"] for sample in samples) == list(range(16))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, trainer.arrays(), trainer.meta())
        again = trainer_of(config)
        assert again.restore(checkpoints) and again.step_number == 1
    for _ in range(8):
        last, other = trainer.step()[0], again.step()[0]
        assert (last["loss"], last["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert last["loss"] < 0.7 * first["loss"] and last["applied"] == 1
    assert trainer.heldout_loss() < before
