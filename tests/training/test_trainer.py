"""What a step says of its update, and its safety net: updates that are not finite."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Stepping, counting, micro_config, stepping, stepping_to_compile

from specrl_jax.checkpoint.checkpoints import Checkpoints, list_steps, restore_part
from specrl_jax.config import ControlConfig, LearnerConfig, RewardConfig, RLConfig
from specrl_jax.config.tasks import RewardError
from specrl_jax.control import acceptance
from specrl_jax.data.examples import Example
from specrl_jax.draft import response_cache
from specrl_jax.metrics import run_files
from specrl_jax.metrics.names import find
from specrl_jax.metrics.progress import Progress
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.host_view import judge
from specrl_jax.rollout.metrics import rollout_metrics
from specrl_jax.rollout.sampler import Sampler
from specrl_jax.runtime.compilation import CompilationCounter, Compiler
from specrl_jax.structs import Metrics, Rollout
from specrl_jax.training.run import Run, TrainingError, run_steps
from specrl_jax.training.saving import restore
from specrl_jax.training.state import TrainState


@pytest.mark.ci
def test_bad_updates_are_skipped_counted_and_stop_the_run(
        tmp_path, capsys) -> None:
    config = micro_config(
        steps=9, learner=LearnerConfig(micro_batch=16, max_bad_steps=3))
    trainer = stepping(config)
    norm = trainer.params["final_norm"]
    broken = trainer.params | {"final_norm": jnp.full_like(norm, jnp.nan)}
    trainer.state = trainer.state.replace(learner=trainer.state.learner.replace(params=broken))
    before = jax.tree.map(np.asarray, trainer.state.learner)
    with pytest.raises(TrainingError, match="max_bad_steps = 3"):
        run_in(tmp_path, trainer, first={"time/startup": 2.0})
    rows = run_files.read_metrics(tmp_path)
    assert [row.get("time/startup") for row in rows] == [2.0, None, None]
    assert config.spec.drafter == "history"
    assert all(np.isfinite(row["time/saved"]) for row in rows)
    assert [row["applied"] for row in rows] == [0.0, 0.0, 0.0]
    assert list_steps(tmp_path / "checkpoints") == [3]
    assert "not finite; skipped" in capsys.readouterr().err
    arrays = {name: restore_part(tmp_path / "checkpoints", 3, name)
              for name in ("actor", "optimizer")}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(before), jax.tree.leaves(
        (arrays["actor"], arrays["optimizer"])))


def run_in(workdir: Path, trainer: Stepping, first: Metrics | None = None) -> TrainState:
    """Runs all steps from a trainer's state, or from the workdir's newest checkpoint."""
    with Checkpoints(workdir / "checkpoints", 2) as checkpoints:
        if resumed := restore(trainer.trainer, trainer.state, checkpoints):
            trainer.state = resumed
        with run_files.Writer(workdir, trainer.state.step) as writer, Progress(
                trainer.config.steps, trainer.state.step) as progress:
            parts = Run(trainer.trainer, None, checkpoints, writer, progress,
                        CompilationCounter())
            list(run_steps(parts, trainer.state, first or {}))
        saved = restore(trainer.trainer, stepping_to_compile(trainer.config).state, checkpoints)
    assert saved is not None
    return saved


def made_up(trainer: Stepping, rng: np.random.Generator) -> Rollout:
    """A rollout of random tokens whose log-probabilities are all -5."""
    config = trainer.config
    q, t, p = config.sequences, config.rollout.max_new_tokens, config.rollout.max_prompt_tokens
    prompts = config.prompts_per_step
    ids = np.repeat(np.arange(prompts, dtype=np.int32), config.group_size)
    prompt = np.repeat(rng.integers(0, 256, (prompts, p)), config.group_size, 0).astype(np.int32)
    tokens, flat = rng.integers(0, 256, (q, t)).astype(np.int32), np.full((q, t), -5, np.float32)
    length = rng.integers(1, t + 1, q).astype(np.int32)
    return Rollout(prompt=prompt, prompt_length=np.full(q, p, np.int32), tokens=tokens,
                   length=length, logprob=flat, raw_logprob=flat, top_p_mass=flat, prompt_id=ids,
                   birth=ids * 0, occurrence=ids * 0, sample_id=ids * 0, stopped=ids > 0,
                   commits=tokens, rounds=ids, version=tokens * 0)


@pytest.mark.parametrize("updates", [0, 1])
def test_loss_and_gap_are_there_whatever_is_learned(
        monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """None of eight groups has an advantage, then one; a micro-batch holds two groups."""
    monkeypatch.setattr(Sampler, "compile", lambda *args: compile_alone(args[-1]))
    monkeypatch.setattr(Sampler, "find_costs", lambda self, inputs, *rest: inputs.speculation)
    trainer = stepping(micro_config(
        learner=LearnerConfig(learning_rate=1e-3, micro_batch=4),
        rl=RLConfig(updates=updates)))
    rollout = made_up(trainer, np.random.default_rng(0))
    for useful in ([], [5]):
        advantage, actual = np.zeros((8, 2), np.float32), {}
        advantage[useful] = [1, -1]
        before = jax.tree.map(np.asarray, trainer.params)
        assert counting(lambda a=advantage, out=actual: out.update(
            trainer.learn(rollout, a.reshape(-1)))) == 0
        lengths = rollout.length.reshape(8, 2)
        if updates:  # the groups with an advantage, or the first one
            assert actual["rollout/logprob_gap_tokens"] == lengths[useful or [0]].sum()
        assert lengths[0].sum() <= actual["rollout/logprob_gap_tokens"] < rollout.length.sum()
        assert 0 < actual["rollout/logprob_gap"] <= actual["rollout/logprob_gap_max"]
        assert actual["applied"] == 1
        jax.tree.map(np.testing.assert_array_equal, trainer.published, trainer.params)
        changed = bool(updates and useful)
        same = jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, trainer.params))
        assert (actual["loss"] != 0) == changed != all(jax.tree.leaves(same))


@pytest.mark.ci
def test_minibatches_are_optimiser_steps_over_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of two steps, a KL term, and then a run that goes on from its arrays."""
    monkeypatch.setattr(Sampler, "compile", lambda *args: compile_alone(args[-1]))
    monkeypatch.setattr(Sampler, "find_costs", lambda self, inputs, *rest: inputs.speculation)
    config = micro_config(rl=RLConfig(updates=2, minibatches=2, kl=0.1))
    trainer, rng = stepping(config), np.random.default_rng(0)
    first = [made_up(trainer, rng) for _ in range(2)]
    advantage = rng.standard_normal(16).astype(np.float32)
    sizes = []
    programs = trainer.policy._programs
    update = programs["update"]
    programs["update"] = lambda state, batch, *rest: (
        sizes.append(int(np.asarray(batch.length).sum())), update(state, batch, *rest))[1]
    assert counting(lambda: trainer.learn(first[0], advantage)) == 0
    halves = first[0].length.reshape(2, -1).sum(1).tolist()
    assert sizes == halves * 2
    other = stepping(config)
    other.policy.frozen = trainer.policy.frozen
    other.state = jax.tree.map(jnp.copy, trainer.state)
    left, right = (one.learn(first[1], advantage) for one in (trainer, other))
    for told in (left, right):
        assert told.pop("learn/tokens_per_second") > 0
    assert left == right and left["applied"] == 1 and left["policy/clip_fraction"] >= 0
    jax.tree.map(np.testing.assert_array_equal, trainer.state.learner, other.state.learner)


