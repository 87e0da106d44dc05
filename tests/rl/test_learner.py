"""The policy update: micro-batches add up, bad ones change nothing, idle sequences are left out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ask,
    make_engine,
    make_task,
    micro_config,
    moments,
    roll_out,
    stepping_to_compile,
    tiny_arch,
    tiny_params,
)

from specrl_jax import sharding
from specrl_jax.config import Config, LearnerConfig, ModelSource, RLConfig, RolloutConfig
from specrl_jax.model.transformer import forward
from specrl_jax.rl import learner, programs
from specrl_jax.rl.batch import Batch, Layout, Totals, make_batch, part_of
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.optimizer import B1
from specrl_jax.structs import Rollout

ARCH = tiny_arch(num_layers=1)
NEW_TOKENS = 12
LEARNER = LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9)


def config_of(learner: LearnerConfig = LEARNER, **rl: Any) -> Config:
    return Config(learner=learner, rl=RLConfig(**rl),
                  rollout=RolloutConfig(max_new_tokens=NEW_TOKENS))


CONFIG = config_of()


@functools.cache
def update(config: Config) -> Any:
    return jax.jit(functools.partial(learner.update, ARCH, config))


@pytest.fixture(scope="module")
def params() -> Any:
    return tiny_params(ARCH)


@pytest.fixture(scope="module")
def rollout(params: Any) -> Rollout:
    """A real one, of plain decoding."""
    task = make_task()
    engine = make_engine(ARCH, task, batch=4)
    engine.compile(params)
    s = roll_out(engine, params, ask(task, temperature=0.8)).sequences
    q = task.sequences
    prompt = np.zeros((q, task.prompt), np.int32)
    for i in range(q):
        prompt[i, : len(task.prompts[i // 2])] = task.prompts[i // 2]
    row = np.zeros(q, np.int32)
    length = np.asarray([len(task.prompts[i // 2]) for i in range(q)], np.int32)
    return Rollout(prompt=prompt, prompt_length=length,
                   tokens=s.tokens, length=s.length, logprob=s.logprob, raw_logprob=s.raw_logprob,
                   top_p_mass=s.top_p_mass, prompt_id=row, birth=row, occurrence=row,
                   sample_id=row, stopped=row > 0, commits=s.commits, rounds=s.rounds,
                   version=s.tokens * 0)


ADVANTAGE = np.asarray([1, -1, 0, 0, 0.5, -0.5, 2, -2, 0, 0, 1, -1], np.float32)


def state_of(params: Any, config: Config = CONFIG) -> LearnerState:
    return LearnerState(params, learner.make_optimizer(config.learner).init(params))


def batch_of(rollout: Rollout, rows: int = 12, keep_all: bool = False, k: int = 1,
             advantage: np.ndarray = ADVANTAGE, columns: int = 0) -> tuple[Batch, Totals]:
    return make_batch(rollout, advantage, 0.8, Layout(rows, k, columns), keep_all)


def gradients(params: Any, batch: Batch, totals: Totals, config: Config = CONFIG) -> Any:
    """Adam's first moment: after one update from zero, (1 - b1) times the gradient."""
    new, metrics = update(config)(state_of(params, config), batch, totals, None, None)
    return moments(new.optimizer), metrics


