"""The drafter's update: what is compared with what, micro-batches, isolation, learning."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_task, tiny_arch, tiny_params
from specrl_kernels.noise import gumbel

from specrl_jax.config import ConfigError, DistillOptions
from specrl_jax.distill import update as distill
from specrl_jax.distill.losses import LOSSES
from specrl_jax.distill.update import Lent, Lessons, Texts
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model import transformer
from specrl_jax.structs import Rollout

ACTOR = tiny_arch(num_layers=2)
ARCH = EagleArch(ACTOR, draft_vocab=16)
VOCAB = np.arange(0, 24, 3).tolist() + np.arange(1, 24, 3).tolist()
OPTIONS = DistillOptions(unroll=2, learning_rate=3e-3, max_grad_norm=1e9)
TEMPERATURE, RESPONSE = 0.7, 12


@pytest.fixture(scope="module")
def actor() -> Any:
    return tiny_params(ACTOR)


@pytest.fixture(scope="module")
def rolled(actor: Any) -> tuple[Texts, np.ndarray]:
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
    return Texts(tokens, length, first, np.full(12, TEMPERATURE, np.float32), reward,
                 reward - 0.5), key


@pytest.fixture(scope="module")
def lent(actor: Any) -> Lent:
    return distill.lend(ARCH, actor, jnp.sort(jnp.asarray(VOCAB)))


@pytest.fixture(scope="module")
def lessons(actor: Any, rolled: Any) -> Lessons:
    return teach()(actor, rolled[0])


@functools.cache
def teach() -> Any:
    return jax.jit(functools.partial(distill.teach, ARCH, RESPONSE))


@functools.cache
def update(options: DistillOptions) -> Any:
    return jax.jit(functools.partial(distill.update, ARCH, options))


def begin(options: DistillOptions) -> Any:
    return distill.begin(options, jax.tree.map(jnp.asarray, eagle_model.initialize(ARCH, 0)))


def split(texts: Texts, lessons: Lessons, parts: int, order: Any = None) -> tuple[Texts, Lessons]:
    """`parts` micro-batches."""
    order = np.arange(12) if order is None else order
    rows = jax.tree.map(lambda a: np.asarray(a)[order].reshape(parts, -1, *a.shape[1:]), texts)

    def wide(a: Any) -> Any:
        cut = np.asarray(a)[:, order].reshape(len(a), parts, -1, *a.shape[2:])
        return np.moveaxis(cut, 1, 0)

    return rows, Lessons(wide(lessons.taps), wide(lessons.hidden), *(
        np.asarray(a)[order].reshape(parts, -1, a.shape[1])
        for a in (lessons.normalizer, lessons.best, lessons.entropy)), np.zeros(parts, np.int32))


def test_a_rollout_becomes_texts(rolled):
    texts, _ = rolled
    fields = dict.fromkeys(Rollout.__dataclass_fields__)
    said = np.full((12, RESPONSE), 9, np.int32)
    for row, (start, end) in enumerate(zip(texts.first, texts.length, strict=True)):
        said[row, : end - start] = texts.tokens[row, start:end]
    rollout = Rollout(**fields | dict(
        prompt=texts.tokens[:, :10], prompt_length=texts.first, tokens=said,
        length=texts.length - texts.first))
    made = distill.make_texts(rollout, texts.reward, texts.advantage, 0.0, rows=5)
    assert made.tokens.shape == (3, 5, 22) and (made.temperature == 1).all()
    assert (made.length[2, 2:] == 0).all() and (made.first[2, 2:] == 1).all()
    for row in range(12):
        at = divmod(row, 5)
        assert (made.length[at], made.first[at]) == (texts.length[row], texts.first[row])
        assert (made.reward[at], made.advantage[at]) == (texts.reward[row], texts.advantage[row])
        real = texts.tokens[row, : texts.length[row]]
        np.testing.assert_array_equal(made.tokens[at], np.pad(real, (0, 22 - len(real))))


def test_targets_are_the_actors_own_distribution(actor, rolled, lent, lessons):
    texts, _ = rolled
    scores = transformer.forward(ACTOR, actor, texts.tokens, jnp.asarray(texts.length))
    logp = np.asarray(jax.nn.log_softmax(scores / TEMPERATURE))
    got = np.asarray(distill.targets(lent, texts.temperature, lessons))
    for row in range(12):
        at = np.arange(texts.first[row] - 1, texts.length[row] - 1)
        want = logp[row, at]
        np.testing.assert_allclose(got[:, row, : len(at)].T, want[:, lent.vocab], atol=1e-4)
        np.testing.assert_array_equal(lessons.best[row, : len(at)], want.argmax(1))
        entropy = -(np.exp(want) * want).sum(1)
        np.testing.assert_allclose(lessons.entropy[row, : len(at)], entropy, atol=1e-4)


def test_summaries_in_chunks_are_those_of_all_tokens_at_once(
        actor: Any, rolled: Any, lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    """144 positions: a chunk of 100, and the rest."""
    monkeypatch.setattr(distill, "TOKENS_AT_ONCE", 100)
    cut = jax.jit(lambda *given: distill.teach(ARCH, RESPONSE, *given))(actor, rolled[0])
    for name in ("normalizer", "best", "entropy"):
        np.testing.assert_allclose(getattr(cut, name), getattr(lessons, name), atol=1e-5)


def test_hidden_states_are_read_with_the_head_of_the_actor_that_made_them(rolled, lent, lessons):
    """As when features of several policy versions are kept."""
    texts, _ = rolled
    other = jnp.flip(lent.teachers[0], 0)
    both = lent.replace(teachers=jnp.stack([other, lent.teachers[0]]))
    want = distill.targets(lent, texts.temperature, lessons)
    second = lessons.replace(teacher=jnp.int32(1))
    np.testing.assert_array_equal(distill.targets(both, texts.temperature, second), want)
    assert (distill.targets(both, texts.temperature, lessons) != want).any()


def test_a_draft_is_compared_with_the_actor_after_the_same_tokens(actor, rolled, lent, lessons):
    texts, key = rolled
    params = begin(OPTIONS).params
    found = jax.jit(functools.partial(distill.assess, ARCH, 3))(
        params, lent, texts, lessons, key, np.ones(12, np.float32))
    features = eagle_model.project(params, lessons.taps)
    every = np.tile(np.arange(texts.tokens.shape[1]), (12, 1))
    hidden = jax.jit(functools.partial(eagle_model.unroll, ARCH), static_argnums=6)(
        params, lent.embed, features, texts.tokens, texts.length, every, 3)
    p = np.asarray(jax.nn.softmax(transformer.forward(
        ACTOR, actor, texts.tokens, jnp.asarray(texts.length)) / TEMPERATURE))
    seen = 0
    for j, h in enumerate(hidden):
        q = np.asarray(jax.nn.softmax(
            eagle_model.logits(ARCH, params, lent.head, h) / TEMPERATURE, axis=0))
        for row in range(12):
            said = texts.length[row] - texts.first[row]
            # The root is token t + 1, the last of k response tokens or of the prompt.
            for k in range(said):
                t = texts.first[row] - 2 + k
                ok = t >= 0 and k + j < said
                assert found.live[j, row, k] == ok
                if ok:
                    want = np.minimum(p[row, t + 1 + j, lent.vocab], q[:, row, t]).sum()
                    assert found.alpha[j, row, k] == pytest.approx(want, abs=1e-4)
                    seen += 1
    assert seen == found.live.sum() > 100


def test_the_actors_noise_on_the_actors_distribution_says_what_was_said(actor, rolled, lessons):
    """So a drafter without error would be accepted always, and noise, keys and places agree."""
    texts, key = rolled
    whole = Lent(actor["embed"], actor["embed"], jnp.arange(24), actor["embed"][None])
    log_p = distill.targets(whole, texts.temperature, lessons)
    drawn = distill.noise(whole.vocab, log_p.shape[2], key, np.ones(12, np.float32))
    for row in range(12):
        said = texts.tokens[row, texts.first[row] : texts.length[row]]
        np.testing.assert_array_equal((log_p + drawn).argmax(0)[row, : len(said)], said)
    assert (log_p.argmax(0) != (log_p + drawn).argmax(0)).any()
    silent = distill.noise(whole.vocab, log_p.shape[2], key, np.zeros(12, np.float32))
    assert (silent == 0).all()


@pytest.mark.parametrize("options", [OPTIONS, *(
    pytest.param(dataclasses.replace(OPTIONS, loss=loss), marks=pytest.mark.slow)
    for loss in ("reward_weighted_kl", "e2e_tv"))], ids=lambda o: o.loss)
def test_unequal_micro_batches_add_up(rolled, lent, lessons, options):
    order = np.random.default_rng(0).permutation(12)
    whole, told = update(options)(begin(options), lent, *split(rolled[0], lessons, 1))
    parts, metrics = update(options)(begin(options), lent, *split(rolled[0], lessons, 3, order))
    for name in told:
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-4, atol=1e-6)
    for a, b in zip(moments(parts), moments(whole), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) and np.linalg.norm(b) > 0


def moments(state: Any) -> list[Any]:
    """Adam's first moments: after one update from zero, (1 - b1) times the gradient."""
    found = [x for x in jax.tree.leaves(state.optimizer, is_leaf=lambda n: hasattr(n, "mu"))
             if hasattr(x, "mu")]
    return jax.tree.leaves(found[0].mu)


