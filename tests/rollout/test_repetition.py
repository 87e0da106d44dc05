"""The repetition penalty: that of transformers, and the same tokens with drafts as without."""

import functools

import jax
import numpy as np
import pytest
from helpers import (
    Course,
    Dice,
    ask,
    assert_same,
    make_engine,
    make_task,
    random_drafter,
    roll_out,
    streams,
    tiny_arch,
    tiny_params,
    wandering,
)

from specrl_jax.model.transformer import forward
from specrl_jax.rollout.engine import Engine, Result

ARCH, TASK, PENALTY = tiny_arch(), make_task(), 1.7
PARAMS = tiny_params(ARCH)


@functools.cache
def plain() -> Engine:
    engine = make_engine(ARCH, TASK, batch=5, repetition_penalty=PENALTY)
    engine.compile(PARAMS)
    return engine


def penalized(logits: np.ndarray, before: list[int]) -> np.ndarray:
    """The logits of RepetitionPenaltyLogitsProcessor of transformers."""
    out = logits.copy()
    out[before] = np.where(logits[before] < 0, logits[before] * PENALTY, logits[before] / PENALTY)
    return out


def log_probability(logits: np.ndarray, token: int) -> float:
    return float(logits[token] - np.logaddexp.reduce(logits))


def test_penalized_log_probabilities_are_those_of_transformers() -> None:
    result = roll_out(plain(), PARAMS, ask(TASK, seed=1))
    run = jax.jit(functools.partial(forward, ARCH))
    prompts = [prompt for prompt in TASK.prompts for _ in range(TASK.group)]
    penalty_showed = 0
    for q, (prompt, answer) in enumerate(zip(prompts, streams(result), strict=True)):
        whole = np.zeros((1, TASK.prompt + TASK.response), np.int32)
        whole[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        logits = np.asarray(run(PARAMS, whole, np.int32([len(prompt) + len(answer)])))[0]
        for t, token in enumerate(answer):
            scores = logits[len(prompt) - 1 + t]
            want = log_probability(penalized(scores, [*prompt, *answer[:t]]), token)
            np.testing.assert_allclose(result.sequences.logprob[q, t], want, rtol=0, atol=1e-4)
            penalty_showed += abs(want - log_probability(scores, token)) > 0.01
    assert penalty_showed > 50


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_drafts_change_no_token_under_the_penalty(temperature: float) -> None:
    course, dice, drafted = trees()
    asked = ask(TASK, seed=2, temperature=temperature)
    alone = roll_out(plain(), PARAMS, asked)
    dice.replay, dice.hit, dice.chain = alone.sequences.tokens, 0.9, 0.8
    for seed in range(3):
        dice.seed = seed
        result = roll_out(drafted, PARAMS, asked, rounds=1 + seed)
        assert_same(alone, result)
        assert accepted(result) > 10


@functools.cache
def trees() -> tuple[Course, Dice, Engine]:
    course, dice = Course(6, 3), Dice(roll_out(plain(), PARAMS, ask(TASK)).sequences.tokens)
    engine = make_engine(
        ARCH, TASK, controller=wandering(course), repetition_penalty=PENALTY,
        drafter=random_drafter(dice, nodes=6, depth=3, vocab=ARCH.vocab_size))
    engine.compile(PARAMS)
    return course, dice, engine


def accepted(result: Result) -> int:
    return int(np.sum(result.counters["accepted"]))