def compile_alone(others: Callable[[Compiler], None]) -> None:
    with Compiler() as compiler:
        others(compiler)


@pytest.mark.parametrize("rule", ["match", "studies.lossy:GREEDY"])
def test_lossy_rule_is_in_every_line_and_drafters_have_shares(rule: str) -> None:
    said, seen = np.ones((1, 2), np.float32), acceptance.blank(1, 1)
    fields = dict.fromkeys((f.name for f in dataclasses.fields(Rollout)), said)
    rollout = Rollout(**fields | {"length": np.full(1, 2)})
    counters = dict.fromkeys(("committed", "row_rounds", "rounds", "packed", "clamped", "broken",
                              "slots"), 1) | {"drafted": 8, "accepted": 0}
    result = Result(
        None, counters, 1.0, 0.1, [], rule=rule, calibration=judge(
            jax.tree.map(lambda a: a[None], seen), np.ones((1, 1, acceptance.BINS))),
        by_drafter={"eagle": {"drafted": 6, "accepted": 0},
                    "history": {"drafted": 2, "accepted": 0}})
    told, twice = (rollout_metrics(rollout, results, {}) for results in ([result], [result] * 2))
    assert twice["rollout/drafted"] == 16 == twice["draft/eagle/drafted"] + 4
    assert (twice["time/rollout"], twice["rollout/batches"]) == (2.0, 2)
    assert twice["draft/eagle/drafted_share"] == told["draft/eagle/drafted_share"]
    assert told["spec/lossy"] == float(rule != "match")
    assert told["draft/eagle/drafted_share"] == 0.75 and told["draft/history/drafted_share"] == 0.25
    assert told["draft/eagle/accepted_share"] == 0


