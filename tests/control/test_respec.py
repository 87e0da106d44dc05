"""The paper's solver, and what every controller's state must do."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from control_cases import (
    BUCKETS,
    DEPTH,
    LIMITS,
    LONGEST,
    NEED_COSTS,
    NODES,
    alone,
    chains,
    controller,
    drive,
    load,
    made_up,
    record,
)

from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.control import respec

SETTINGS = respec.settings_of((), LIMITS)
TOKENS = (1.5, 1.9, 2.2)  # of each setting, a row and round


def used(policy: str) -> Any:
    """A state that rounds and launches have changed, as host arrays."""
    control = controller(policy)
    state, _ = drive(control, control.init(made_up()), [{"accept": 0.7}] * 12)
    return control.end_chunk(jax.tree.map(np.asarray, state), record(
        14.0, rounds=12, row_rounds=96, committed=150, draft_rounds=12, last=True))[0]


@pytest.mark.parametrize("policy", NEED_COSTS)
def test_state_survives_a_checkpoint_bit_for_bit(policy: str, tmp_path: Path) -> None:
    host = jax.tree.map(np.asarray, used(policy))
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, {"control": host}, {})
        _, arrays, _ = checkpoints.restore_latest({"control": host}) or pytest.fail("no checkpoint")
    assert jax.tree.structure(arrays["control"]) == jax.tree.structure(host)
    for before, after in zip(*map(jax.tree.leaves, (host, arrays["control"])), strict=True):
        assert before.dtype == after.dtype and before.tobytes() == after.tobytes()
    first, second = (drive(controller(policy), s, [{"accept": 0.4}] * 3)
                     for s in (host, arrays["control"]))
    for a, b in zip(*map(jax.tree.leaves, (first[0], second[0])), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ["off", "fixed", *NEED_COSTS])
@pytest.mark.parametrize("seed", range(3))
def test_no_choice_leaves_the_bounds(policy: str, seed: int) -> None:
    """Whatever rounds cost, rows are left with and launches have taught, beyond all tables too."""
    control, rng, ladder = controller(policy), np.random.default_rng(seed), BUCKETS[8]
    plan = alone(control.plan)
    prune = alone(lambda s, plan, of, tree: control.prune(s, plan, of, tree, ladder))
    state, drafting = control.init(None), 0
    for turn in range(40):
        if turn % 8 == 7 and policy in NEED_COSTS:
            state = control.init(made_up(*rng.exponential((0.2, 0.05, 0.2, 0.01))))
            state, _ = drive(control, state, [{"accept": rng.random()}] * 12)
            state, _ = control.end_chunk(jax.tree.map(np.asarray, state), record(
                float(rng.exponential(10.0)), row_rounds=96, committed=100, draft_rounds=12))
        alive = rng.random(8) < rng.random()
        of = load(live=alive, length=int(rng.integers(1, 2 * LONGEST)),
                  left=rng.choice([0.0, 1.0, 30.0, 1e4]), room=rng.integers(1, 12, 8),
                  waiting=int(rng.integers(2)))
        planned = plan(state, of)
        spec = planned.spec
        assert 0 <= int(spec.depth) <= DEPTH and 0 <= int(spec.branch) <= 1
        assert 0 <= int(spec.nodes) <= NODES and int(planned.valid_for) >= 1
        tree = chains(np.cumprod(rng.random((8, DEPTH)), 1), alive, int(spec.depth))
        kept, bucket = (np.asarray(a) for a in prune(state, planned, of, tree))
        assert 0 <= bucket < len(ladder) and kept.sum() <= ladder[bucket].packed
        assert kept.sum(1).max() <= ladder[bucket].nodes
        assert not (kept & ~np.asarray(tree.live)).any()
        np.testing.assert_array_equal(kept[:, 0], alive)
        drafting += int(spec.depth) > 0
    assert drafting > 0 or policy == "off"


def profiled(costs: Any) -> Any:
    """The state after one launch of each setting."""
    control = controller("respec")
    state, plan = control.init(costs), alone(control.plan)
    for i, setting in enumerate(SETTINGS):
        spec = plan(state, load()).spec
        assert (int(spec.depth), int(spec.branch), int(spec.nodes)) == setting
        state, _ = control.end_chunk(state, record(
            committed=80 * TOKENS[i], row_rounds=80, rounds=10, draft_rounds=10))
    assert int(state.setting) == respec.OFF
    return state


def test_respec_takes_the_best_setting_for_its_rows() -> None:
    state, plan = profiled(made_up(wide=0.3, step=0.1)), alone(controller("respec").plan)
    gain = [TOKENS[i] / (1 + 0.3 * np.log2(w / 8) + 0.1 * s)
            for i, ((s, _, _), w) in enumerate(zip(SETTINGS, (16, 32, 32), strict=True))]
    assert int(plan(state, load()).spec.depth) == SETTINGS[int(np.argmax(gain))][0]
    assert int(plan(profiled(made_up(wide=3.0, step=0.5)), load()).spec.depth) == 0
    assert int(plan(state, load(64)).spec.depth) == 0
