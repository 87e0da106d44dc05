"""The ring of features: its budget, what makes room for what, and what a batch is made of."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from helpers import tiny_arch

from specrl_jax.config import ConfigError, DistillConfig
from specrl_jax.distill.features import EMPTY, MEGABYTE, FeatureRing, Sizes, draw
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch

DRAFTER = eagle_model.trainable(EagleArch(tiny_arch(hidden_size=64), draft_vocab=16))
COLUMNS, WINDOW = 40, 12
OPTIONS = DistillConfig(batch=4, micro_batch=2, rollouts=2)


def ring(sequences=6, drafter=DRAFTER, dtype=np.float32, **changes):
    return FeatureRing(dataclasses.replace(OPTIONS, **changes), drafter,
                       Sizes(sequences, COLUMNS, WINDOW, 64), np.dtype(dtype))


def numbered(first, count, rows=2, taps=2):
    """`count` sequences whose every value is their number: first, first + 1, ..."""
    n = -(-count // rows)
    number = (first + np.arange(n * rows)).reshape(n, rows)
    length = np.where(number < first + count, 5, 0).astype(np.int32)
    wide = {name: np.broadcast_to(number[:, None, :, None], (n, size, rows, last)).astype(
        np.float32) for name, size, last in (("taps", taps * 64, COLUMNS), ("hidden", 64, WINDOW))}
    flat = np.broadcast_to(number[..., None], (n, rows, WINDOW))
    batch = SequenceBatch(
        tokens=np.broadcast_to(number[..., None], (n, rows, COLUMNS)).astype(np.int32),
        length=length, first=length * 0 + 2, temperature=length + np.float32(1),
        reward=number.astype(np.float32), advantage=-number.astype(np.float32))
    return batch, TeacherTargets(
        **wide, normalizer=flat.astype(np.float32), best=flat.astype(np.int32),
        entropy=flat.astype(np.float32), drafted=flat.astype(np.int32),
        teacher=np.zeros(n, np.int32))


def fill(into, *rollouts, start=None):
    """Features after rollouts of (version, sequences), numbered from 100 times the version."""
    features = into.empty() if start is None else start
    for version, count in rollouts:
        features = into.add(features, *numbered(100 * version, count), version,
                            np.full((16, 64), version, np.float32))
    return features


def stored(features):
    """The numbers of the sequences that are there."""
    return sorted(int(row["reward"]) for row, version in zip(
        features.rows, features.version, strict=True) if version != EMPTY)


@pytest.mark.parametrize("options, rollouts, numbers, versions", [
    ({}, [(0, 5)], range(5), [EMPTY, 0]),
    ({}, [(0, 5), (1, 6), (2, 6)], [*range(100, 106), *range(200, 206)], [1, 2]),
    ({"when": "once"}, [(0, 6), (1, 2)], [100, 101], [1]),  # a version whose head goes, goes whole
    ({"when": "once"}, [(0, 4), (0, 4)], [0, 0, 1, 1, 2, 2, 3, 3], [0]),  # one head for both
])
def test_ring_keeps_the_newest_rollouts_whole(options, rollouts, numbers, versions):
    features = fill(ring(**options), *rollouts)
    assert stored(features) == [*numbers] and sorted(features.versions) == versions
    assert all((head == v).all() for head, v in zip(
        features.heads, features.versions, strict=True) if v != EMPTY)


@pytest.mark.parametrize("before", [[], [(1, 3)], [(1, 6), (2, 6)]])
def test_adding_leaves_earlier_features_as_they_are(before):
    """Also where new sequences and heads replace old ones: a state may be used again."""
    made = ring()
    features, drawn = fill(made, *before), []
    held = {name: a.copy() for name, a in features.arrays().items()}
    for _ in range(2):
        added = fill(made, (3, 6), start=features)
        drawn.append(draw(added, np.random.default_rng(0), 4, 2)[0].reward)
        for name, a in features.arrays().items():
            np.testing.assert_array_equal(a, held[name])
    np.testing.assert_array_equal(*drawn)
    assert sum(x is y for x, y in zip(features.rows, added.rows, strict=True)) == made.rows - 6


@pytest.mark.parametrize("megabytes, rows", [(1, 43), (2, 87), (3, 100)])
def test_ring_stays_within_its_budget(megabytes, rows):
    """A sequence of these sizes takes 24 KiB, so the first two budgets cut."""
    made = ring(sequences=50, megabytes=megabytes)
    features = fill(made, *((version, 50) for version in range(4)))
    assert made.nbytes == sum(a.nbytes for a in features.arrays().values())
    assert made.nbytes <= megabytes * MEGABYTE and made.rows == rows
    assert made.nbytes > (megabytes - 0.1) * MEGABYTE or rows == 100
    assert stored(features) == sorted([*range(200, 250), *range(300, 350)][-rows:])


@pytest.mark.parametrize("changes, message", [
    (dict(batch=50, megabytes=1, rollouts=50), "distill.megabytes = 1: an update of 50 sequences "
                                               "and 50 heads take 2; raise it"),
    (dict(batch=14), "distill.batch = 14: 2 x 6 sequences are kept; lower it"),
])
def test_less_than_an_update_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ring(**changes)


def test_drawn_micro_batch_is_of_one_version_and_whole_sequences():
    features, seen = fill(ring(), (3, 5), (4, 6)), set()
    for seed in range(20):
        batch, targets = draw(features, np.random.default_rng(seed), 4, 2)
        assert batch.tokens.shape == (2, 2, COLUMNS) and targets.taps.shape == (2, 128, 2, COLUMNS)
        for part, row in np.ndindex(2, 2):
            number = int(batch.reward[part, row])
            if batch.length[part, row] == 0:
                assert (batch.first[part, row], batch.temperature[part, row]) == (1, 1)
                continue
            seen.add(number)
            assert features.heads[targets.teacher[part]][0, 0] == number // 100
            for a in (batch.tokens[part, row], targets.taps[part, :, row],
                      targets.hidden[part, :, row], targets.normalizer[part, row],
                      targets.best[part, row], targets.entropy[part, row]):
                assert (a == number).all()
            assert batch.advantage[part, row] == -number
        real = batch.reward[batch.length > 0]
        assert len(set(real)) == len(real)
        newest, _ = draw(features, np.random.default_rng(seed), 4, 2, newest=True)
        assert (newest.reward >= 400).all()
    assert seen == {300, 301, 302, 303, 304, *range(400, 406)}


def test_draw_of_too_few_sequences_is_padded():
    batch, targets = draw(fill(ring(), (0, 1)), np.random.default_rng(0), 4, 2)
    assert sorted(batch.length.ravel()) == [0, 0, 0, 5] and (targets.teacher >= 0).all()


def test_restored_features_go_on_as_before():
    made, other = ring(), ring()
    before = fill(made, (0, 6), (1, 3))
    copied = {name: a.copy() for name, a in before.arrays().items()}
    after = [fill(made, (2, 6), start=before), fill(other, (2, 6), start=other.restore(copied))]
    for name, a in after[0].arrays().items():
        np.testing.assert_array_equal(a, after[1].arrays()[name], err_msg=name)
    np.testing.assert_array_equal(*(draw(one, np.random.default_rng(0), 4, 2)[0].reward
                                    for one in after))


def test_features_without_taps_save_no_empty_array():
    made = ring(drafter=DRAFTER._replace(taps=()))
    head = np.zeros((16, 64), np.float32)
    features = made.add(made.empty(), *numbered(0, 4, taps=0), 0, head)
    assert all(a.size for a in features.arrays().values())
    other = made.restore(features.arrays())
    assert stored(other) == [0, 1, 2, 3]
    assert draw(other, np.random.default_rng(0), 4, 2)[1].taps.shape == (2, 0, 2, COLUMNS)


def test_features_of_the_actor_have_its_dtype():
    made = ring(dtype=ml_dtypes.bfloat16)
    batch, targets = draw(fill(made, (0, 6)), np.random.default_rng(0), 4, 2)
    assert targets.taps.dtype == targets.hidden.dtype == made.heads.dtype == ml_dtypes.bfloat16
    assert targets.normalizer.dtype == np.float32 and batch.tokens.dtype == np.int32
