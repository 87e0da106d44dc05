"""The drafter's update: what is compared with what, micro-batches, isolation, learning."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_task, moments, tiny_arch, tiny_params
from jax.sharding import NamedSharding
from specrl_kernels.noise import gumbel

from specrl_jax import sharding
from specrl_jax.config import ConfigError, DistillConfig, DistillOptions, MeshConfig
from specrl_jax.distill import metrics
from specrl_jax.distill import teacher as teachers
from specrl_jax.distill import update as distill
from specrl_jax.distill.losses import LOSSES
from specrl_jax.distill.online import batch_of
from specrl_jax.distill.programs import batch_shardings
from specrl_jax.distill.teacher import FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model import transformer
from specrl_jax.rl.experience import Experience
from specrl_jax.structs import Rollout

ACTOR = tiny_arch(num_layers=2)
ARCH = EagleArch(ACTOR, draft_vocab=16)
DRAFTER = eagle_model.trainable(ARCH)
VOCAB = np.arange(0, 24, 3).tolist() + np.arange(1, 24, 3).tolist()
OPTIONS = DistillOptions(unroll=2, learning_rate=3e-3, max_grad_norm=1e9)
TEMPERATURE, RESPONSE = 0.7, 12


@pytest.fixture(scope="module")
def actor() -> Any:
    return tiny_params(ACTOR)


@pytest.fixture(scope="module")
def rolled(actor: Any) -> tuple[SequenceBatch, np.ndarray]:
    """Twelve rows that the actor drew, as one micro-batch, and their noise keys."""
    task = make_task()
    key, first = task.keys(), np.repeat([len(p) for p in task.prompts], 2).astype(np.int32)
    tokens = np.zeros((12, task.prompt + RESPONSE), np.int32)
    for row, start in enumerate(first):
        tokens[row, :start] = task.prompts[row // 2]
    forward = jax.jit(functools.partial(transformer.forward, ACTOR))
    rows = np.arange(12)
    for k in range(RESPONSE):
        scores = forward(actor, tokens, first + k)[rows, first + k - 1] / TEMPERATURE
        drawn = scores + gumbel(key, jnp.full(12, k), jnp.arange(24))
        tokens[rows, first + k] = drawn.argmax(1)
    length = first + np.asarray([12, 11, 10, 9, 12, 7, 12, 5, 4, 3, 2, 1], np.int32)
    reward = np.tile(np.float32([1, 0, 0]), 4)
    return SequenceBatch(tokens, length, first, np.full(12, TEMPERATURE, np.float32), reward,
                 reward - 0.5), key


@pytest.fixture(scope="module")
def frozen(actor: Any) -> FrozenParams:
    return teachers.frozen_params(ACTOR, actor, jnp.sort(jnp.asarray(VOCAB)))


@pytest.fixture(scope="module")
def teacher(actor: Any, rolled: Any) -> TeacherTargets:
    return compute()(actor, rolled[0])


@functools.cache
def compute() -> Any:
    return jax.jit(functools.partial(teachers.compute_targets, ACTOR, ARCH.taps, RESPONSE))


@functools.cache
def update(options: DistillOptions) -> Any:
    return jax.jit(functools.partial(distill.update, DRAFTER, options))


def begin(options: DistillOptions) -> Any:
    return distill.init_state(options, jax.tree.map(jnp.asarray, eagle_model.initialize(ARCH, 0)))


def split(batch: SequenceBatch, teacher: TeacherTargets, parts: int, order: Any = None
          ) -> tuple[SequenceBatch, TeacherTargets]:
    """`parts` micro-batches."""
    order = np.arange(12) if order is None else order
    rows = jax.tree.map(lambda a: np.asarray(a)[order].reshape(parts, -1, *a.shape[1:]), batch)

    def wide(a: Any) -> Any:
        cut = np.asarray(a)[:, order].reshape(len(a), parts, -1, *a.shape[2:])
        return np.moveaxis(cut, 1, 0)

    return rows, TeacherTargets(wide(teacher.taps), wide(teacher.hidden), *(
        np.asarray(a)[order].reshape(parts, -1, a.shape[1])
        for a in (teacher.normalizer, teacher.best, teacher.entropy, teacher.drafted)),
        np.zeros(parts, np.int32))


def test_sequence_batch_of_a_rollout_holds_its_rows(rolled):
    texts, _ = rolled
    fields = dict.fromkeys(Rollout.__dataclass_fields__)
    said = np.full((12, RESPONSE), 9, np.int32)
    for row, (start, end) in enumerate(zip(texts.first, texts.length, strict=True)):
        said[row, : end - start] = texts.tokens[row, start:end]
    rollout = Rollout(**fields | dict(prompt=texts.tokens[:, :10], prompt_length=texts.first,
                                      tokens=said, length=texts.length - texts.first))
    experience = Experience(rollout, rollout, texts.reward, texts.advantage, [], {})
    made = batch_of(experience, np.arange(12), 5, 22, temperature=0.0)
    assert made.tokens.shape == (3, 5, 22) and (made.temperature == 1).all()
    assert (made.length[2, 2:] == 0).all() and (made.first[2, 2:] == 1).all()
    for row in range(12):
        at = divmod(row, 5)
        assert (made.length[at], made.first[at]) == (texts.length[row], texts.first[row])
        assert (made.reward[at], made.advantage[at]) == (texts.reward[row], texts.advantage[row])
        real = texts.tokens[row, : texts.length[row]]
        np.testing.assert_array_equal(made.tokens[at], np.pad(real, (0, 22 - len(real))))


def targets(frozen, batch, teacher, depths=1):
    """What a loss is given, without weights."""
    return teachers.targets_of(dataclasses.replace(OPTIONS, unroll=depths), frozen,
                               (batch, teacher), (jnp.ones(depths), jnp.ones(len(batch.length))))


def test_targets_are_the_actors_own_distribution(actor, rolled, frozen, teacher):
    texts, _ = rolled
    scores = transformer.forward(ACTOR, actor, texts.tokens, jnp.asarray(texts.length))
    logp = np.asarray(jax.nn.log_softmax(scores / TEMPERATURE))
    got = np.asarray(targets(frozen, texts, teacher).log_probs())
    for row in range(12):
        at = np.arange(texts.first[row] - 1, texts.length[row] - 1)
        want = logp[row, at]
        np.testing.assert_allclose(got[:, row, : len(at)].T, want[:, frozen.vocab], atol=1e-4)
        np.testing.assert_array_equal(teacher.best[row, : len(at)], want.argmax(1))
        entropy = -(np.exp(want) * want).sum(1)
        np.testing.assert_allclose(teacher.entropy[row, : len(at)], entropy, atol=1e-4)


def test_summaries_in_chunks_equal_those_of_all_tokens(
        actor: Any, rolled: Any, teacher: TeacherTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    """144 positions: a chunk of 100, and the rest."""
    monkeypatch.setattr(teachers, "TOKENS_AT_ONCE", 100)
    cut = jax.jit(lambda *given: teachers.compute_targets(ACTOR, ARCH.taps, RESPONSE, *given))(
        actor, rolled[0])
    for name in ("normalizer", "best", "entropy"):
        np.testing.assert_allclose(getattr(cut, name), getattr(teacher, name), atol=1e-5)


def test_targets_use_the_head_of_the_version_that_made_them(rolled, frozen, teacher):
    """As when features of several policy versions are kept."""
    texts, _ = rolled
    other = jnp.flip(frozen.teachers[0], 0)
    both = frozen.replace(teachers=jnp.stack([other, frozen.teachers[0]]))
    want = targets(frozen, texts, teacher).log_probs()
    second = teacher.replace(teacher=jnp.int32(1))
    np.testing.assert_array_equal(targets(both, texts, second).log_probs(), want)
    assert (targets(both, texts, teacher).log_probs() != want).any()


@pytest.mark.parametrize("anchors", [teachers.ANCHORS_AT_ONCE, 60])  # 12 rows: chunks of 5 tokens
def test_evaluation_compares_draft_and_actor_after_equal_tokens(
        anchors, actor, rolled, frozen, teacher, monkeypatch):
    monkeypatch.setattr(teachers, "ANCHORS_AT_ONCE", anchors)
    texts, key = rolled
    params = begin(OPTIONS).params
    options = dataclasses.replace(OPTIONS, unroll=3)
    evaluation = jax.jit(lambda *given: metrics.evaluate_drafter(DRAFTER, options, *given))(
        params, frozen, (texts, teacher), (key, np.ones(12, np.float32)))
    features = eagle_model.project(ARCH, params, teacher.taps)
    every = np.tile(np.arange(texts.tokens.shape[1]), (12, 1))
    hidden = jax.jit(functools.partial(eagle_model.unroll, ARCH), static_argnums=6)(
        params, frozen.embed, features, texts.tokens, texts.length, every, 3)
    p = np.asarray(jax.nn.softmax(transformer.forward(
        ACTOR, actor, texts.tokens, jnp.asarray(texts.length)) / TEMPERATURE))
    seen = 0
    for j, h in enumerate(hidden):
        q = np.asarray(jax.nn.softmax(
            eagle_model.logits(ARCH, params, frozen.head, h) / TEMPERATURE, axis=0))
        for row in range(12):
            said = texts.length[row] - texts.first[row]
            # The root is token t + 1, the last of k response tokens or of the prompt.
            for k in range(said):
                t = texts.first[row] - 2 + k
                ok = t >= 0 and k + j < said
                assert evaluation.live[j, row, k] == ok
                if ok:
                    want = np.minimum(p[row, t + 1 + j, frozen.vocab], q[:, row, t]).sum()
                    assert evaluation.alpha[j, row, k] == pytest.approx(want, abs=1e-4)
                    seen += 1
    assert seen == evaluation.live.sum() > 100


def test_noise_on_the_actors_distribution_draws_the_response(actor, rolled, teacher):
    """So a drafter without error would be accepted always, and noise, keys and positions agree."""
    texts, key = rolled
    whole = FrozenParams(actor["embed"], actor["embed"], jnp.arange(24), actor["embed"][None])
    log_p = targets(whole, texts, teacher).log_probs()
    place = np.tile(np.arange(log_p.shape[2]), (12, 1))
    drawn = metrics.noise(whole.vocab, place, key, np.ones(12, np.float32))
    for row in range(12):
        said = texts.tokens[row, texts.first[row] : texts.length[row]]
        np.testing.assert_array_equal((log_p + drawn).argmax(0)[row, : len(said)], said)
    assert (log_p.argmax(0) != (log_p + drawn).argmax(0)).any()
    silent = metrics.noise(whole.vocab, place, key, np.zeros(12, np.float32))
    assert (silent == 0).all()


@pytest.mark.parametrize("options", [OPTIONS, *(
    pytest.param(dataclasses.replace(OPTIONS, loss=loss), marks=pytest.mark.ci)
    for loss in ("reward_weighted_kl", "e2e_tv"))], ids=lambda o: o.loss)
@pytest.mark.parametrize("anchors", [teachers.ANCHORS_AT_ONCE, 20])  # 4 rows: chunks of 5 tokens
def test_update_in_micro_batches_and_chunks_equals_the_whole(
        rolled, frozen, teacher, options, anchors, monkeypatch):
    order = np.random.default_rng(0).permutation(12)
    whole, told = update(options)(begin(options), frozen, *split(rolled[0], teacher, 1))
    monkeypatch.setattr(teachers, "ANCHORS_AT_ONCE", anchors)
    again = jax.jit(lambda *given: distill.update(DRAFTER, options, *given))
    parts, metrics = again(begin(options), frozen, *split(rolled[0], teacher, 3, order))
    for name in told:
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-4, atol=1e-6)
    gradients = [jax.tree.leaves(moments(state.optimizer)) for state in (parts, whole)]
    for a, b in zip(*gradients, strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) and np.linalg.norm(b) > 0


def test_update_in_chunks_of_attention_equals_the_whole(rolled, frozen, teacher, monkeypatch):
    given = frozen, *split(rolled[0], teacher, 1)
    whole, told = update(OPTIONS)(begin(OPTIONS), *given)
    monkeypatch.setattr(eagle_model, "ANCHORS_AT_ONCE", 5)
    parts, metrics = jax.jit(lambda *given: distill.update(DRAFTER, OPTIONS, *given))(
        begin(OPTIONS), *given)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-5)
    close(parts, whole)


@pytest.mark.skipif(jax.device_count() < 8, reason="see XLA_FLAGS in tests/conftest.py")
def test_update_on_a_mesh_equals_that_of_one_device(rolled, frozen, teacher):
    """Weights lie as the actor's do, and moments over all data shards."""
    given = frozen, *split(rolled[0], teacher, 1)
    whole, told = update(OPTIONS)(begin(OPTIONS), *given)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    programs = distill.Programs(DRAFTER, ACTOR, OPTIONS, mesh)
    state = programs.init(sharding.put(programs.shardings.params, begin(OPTIONS).params))
    batch = sharding.put(batch_shardings(mesh), given[1:])
    made, metrics = programs.update(state, programs.replicate(frozen), *batch)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-5)
    close(made, whole)
    for tree, rules in ((made.params, sharding.LEARNER_RULES),
                        (moments(made.optimizer), sharding.MOMENT_RULES)):
        for name, leaf in tree.items():
            described = DRAFTER.described[name]
            spec = sharding.spec_of(leaf.shape, described.axes, rules, mesh)
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
            assert not leaf.sharding.is_fully_replicated, name


