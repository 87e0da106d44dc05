"""What the adaptive policies share, and the choices of respec, oracle and bandit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import (
    ACCEPT,
    ADAPTIVE,
    DEPTH,
    LADDERS,
    LONGEST,
    NODES,
    alone,
    chains,
    controller,
    drive,
    load,
    priced,
)

from specrl_jax.config import Config, ConfigError, ControlConfig, RolloutConfig, SpecOptions
from specrl_jax.control import adaptive, bandit, protocol, registry, respec
from specrl_jax.control.adaptive import FREE, HOLD, SUMS
from specrl_jax.control.harvest import trust
from specrl_jax.control.protocol import Outcome
from specrl_jax.io.checkpoint import Checkpoints

SIZE = len(SUMS) + 4  # of sums: seconds of three buckets and drafts come after the named ones
SETTINGS = respec.settings_of((), DEPTH, 1, NODES)


def launch(seconds: float = 1.0, batch: int = 8, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "seconds": seconds, "predicted_seconds": seconds} | more


def used(policy: str) -> Any:
    """A state that rounds, launches and a rollout have changed."""
    control = controller(policy)
    state, _ = drive(control, control.begin(priced(control.init()), 40), [{"accept": 0.7}] * 12)
    state = jax.tree.map(np.asarray, state)
    record = launch(14.0)
    record |= control.explain(state, record)
    return control.end(control.update(state, record), [record], []), record


def explained(control: Any, state: Any, took: float, foreseen: float = 5.0, **more: Any) -> Any:
    """The state after a launch of which a narrow bucket and drafts were to take `foreseen`."""
    sums = np.zeros(SIZE, np.float32)
    sums[[len(SUMS), -1]] = 0.6 * foreseen, 0.4 * foreseen
    state, record = state.replace(sums=sums), launch(took)
    return control.update(state, record | control.explain(state, record) | more)


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_the_state_survives_a_checkpoint_bit_for_bit(policy: str, tmp_path: Path) -> None:
    state, _ = used(policy)
    host = jax.tree.map(np.asarray, state)
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, {"control": host}, {})
        _, arrays, _ = checkpoints.restore(1, {"control": host})
    assert jax.tree.structure(arrays["control"]) == jax.tree.structure(host)
    for before, after in zip(*map(jax.tree.leaves, (host, arrays["control"])), strict=True):
        assert before.dtype == after.dtype and before.tobytes() == after.tobytes()
    control = controller(policy)
    rounds = [{"accept": 0.4}] * 3
    first, second = (drive(control, s, rounds) for s in (host, arrays["control"]))
    for a, b in zip(*map(jax.tree.leaves, (first[0], second[0])), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_shapes_of_a_state_never_change(policy: str) -> None:
    state, _ = used(policy)
    like = controller(policy).init()
    for a, b in zip(*map(jax.tree.leaves, (like, state)), strict=True):
        assert np.shape(a) == np.shape(b) and np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize("policy", ["off", "fixed", *ADAPTIVE])
@pytest.mark.parametrize("seed", range(3))
def test_no_choice_leaves_the_bounds(policy: str, seed: int) -> None:
    """Whatever rounds cost, rows are left with and launches have taught, beyond all tables too."""
    control, rng, ladder = controller(policy), np.random.default_rng(seed), LADDERS[8]
    plan, keep = alone(control.plan), alone(lambda s, of, spec, tree: control.keep(
        s, of, spec, tree, ladder))
    state, drafting = control.init(), 0
    for turn in range(40):
        if control.adaptive:
            state = priced(state, *rng.exponential((0.2, 0.05, 0.2, 0.01)))
        if control.adaptive and turn % 8 == 7:
            state = taught(control, state, rng)
        alive = rng.random(8) < rng.random()
        of = load(live=alive, length=int(rng.integers(1, 2 * LONGEST)),
                  left=rng.choice([0.0, 1.0, 30.0, 1e4]), room=rng.integers(1, 12, 8),
                  weight=rng.uniform(0, 3, 8))
        spec = plan(state, of)
        assert 0 <= int(spec.steps) <= DEPTH and 0 <= int(spec.branch) <= 1
        assert 0 <= int(spec.nodes) <= NODES
        tree = chains(np.cumprod(rng.random((8, DEPTH)), 1), alive, int(spec.steps))
        kept, bucket = (np.asarray(a) for a in keep(state, of, spec, tree))
        assert 0 <= bucket < len(ladder) and kept.sum() <= ladder[bucket].packed
        assert kept.sum(1).max() <= ladder[bucket].nodes
        assert not (kept & ~np.asarray(tree.live)).any()
        np.testing.assert_array_equal(kept[:, 0], alive)
        drafting += int(spec.steps) > 0
    assert drafting > 0 or policy == "off"


def taught(control: Any, state: Any, rng: np.random.Generator) -> Any:
    """The state after some rounds, whose launch took any time, and the end of a rollout."""
    state, _ = drive(control, control.begin(state, 40), [{"accept": rng.random()}] * 12)
    state = jax.tree.map(np.asarray, state)
    record = launch(float(rng.exponential(10.0)))
    record |= control.explain(state, record)
    return control.end(control.update(state, record), [record], [])


def test_a_launch_is_explained_by_its_rounds() -> None:
    control = controller("budget")
    state = priced(control.init(), wide=0.1, step=0.0)
    state, seen = drive(control, state, [{"accept": 0.9}] * 10)
    told = control.explain(jax.tree.map(np.asarray, state), launch(12.0))
    buckets = [bucket for _, bucket, *_ in seen]
    seconds = sum(1 + 0.1 * bucket for bucket in buckets)
    assert told["launch_rounds"] == 10 and told["live"] == 8 and told["context"] == 40
    assert told["predicted_seconds"] == pytest.approx(seconds, rel=1e-4)
    assert told["spent_seconds"] == pytest.approx(seconds - 10, abs=1e-3)
    assert told["off_seconds"] == pytest.approx(told["tokens"] / 8, rel=1e-4)
    assert told["steps"] == pytest.approx(np.mean([steps for steps, *_ in seen]))
    assert told["width"] == pytest.approx(np.mean([(8, 16, 32)[b] for b in buckets]))
    assert told["fixed_seconds"] <= told["off_seconds"] and 1 <= told["fixed_steps"] <= DEPTH
    assert told["spent"] == pytest.approx(
        [*((1 + 0.1 * b) * buckets.count(b) for b in range(3)), 0.0], rel=1e-4)
    assert all(np.isfinite(v).all() for v in told.values())
    after = control.start(control.update(jax.tree.map(np.asarray, state), launch(12.0)))
    assert not after.sums.any() and not after.by_depth.any() and len(after.sums) == SIZE


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_plain_rounds_are_accounted_for_at_once_as_one_by_one(policy: str) -> None:
    control = controller(policy, hysteresis=100.0)
    state, _ = drive(control, priced(control.init(), far=0.3, catch_up=0.2), [{"accept": 0.9}] * 6)
    tree = chains(np.zeros((8, DEPTH)), live=np.zeros(8, bool))

    def told(state: Any, of: Any, rounds: Any) -> Any:
        plain = protocol.make_spec(0, 1, 1, 0)
        return control.note(state, Outcome(of, plain, tree, tree.live, jnp.int32(0),
                                           rounds * of.live, rounds))

    note, live = alone(told), np.arange(8) < 5
    before = np.asarray(state.sums)[SUMS.index("tokens")]
    at_once = note(state, load(length=40, live=live), np.int32(7))
    for i in range(7):
        state = note(state, load(length=40 + i, live=live), np.int32(1))
    for a, b in zip(*map(jax.tree.leaves, (at_once, state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    assert np.asarray(at_once.sums)[SUMS.index("tokens")] == before + 7 * 5


@pytest.mark.parametrize("clock,factor", [("measured", 2.0), ("frozen", 1.0)])
def test_whole_launches_correct_the_table_unless_the_clock_is_frozen(
        clock: str, factor: float) -> None:
    control = controller("budget", clock=clock)
    state = priced(control.init())
    for _ in range(30):
        state = explained(control, state, 10.0)
    assert float(state.factor) == pytest.approx(factor, rel=0.02)
    stall = explained(control, state, 1e6)
    assert float(stall.factor) <= 2 * factor, "one stall says little"


def test_forced_settings_are_what_is_measured() -> None:
    control = controller("budget")
    state = priced(control.init())
    for steps, bucket in ((1, 2), (3, 0), (DEPTH, 1)):
        forced = state.replace(force=np.asarray([steps, bucket], np.int32))
        _, seen = drive(control, forced, [{"accept": 0.9}])
        assert seen[0][:3] == (steps, bucket, 8)
    plain = state.replace(force=np.asarray([0, 0], np.int32))
    assert len(drive(control, plain, [{"accept": 0.9}])[1]) == 1
    assert alone(control.hold)(plain, load()) == HOLD, "as plain rounds of rollouts are held"
    whole = state.replace(force=np.asarray([2, FREE], np.int32))
    assert drive(control, whole, [{"accept": 0.9}])[1][0][:3] == (2, 2, 24)


def test_what_drafts_gave_is_found_again() -> None:
    control = controller("budget", explore=0.0)
    state = priced(control.init(), wide=0.0, step=0.0)
    state, _ = drive(control, state, [{"accept": 0.8}] * 60)
    mass = np.asarray(state.harvest.mass).sum(1)
    np.testing.assert_allclose(mass[:3], 0.8 ** np.arange(1, 4), rtol=0.02)
    assert 0.7 < float(trust(state.harvest)) < 1.3


def test_drafts_that_promise_too_much_lose_their_credit() -> None:
    control = controller("budget", explore=0.0)
    state = priced(control.init(), wide=0.0, step=0.0)
    step = control.note

    @alone
    def lying(state: Any, of: Any, tree: Any, live: Any) -> Any:
        spec = control.plan(state, of)
        return step(state, Outcome(of, spec, tree, live, jnp.int32(1), jnp.ones(8, jnp.int32),
                                   jnp.int32(1)))

    tree = chains(np.full((8, DEPTH), 0.9))
    for _ in range(20):
        state = lying(state, load(), tree, tree.live)
    assert float(trust(state.harvest)) < 0.1


# Weights.


def test_rows_that_run_long_weigh_more_where_small_batches_are_hardly_faster() -> None:
    state = controller("budget").init()
    flat, steep = (state.replace(tables={rows: t.replace(
        verify=np.full_like(t.verify, 1 + slope * int(rows))) for rows, t in state.tables.items()})
        for slope in (0.0, 1e3))
    left = np.asarray([5, 90, 20, 40], np.float32)
    heavy, even = (adaptive.weigh(s, 1.0, left) for s in (flat, steep))
    # The smallest batch has two rows, so a round of two takes as long as one of four.
    np.testing.assert_allclose(heavy, [0, 2, 0, 2], atol=1e-6)
    np.testing.assert_allclose(even, 1, atol=0.35)
    np.testing.assert_array_equal(adaptive.weigh(flat, 0.0, left), 1)
    np.testing.assert_array_equal(adaptive.weigh(state, 1.0, left), 1)  # nothing measured yet
    ties = np.asarray([20, 90, 20, 20], np.float32)  # any of the three may end last of them
    np.testing.assert_allclose(adaptive.weigh(flat, 1.0, ties), [2 / 3, 2, 2 / 3, 2 / 3], atol=1e-6)


# respec, oracle, bandit.


def test_respec_profiles_each_setting_once_and_takes_the_best_for_its_rows() -> None:
    control = controller("respec")
    state = priced(control.init(), wide=0.3, step=0.1)
    plan = alone(control.plan)
    for arm, setting in enumerate(SETTINGS):
        spec = plan(state, load())
        assert (int(spec.steps), int(spec.branch), int(spec.nodes)) == setting
        state = control.update(state, launch(
            1.0, tokens=80 * ACCEPT[arm], drafting=1.0, live=8.0, launch_rounds=10.0))
    assert int(state.own.arm) == FREE
    gain = [ACCEPT[i] / (1 + 0.3 * np.log2(w / 8) + 0.1 * s)
            for i, ((s, _, _), w) in enumerate(zip(SETTINGS, (16, 32, 32), strict=True))]
    assert int(plan(state, load()).steps) == SETTINGS[int(np.argmax(gain))][0]
    dear = priced(state, wide=3.0, step=0.5)
    assert int(plan(dear, load()).steps) == 0, "no gain above 1: off"
    assert int(plan(state, load(64)).steps) == 0


def test_a_launch_that_could_not_draft_is_no_profile() -> None:
    control = controller("respec")
    assert int(alone(control.plan)(control.init(), load(64)).steps) == 0  # one bucket, of roots
    state = control.update(control.init(), launch(1.0, tokens=9.0, drafting=0.0, live=8.0,
                                                  launch_rounds=10.0))
    assert int(state.own.arm) == 0


def test_the_oracle_goes_by_rows_and_context() -> None:
    control = controller("oracle")
    plan = alone(control.plan)
    state = priced(control.init(), wide=0.1, step=0.01, far=2.0)
    assert int(plan(state, load(length=10)).steps) > 0
    assert int(plan(state, load(length=LONGEST)).steps) == 0
    with pytest.raises(ConfigError, match="control.accept"):
        controller("oracle", accept=(1.5,))


def test_what_settings_were_timed_at_comes_before_the_oracles_tables() -> None:
    plan, state = alone(controller("oracle").plan), priced(controller("oracle").init(), wide=3.0)
    assert int(plan(state, load()).steps) == 0  # by the tables
    gain = np.array(state.own.gain)
    assert gain.shape == (len(LADDERS), len(SETTINGS)) and np.isnan(gain).all()
    gain[sorted(LADDERS).index(8)] = 0.9, 1.1, 1.05
    state = state.replace(own=state.own.replace(gain=gain))
    assert int(plan(state, load(8)).steps) == SETTINGS[1][0]
    assert int(plan(state, load(2)).steps) == 0 and int(plan(state, load(64)).steps) == 0


def test_the_bandit_tries_all_arms_and_settles_on_the_best() -> None:
    control = controller("bandit", epsilon=0.0, window=4)
    state, speed = control.init(), [5.0, 7.0, 9.0, 6.0]
    plan, chosen = alone(control.plan), []
    for _ in range(12):
        arm = int(state.own.arm["8"])
        chosen.append(int(plan(state, load()).steps))
        state = control.update(state, launch(1.0, tokens=speed[arm]))
    depths = [0, *(s for s, _, _ in SETTINGS)]
    assert chosen[:4] == depths and set(chosen[4:]) == {depths[2]}
    assert int(state.own.arm["2"]) == 0  # another load, another arm
    state = state.replace(own=state.own.replace(
        reward=state.own.reward | {"8": state.own.reward["8"] * 0}))
    for _ in range(4):  # what was best becomes worst, and its window forgets
        arm = int(state.own.arm["8"])
        state = control.update(state, launch(1.0, tokens=[5.0, 7.0, 1.0, 6.0][arm]))
    assert int(plan(state, load()).steps) != depths[2]


def test_the_bandit_explores_as_often_as_it_is_told() -> None:
    reward, tries = np.asarray([[1.0], [5.0], [2.0]]), np.ones(3, np.int32)
    picks = [bandit.next_arm(reward, tries, 0.3, np.random.default_rng([0, i]))
             for i in range(600)]
    assert 0.14 < np.mean([p != 1 for p in picks]) < 0.26  # two thirds of 0.3
    assert bandit.next_arm(reward, np.asarray([1, 0, 1]), 0.0, np.random.default_rng(0)) == 1


def test_rewards_of_a_frozen_clock_come_from_the_table() -> None:
    control = controller("bandit", clock="frozen")
    rewards = []
    for seconds in (1.0, 50.0):
        state = explained(control, control.init(), seconds, 2.0, tokens=8.0)
        rewards.append(float(state.own.reward["8"][0, 0]))
    assert rewards == [4.0, 4.0]


# Names and settings.


def test_settings_are_a_ladder_or_what_is_named() -> None:
    assert SETTINGS == [(1, 1, 2), (2, 1, 3), (4, 1, 5)]
    assert respec.settings_of((), 3, 2, 5) == [(1, 1, 2), (2, 1, 3), (3, 1, 4), (1, 2, 3),
                                               (2, 2, 5), (3, 2, 5)]
    assert respec.settings_of(("2x1x3",), DEPTH, 1, NODES) == [(2, 1, 3)]


@pytest.mark.parametrize("changes,names", [
    ({"policy": "best"}, "control.policy"), ({"clock": "wall"}, "control.clock"),
    ({"settings": ("4x1",)}, "control.settings"), ({"settings": ("0x1x2",)}, "control.settings"),
    ({"epsilon": 1.5}, "control.epsilon"), ({"explore": -0.1}, "control.explore"),
    ({"length_weight": 2.0}, "control.length_weight"), ({"hysteresis": -1.0}, "control.hysteresis"),
    ({"window": 0}, "control.window"), ({"audit": -1}, "control.audit"),
    ({"audit": 4, "policy": "fixed"}, "control.audit"), ({"policy": "oracle"}, "control.accept"),
    ({"policy": "oracle", "accept": (0.5,)}, "control.accept"),
    ({"policy": "oracle", "accept": (float("nan"),)}, "control.accept")])
def test_nonsense_is_refused_in_one_line(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as error:
        ControlConfig(**changes)
    assert "\n" not in str(error.value)


def test_settings_beyond_the_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="control.settings = '9x1x5'"):
        registry.make(ControlConfig(policy="respec", settings=("9x1x5",)), SpecOptions(),
                    ladders=LADDERS)


def test_every_policy_by_its_name() -> None:
    for policy in ("off", "fixed", *ADAPTIVE):
        assert controller(policy).adaptive == (policy in ADAPTIVE)
    assert Config(rollout=RolloutConfig()).control.policy == "budget"


def lagging(state: Any, lag: float) -> Any:
    return state.replace(lag=state.lag | {"8": np.float32(lag)})


def ran(batch: int, rounds: float, tokens: float, live: float, drafting: float = 1.0,
        context: float = 40.0) -> dict[str, Any]:
    """A launch as the trace has it, of which no price is learned."""
    return dict(batch=batch, launch_rounds=rounds, tokens=tokens, live=live, drafting=drafting,
                context=context, seconds=0.0, spent=np.zeros(len(LADDERS[batch]) + 1))


@pytest.mark.parametrize("accept, drafting", [(0.9, 1.0), (0.0, 0.0)])
def test_drafts_are_said_to_give_less_by_what_they_let_rows_lag(
        accept: float, drafting: float) -> None:
    """Of launches that drafted, off would have taken less; of the others, a draft more."""
    control = controller("budget", explore=0.0)
    start = priced(control.init(), step=0.0) if drafting else priced(control.init(), wide=9.0)
    state, _ = drive(control, start, [{"accept": accept}] * 10)
    state = jax.tree.map(np.asarray, state)
    told, late = (control.explain(s, launch(12.0)) for s in (state, lagging(state, 1.25)))
    assert told["drafting"] == drafting and (told["lag"], late["lag"]) == (1, 1.25)
    assert late["off_seconds"] == pytest.approx(told["off_seconds"] / (1 + 0.25 * drafting))
    assert late["predicted_seconds"] == told["predicted_seconds"]
    rate = state.by_depth[1] / state.by_depth[0] * ([1 + 0.25 * drafting] + DEPTH * [
        1 / (1 + 0.25 * (1 - drafting))])
    assert late["fixed_seconds"] == pytest.approx(told["tokens"] / rate.max(), rel=1e-4)


def test_drafts_of_few_rows_are_priced_by_a_bucket_that_holds_them() -> None:
    """Those of a single row of 8 are no more tokens than plain decoding packs, for roots alone."""
    control, alone_in = controller("budget", explore=0.0), np.arange(8) == 0
    state, _ = drive(control, priced(control.init(), wide=0.5, step=0.0),
                     [{"accept": 0.9, "live": alone_in}] * 4)
    np.testing.assert_allclose(state.by_depth[0], [4.0, *DEPTH * [6.0]], rtol=1e-6)
    gain = respec.gains(np.asarray([[1, 1, 2], [4, 1, 5]]), np.asarray([1.2, 1.8]),
                        jax.tree.map(jnp.asarray, state.tables["8"]), jnp.float32(40),
                        jnp.float32(1))
    np.testing.assert_allclose(gain, [0.8, 1.2], rtol=1e-6)


def test_drafts_that_let_rows_lag_are_worth_less() -> None:
    """8 rows of 10 tokens end together after 10 plain rounds. Drafts gave 76 of these tokens in
    rounds of 8 rows, worth 9.5 plain ones, and 4 in one of a single row of 2, worth 4."""
    control = controller("budget")
    state = priced(control.init())
    trace = [ran(8, 4, 76, 8.0), ran(2, 2, 4, 1.0)]
    ended = control.end(state, trace, [(8, 10, 40.0)])
    assert ended.lag["8"] == ended.lag["2"] == pytest.approx(1 + 0.5 * (13.5 / 10 - 1))
    assert ended.lag["64"] == 1
    again = control.end(ended, trace, [(8, 10, 40.0)])
    assert again.lag["8"] == pytest.approx(1 + 0.75 * 0.35)
    worst = control.end(state, trace, [(8, 1, 40.0)])
    assert worst.lag["8"] == 1.5, "twice at most"


def test_a_lag_is_that_of_launches_that_drafted_and_fades_without() -> None:
    """10 plain rounds of 8 rows, then 2 rows that drafts bring to the end as one round late."""
    control = controller("budget")
    state = lagging(priced(control.init()), 1.5)
    trace = [ran(8, 10, 80, 8.0, 0.0), ran(2, 4, 20, 2.0), ran(2, 1, 1, 1.0)]
    ended = control.end(state, trace, [(8, 10, 40.0), (2, 10, 40.0)])
    assert ended.lag["8"] == pytest.approx(1 + 0.98 * 0.5)
    assert ended.lag["2"] == pytest.approx(1 + 0.5 * 0.1)
    quicker = control.end(state, trace, [(8, 10, 40.0), (2, 12, 40.0)])
    assert quicker.lag["2"] == 1, "rows that drafts bring to the end together are no reason"
    for stretches in ([(8, 10, 40.0)], []):  # nothing is left, or less
        assert control.end(state, trace, stretches).lag["2"] == 1
    few = [ran(8, 40, 320, 8.0, 0.0), *trace[1:]]
    assert control.end(state, few, [(8, 40, 40.0), (2, 10, 40.0)]).lag["2"] == 1
    assert control.end(state, [], []).lag["8"] == pytest.approx(1 + 0.98 * 0.5)


def test_of_a_launch_of_both_kinds_drafts_gave_what_plain_rounds_did_not() -> None:
    """8 drafted rounds of 4 tokens a row and 24 plain ones, worth 56 plain ones; it takes 40."""
    control = controller("budget")
    ended = control.end(priced(control.init()), [ran(8, 32, 448, 8.0, 0.25)], [(8, 40, 40.0)])
    assert ended.lag["8"] == pytest.approx(1 + 0.5 * (32 / 16 - 1))


def test_rounds_are_weighed_by_what_plain_ones_take_at_their_context() -> None:
    control = controller("budget")
    state = priced(control.init())
    grid = state.tables["8"].context
    tables = {rows: table.replace(verify=np.concatenate(
        [table.verify[:1] * (1 + table.context / grid[-1]).astype(np.float32), table.verify[1:]]))
        for rows, table in state.tables.items()}
    middle = float(grid[1] + grid[2]) / 2
    ended = control.end(state.replace(tables=tables), [ran(8, 4, 120, 8.0, context=middle)],
                        [(8, 10, float(grid[0]))])
    prices = [1 + at / float(grid[-1]) for at in (middle, float(grid[0]))]
    assert ended.lag["8"] == pytest.approx(
        1 + 0.5 * (min(15 * prices[0] / (10 * prices[1]), 2) - 1), rel=1e-4)


def test_what_lags_is_not_drafted_where_it_would_pay_but_for_that() -> None:
    control = controller("budget")
    state = priced(control.init(), wide=0.2, step=0.05)
    drafted, seen = drive(control, state, [{"accept": 0.6}] * 20)
    assert all(steps > 0 for steps, *_ in seen[-10:])
    late = lagging(state.replace(harvest=jax.tree.map(np.asarray, drafted.harvest)), 1.6)
    _, seen = drive(control, late, [{"accept": 0.6}] * 20)
    assert sum(steps > 0 for steps, *_ in seen) <= 4, "only looking again may draft"
