"""The buffer of features: its budget, what makes room for what, and what a batch is made of."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from helpers import tiny_arch

from specrl_jax.config import ConfigError, DistillConfig
from specrl_jax.distill.features import EMPTY, MEGABYTE, FeatureBuffer
from specrl_jax.distill.teacher import SequenceBatch, TeacherTargets
from specrl_jax.draft import eagle_model
from specrl_jax.draft.eagle_model import EagleArch

DRAFTER = eagle_model.trainable(EagleArch(tiny_arch(hidden_size=64), draft_vocab=16))
COLUMNS, WINDOW = 40, 12
FLOAT32 = np.dtype(np.float32)
OPTIONS = DistillConfig(batch=4, micro_batch=2, rollouts=2)


def buffer(sequences=6, heads=2, **changes):
    return FeatureBuffer(dataclasses.replace(OPTIONS, **changes), DRAFTER, 64, sequences, COLUMNS,
                         WINDOW, heads, FLOAT32)


def taught(mark, count, rows=2):
    """`count` sequences whose every number says which they are: mark + 0, 1, ..."""
    n = -(-count // rows)
    which = (mark + np.arange(n * rows)).reshape(n, rows)
    length = np.where(which < mark + count, 5, 0).astype(np.int32)
    wide = {name: np.broadcast_to(which[:, None, :, None], (n, size, rows, last)).astype(np.float32)
            for name, size, last in (("taps", 2 * 64, COLUMNS), ("hidden", 64, WINDOW))}
    flat = np.broadcast_to(which[..., None], (n, rows, WINDOW))
    batch = SequenceBatch(
        tokens=np.broadcast_to(which[..., None], (n, rows, COLUMNS)).astype(np.int32),
        length=length, first=length * 0 + 2, temperature=length + np.float32(1),
        reward=which.astype(np.float32), advantage=-which.astype(np.float32))
    return batch, TeacherTargets(
        **wide, normalizer=flat.astype(np.float32), best=flat.astype(np.int32),
        entropy=flat.astype(np.float32), teacher=np.zeros(n, np.int32))


def add(kept, version, count=6):
    head = np.full((16, 64), version, np.float32)
    kept.add(*taught(100 * version, count), version, head)


def held(kept):
    """The sequences that are there, by their numbers."""
    arrays = kept.arrays()
    return sorted(arrays["reward"][arrays["version"] != EMPTY].astype(int).tolist())


def test_buffer_keeps_the_newest_rollouts_whole():
    kept = buffer()
    add(kept, 0, 5)
    assert held(kept) == [0, 1, 2, 3, 4]
    add(kept, 1)
    add(kept, 2)
    assert held(kept) == [*range(100, 106), *range(200, 206)]
    assert sorted(kept.arrays()["versions"]) == [1, 2]


def test_version_whose_head_made_room_goes_whole():
    kept = buffer(heads=1)
    add(kept, 0)
    add(kept, 1, 2)
    assert held(kept) == [100, 101] and (kept.heads == 1).all()


def test_rollouts_of_one_version_share_its_head():
    kept = buffer(heads=1)
    add(kept, 0, 4)
    kept.add(*taught(50, 4), 0, np.zeros((16, 64), np.float32))
    assert held(kept) == [0, 1, 2, 3, 50, 51, 52, 53]


@pytest.mark.parametrize("megabytes", [1, 2, 3])
def test_buffer_stays_within_its_budget(megabytes):
    """A sequence of these sizes takes 24 KiB, so the first two budgets cut."""
    kept = buffer(sequences=50, megabytes=megabytes)
    for version in range(4):
        add(kept, version, 50)
    assert kept.nbytes <= megabytes * MEGABYTE
    assert kept.nbytes > (megabytes - 0.1) * MEGABYTE or kept.rows == 100
    assert held(kept) == sorted([*range(200, 250), *range(300, 350)][-kept.rows :])
    assert kept.rows == {1: 43, 2: 87, 3: 100}[megabytes]


@pytest.mark.parametrize("changes, message", [
    (dict(batch=50, megabytes=1, rollouts=50), "distill.megabytes = 1: an update of 50 sequences "
                                               "and 2 heads take 2; raise it"),
    (dict(batch=14), "distill.batch = 14: 2 x 6 sequences are kept; lower it"),
])
def test_less_than_an_update_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        buffer(**changes)


def test_draw_micro_batch_is_of_one_version_and_whole_sequences():
    kept = buffer()
    add(kept, 3, 5)
    add(kept, 4)
    seen = set()
    for seed in range(20):
        batch, targets = kept.draw(np.random.default_rng(seed), 4, 2)
        assert batch.tokens.shape == (2, 2, COLUMNS) and targets.taps.shape == (2, 128, 2, COLUMNS)
        for part in range(2):
            head = kept.heads[targets.teacher[part]]
            for row in range(2):
                name = int(batch.reward[part, row])
                if batch.length[part, row] == 0:
                    assert (batch.first[part, row], batch.temperature[part, row]) == (1, 1)
                    continue
                seen.add(name)
                assert head[0, 0] == name // 100
                for a in (batch.tokens[part, row], targets.taps[part, :, row],
                          targets.hidden[part, :, row], targets.normalizer[part, row],
                          targets.best[part, row], targets.entropy[part, row]):
                    assert (a == name).all()
                assert batch.advantage[part, row] == -name
        real = batch.reward[batch.length > 0]
        assert len(set(real)) == len(real)
        newest, _ = kept.draw(np.random.default_rng(seed), 4, 2, newest=True)
        assert (newest.reward >= 400).all()
    assert seen == {300, 301, 302, 303, 304, *range(400, 406)}


def test_draw_of_too_few_sequences_is_padded():
    kept = buffer()
    add(kept, 0, 1)
    batch, targets = kept.draw(np.random.default_rng(0), 4, 2)
    assert sorted(batch.length.ravel()) == [0, 0, 0, 5] and (targets.teacher >= 0).all()


def test_restored_buffer_goes_on_as_before():
    kept, other = buffer(), buffer()
    add(kept, 0)
    add(kept, 1, 3)
    other.restore(kept.arrays())
    for one in (kept, other):
        add(one, 2)
    for name, a in kept.arrays().items():
        np.testing.assert_array_equal(a, other.arrays()[name], err_msg=name)
    drawn = [one.draw(np.random.default_rng(0), 4, 2)[0].reward for one in (kept, other)]
    np.testing.assert_array_equal(*drawn)


def test_buffer_without_taps_saves_no_empty_array():
    drafter = DRAFTER._replace(taps=())
    kept, other = (FeatureBuffer(OPTIONS, drafter, 64, 6, COLUMNS, WINDOW, 2, FLOAT32)
                   for _ in range(2))
    batch, targets = taught(0, 4)
    kept.add(batch, targets.replace(taps=targets.taps[:, :0]), 0, np.zeros((16, 64), np.float32))
    assert all(a.size for a in kept.arrays().values())
    other.restore(kept.arrays())
    assert held(other) == [0, 1, 2, 3]
    assert other.draw(np.random.default_rng(0), 4, 2)[1].taps.shape == (2, 0, 2, COLUMNS)


def test_checkpoint_of_another_dtype_becomes_the_buffers_own():
    """Version 0.2.0 stored features of a bfloat16 actor as float32."""
    old, new = buffer(), FeatureBuffer(OPTIONS, DRAFTER, 64, 6, COLUMNS, WINDOW, 2,
                                       np.dtype(ml_dtypes.bfloat16))
    add(old, 0)
    new.restore(old.arrays())
    batch, targets = new.draw(np.random.default_rng(0), 4, 2)
    assert targets.taps.dtype == targets.hidden.dtype == new.heads.dtype == ml_dtypes.bfloat16
    assert targets.normalizer.dtype == np.float32 and batch.tokens.dtype == np.int32
