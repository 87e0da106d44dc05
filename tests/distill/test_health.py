"""What a drafter's weights and a few probe rollouts show of its faults."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.distill.health import Probe, equal, fault_of, summarize


class Accepting:
    """A sampler of one row whose head gets `rate` drafts a round accepted, as does another."""

    def __init__(self, rate: float, sequences: int = 8) -> None:
        self.rate, self.limits = rate, []
        self.engine = SimpleNamespace(shapes=SimpleNamespace(
            batch=1, sequences=sequences, shards=1, depth=3))

    def probe(self, inputs: Any, prompts: Any, limit: np.ndarray, depth: int) -> Any:
        self.limits.append(limit.tolist())
        rounds = int(limit.sum() / (1 + self.rate))
        return SimpleNamespace(counters={"row_rounds": rounds, "accepted": 1000, "broken": 0},
                               by_drafter={"eagle": {"accepted": round(rounds * self.rate)},
                                           "history": {"accepted": 1000}})


def probing(sampler: Any, rate: float | None) -> tuple[str, float]:
    inputs: Any = None
    return Probe(sampler, "eagle", [[1]], 8).check(inputs, rate)


@pytest.mark.parametrize("rate, answers", [(0.0, 8), (0.3, 5), (1.05, 2), (2.7, 1)])
def test_probe_of_one_row_generates_enough_to_detect_a_dead_head(rate: float, answers: int) -> None:
    sampler: Any = Accepting(rate)
    assert probing(sampler, rate)[0] == ""
    assert sampler.limits == [[8] * answers + [0] * (8 - answers)]
    sampler.rate = 0.0
    assert probing(sampler, rate)[0] == ("dead" if rate else "")


def test_probe_of_a_head_that_keeps_losing_fails_in_the_end() -> None:
    sampler: Any = Accepting(2.0)
    (fault, rate), faults = probing(sampler, None), []
    assert (fault, rate) == ("", pytest.approx(2.0, abs=0.1))
    for _ in range(8):
        sampler.rate *= 0.6
        fault, rate = probing(sampler, rate)
        faults.append(fault)
    assert not faults[0] and "dead" in faults


def test_summaries_show_what_happened() -> None:
    rng = np.random.default_rng(0)
    tree = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.ones(5, np.float32)}
    vocab, other = np.arange(4, dtype=np.int32), np.array([0, 1, 2, 5], np.int32)
    wanted = summarize({"weights": tree, "vocab": vocab})

    def fault(weights: Any, vocab: Any = vocab) -> str:
        return fault_of(summarize({"weights": weights, "vocab": vocab}), wanted)

    assert fault(tree) == wanted.fault == ""
    turned = tree | {"a": tree["a"][::-1].copy()}
    crossed = tree | {"a": np.concatenate([tree["b"][:1], tree["a"].ravel()[1:]]).reshape(3, 4),
                      "b": np.concatenate([tree["a"].ravel()[:1], tree["b"][1:]])}
    doubled = {k: v * 2 for k, v in tree.items()}
    for changed in (turned, crossed, doubled):
        assert fault(changed) == "not as published"
    assert fault(tree, other) == "not as published"
    assert fault({k: v * 0 for k, v in tree.items()}) == "zeroed"
    assert fault(tree | {"b": tree["b"] * np.nan}) == "not finite"
    small = {k: jnp.asarray(v, jnp.bfloat16) for k, v in tree.items()}
    assert summarize(small) != summarize(small | {"a": small["a"].at[2, 3].add(0.5)})


def test_equal_trees_have_equal_bits() -> None:
    tree = {"a": jnp.asarray([1.0, np.nan]), "b": jnp.arange(3)}
    copied = jax.tree.map(jnp.copy, tree)
    assert equal(tree, tree) and equal(tree, copied)
    for other in (copied | {"b": jnp.arange(3) + 1}, copied | {"b": jnp.arange(4)},
                  {"a": tree["a"]}):
        assert not equal(tree, other)
