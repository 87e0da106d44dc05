"""Deliberately broken rules: the checks that pass for the right rules notice each of them.

Most of them have been somebody's bug, and look like a reward curve that is worse with speculation
than without. Each is the right rule with one part exchanged; its docstring says whose bug it was.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_checks import (
    CHAIN,
    DEPTH,
    REJECTION,
    SETTINGS,
    TREE,
    VOCAB,
    Round,
    Rule,
    Shape,
    World,
    by_walk,
    distributions,
    keys,
    match,
    models,
    sampled,
    tree_of,
    two_tokens,
    world,
    wrong_settings,
)
from studies import lossy

from specrl_jax.structs import Array
from specrl_jax.verify import rejection, sampling
from specrl_jax.verify.rejection import (
    COINS,
    RESIDUAL,
    Noise,
    coin,
    decide,
    emit,
    last_token,
    lossless,
)


def rejecting(r: Round, *, live: Array | None = None, logq: Array | None = None,
              coin_of: rejection.Coin | None = None, test: rejection.Test = lossless,
              left_of: Callable[..., Array] = lambda left, at: left) -> tuple[Array, Array]:
    """The right rule, of which each broken rule replaces one part."""
    nodes, noise = tree_of(r), Noise(r.key, r.generated)
    nodes = nodes if live is None else nodes.replace(live=live)
    path, accepted, left = decide(nodes, r.logp, r.logq if logq is None else logq,
                                  coin_of or functools.partial(coin, noise), DEPTH, test)
    at = jnp.take_along_axis(path, accepted[:, None], 1)[:, 0]
    last = last_token(left_of(left, at), noise, accepted)
    return emit(nodes, path, accepted, last), accepted + 1


def top(scores: Array, noise: Array) -> Array:
    """Children are the drafter's most likely tokens, without noise."""
    return scores


def right(r: Round) -> tuple[Array, Array]:
    return rejecting(r)


def top_as_point_masses(r: Round) -> tuple[Array, Array]:
    """With `top` children this is what engines call point-mass verification, and exact."""
    return rejecting(r, logq=jnp.full_like(r.logq, -jnp.inf))


def cut_by_what_was_known(r: Round) -> tuple[Array, Array]:
    """Whether a node is verified depends on the drafter's confidence before it was drawn."""
    sure = r.logq.max(2) > np.log(0.6)
    parent = jnp.asarray(r.shape.parent)
    return rejecting(r, live=r.live & sure[:, parent] & sure[:, parent[parent]])


def point_masses_cut_by_what_was_drawn(r: Round) -> tuple[Array, Array]:
    """Point masses may be pruned by looks: given any tree, however made, the distribution is p."""
    live = r.live & (r.logq.max(2) > np.log(0.6)).at[:, 0].set(True)
    return rejecting(r, live=live, logq=jnp.full_like(r.logq, -jnp.inf))


def coins_from(r: Round, start: int) -> rejection.Coin:
    """Coins made of the hash indices from `start` on."""
    shift = jnp.uint32((start - COINS) % 2**32)
    noise = Noise(r.key, r.generated)
    return lambda level, tries: coin(noise, level, tries.astype(jnp.uint32) + shift)


def coins_of_the_drafter(r: Round) -> tuple[Array, Array]:
    """u < p / q with a u from the words that drew the children."""
    return rejecting(r, coin_of=coins_from(r, 0))


def coins_of_the_residual(r: Round) -> tuple[Array, Array]:
    """One word throws the coin and is the noise of a token in what follows a rejection."""
    return rejecting(r, coin_of=coins_from(r, RESIDUAL))


def one_coin_a_round(r: Round) -> tuple[Array, Array]:
    """The same u at every level: that the first node was accepted says something about it."""
    noise = Noise(r.key, r.generated)
    return rejecting(r, coin_of=lambda level, tries: coin(noise, 0 * level, tries))


def one_coin_a_node(r: Round) -> tuple[Array, Array]:
    """The same u for all siblings."""
    noise = Noise(r.key, r.generated)
    return rejecting(r, coin_of=lambda level, tries: coin(noise, level, 0 * tries))


def bonus_of_the_drafter(r: Round) -> tuple[Array, Array]:
    """After a path accepted whole, the token more comes from q."""
    def left_of(left: Array, at: Array) -> Array:
        leaf = ~(r.live & (jnp.asarray(r.shape.parent)[None] == at[:, None])
                 & (jnp.arange(r.live.shape[1]) > 0)[None]).any(1)
        return jnp.where(leaf[:, None], jnp.exp(r.logq[jnp.arange(len(at)), at]), left)

    return rejecting(r, left_of=left_of)


