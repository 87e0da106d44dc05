"""Under lossless rules, responses are distributed as without speculation.

A chi-square of whole rollouts against the distribution of plain forward passes: 3200 responses of
two tokens to 8 prompts, a cell for each response to each prompt, the rare ones of a prompt pooled.
Its level is ALPHA = 0.001. Its power is .99 or more against an error of Cohen's w = EFFECT = 0.2
(the root mean square of the relative error of a cell's probability; a total variation of 0.1 at
most), by the noncentral chi-square and by simulation, see `test_power_is_as_stated`. The drafter is
the actor with noise in its weights, in chains of two and trees of two children. Shared noise moves
a token's distribution by an effect of .1 only, and more with a bad drafter: it gets more noise and
six times the responses.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import limits_of, made_up
from distribution_checks import distribution
from helpers import Task, ask, make_engine, tiny_arch, tiny_params
from scipy import stats
from studies import lossy

from specrl_jax.config import ControlConfig, SpecOptions
from specrl_jax.control import fixed, protocol, registry
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.model.transformer import forward
from specrl_jax.rollout.engine import Result
from specrl_jax.verify.protocol import Rule

ARCH = tiny_arch()
TASK = Task(np.random.default_rng(5).integers(0, 24, (8, 4)).tolist(), group=400, prompt=4,
            response=3, stop=(-1,))  # the first two are judged: a whole tree fits
TEMPERATURE, VOCAB = 0.4, ARCH.vocab_size
ALPHA, EFFECT, POWER = 1e-3, 0.2, 0.99
SUBTLE = {"studies.lossy:SHARED_NOISE": {"noise": 1.0, "times": 6}}
LOSSY = [f"studies.lossy:{name}" for name, rule in vars(lossy).items() if isinstance(rule, Rule)]


@functools.cache
def params() -> Any:
    return tiny_params(ARCH)


def roll_out(rule: str, noise: float = 0.3, times: int = 1, temperature: float = 1.0,
             branch: int = 1, policy: str = "fixed") -> list[Result]:
    """Rolls out with a drafter whose weights carry noise and whose nodes have `branch` children.

    `budget` verifies only what pays at the costs of a made-up table.
    """
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(
        lambda a: a * (1 + noise * rng.standard_normal(a.shape).astype(np.float32)), params())
    nodes = 1 + 2 * branch
    drafter = draft_model(ARCH, depth=2, branch=branch, nodes=nodes, temperature=temperature,
                       drawn=True)
    controller, control = fixed.fixed(), protocol.make_spec(2, branch, nodes, 0)
    if policy == "budget":
        spec = SpecOptions(depth=2, max_depth=2, branch=branch, max_branch=branch, nodes=nodes,
                           max_nodes=nodes)
        limits = limits_of((200,), nodes, 2, TASK.prompt + 2, branch, 200 * nodes)
        controller = registry.make(ControlConfig(policy=policy), spec, limits)
        control = controller.init(made_up(wide=0.3, limits=limits))
    engine = make_engine(ARCH, TASK, batch=200, max_packed=200 * nodes, controller=controller,
                         rule=rule, drafter=drafter)
    bound = drafter.bind(params(), noisy)
    engine.compile(params(), bound)
    return [roll_out(engine, params(), ask(TASK, seed, temperature=TEMPERATURE), bound,
                     control=control)
            for seed in range(times)]


@functools.cache
def expected() -> list[np.ndarray]:
    """f64[V * V] of each prompt: how many of its answers are to be each pair of tokens."""
    found = []
    for prompt in TASK.prompts:
        rows = jnp.asarray([[*prompt, first] for first in range(VOCAB)])
        logits = np.asarray(forward(ARCH, params(), rows, jnp.full(VOCAB, 5)), np.float64)
        first, second = distribution(logits[0, 3], TEMPERATURE, 0, 1.0), np.stack(
            [distribution(row, TEMPERATURE, 0, 1.0) for row in logits[:, 4]])
        found.append(TASK.group * (first[:, None] * second).reshape(-1))
    return found


def pooled(counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Counts of one prompt with the cells pooled that are to hold fewer than 5 in a rollout."""
    rare = wanted < 5
    return np.append(counts[~rare], counts[rare].sum())


def freedom() -> int:
    return sum(len(pooled(e, e)) - 1 for e in expected())


def p_value(results: list[Result]) -> float:
    """Of all rollouts together."""
    seen, wanted = [], []
    for prompt, counts_of in enumerate(expected()):
        mine = slice(prompt * TASK.group, (prompt + 1) * TASK.group)
        pairs = np.concatenate([r.sequences.tokens[mine, :2] @ (VOCAB, 1) for r in results])
        seen.append(pooled(np.bincount(pairs, minlength=VOCAB**2), counts_of))
        wanted.append(pooled(counts_of, counts_of) * len(results))
    seen, wanted = np.concatenate(seen), np.concatenate(wanted)
    return float(stats.chi2.sf(((seen - wanted) ** 2 / wanted).sum(), freedom()))


@pytest.mark.full
@pytest.mark.parametrize("rule, temperature, branch, policy", [
    ("match", 1.0, 1, "fixed"), ("rejection", 1.0, 1, "fixed"), ("rejection", 1.0, 2, "fixed"),
    ("rejection_drawn", 1.0, 1, "fixed"), ("rejection_drawn", 0.5, 1, "fixed"),
    ("rejection_drawn", 1.0, 2, "fixed"), ("rejection_drawn", 1.0, 2, "budget")])
def test_lossless_rule_keeps_the_distribution(
        rule: str, temperature: float, branch: int, policy: str) -> None:
    results = roll_out(rule, temperature=temperature, branch=branch, policy=policy)
    counters = results[0].counters
    assert 800 < counters["accepted"] < counters["drafted"] - 800
    if policy == "budget":
        whole = roll_out(rule, temperature=temperature, branch=branch)[0].counters
        assert counters["drafted"] < 0.9 * whole["drafted"], "some are not verified"
    assert p_value(results) > ALPHA


@pytest.mark.full
@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_rule_is_found(rule: str) -> None:
    assert p_value(roll_out(rule, **SUBTLE.get(rule, {}))) < ALPHA


def off_by(effect: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Distributions of pooled cells whose relative errors have the root mean square `effect`."""
    distributions = []
    for wanted in expected():
        p = pooled(wanted, wanted) / TASK.group
        error = np.append(1.0, rng.choice((-1.0, 1.0), len(p) - 1))
        error[-1] = -1.0
        error -= (p * error).sum()
        error *= effect / (p * error**2).sum() ** 0.5
        distributions.append(p * (1 + (error if error.min() > -1 else -error)))
    return distributions


def test_power_is_as_stated() -> None:
    bound = stats.chi2.isf(ALPHA, freedom())
    assert stats.ncx2.sf(bound, freedom(), TASK.sequences * EFFECT**2) > POWER
    rng, wanted, tries = np.random.default_rng(0), [pooled(e, e) for e in expected()], 400

    def found(effect: float) -> float:
        """Share of simulated rollouts that fail."""
        failed = 0
        for _ in range(tries):
            seen = [rng.multinomial(TASK.group, p) for p in off_by(effect, rng)]
            failed += sum(((s - w) ** 2 / w).sum()
                          for s, w in zip(seen, wanted, strict=True)) > bound
        return failed / tries

    assert found(EFFECT) > POWER - 3 * ((1 - POWER) * POWER / tries) ** 0.5
    assert found(0.0) < ALPHA + 3 * (ALPHA / tries) ** 0.5
