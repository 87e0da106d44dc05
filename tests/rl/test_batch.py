"""Packed rows hold every token once, in bounds, and change neither loss nor gradient."""

import numpy as np
import pytest

from specrl_jax.config import Config, ConfigError, build
from specrl_jax.rl.batch import Layout, make_batch
from specrl_jax.structs import Rollout

PROMPT, RESPONSE, GROUP = 6, 10, 2


def made_up(prompts: int = 7, seed: int = 0) -> Rollout:
    """A rollout of random tokens and lengths, some of them 0."""
    rng = np.random.default_rng(seed)
    q = prompts * GROUP
    ids = np.repeat(np.arange(prompts, dtype=np.int32), GROUP)
    tokens = rng.integers(1, 99, (q, RESPONSE)).astype(np.int32)
    logprob = -rng.random((q, RESPONSE)).astype(np.float32)
    return Rollout(
        prompt=rng.integers(1, 99, (prompts, PROMPT)).astype(np.int32)[ids],
        prompt_length=rng.integers(1, PROMPT + 1, prompts).astype(np.int32)[ids],
        tokens=tokens, length=rng.integers(0, RESPONSE + 1, q).astype(np.int32), logprob=logprob,
        raw_logprob=logprob, top_p_mass=logprob, prompt_id=ids, birth=ids * 0,
        occurrence=ids * 0, sample_id=np.tile(np.arange(GROUP, dtype=np.int32), prompts),
        stopped=ids > 0, commits=tokens, rounds=ids, version=tokens * 0)


@pytest.mark.parametrize("layout", [
    Layout(2, 1), Layout(3, GROUP), Layout(1, 1, 64), Layout(2, GROUP, 90)])
def test_batch_holds_each_response_with_its_context(layout: Layout) -> None:
    rollout = made_up()
    advantage = np.arange(1, len(rollout.length) + 1, dtype=np.float32)
    batch, totals = make_batch(rollout, advantage, 0.5, layout, False)
    assert totals.tokens == rollout.length.sum() == batch.length.sum()
    assert totals.sequences == (rollout.length > 0).sum()
    actual = {}
    for at in zip(*np.nonzero(batch.advantage), strict=True):
        row, start, length = at[:2], batch.start[at], batch.length[at]
        read = [context(batch, row, c) for c in batch.predicted_at[row][start : start + length]]
        actual[batch.advantage[at]] = (batch.response[row][start : start + length].tolist(),
                                       batch.rollout_logprob[row][start : start + length], read)
    assert sorted(actual) == advantage.tolist() and (batch.temperature == 0.5).all()
    for i, (response, logprob, read) in enumerate(actual[a] for a in advantage):
        n, p = rollout.length[i], rollout.prompt_length[i]
        assert response == rollout.tokens[i, :n].tolist()
        np.testing.assert_array_equal(logprob, rollout.raw_logprob[i, :n])
        whole = [*rollout.prompt[i, :p], *rollout.tokens[i, :n]]
        assert read == [whole[: p + j] for j in range(n)]


def context(batch, row, column) -> list[int]:
    """The tokens that a column attends to, by position."""
    prefix = batch.segment if batch.prefix is None else batch.prefix
    segment, position = batch.segment[row], batch.position[row]
    seen = (segment == segment[column]) | (segment == prefix[row][column])
    seen &= position <= position[column]
    assert sorted(position[seen]) == list(range(seen.sum()))
    return batch.tokens[row][seen][np.argsort(position[seen])].tolist()


@pytest.mark.parametrize("values, line", [
    ({"learner": {"tokens_per_row": 25, "micro_batch": 4}},
     "learner.tokens_per_row = 25: must hold 26: a prompt with 2 responses of full length"),
    ({"learner": {"tokens_per_row": 80, "micro_batch": 4}},
     "learner.micro_batch = 4: must be a multiple of 6: 1 data shards x 6 sequences a row"),
    ({"rl": {"minibatches": 3}, "learner": {"micro_batch": 4}},
     "rl.minibatches = 3: must divide prompts_per_step = 4: a group stays together"),
    ({"learner": {"remat": True}}, "learner.remat = True"),
    ({"learner": {"remat": False}}, "learner.remat = False"),
])
def test_values_that_cannot_work_are_refused(values: dict, line: str) -> None:
    sizes = {"max_prompt_tokens": PROMPT, "max_new_tokens": RESPONSE}
    with pytest.raises(ConfigError) as error:
        build(Config, {"prompts_per_step": 4, "group_size": GROUP, "rollout": sizes} | values)
    assert str(error.value).startswith(line)