def test_the_actor_has_no_gradient(actor, rolled):
    texts, _ = rolled
    options, count = dataclasses.replace(OPTIONS, unroll=1), jnp.ones(1)

    def loss(actor: Any, params: Any) -> Any:
        lent = distill.lend(ARCH, actor, jnp.sort(jnp.asarray(VOCAB)))
        lessons = distill.teach(ARCH, RESPONSE, actor, texts)
        return distill.micro_loss(ARCH, options, params, lent, count, texts, lessons,
                                  jnp.ones(12))[0]

    own, theirs = jax.jit(jax.grad(loss, (1, 0)))(actor, begin(OPTIONS).params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(theirs))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(own))


def test_padding_is_inert(actor, rolled, lent, lessons):
    texts, _ = rolled
    past = np.arange(texts.tokens.shape[1])[None] >= texts.length[:, None]
    other = texts.replace(tokens=np.where(past, 7, texts.tokens).astype(np.int32))
    told = update(OPTIONS)(begin(OPTIONS), lent, *split(texts, lessons, 1))[1]
    again = update(OPTIONS)(begin(OPTIONS), lent, *split(other, teach()(actor, other), 1))[1]
    jax.tree.map(np.testing.assert_array_equal, told, again)


def test_what_is_not_finite_leaves_the_state_as_it_was(rolled, lent, lessons):
    texts, taught = split(rolled[0], lessons, 1)
    bad = np.where(np.arange(12)[None, :, None] == 1, np.inf, taught.normalizer)
    broken = taught.replace(normalizer=bad.astype(np.float32))
    before = begin(OPTIONS)
    after, metrics = update(OPTIONS)(before, lent, texts, broken)
    assert metrics["applied"] == 0
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("options", [OPTIONS, *(
    pytest.param(dataclasses.replace(OPTIONS, loss=loss), marks=pytest.mark.slow)
    for loss in LOSSES if loss != OPTIONS.loss)], ids=lambda o: o.loss)
