"""Prompts of a run: rendered with the config's variables, short enough, the same every day."""

import dataclasses
import datetime
from pathlib import Path

import pytest

from specrl_jax.config import Config, ConfigError, DataConfig, RolloutConfig, override
from specrl_jax.data.prompts import Prompts, make_prompts
from specrl_jax.model.tiny import byte_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"


def riddles(data, say):
    return [{"question": "x" * n, "answer": "y"} for n in (5, 50, 7, 90)]


def make(said: list[str], chat_template: str | None = None, width: int = 200, **data) -> Prompts:
    config = Config(data=DataConfig(**{"name": f"{__name__}:riddles"} | data),
                    rollout=RolloutConfig(max_prompt_tokens=width))
    tokenizer = byte_tokenizer()
    if chat_template is not None:
        tokenizer = dataclasses.replace(tokenizer, template=chat_template)
    return make_prompts(config, tokenizer, said.append)


def test_template_sees_the_variables_of_the_config() -> None:
    template = "{{ mode }}{% if enable_thinking is not false %} think{% endif %}"
    given = make([], template, template=("mode=short", "enable_thinking=False"))
    assert given.texts[0] == "short"
    assert make([], template, template=("mode=short",)).texts[0] == "short think"


def test_todays_date_in_a_template_is_told_and_can_be_fixed() -> None:
    said: list[str] = []
    today = f"{datetime.date.today():%d %b %Y} xxxxx"
    assert make(said, DATED).texts[0] == today
    assert len(said) == 1 and "prompts change from day to day; data.date=20" in said[0]
    assert make(said, DATED, date="2026-01-31").texts[0] == "31 Jan 2026 xxxxx"
    make(said)  # the template has no date
    assert len(said) == 1


def test_long_prompts_are_refused_or_dropped_and_counted() -> None:
    with pytest.raises(ConfigError, match="example 3 has 109 tokens; .* data.long_prompts=drop"):
        make([], width=50)
    said: list[str] = []
    kept = make(said, width=50, long_prompts="drop")
    assert [e["id"] for e in kept.examples] == [0, 2] == list(kept.index_of)
    assert said == ["2 of 4 prompts have more than rollout.max_prompt_tokens = 50 tokens and are "
                    "left out"]
    with pytest.raises(ConfigError, match="raise it to at least that"):
        make([], width=10, long_prompts="drop")


def test_what_only_generate_does_is_refused_elsewhere() -> None:
    config = Config(data=DataConfig(name=f"{__name__}:riddles"), rollout=RolloutConfig(stop=("x",)))
    with pytest.raises(ConfigError, match=r"rollout.stop = \('x',\): only generate.py ends"):
        make_prompts(config, byte_tokenizer(), print)
    config = override(config, {"rollout.stop": (), "rollout.repetition_penalty": 1.2})
    with pytest.raises(ConfigError, match="rollout.repetition_penalty = 1.2: only generate.py"):
        make_prompts(config, byte_tokenizer(), print)
    with pytest.raises(ConfigError, match="rollout.stop = .*: an empty string ends every answer"):
        RolloutConfig(stop=("",))


def twins(data, say):
    return [{"id": 7, "question": f"{i}?", "answer": 1} for i in range(2)]


def test_examples_that_share_an_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="data.name = .*: 2 examples have the id 7"):
        make([], name=f"{__name__}:twins")


def test_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the prompt of example 0 has no tokens"):
        make([], "")
