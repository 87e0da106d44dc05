"""Rollouts in passes of rollout.quota tokens: what trains, and when, depends on tokens alone."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from helpers import Stepping, micro_config, micro_trainer_to_compile, stepping, with_fields

from specrl_jax.checkpoint.checkpoints import Checkpoints
from specrl_jax.config import Config, ConfigError, RewardConfig
from specrl_jax.rl.algorithm import check_training
from specrl_jax.rl.experience import Rewarded, keys_of
from specrl_jax.rl.programs import blank_rollout
from specrl_jax.rollout import requests
from specrl_jax.structs import Rollout
from specrl_jax.training import passes
from specrl_jax.training.saving import restore, to_save

QUOTA = dict(rollout__quota=2, rollout__in_flight=24, rollout__max_new_tokens=16,
             rollout__temperature=3.0,
             model__numerics="invariant",
             reward=RewardConfig(terms=("helpers:even",)))
STEPS = 5


def made(config: Config) -> Stepping:
    """A trainer whose numerics can be invariant, and whose responses differ in length."""
    return stepping(config, head_dim=16, stop=range(0, 512, 8))


def steps_of(trainer: Stepping, count: int = STEPS) -> list[Any]:
    """What each step trained on: keys, tokens, versions and rewards."""
    out = []
    for _ in range(count):
        _, samples = trainer.step()
        out.append([((s["birth"], s["prompt_id"], s["occurrence"], s["sample_id"]), s["tokens"],
                     s["versions"], s["reward"]) for s in samples])
    return out


def assert_same_weights(left: Stepping, right: Stepping) -> None:
    jax.tree.map(np.testing.assert_array_equal, left.params, right.params)


@pytest.fixture(scope="module")
def plain() -> tuple[Stepping, list[Any]]:
    trainer = made(micro_config(**QUOTA, spec__drafter="off"))
    return trainer, steps_of(trainer)


@pytest.mark.ci
@pytest.mark.parametrize("changes", [
    {}, {"rollout__batch_size": 24, "rollout__rounds_per_launch": 2}, {"spec__drafter": "eagle"}])
def test_drafts_and_slots_change_nothing_that_trains(plain: Any, changes: Any) -> None:
    whole, steps = plain
    assert len({s[3] for step in steps for s in step}) > 1, "nothing is learned"
    trainer = made(micro_config(**QUOTA | changes))
    assert steps_of(trainer) == steps
    assert_same_weights(whole, trainer)


@pytest.mark.ci
def test_groups_span_steps_and_have_tokens_of_several_versions(plain: Any) -> None:
    _, steps = plain
    versions = [sample[2] for step in steps for sample in step]
    assert max(len(one) for one in versions) >= 3
    for number, step in enumerate(steps):
        assert [key for key, *_ in step] == sorted(key for key, *_ in step)
        assert len(step) == 16 and all(key[0] <= number for key, *_ in step)
        for _, tokens, spans, _ in step:
            assert all(version <= number for version, _ in spans)
            assert sum(count for _, count in spans) == len(tokens)


@pytest.mark.ci
def test_a_cut_by_rounds_would_be_noticed(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that ends after as many rounds, so that drafts get more tokens into it."""
    _, steps = plain
    trainer = made(micro_config(**QUOTA))
    extend = trainer.sampler.extend

    def by_rounds(rollout: Rollout, *args: Any, limit: Any = None, **options: Any) -> Any:
        rounds = []
        return extend(rollout, *args, **options, limit=np.full_like(rollout.length, 99),
                      on_chunk=lambda *seen: rounds.append(seen) is None and len(rounds) == 3)

    monkeypatch.setattr(trainer.sampler, "config", with_fields(
        trainer.config, rollout__rounds_per_launch=1))
    monkeypatch.setattr(trainer.sampler, "extend", by_rounds)
    assert steps_of(trainer) != steps


@pytest.mark.ci
def test_a_quota_of_whole_responses_equals_no_quota() -> None:
    config = micro_config(model__numerics="invariant",
                          reward=RewardConfig(terms=("helpers:even",)))
    one = made(config)
    other = made(with_fields(config, rollout__quota=8, rollout__in_flight=8))
    for _ in range(2):
        (was, samples), (now, same) = one.step(), other.step()
        assert samples == [{k: v for k, v in s.items() if k not in ("birth", "versions")}
                           for s in same]
        for name in ("loss", "grad_norm", "policy/ess", "rollout/tokens", "rollout/logprob_gap"):
            assert was[name] == now[name], name
    assert_same_weights(one, other)


@pytest.mark.ci
def test_a_resumed_run_goes_on_with_what_was_in_flight(plain: Any, tmp_path: Any) -> None:
    whole, steps = plain
    trainer = made(micro_config(**QUOTA))
    steps_of(trainer, 2)
    assert len(trainer.state.in_flight.length) == 2 * (24 - 8)
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(2, *to_save(trainer.trainer, trainer.state))
    with Checkpoints(tmp_path, 1) as checkpoints:
        fresh = made(trainer.config)
        fresh.state = restore(fresh.trainer, fresh.state, checkpoints)
    assert steps_of(fresh, STEPS - 2) == steps[2:]
    assert_same_weights(whole, fresh)