class Held:
    """A checkpoint in memory."""

    def __init__(self, trainer: Stepping, *left_out: str) -> None:
        arrays, self.meta = trainer.saved()
        self.arrays = {name: jax.tree.map(np.array, a) for name, a in arrays.items()
                       if name not in left_out}

    def restore_latest(self, abstract: object, required: object = None) -> tuple:
        assert required or jax.tree.structure(abstract) == jax.tree.structure(self.arrays)
        return self.meta["step"], self.arrays, self.meta


def test_resumed_state_holds_all_that_was_saved() -> None:
    old, new = (stepping_to_compile(micro_config()) for _ in range(2))
    rng, state = np.random.default_rng(0), old.state
    rollout = made_up(old, rng)
    learner = jax.tree.map(lambda a: a + 1, state.learner)
    old.state = state.replace(
        step=7, bad_steps=2, learner=learner, policy=old.publish(learner, state.policy, 7),
        best={"step": 4, "accuracy": 0.5},
        prompts=jax.tree.map(lambda a: a + 1, state.prompts),
        speculation=state.speculation.replace(
            fresh=False, plain_round_seconds={4: 0.25},
            responses=response_cache.add(state.speculation.responses, rollout.prompt_id,
                                         rollout.tokens, rollout.length, 4),
            acceptance=jax.tree.map(lambda a: a + rng.random(a.shape, np.float32),
                                    state.speculation.acceptance)))
    same = jax.tree.map(np.array_equal, old.saved().arrays, new.saved().arrays)
    for part in ("actor", "optimizer", "responses", "acceptance", "prompts"):
        assert not all(jax.tree.leaves(same[part])), part
    resumed = restore(new.trainer, new.state, Held(old))
    assert resumed is not None
    new.state = resumed
    jax.tree.map(np.testing.assert_array_equal, old.saved().arrays, new.saved().arrays)
    jax.tree.map(np.testing.assert_array_equal, new.published, old.params)
    assert new.saved().meta == old.saved().meta
    jax.tree.map(np.testing.assert_array_equal, new.state, old.state)


def test_resuming_names_what_has_another_shape() -> None:
    trainer, lines = stepping_to_compile(micro_config()), []
    resumed = restore(trainer.trainer, trainer.state, Held(trainer, "responses"), (), lines.append)
    assert resumed is not None and resumed.step == 0
    assert len(lines) == 1 and "responses" in lines[0]


@pytest.mark.ci
def test_step_of_a_new_trainer_compiles_it_first() -> None:
    trainer = stepping_to_compile(micro_config())
    record, samples = trainer.step()
    assert record["step"] == 0 and len(samples) == trainer.config.sequences