def close(state: Any, want: Any) -> None:
    gradients = [jax.tree.leaves(moments(a.optimizer)) for a in (state, want)]
    for a, b in zip(*gradients, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) and np.linalg.norm(b) > 0


def test_loss_gives_the_actor_no_gradient(actor, rolled):
    texts, _ = rolled
    options, count = dataclasses.replace(OPTIONS, unroll=1), jnp.ones(1)

    def loss(actor: Any, params: Any) -> Any:
        frozen = teachers.frozen_params(ACTOR, actor, jnp.sort(jnp.asarray(VOCAB)))
        teacher = teachers.compute_targets(ACTOR, ARCH.taps, RESPONSE, actor, texts)
        return distill.micro_loss(DRAFTER, options, params, frozen, (texts, teacher),
                                  (count, jnp.ones(12)))[0]

    own, theirs = jax.jit(jax.grad(loss, (1, 0)))(actor, begin(OPTIONS).params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(theirs))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(own))


def test_padding_is_inert(actor, rolled, frozen, teacher):
    texts, _ = rolled
    past = np.arange(texts.tokens.shape[1])[None] >= texts.length[:, None]
    other = texts.replace(tokens=np.where(past, 7, texts.tokens).astype(np.int32))
    told = update(OPTIONS)(begin(OPTIONS), frozen, *split(texts, teacher, 1))[1]
    again = update(OPTIONS)(begin(OPTIONS), frozen, *split(other, compute()(actor, other), 1))[1]
    jax.tree.map(np.testing.assert_array_equal, told, again)