def flight_of(config: Config, lengths: Any, births: Any = None) -> Rollout:
    """Groups in flight whose sequences have tokens of version 0; a group's id is its place."""
    size, lengths = config.responses, np.asarray(lengths, np.int32)
    groups = len(lengths) // size
    ids = np.repeat(np.arange(groups, dtype=np.int32), size)
    blank = jax.tree.map(lambda a: np.zeros((len(ids), *a.shape[1:]), a.dtype),
                         blank_rollout(config))
    return blank.replace(length=lengths, prompt_id=ids, prompt_length=ids * 0 + 1,
                         sample_id=np.tile(np.arange(size, dtype=np.int32), groups),
                         birth=ids * 0 if births is None else np.repeat(births, size))


def rewarding(config: Config, useful: Callable[[int], bool]) -> Any:
    """A reward that gives the groups an advantage for which `useful` is true of their ids."""
    def reward(rollout: Rollout) -> Rewarded:
        advantage = np.asarray([useful(int(i)) for i in rollout.prompt_id], np.float32)
        return Rewarded(rollout, types.SimpleNamespace(), [], advantage, None, advantage, {})

    return reward


@pytest.mark.parametrize(("lengths", "filtered", "trained", "passed"), [
    # Groups of two; a pass adds 3 tokens, 8 complete a response.
    ([0, 0, 0, 0, 0, 0], "none", [0, 1], 3),  # ties: the first prompts
    ([0, 0, 5, 6, 7, 7], "none", [1, 2], 1),
    ([8, 8, 8, 8, 0, 0], "none", [0, 1], 1),  # complete before, yet others gain a pass
    ([2, 8, 4, 4, 5, 5], "none", [0, 1], 2),  # 2 completes first, but two are needed
    ([0, 0, 5, 6, 7, 7], "dynamic", [1, 2, 0], 3)])  # 1 has no advantage
def test_which_groups_train(lengths: Any, filtered: str, trained: list[int], passed: int) -> None:
    config = micro_config(prompts_per_step=2, rollout__quota=3, rollout__in_flight=8,
                          learner__micro_batch=4, rl__filter=filtered)
    ran = []

    def extend(flight: Rollout) -> Rollout:
        ran.append(flight)
        return flight.replace(length=np.minimum(flight.length + 3, 8))

    left, rewarded = passes.collect(config, flight_of(config, lengths), extend,
                                    rewarding(config, lambda i: i != 1))
    got = [key[1] for one in rewarded for key in keys_of(one.rollout, 2)]
    assert got == trained and len(ran) == passed
    assert sorted(got + [key[1] for key in keys_of(left, 2)]) == [0, 1, 2]


def test_age_of_what_trains() -> None:
    config = micro_config()
    flight = flight_of(config, [4, 2])
    flight = flight.replace(version=flight.version + np.asarray([[3, 3, 4, 5] + [0] * 4,
                                                                [5] * 8], np.int32))
    found = passes.metrics(flight, flight, version=5, passes=2)
    assert found == {"rollout/passes": 2, "rollout/in_flight": 2, "stale/mean": 5 / 6,
                     "stale/worst": 2, "stale/partial": 0.5}


def test_padding_of_groups_in_flight_is_undone() -> None:
    config = micro_config()
    for lengths in ([4, 2], []):
        flight = flight_of(config, lengths)
        padded = passes.pad(flight, 6)
        assert len(padded.length) == 6
        jax.tree.map(np.testing.assert_array_equal, passes.unpad(padded), flight)


@pytest.mark.parametrize(("work", "count", "shards", "expected"), [
    ([1, 1, 1, 1], 4, 2, [0, 1, 2, 3]),
    ([0, 1, 0, 1, 1], 6, 2, [1, 3, 0, 4, 2, -1]),
    ([0, 0, 1], 4, 2, [2, 0, 1, -1]),
    ([1], 4, 4, [0, -1, -1, -1])])
def test_places_spread_the_work_over_shards(work: Any, count: int, shards: int, expected: Any
                                            ) -> None:
    assert requests.places(np.asarray(work, bool), count, shards).tolist() == expected


@pytest.mark.parametrize(("changes", "named"), [
    (dict(rollout__quota=9), ("rollout.quota = 9", "rollout.max_new_tokens = 8")),
    (dict(rollout__quota=2, rollout__in_flight=7), ("rollout.in_flight = 7", "prompts_per_step")),
    (dict(rollout__quota=2, spec__rule="studies.lossy:GREEDY"), ("spec.rule", "rollout.quota")),
    (dict(rollout__quota=2, spec__rule="rejection"), ("spec.rule", "rollout.quota")),
    (dict(rollout__quota=2, spec__drafter="eagle", distill__when="verification"),
     ("distill.when", "rollout.quota")),
    (dict(rollout__quota=2, rollout__in_flight=16, rl__filter="dynamic"),
     ("rollout.in_flight = 16", "rl.filter")),
    (dict(rollout__quota=2, rl__filter="dynamic", rl__kl=0.1, rl__kl_in="reward",
          rl__kl_estimator="k1"), ("rl.kl_in", "rollout.quota"))])
def test_what_a_quota_cannot_do_is_refused(changes: Any, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        micro_trainer_to_compile(micro_config(**changes))
    assert all(name in str(error.value) for name in named), error.value


def test_no_correction_is_warned_of() -> None:
    lines: list[str] = []
    config = micro_config(**QUOTA)
    for correction, count in (("none", 1), ("truncated", 0)):
        lines.clear()
        check_training(dataclasses.replace(config, rl=dataclasses.replace(
            config.rl, correction=correction)), lines.append)
        assert sum("rl.correction" in line for line in lines) == count