def assert_close(left: Any, right: Any, share: float = 1e-5) -> None:
    """Each leaf within `share` of its norm."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)


@pytest.mark.parametrize("normalize,split", [
    ("token", (5, 1, 0)), ("token", (4, 2, 0)), ("token", (2, 2, 100)),
    pytest.param("token", (1, 1, 120), marks=pytest.mark.ci),
    pytest.param("sequence", (2, 2, 100), marks=pytest.mark.ci),
    pytest.param("constant", (5, 1, 0), marks=pytest.mark.ci)])
def test_packing_and_unequal_micro_batches_add_up(
        params: Any, rollout: Rollout, normalize: str, split: tuple[int, int, int]) -> None:
    config = config_of(normalize=normalize)
    alone = [batch_of(part_of(rollout, i, 12), 1, True, advantage=ADVANTAGE[i : i + 1])[0]
             for i in range(12)]  # one sequence a row
    _, totals = batch_of(rollout, 12, True)
    whole, told = gradients(params, jax.tree.map(lambda *a: np.concatenate(a), *alone),
                            totals.replace(micro_batches=np.int32(12)), config)
    rows, k, columns = split
    batch, totals = batch_of(rollout, rows, True, k, columns=columns)
    parts, metrics = gradients(params, batch, totals, config)
    assert_close(parts, whole)
    for name in told:
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-4, atol=1e-6)
    assert all(np.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(whole))


def test_sequences_without_advantage_change_no_gradient(
        params: Any, rollout: Rollout) -> None:
    every, used = batch_of(rollout, 1, True), batch_of(rollout, 1)
    assert int(used[1].micro_batches) < int(every[1].micro_batches) <= 12
    assert_close(gradients(params, *used)[0], gradients(params, *every)[0])


def sequences(rollout: Rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole rows i32[Q, P+T], their ends i32[Q], and what predicts responses bool[Q, P+T]."""
    whole = np.zeros((len(rollout.tokens), rollout.prompt.shape[1] + NEW_TOKENS), np.int32)
    for i, (start, length) in enumerate(zip(rollout.prompt_length, rollout.length, strict=True)):
        whole[i, :start] = rollout.prompt[i, :start]
        whole[i, start : start + length] = rollout.tokens[i, :length]
    ends, column = rollout.prompt_length + rollout.length, np.arange(whole.shape[1])[None]
    mine = (column >= rollout.prompt_length[:, None] - 1) & (column < ends[:, None] - 1)
    return whole, ends, mine


@pytest.mark.parametrize("k", [1, 2])
def test_the_gradient_is_that_of_the_policy_gradient(
        params: Any, rollout: Rollout, k: int) -> None:
    """At ratio 1: minus the mean over tokens of advantage times the score's gradient."""
    whole, ends, mine = sequences(rollout)
    mine = mine[:, :-1]

    def objective(params: Any) -> Any:
        scores = forward(ARCH, params, whole, jnp.asarray(ends))[:, :-1] / 0.8
        logprob = jax.nn.log_softmax(scores)
        logprob = jnp.take_along_axis(logprob, whole[:, 1:, None], 2)[..., 0]
        return -(jnp.where(mine, logprob, 0) * ADVANTAGE[:, None]).sum() / mine.sum()

    want = jax.tree.map(lambda g: g * (1 - B1), jax.jit(jax.grad(objective))(params))
    assert_close(gradients(params, *batch_of(rollout, 4, k=k))[0], want, 2e-5)


@pytest.mark.parametrize("where", ["advantage", "params"])
def test_what_is_not_finite_leaves_the_state_as_it_was(
        params: Any, rollout: Rollout, where: str) -> None:
    batch, totals = batch_of(rollout, 4)
    state = state_of(params)
    if where == "advantage":
        batch = batch.replace(advantage=np.where(batch.advantage == 2, np.inf, batch.advantage))
    else:
        broken = params | {"final_norm": params["final_norm"].at[0].set(jnp.nan)}
        state = LearnerState(broken, state.optimizer)
    new, metrics = update(CONFIG)(state, batch, totals, None, None)
    assert metrics["applied"] == 0
    jax.tree.map(np.testing.assert_array_equal, new, state)