def test_every_loss_raises_acceptance(rolled, lent, lessons, options):
    state, first, batch = begin(options), None, split(rolled[0], lessons, 1)
    for _ in range(80):
        state, metrics = update(options)(state, lent, *batch)
        first = first or metrics
    assert metrics["loss"] < first["loss"] and metrics["applied"] == 1
    assert (metrics["alpha"] > first["alpha"] + 0.05).all()
    assert metrics["accept_length"] > first["accept_length"] + 0.1
    assert 1 < metrics["accept_length"] <= 1 + metrics["alpha"].sum()


def test_the_learning_rate_warms_up_and_falls_to_nothing():
    options = DistillOptions(warmup_steps=1, decay_steps=3, learning_rate=1e-3)
    optimizer, params, moved = distill.make_optimizer(options), {"w": jnp.ones(2)}, []
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update(params, state, params)
        moved.append(-float(updates["w"][0]))  # Adam steps as far as the rate says
    assert moved == pytest.approx([5e-4, 1e-3, 5e-4, 0], rel=0.01)


@pytest.mark.parametrize("changes, message", [
    ({"loss": "mse"}, "loss = 'mse': choose one of forward_kl"),
    ({"unroll": 0}, "unroll = 0: must be at least 1"),
    ({"depth_decay": 0.0}, r"depth_decay = 0.0: must lie in \(0, 1\]"),
    ({"warmup_steps": 5, "decay_steps": 5}, "decay_steps = 5: must be 0 or more than"),
])
def test_options_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        DistillOptions(**changes)


def test_an_actor_in_bfloat16_teaches_the_same(rolled):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params(ACTOR))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    told = []
    for actor in (narrow, wide):
        options = dataclasses.replace(OPTIONS, unroll=1)
        lent = distill.lend(ARCH, actor, jnp.sort(jnp.asarray(VOCAB)))
        batch = split(rolled[0], teach()(actor, rolled[0]), 1)
        told.append(update(options)(begin(options), lent, *batch)[1])
    np.testing.assert_allclose(told[0]["loss"], told[1]["loss"], rtol=0.02)
    np.testing.assert_allclose(told[0]["alpha"], told[1]["alpha"], rtol=0.02)
