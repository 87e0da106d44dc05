"""Whole rollouts under each rule: lossless ones keep the distribution, a lossy one is noticed."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import ProcessedDistribution, distribution
from helpers import (
    Dice,
    Task,
    ask,
    make_engine,
    random_drafter,
    roll_out,
    streams,
    tiny_arch,
    tiny_params,
)
from scipy import stats
from studies import lossy

from specrl_jax.config import ConfigError
from specrl_jax.control import fixed, protocol
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.model.transformer import forward
from specrl_jax.rollout.engine import Engine, Result
from specrl_jax.structs import SpecConfig
from specrl_jax.verify.protocol import Rule
from specrl_jax.verify.registry import RULES

ARCH = tiny_arch()
TASK = Task([[5, 9, 2]], group=600, prompt=4, response=3, stop=(-1,))  # the first two are judged
LEVEL = 1e-4  # chance that a right rule fails a check; seeds are fixed
LOSSLESS = tuple(RULES)
LOSSY = tuple(f"studies.lossy:{name}" for name, rule in vars(lossy).items()
              if isinstance(rule, Rule))
NEED_PROPOSAL = tuple(rule for rule in LOSSLESS + LOSSY if RULES.resolve(rule).needs_proposal)
SETTINGS = {"plain": (1.0, 0, 1.0), "truncated": (0.8, 9, 0.85)}
"""temperature, top-k, top-p"""


def some(rules: Sequence[str]) -> Any:
    """Parametrizes a test over rules; most are full, since each compiles an engine."""
    return pytest.mark.parametrize("rule", [
        rule if rule.startswith("rejection") else pytest.param(rule, marks=pytest.mark.full)
        for rule in rules])


@functools.cache
def params() -> Any:
    return tiny_params(ARCH)


@functools.cache
def made(rule: str) -> tuple[Engine, Dice, Any]:
    """An engine with random trees or, if the rule needs a proposal, with a model's.

    Those have two children a node, and the batch has no room for all of them.
    """
    own, dice = (), Dice(np.zeros((TASK.sequences, 2)))
    if RULES.resolve(rule).needs_proposal:
        drafter = draft_model(ARCH, depth=2, branch=2, nodes=5, drawn=True)
        rng = np.random.default_rng(1)
        own = drafter.bind(params(), jax.tree.map(
            lambda a: a * (1 + 0.4 * rng.standard_normal(a.shape).astype(np.float32)), params()))
    else:
        drafter = random_drafter(dice, nodes=4, depth=2, vocab=24)
    engine = make_engine(ARCH, TASK, batch=30, controller=fixed.fixed(), rule=rule, max_packed=120,
                         drafter=drafter, truncates=True)
    engine.compile(params(), own)
    return engine, dice, own


def control(engine: Engine) -> SpecConfig:
    return protocol.make_spec(2, 4, engine.decoder.drafter.nodes, 0)


@functools.cache
def rollouts(rule: str, setting: str = "plain") -> list[Result]:
    """Two rollouts; random trees guess the likeliest pair of tokens."""
    engine, dice, own = made(rule)
    joint = joint_distribution(setting)
    likely = np.unravel_index(joint.argmax(), joint.shape)
    dice.replay = np.tile(np.asarray(likely, np.int32), (TASK.sequences, 1))
    temperature, top_k, top_p = SETTINGS[setting]
    return [roll_out(engine, params(), ask(TASK, seed, temperature=temperature, top_k=top_k,
                                            top_p=top_p), own, control=control(engine))
            for seed in range(2)]


@functools.cache
def logits() -> tuple[np.ndarray, np.ndarray]:
    """After the prompt f32[24], and after each first token f32[24, 24], by plain forwards."""
    rows = jnp.asarray([[*TASK.prompts[0], first] for first in range(24)])
    actual = np.asarray(forward(ARCH, params(), rows, jnp.full(24, 4)))
    return actual[0, 2], actual[:, 3]


@functools.cache
def joint_distribution(setting: str) -> np.ndarray:
    """f64[24, 24] of the first two tokens."""
    first, second = logits()
    below = np.stack([distribution(row, *SETTINGS[setting]) for row in second])
    return distribution(first, *SETTINGS[setting])[:, None] * below


def p_value(rule: str, setting: str = "plain") -> float:
    """Chi-square of all pairs of tokens against their distribution, rare cells pooled."""
    pairs = np.concatenate([result.sequences.tokens[:, :2] for result in rollouts(rule, setting)])
    expected = (len(pairs) * joint_distribution(setting)).reshape(-1)
    seen = np.bincount(pairs[:, 0] * 24 + pairs[:, 1], minlength=24 * 24).astype(float)
    if seen[expected == 0].any():
        return 0.0
    rare = expected < 6
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(np.append(seen[~rare], seen[rare].sum()), expected).pvalue)


@pytest.mark.ci
@pytest.mark.parametrize("setting", SETTINGS)
@some(LOSSLESS)
def test_lossless_rule_keeps_the_distribution(rule: str, setting: str) -> None:
    results = rollouts(rule, setting)
    assert all(r.counters["accepted"] > 20 and r.rule == rule for r in results)
    assert p_value(rule, setting) > LEVEL


@pytest.mark.ci
@pytest.mark.parametrize("setting", SETTINGS)
def test_lossy_rule_is_noticed(setting: str) -> None:
    assert p_value("studies.lossy:TYPICAL", setting) < 1e-9


@pytest.mark.parametrize("rule", NEED_PROPOSAL)
def test_drafter_without_proposal_is_refused(rule: str) -> None:
    engine = make_engine(
        ARCH, TASK, batch=30, controller=fixed.fixed(), rule=rule, max_packed=120,
        drafter=random_drafter(Dice(np.zeros((600, 2))), nodes=4, depth=2, vocab=24))
    with pytest.raises(ConfigError, match=f"spec.rule = {rule!r}: .*choose rejection"):
        engine.compile(params())


@pytest.mark.ci
def test_controller_cannot_choose_by_drawn_tokens() -> None:
    """One that keeps nodes by their tokens and probabilities keeps what others keep."""
    def peeking(state: Any, plan: Any, load: Any, tree: Any, buckets: Any) -> Any:
        assert tree.proposal is None
        liked = (tree.tokens < 12) & (tree.logq > -2) & (tree.score_gap < 1)
        tree = tree.replace(survival=jnp.where(liked, tree.survival, 0.0))
        return protocol.prune_within(plan.spec, tree, buckets)

    engine, _, own = made("rejection_drawn")
    other = make_engine(
        ARCH, TASK, batch=30, controller=fixed.fixed()._replace(prune=peeking),
        rule="rejection_drawn", max_packed=120, drafter=engine.decoder.drafter, truncates=True)
    other.compile(params(), own)
    actual = roll_out(other, params(), ask(TASK, 0), own, control=control(other))
    assert streams(actual) == streams(rollouts("rejection_drawn")[0])


@pytest.mark.ci
@pytest.mark.parametrize("setting", SETTINGS)
@some(LOSSLESS + LOSSY)
def test_log_probabilities_equal_a_plain_forward(rule: str, setting: str) -> None:
    """But where a boundary of truncation lies within 1e-4, which few positions do.

    A lossy rule may emit tokens that truncation removed: they have probability 0.
    """
    sequences = rollouts(rule, setting)[0].sequences
    first, second = logits()
    asked = SETTINGS["plain" if rule == "studies.lossy:DEFAULT_SAMPLING" else setting]
    after_prompt = ProcessedDistribution(first, *asked)
    after = [ProcessedDistribution(row, *asked) for row in second]
    checked = 0
    for q, pair in enumerate(sequences.tokens[:, :2]):
        for t, want in enumerate((after_prompt, after[pair[0]])):
            if want.boundary < 1e-4:
                continue
            checked += 1
            got = (sequences.logprob[q, t], sequences.raw_logprob[q, t],
                   sequences.top_p_mass[q, t])
            logprob = want.logprob[pair[t]]
            raw = want.raw[pair[t]] if np.isfinite(logprob) else logprob
            assert np.isfinite(logprob) or rule not in LOSSLESS
            np.testing.assert_allclose(got, (logprob, raw, want.kept), rtol=0, atol=1e-4)
    assert checked > 0.95 * 2 * len(sequences.tokens)