def whole_residual(r: Round) -> tuple[Array, Array]:
    """After a rejection the token is drawn from p, not from norm(max(p - q, 0))."""
    return rejecting(r, test=lambda p, q, token: (lossless(p, q, token)[0], p, q))


def siblings_as_if_independent(r: Round) -> tuple[Array, Array]:
    """Children drawn without replacement, tested as SpecInfer tests independent ones: q stays."""
    return rejecting(r, test=lambda p, q, token: (*lossless(p, q, token)[:2], q))


def blockwise(r: Round, *, adjusted: bool = True) -> tuple[Array, Array]:
    """Block verification (arXiv 2403.10444, algorithm 2) of a chain: the longest block that passes
    is kept, and what follows it comes from the residual of the whole block. It tests drafts behind
    a rejected one, so it needs noise of each round, where `right` has noise of each position."""
    nodes, noise, length = tree_of(r), Noise(r.key, r.generated), r.tokens.shape[1] - 1
    p, q, rows = jnp.exp(r.logp), jnp.exp(r.logq), jnp.arange(len(r.key))
    ratio, kept, left = jnp.ones(len(rows)), jnp.zeros(len(rows), jnp.int32), None
    for i in range(length + 1):
        if i:
            token = r.tokens[:, i]
            ratio = jnp.minimum(ratio * p[rows, i - 1, token] / q[rows, i - 1, token], 1)
        scale = ratio[:, None] if adjusted else 1.0
        more = jnp.maximum(scale * p[:, i] - q[:, i], 0) if i < length else p[:, i]
        total = more.sum(1)
        chance = ratio if i == length or not adjusted else total / jnp.maximum(
            total + 1 - ratio, 1e-9)
        passes = (coin(noise, jnp.int32(i), kept * 0) < chance) | (i == 0)
        kept = jnp.where(passes, i, kept)
        left = more if left is None else jnp.where(passes[:, None], more, left)
    path = jnp.minimum(jnp.arange(length + 1)[None], kept[:, None])
    return emit(nodes, path, kept, last_token(left, noise, kept)), kept + 1


def block_verification_of_ratios(r: Round) -> tuple[Array, Array]:
    """Tests each block by its ratio alone, and leaves the residual of single tokens: vllm-ascend
    before its pull request 7808."""
    return blockwise(r, adjusted=False)


def of_default_settings(quality: str) -> World:
    """The drafter's distribution is processed as asked for, the target's by `default_sampling`."""
    target = jnp.tile(jnp.asarray(models(quality)[0]), (len(SETTINGS), 1)).T
    asked = np.repeat(SETTINGS, VOCAB + 1, 0).T
    logp = lossy.default_sampling(target, asked[0], asked[1].astype(np.int32), asked[2]).logp
    return world(quality)._replace(logp=logp.reshape(len(SETTINGS), VOCAB + 1, VOCAB))


def count_wrong(rule: Rule, shape: Shape, w: World,
                order_of: Callable[[Array, Array], Array] = sampled) -> int:
    """How many of the 13 settings the end-to-end check finds wrong."""
    def one_operation_at_a_time(r: Round) -> tuple[Array, Array]:
        with jax.disable_jit():  # compiling each broken rule would take longer
            return rule(r)

    return len(wrong_settings(one_operation_at_a_time, shape, w, order_of=order_of))


@pytest.mark.parametrize("rule,shape,order_of", [
    (right, TREE, sampled), (top_as_point_masses, TREE, top),
    (top_as_point_masses, TREE, sampled), (cut_by_what_was_known, CHAIN, sampled),
    (point_masses_cut_by_what_was_drawn, CHAIN, sampled)])
def test_right_rules_pass(rule: Rule, shape: Shape, order_of: Callable[[Array, Array], Array]
                          ) -> None:
    assert count_wrong(rule, shape, world("decent"), order_of) == 0


@pytest.mark.parametrize("rule,shape,quality", [
    (by_walk(lossy.shared_noise), CHAIN, "useless"), (coins_of_the_drafter, CHAIN, "useless"),
    (coins_of_the_residual, CHAIN, "useless"), (one_coin_a_round, CHAIN, "decent"),
    (one_coin_a_node, TREE, "useless"), (by_walk(lossy.retrospective), CHAIN, "decent"),
    (bonus_of_the_drafter, TREE, "useless"), (whole_residual, CHAIN, "decent"),
    (siblings_as_if_independent, TREE, "useless"),
    (by_walk(lossy.accept_all), CHAIN, "decent"),
    (by_walk(lossy.greedy), CHAIN, "perfect"),
    (by_walk(lossy.lenient), CHAIN, "decent"),
    (by_walk(lossy.typical), CHAIN, "decent")])