def test_the_gap_to_the_rollout_is_small(params: Any, rollout: Rollout) -> None:
    batch, totals = batch_of(rollout, 4, True)
    _, metrics = update(CONFIG)(state_of(params), batch, totals, None, None)
    assert 0 < metrics["logprob_gap"] <= metrics["logprob_gap_max"] < 1e-4
    compute = jax.jit(functools.partial(learner.compute_logprobs, ARCH, CONFIG))
    logprobs = compute(params, batch, totals)
    mask = np.arange(logprobs.shape[-1]) < batch.length.sum(-1)[..., None]
    assert mask.sum() == rollout.length.sum()
    np.testing.assert_allclose(logprobs[mask], batch.rollout_logprob[mask], rtol=0, atol=1e-4)
    off = batch.replace(rollout_logprob=batch.rollout_logprob - np.float32(0.25))
    _, metrics = update(CONFIG)(state_of(params), off, totals, None, None)
    assert metrics["logprob_gap"] == pytest.approx(0.25, abs=1e-3)


def test_kl_and_old_logprobs(params: Any, rollout: Rollout) -> None:
    config = config_of(LearnerConfig(learning_rate=1e-2), kl=0.1)
    batch, totals = batch_of(rollout, 4, True)
    compute = jax.jit(functools.partial(learner.compute_logprobs, ARCH, CONFIG))
    state, told = state_of(params, config), []
    reference = compute(params, batch, totals)
    for _ in range(3):
        state, metrics = update(config)(state, batch, totals, reference,
                                        (reference, compute(state.params, batch, totals)))
        told.append(jax.tree.map(float, metrics))
    assert told[0]["kl/reference"] == 0
    assert told[0]["policy/clip_fraction"] == 0 < told[2]["policy/clip_fraction"]
    assert 0 < told[1]["kl/reference"] < told[2]["kl/reference"]
    assert 0 < told[1]["kl/update"] and all(m["applied"] for m in told)
    # The same old log-probabilities as the policy's own change nothing.
    plain = update(CONFIG)(state_of(params), batch, totals, None, None)[0]
    given = update(CONFIG)(state_of(params), batch, totals, reference, None)[0]
    assert_close(plain.params, given.params, 1e-4)


@pytest.mark.parametrize("optimizer, options", [
    ("adamw", {}), ("lion", {}), ("muon", {}), ("adafactor", {}), ("adamw", {"kl_estimator": "k2"}),
    *(("adamw", {"loss": loss}) for loss in ("gspo", "cispo", "reinforce"))])
def test_policy_without_signal_stays_at_its_reference(
        params: Any, rollout: Rollout, optimizer: str, options: dict[str, str]) -> None:
    config = config_of(LearnerConfig(learning_rate=1e-2, optimizer=optimizer), kl=0.1, **options)
    batch, totals = batch_of(rollout, 4, True, advantage=np.zeros(12, np.float32))
    compute = jax.jit(functools.partial(learner.compute_logprobs, ARCH, CONFIG))
    same = (compute(params, batch, totals),) * 2
    new, metrics = update(config)(state_of(params, config), batch, totals, None, same)
    assert metrics["grad_norm"] == metrics["kl/reference"] == 0 and metrics["applied"] == 1
    jax.tree.map(np.testing.assert_array_equal, new.params, params)


def test_entropy_bonus_follows_the_gradient_of_entropy(params: Any, rollout: Rollout) -> None:
    batch, totals = batch_of(rollout, 12, True)
    plain, _ = gradients(params, batch, totals)
    with_bonus, _ = gradients(params, batch, totals, config_of(entropy=0.5))
    whole, ends, mine = sequences(rollout)

    def mean_entropy(params: Any) -> Any:
        logp = jax.nn.log_softmax(forward(ARCH, params, whole, jnp.asarray(ends)) / 0.8)
        return -jnp.where(mine, (jnp.exp(logp) * logp).sum(-1), 0).sum() / mine.sum()

    want = jax.tree.map(lambda p, g: p - 0.5 * (1 - B1) * g, plain,
                        jax.jit(jax.grad(mean_entropy))(params))
    assert error(plain, want) > 0.01
    assert_close(with_bonus, want, 1e-4)


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_losses_ignore_packing_where_ratios_differ(
        params: Any, rollout: Rollout, loss: str) -> None:
    config = config_of(loss=loss, normalize="sequence", clip_low=0.5, clip_high=0.5)
    noise = np.random.default_rng(0).normal(size=rollout.raw_logprob.shape).astype(np.float32)
    moved = rollout.replace(raw_logprob=rollout.raw_logprob + noise)  # old ones, packed alike
    actual = []
    for rows, k, columns in ((12, 1, 0), (2, 2, 100)):
        batch, totals = batch_of(moved, rows, True, k, columns=columns)
        new, metrics = update(config)(state_of(params, config), batch, totals,
                                      batch.rollout_logprob, None)
        assert metrics["policy/ratio_max"] > metrics["policy/ratio_mean"] > 0.5
        actual.append(moments(new.optimizer))
    assert_close(*actual)


