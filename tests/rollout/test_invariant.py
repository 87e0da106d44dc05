"""With invariant numerics speculation, batch and order change no bit of a rollout."""

import dataclasses

import numpy as np
import pytest
from helpers import (
    Course,
    Dice,
    ask,
    make_engine,
    make_task,
    random_drafter,
    roll_out,
    said,
    tiny_arch,
    tiny_params,
    wandering,
)

from specrl_jax import sharding
from specrl_jax.config import (
    Config,
    ConfigError,
    MeshConfig,
    ModelSource,
    RolloutConfig,
)
from specrl_jax.model import invariant
from specrl_jax.rollout.sampler import Sampler

pytestmark = pytest.mark.ci  # .ci/run compiles these at the default optimisation level
ARCH = tiny_arch(hidden_size=96, intermediate_size=160, num_heads=3, num_kv_heads=1, head_dim=32,
                 vocab_size=50)
TASK = make_task(prompts=6, vocab=50, group=2, response=14)
MACHINE = {"invariant": True, "implementation": invariant.IMPLEMENTATION}


def bits(result, order=None):
    """What was said, with both log-probabilities, by sequence of the task's own order."""
    s, where = result.sequences, said(result)
    rows = np.arange(TASK.sequences) if order is None else np.argsort(
        np.repeat(order * TASK.group, TASK.group) + np.tile(np.arange(TASK.group), len(order)))
    return [[getattr(s, name)[q][where[q]].tolist()
             for name in ("tokens", "logprob", "raw_logprob", "top_p_mass")] for q in rows]


@pytest.fixture(scope="module")
def params():
    return tiny_params(ARCH)


def engine(params, **how):
    made = make_engine(ARCH, TASK, **MACHINE, **how)
    made.compile(params)
    return made


@pytest.fixture(scope="module")
def plain(params):
    return engine(params, batch=4)


@pytest.mark.parametrize("mix", [{}, {"temperature": 0}], ids=str)
def test_trees_change_no_bit(params, plain, mix, trees):
    same_bits(params, plain, *trees, **mix)


def test_trees_change_no_bit_of_truncated_draws(params):
    plain = engine(params, batch=4, truncates=True)
    drafting = random_trees(params, plain, truncates=True)
    same_bits(params, plain, *drafting, temperature=0.6, top_p=0.8)


def same_bits(params, plain, made, dice, **mix):
    want = bits(roll_out(plain, params, ask(TASK, **mix)))
    for hit in (0.0, 0.7, 1.0):
        dice.hit, dice.replay = hit, roll_out(plain, params, ask(TASK, **mix)).sequences.tokens
        assert bits(roll_out(made, params, ask(TASK, **mix), rounds=2)) == want


def random_trees(params, plain, **how):
    """A drafter of random trees under settings that change from launch to launch."""
    dice = Dice(roll_out(plain, params, ask(TASK)).sequences.tokens)
    return engine(params, batch=3, drafter=random_drafter(dice, nodes=4, depth=2, vocab=50),
                  controller=wandering(Course(4, 2)), **how), dice


@pytest.fixture(scope="module")
def trees(params, plain):
    return random_trees(params, plain)


@pytest.mark.parametrize("batch", [1, 12])
def test_batches_and_compaction_change_no_bit(params, plain, batch):
    other = engine(params, batch=batch, min_batch=min(batch, 6))
    assert bits(roll_out(other, params, ask(TASK))) == bits(roll_out(plain, params, ask(TASK)))


def test_order_changes_no_bit(params, plain):
    order = np.asarray([3, 0, 5, 1, 4, 2])
    assert bits(roll_out(plain, params, ask(TASK, order=order)), order) == bits(
        roll_out(plain, params, ask(TASK)))


def test_it_agrees_with_default_numerics(params, plain):
    default = make_engine(ARCH, TASK, batch=4)
    default.compile(params)
    ours, theirs = (roll_out(made, params, ask(TASK)) for made in (plain, default))
    assert np.array_equal(ours.sequences.tokens, theirs.sequences.tokens)
    np.testing.assert_allclose(ours.sequences.logprob, theirs.sequences.logprob, rtol=0, atol=1e-4)


def sampler(model=None, mesh=None, arch=ARCH, prompts=2):
    config = Config(model=ModelSource(numerics="invariant", **(model or {})),
                    rollout=RolloutConfig(batch_size=4, max_prompt_tokens=10, max_new_tokens=8))
    return Sampler(config, arch, (3,), mesh or sharding.make_mesh(MeshConfig()), prompts=prompts,
                   group=2)


@pytest.mark.parametrize(("how", "why"), [
    (dict(model={"dtype": "bfloat16"}), "bfloat16: float32 only"),
    (dict(arch=dataclasses.replace(ARCH, head_dim=24)), "heads of 24 features"),
    (dict(arch=dataclasses.replace(ARCH, intermediate_size=100)), "K = 100"),
])
def test_where_it_cannot_work_it_is_refused(how, why):
    with pytest.raises(ConfigError, match=f"model.numerics = 'invariant': .*{why}.*use default"):
        sampler(**how)
