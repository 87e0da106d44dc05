"""The rules end to end by chi-square: draft, verify, and again, over many keys.

rule x tree shape x drafter quality, each over temperature x truncation: the joint distribution of
the first two tokens is the product of the processed distributions. The drafter always draws its
children with the noise of the match rule. test_known_broken_rules.py shows what the check notices.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import (
    CHAIN,
    REJECTION,
    SETTINGS,
    TREE,
    VOCAB,
    Rule,
    Shape,
    distributions,
    keys,
    match,
    points,
    two_tokens,
    world,
    wrong_settings,
)

RULES = {"match": (match, 1024), "rejection_drawn": (REJECTION, 4096),
         "rejection": (points, 4096)}  # rows a setting: match is slower
SHAPES = {"chain": CHAIN, "tree": TREE}
QUALITIES = ("useless", "decent", "perfect")


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("rule,rows", RULES.values(), ids=RULES.keys())
def test_rule_keeps_the_joint_distribution_of_two_tokens(rule: Rule, rows: int, shape: Shape,
                                                         quality: str) -> None:
    assert wrong_settings(rule, shape, world(quality), rows=rows) == []


def first_round(rule: Rule, shape: Shape, quality: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """i32[settings, rows, 2] tokens, and i32[settings, rows] of them emitted in the first round."""
    setting = np.repeat(np.arange(len(SETTINGS)), rows)
    pair, count = two_tokens(rule, shape, world(quality), setting, keys(len(setting), 1))
    return pair.reshape(len(SETTINGS), rows, 2), count.reshape(len(SETTINGS), rows)


def test_perfect_drafter_is_accepted_whole() -> None:
    for name in ("match", "rejection_drawn"):
        rule, rows = RULES[name]
        assert (first_round(rule, CHAIN, "perfect", rows)[1] == 3).all()


@pytest.mark.parametrize("quality", ["useless", "decent"])
def test_rejection_accepts_with_the_optimal_probability(quality: str) -> None:
    """A chain's first token is accepted with probability sum(min(p, q)) (Leviathan et al.)."""
    w = world(quality)
    p = distributions(np.asarray(w.model), SETTINGS)[:, VOCAB]
    most = np.minimum(p, np.asarray(jnp.exp(w.logq[:, VOCAB]))).sum(1)
    accepted = (first_round(REJECTION, CHAIN, quality, 4096)[1] > 1).mean(1)
    assert (np.abs(accepted - most) <= 5 * (most * (1 - most) / 4096) ** 0.5 + 1e-6).all()
