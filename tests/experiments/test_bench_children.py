"""Acceptance of children by kind, against what can be worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import children

P = np.asarray([0.4, 0.3, 0.1, 0.1], np.float32)  # a tenth lies outside the draft vocabulary
Q = np.asarray([0.1, 0.5, 0.3, 0.1], np.float32)
COUNTS = (1, 2, 4)
KINDS = children.kinds([1, 0.5], truncated=False)


def means(p, q, draws=20_000):
    keys = jax.random.split(jax.random.key(0), draws)
    one = jax.jit(jax.vmap(
        lambda key: children.accepted(COUNTS, [1, 0.5], jnp.log(p), jnp.log(q), None, key)))
    return dict(zip(KINDS, np.asarray(one(keys), np.float64).mean(0), strict=True))


def test_chances_are_those_of_theory():
    found = means(P, Q)
    np.testing.assert_allclose(found["top"], [0.3, 0.4, 0.9], atol=1e-6)
    close = {"atol": 0.012}  # over four standard errors
    np.testing.assert_allclose(found["sampled"][0], (P * Q).sum(), **close)
    np.testing.assert_allclose(found["rejection"][0], np.minimum(P, Q).sum(), **close)
    whole = np.append(P, 0.1)
    for temperature in (1, 0.5):
        ratio = np.append(Q, 0.0) ** (1 / temperature)  # two races with one noise: 2408.07978
        same = sum(1 / np.maximum(whole / P[x], ratio / ratio[x]).sum() for x in range(4))
        np.testing.assert_allclose(found[f"perturbed {temperature}"][0], same, **close)
    for kind in ("perturbed 1", "perturbed 0.5", "sampled"):
        np.testing.assert_allclose(found[kind][2], 0.9, **close)
    assert (np.diff(np.stack(list(found.values())), axis=1) > 0).all()


def test_a_perfect_drafter_misses_only_what_it_cannot_say():
    found = means(P, P / P.sum())
    np.testing.assert_allclose(found["perturbed 1"], 0.9, atol=0.012)
    np.testing.assert_allclose(found["rejection"][0], 0.9, atol=0.012)


def test_cut_children_are_of_what_truncation_keeps_of_q():
    keep, drawn = jnp.asarray([False, True, True, False]), jnp.log(P)
    keys = jax.random.split(jax.random.key(1), 20_000)
    one = jax.jit(jax.vmap(
        lambda key: children.accepted(COUNTS, [1], drawn, jnp.log(Q), keep, key)))
    found = dict(zip(children.kinds([1], truncated=True), np.asarray(one(keys)).mean(0),
                     strict=True))
    cut, last = found["perturbed 1, cut"], found["perturbed 1, cut last"]
    np.testing.assert_allclose(cut[1:], 0.3 + 0.1, atol=0.012)  # both of those kept, never a third
    np.testing.assert_allclose(last[2], 0.9, atol=0.012)  # all that the drafter can say
    np.testing.assert_array_equal(cut[:2], last[:2])
    assert found["perturbed 1"][1] > cut[1] + 0.1 > cut[0] + 0.1


def test_kinds_are_compared_prompt_by_prompt():
    rng = np.random.default_rng(0)
    base = rng.random((40, 1, len(COUNTS)))
    values = base + np.asarray([0.0, 0.1, 0.2, 0.3, 0.4])[None, :, None]
    found = children.summarize(KINDS, COUNTS, values)
    assert found["prompts"] == 40
    one = found["difference"]["perturbed 1 less top"]["2"]
    np.testing.assert_allclose([one["mean"], one["low"], one["high"]], -0.2, atol=1e-9)
    assert found["accepted"]["rejection"]["4"]["low"] < found["accepted"]["rejection"]["4"]["mean"]