def test_broken_rules_are_noticed(rule: Rule, shape: Shape, quality: str) -> None:
    assert count_wrong(rule, shape, world(quality)) >= 6


def test_top_children_with_the_real_q_are_noticed() -> None:
    """Deterministic children are not drawn from q: tested with p / q they come too often."""
    assert count_wrong(right, TREE, world("decent"), order_of=top) >= 6


def test_default_settings_for_the_target_are_noticed() -> None:
    assert count_wrong(right, CHAIN, of_default_settings("decent")) == 12  # all but the default


@pytest.mark.parametrize("rule, by_round, wrong", [
    (blockwise, True, False), (block_verification_of_ratios, True, True),
    (blockwise, False, True)], ids=["right", "ratios", "rejected noise is used again"])
def test_broken_block_verification_is_noticed(rule: Rule, by_round: bool, wrong: bool) -> None:
    def one_operation_at_a_time(r: Round) -> tuple[Array, Array]:
        with jax.disable_jit():
            return rule(r)

    found = wrong_settings(one_operation_at_a_time, CHAIN, world("decent"), by_round=by_round)
    assert len(found) >= 3 if wrong else found == []


def with_min_p(min_p: float) -> World:
    """The world whose target is processed with a min-p."""
    target = jnp.tile(jnp.asarray(models("decent")[0]), (len(SETTINGS), 1)).T
    asked = np.repeat(SETTINGS, VOCAB + 1, 0).T
    logp = sampling.process(target, asked[0], asked[1].astype(np.int32), asked[2], min_p=min_p).logp
    return world("decent")._replace(logp=logp.reshape(len(SETTINGS), VOCAB + 1, VOCAB))


def test_min_p_that_verification_drops_is_noticed() -> None:
    """vLLM applied min-p to plain decoding alone (pull request 42802)."""
    plain = np.exp(np.asarray(with_min_p(0.3).logp, np.float64))
    best = distributions(models("decent")[0], SETTINGS[4:5])[0]  # temperature 1, no truncation
    kept = np.where(best >= 0.3 * best.max(1, keepdims=True), best, 0)
    np.testing.assert_allclose(plain[4], kept / kept.sum(1, keepdims=True), rtol=1e-5)
    assert wrong_settings(REJECTION, CHAIN, with_min_p(0.3), plain=plain) == []
    assert len(wrong_settings(REJECTION, CHAIN, world("decent"), plain=plain)) >= 6


def test_match_is_immune_to_peeking() -> None:
    """What is verified may depend on anything: the actor's draw does not depend on the tree."""
    def peeking(r: Round) -> tuple[Array, Array]:
        sure = (r.logq.max(2) > np.log(0.6)).at[:, 0].set(True)
        return match(r._replace(live=r.live & sure))

    assert wrong_settings(peeking, CHAIN, world("decent"), rows=1024) == []


def by_slot(rule: Rule) -> Rule:
    """Noise keyed by the slot of the batch instead of by the sequence."""
    def of(r: Round) -> tuple[Array, Array]:
        slot = jnp.arange(len(r.key), dtype=jnp.uint32)
        return rule(r._replace(key=jnp.stack([slot, slot * 0 + 9], 1)))

    return of


def moved_rows_say_the_same(rule: Rule) -> bool:
    """Whether sequences say the same tokens in other rows of the batch."""
    count = 1024 * len(SETTINGS)
    setting, key = np.arange(count) % len(SETTINGS), keys(count, 4)
    order = np.random.default_rng(0).permutation(count)
    said, _ = two_tokens(rule, CHAIN, world("decent"), setting, key)
    moved, _ = two_tokens(rule, CHAIN, world("decent"), setting[order], key[order])
    return bool((moved == said[order]).all())


@pytest.mark.parametrize("rule", [match, REJECTION], ids=["match", "rejection"])
def test_noise_of_the_slot_is_noticed_when_rows_move(rule: Rule) -> None:
    """A refill moves sequences between slots; their distribution alone shows nothing."""
    assert moved_rows_say_the_same(rule)
    broken = by_slot(rule)
    assert not moved_rows_say_the_same(broken)
    assert wrong_settings(broken, CHAIN, world("decent"), rows=1024) == []