def test_update_that_is_not_finite_leaves_the_state(rolled, frozen, teacher):
    texts, taught = split(rolled[0], teacher, 1)
    bad = np.where(np.arange(12)[None, :, None] == 1, np.inf, taught.normalizer)
    broken = taught.replace(normalizer=bad.astype(np.float32))
    before = begin(OPTIONS)
    after, metrics = update(OPTIONS)(before, frozen, texts, broken)
    assert metrics["applied"] == 0
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("options", [OPTIONS, *(
    pytest.param(dataclasses.replace(OPTIONS, loss=loss), marks=pytest.mark.ci)
    for loss in LOSSES if loss != OPTIONS.loss)], ids=lambda o: o.loss)
def test_every_loss_raises_acceptance(rolled, frozen, teacher, options):
    state, first, batch = begin(options), None, split(rolled[0], teacher, 1)
    for _ in range(80):
        state, metrics = update(options)(state, frozen, *batch)
        first = first or metrics
    assert metrics["loss"] < first["loss"] and metrics["applied"] == 1
    assert (metrics["alpha"] > first["alpha"] + 0.05).all()
    assert metrics["accept_length"] > first["accept_length"] + 0.1
    assert 1 < metrics["accept_length"] <= 1 + metrics["alpha"].sum()


def test_learning_rate_warms_up_and_falls_to_zero():
    options = DistillOptions(warmup_steps=1, decay_steps=3, learning_rate=1e-3)
    optimizer, params, moved = distill.make_optimizer(options), {"w": jnp.ones(2)}, []
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update(params, state, params)
        moved.append(-float(updates["w"][0]))  # Adam steps as far as the rate says
    assert moved == pytest.approx([5e-4, 1e-3, 5e-4, 0], rel=0.01)


