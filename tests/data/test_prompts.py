"""Prompts of a run: rendered with the config's variables, short enough, the same every day."""

import dataclasses
import datetime

import pytest

from specrl_jax.config import Config, ConfigError, DataConfig, RolloutConfig
from specrl_jax.data.prompts import Prompts, make_prompts
from specrl_jax.model.tiny import byte_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"


def riddles(data, say):
    return [{"question": "x" * n, "answer": "y"} for n in (5, 50, 7, 90)]


def twins(data, say):
    return [{"id": 7, "question": f"{i}?", "answer": 1} for i in range(2)]


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
    for fields, words in ((dict(width=10, long_prompts="drop"), "raise it to at least that"),
                          (dict(name=f"{__name__}:twins"), "data.name = .*: 2 examples have the"),
                          (dict(chat_template=""), "the prompt of example 0 has no tokens")):
        with pytest.raises(ConfigError, match=words):
            make([], **fields)


def test_what_only_generate_does_is_refused_elsewhere() -> None:
    for options, words in ((RolloutConfig(stop=("x",)), r"stop = \('x',\): only generate.py ends"),
                           (RolloutConfig(repetition_penalty=1.2), "penalty = 1.2: only gener")):
        with pytest.raises(ConfigError, match=f"rollout..*{words}"):
            make_prompts(Config(rollout=options), byte_tokenizer(), print)
    for fields, words in (({"template": ("x",)}, "data.template = 'x': give NAME=VALUE"),
                          ({"template": ("messages=[]",)}, "data.template = 'messages=.*: give NA"),
                          ({"date": "31 Jan"}, "data.date = '31 Jan': give a date as YYYY-MM-DD")):
        with pytest.raises(ConfigError, match=words):
            DataConfig(**fields)
    with pytest.raises(ConfigError, match="rollout.stop = .*: an empty string ends every answer"):
        RolloutConfig(stop=("",))
