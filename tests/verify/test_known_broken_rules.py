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
from specrl_jax.verify import rejection
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