@pytest.mark.parametrize("options, changes, message", [
    (DistillOptions, {"loss": "mse"}, "^loss = 'mse': choose one of forward_kl"),
    (DistillOptions, {"unroll": 0}, "unroll = 0: must be at least 1"),
    (DistillOptions, {"max_grad_norm": 0.0}, r"max_grad_norm = 0.0: must lie in \(0, inf\]"),
    (DistillOptions, {"warmup_steps": 5, "decay_steps": 5}, "decay_steps = 5: must be 0 or more"),
    (DistillConfig, {"when": "often"}, "distill.when = 'often': choose one of off, once"),
    (DistillConfig, {"loss": "mse"}, "distill.loss = 'mse': choose one of forward_kl"),
    (DistillConfig, {"batch": 12}, "distill.batch = 12: must be a multiple of .*micro_batch = 8"),
    (DistillConfig, {"interval": 0}, "distill.interval = 0: must be at least 1"),
    (DistillConfig, {"when": "once", "overlap": True},
     "distill.overlap = True: needs distill.when = 'interval'")])
def test_options_are_checked(options, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_actor_in_bfloat16_teaches_the_same(rolled):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params(ACTOR))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    told = []
    for actor in (narrow, wide):
        options = dataclasses.replace(OPTIONS, unroll=1)
        frozen = teachers.frozen_params(ACTOR, actor, jnp.sort(jnp.asarray(VOCAB)))
        batch = split(rolled[0], compute()(actor, rolled[0]), 1)
        told.append(update(options)(begin(options), frozen, *batch)[1])
    np.testing.assert_allclose(told[0]["loss"], told[1]["loss"], rtol=0.02)
    np.testing.assert_allclose(told[0]["alpha"], told[1]["alpha"], rtol=0.02)
