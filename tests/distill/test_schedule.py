"""When the drafter trains, and what entropy explains of a fall of acceptance."""

import numpy as np
import pytest

from specrl_jax.config import DistillConfig
from specrl_jax.distill import schedule


@pytest.mark.parametrize("options, collects, due",
                         [(dict(when="off"), "", ""), (dict(when="once"), "", ""),
                          (dict(when="interval"), "01234567", "01234567"),
                          (dict(when="interval", interval=4), "37", "37"),
                          (dict(when="interval", interval=4, rollouts=3), "123567", "37"),
                          (dict(when="interval", interval=4, overlap=True), "37", "37"),
                          (dict(when="trigger"), "01234567", "")])
def test_schedule_collects_and_trains_when_due(options, collects, due):
    made, state = DistillConfig(**options), schedule.forget()
    actual = ["".join(str(s) for s in range(8) if rule(s)) for rule in (
        lambda s: schedule.collects(made, s), lambda s: schedule.due(made, s, state))]
    assert actual == [collects, due]


def tokens(rng, mean, drafter):
    """Acceptance that falls by .2 a nat, and entropy, of 500 tokens."""
    entropy = rng.uniform(mean - 0.5, mean + 0.5, 500)
    return drafter - 0.2 * entropy + rng.normal(0, 0.02, 500), entropy


def after(steps, memory=0.0):
    rng, state, left = np.random.default_rng(0), schedule.forget(), []
    for mean, drafter in steps:
        state, more = schedule.observe(state, *tokens(rng, mean, drafter), memory)
        left.append(more)
    return state, left


def test_fall_that_entropy_explains_starts_nothing():
    options = DistillConfig(when="trigger", threshold=0.05)
    state, left = after([(1, 0.9), (2, 0.9), (0.6, 0.9)])
    assert state.slope == pytest.approx(-0.2, abs=0.01)
    assert left == pytest.approx([0, 0, 0], abs=0.01) and not schedule.due(options, 3, state)


def test_staleness_of_a_worse_drafter_is_due_at_any_entropy():
    options = DistillConfig(when="trigger", threshold=0.05)
    for mean in (1, 2, 0.6):
        state, left = after([(1, 0.9), (mean, 0.8)])
        assert left[1] == pytest.approx(-0.1, abs=0.01) and schedule.due(options, 1, state)
        # .7 was accepted at first.
        assert state.fall == pytest.approx(-0.1 / 0.7, abs=0.02)


def test_one_bad_step_is_not_enough_with_a_memory():
    options = DistillConfig(when="trigger", threshold=0.1)
    state, _ = after([(1, 0.9), (1, 0.8)], memory=0.8)
    assert not schedule.due(options, 1, state)
    state, _ = after([(1, 0.9)] + [(1, 0.8)] * 9, memory=0.8)
    assert schedule.due(options, 1, state)


def test_reference_without_spread_or_tokens_explains_nothing():
    state, left = schedule.observe(schedule.forget(), np.zeros(0), np.zeros(0), 0.0)
    assert (state.tokens, left) == (0, 0)
    state, _ = schedule.observe(state, np.full(9, 0.5), np.ones(9), 0.0)
    _, left = schedule.observe(state, np.full(9, 0.4), np.full(9, 3.0), 0.0)
    assert state.slope == 0 and left == pytest.approx(-0.1)