class Failing:
    """A reward that fails at its 40th answer, in the third step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompt: str, completion: str, example: object) -> float:
        self.calls += 1
        return 1 / (self.calls != 40)


fails_once = Failing()


@pytest.mark.ci
def test_a_reward_that_fails_loses_no_step(tmp_path: Path) -> None:
    """The run goes on after the last complete step, and equals one that never failed."""
    def run(workdir: Path, reward: str) -> TrainState:
        return run_in(workdir, stepping(micro_config(
            steps=4, checkpoint_every=9, reward=RewardConfig(terms=(reward,)))))

    mine = f"{__name__}:fails_once"
    with pytest.raises(RewardError, match="example .* answer .*ZeroDivisionError"):
        run(tmp_path / "fails", mine)
    assert list_steps(tmp_path / "fails" / "checkpoints") == [2]
    resumed, whole = run(tmp_path / "fails", mine), run(tmp_path / "whole", mine)
    jax.tree.map(np.testing.assert_array_equal, resumed.learner, whole.learner)
    jax.tree.map(np.testing.assert_array_equal, resumed.prompts, whole.prompts)


def test_costs_reach_the_state_that_steps_whoever_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles, measures, and fails; the caller's state still lacks the costs."""
    trainer = stepping_to_compile(micro_config(control=ControlConfig(policy="budget")))
    start = trainer.state

    def fails(*args: object) -> None:
        raise RewardError("down")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.trainer, "reward", fails)
        with pytest.raises(RewardError, match="down"):
            trainer.step()
    assert trainer.state is start and start.speculation.fresh
    trainer.step()
    assert trainer.state.speculation.plain_round_seconds and not trainer.state.speculation.fresh


def refuses_odd(prompt: str, completion: str, example: Example) -> float:
    return 1 / (1 - example["id"] % 2)


def test_answers_whose_reward_failed_are_marked_and_counted() -> None:
    lines: list[str] = []
    trainer = stepping_to_compile(micro_config(reward=RewardConfig(
        terms=(f"{__name__}:refuses_odd", "digit_fraction"), weights=(1.0, 0.0),
        on_failure="-2")), warn=lines.append)
    samples, rewards, terms = trainer.score(made_up(trainer, np.random.default_rng(0)))
    odd = [sample["prompt_id"] % 2 == 1 for sample in samples]
    assert rewards.tolist() == [-2.0 if x else 1.0 for x in odd] and any(odd)
    assert [list(x.get("failures", [])) for x in samples] == [
        [f"{__name__}:refuses_odd"] * x for x in odd]
    assert terms["reward/failures"] == sum(odd)
    assert "8 of 16 answers count as -2; the first: reward" in lines[-1]


USUAL = {  # what every algorithm tells
    "reward/mean", "reward/std", "reward/nonzero_advantage_fraction", "response/length_mean",
    "response/length_max", "response/clipped_fraction", "policy/entropy", "kl/update",
    "policy/clip_fraction", "policy/ratio_mean", "policy/ratio_max", "policy/correction_fraction",
    "grad_norm", "learning_rate", "loss", "rollout/tokens_per_second", "time/step", "time/rollout",
    "time/reward", "time/learn"}


@pytest.mark.ci
def test_metrics_of_a_run_are_all_registered(tmp_path: Path) -> None:
    trainer = stepping(micro_config(rl=RLConfig(kl=0.1)))
    run_in(tmp_path, trainer, {"time/startup": 1.0, "time/profiling": 0.0})
    rows = run_files.read_metrics(tmp_path)
    assert [name for row in rows for name in row if find(name) is None] == []
    assert all(row.keys() >= USUAL for row in rows)
    assert all(row["policy/entropy"] > 0 <= row["kl/reference"] for row in rows)
    for row in rows:
        assert row["rollout/acceptance_rate"] == row["rollout/accepted"] / max(
            row["rollout/drafted"], 1)
    lengths = [[len(s["tokens"]) for s in run_files.read_samples(tmp_path) if s["step"] == step]
               for step in range(2)]
    assert [row["response/length_max"] for row in rows] == [max(x) for x in lengths]
    assert all(0 <= row["response/clipped_fraction"] <= 1 for row in rows)


@pytest.mark.ci
def test_step_without_updates_has_a_gap_and_a_loss(tmp_path: Path) -> None:
    trainer = stepping(micro_config(
        learner=LearnerConfig(micro_batch=4), rl=RLConfig(updates=0)))
    run_in(tmp_path, trainer)
    rows = run_files.read_metrics(tmp_path)
    assert [(row["loss"], row["compilations"]) for row in rows] == [(0.0, 0), (0.0, 0)]
    for row in rows:
        assert 0 < row["rollout/logprob_gap"] <= row["rollout/logprob_gap_max"] < 1e-4
        assert 0 < row["rollout/logprob_gap_tokens"] < row["rollout/tokens"]