def test_minibatches_divide_by_their_own_tokens(params: Any, rollout: Rollout) -> None:
    actual = []
    for i in range(2):
        part, mine = part_of(rollout, i, 2), np.array_split(ADVANTAGE, 2)[i]
        batch, totals = batch_of(part, 4, True, advantage=mine)
        assert totals.tokens == part.length.sum() == batch.length.sum() < rollout.length.sum()
        actual.append(jax.tree.map(lambda g, n=totals.tokens: g * n, gradients(
            params, batch, totals)[0]))
    whole, totals = batch_of(rollout, 4, True)
    want = jax.tree.map(lambda g: g * totals.tokens, gradients(params, whole, totals)[0])
    assert_close(jax.tree.map(jnp.add, *actual), want)


@pytest.mark.ci
@pytest.mark.parametrize("remat", ["none", "full"])
def test_remat_changes_no_gradient(params: Any, rollout: Rollout, remat: str) -> None:
    config = config_of(dataclasses.replace(LEARNER, remat=remat))
    batch, totals = batch_of(rollout, 4)
    assert_close(gradients(params, batch, totals, config)[0], gradients(params, batch, totals)[0])


def test_update_in_bfloat16_keeps_float32_state(params: Any, rollout: Rollout) -> None:
    config = dataclasses.replace(CONFIG, model=ModelSource(dtype="bfloat16"))
    batch, totals = batch_of(rollout, 4, True)
    new, metrics = update(config)(state_of(params), batch, totals, None, None)
    assert {a.dtype for a in jax.tree.leaves(new.params)} == {jnp.dtype("float32")}
    wide = gradients(params, batch, totals)[0]
    assert 1e-4 < error(gradients(params, batch, totals, config)[0], wide) < 0.03
    assert 1e-5 < metrics["logprob_gap"] < 1e-2


@pytest.mark.ci
def test_moments_on_the_host_change_no_bit() -> None:
    states = []
    for offload, kind in ((False, "device"), (True, "pinned_host")):
        trainer = stepping_to_compile(micro_config(learner=LearnerConfig(
            learning_rate=1e-3, micro_batch=16, optimizer_offload=offload)))
        program, = programs.programs(trainer.config, trainer.arch, trainer.mesh)
        rollout = programs.blank_rollout(trainer.config)
        batches = programs.host_batches(trainer.config, rollout, NOISE)
        part = sharding.put(programs.batch_shardings(trainer.mesh), batches[0])
        new, _ = program.lower().compile()(trainer.state.learner, *part, *[None] * 4)
        kinds = {a.sharding.memory_kind for a in jax.tree.leaves(new.optimizer) if a.ndim}
        assert kinds == {kind}
        states.append(jax.tree.map(np.asarray, new))
    jax.tree.map(np.testing.assert_array_equal, *states)


NOISE = np.random.default_rng(0).standard_normal(16).astype(np.float32)


def error(tree: Any, want: Any) -> float:
    """Distance of two trees, relative to the second one's norm."""
    square = [sum(float((a**2).sum()) for a in jax.tree.leaves(t))
              for t in (jax.tree.map(jnp.subtract, tree, want), want)]
    return (square[0] / square[1]) ** 0.5
