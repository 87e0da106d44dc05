"""A drafter whose parameters are not finite: speculation goes off loudly, tokens stay the same."""

import dataclasses
import functools

import numpy as np
import pytest
from helpers import micro_config

from specrl_jax import sharding
from specrl_jax.data.prompts import PromptBatch
from specrl_jax.draft import eagle_model
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source
from specrl_jax.rollout.sampler import Sampler

ARCH = dataclasses.replace(TINY, num_layers=1)


def generate(drafter, dtype="float32"):
    """The tokens of a rollout, its counters and those of the next one, and all warnings."""
    config, warnings = micro_config(
        spec__drafter=drafter, spec__branch=2, spec__nodes=4, spec__max_branch=2, spec__max_nodes=5,
        model__dtype=dtype, draft__model="random:tiny"), []
    sampler = Sampler(config, ARCH, (3,), sharding.make_mesh(config.mesh), prompts=4, group=2,
                      warn=warnings.append, tokenizer=byte_tokenizer())
    policy, published, speculation = sampler.initial_state(
        Source(ARCH, byte_tokenizer(), random_tensors(ARCH, 0), "").params())
    ids = np.arange(4)
    batch = PromptBatch([[5, 9]] * 4, ids, ids * 0)
    rollout, speculation, first = sampler.generate(batch, policy, published, speculation, "train")
    published = published.replace(enabled=not first.counters["broken"])  # as a run does
    _, _, second = sampler.generate(batch, policy, published, speculation, "train", 1)
    said = [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.length, strict=True)]
    return said, first.counters, second.counters, warnings


sound = functools.cache(generate)


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["eagle", "merge"])  # a small model like this is refused
@pytest.mark.parametrize("name, factor", [("fc", np.nan), ("final_norm", 3e38)])
def test_broken_drafter_is_reported_and_changes_no_token(monkeypatch, drafter, name, factor):
    plain, *_, quiet = sound("off")
    drafted, counters, after, warnings = sound(drafter)
    assert drafted == plain and counters["drafted"] > 0 and after["drafted"] > 0
    assert counters["broken"] == after["broken"] == 0
    assert not any("finite" in warning for warning in [*quiet, *warnings])
    whole = eagle_model.initialize

    def broken(arch, seed):
        weights = whole(arch, seed)
        return weights | {name: (weights[name] * factor).astype(np.float32)}

    monkeypatch.setattr(eagle_model, "initialize", broken)
    tokens, counters, after, warnings = generate(drafter)
    assert tokens == plain and counters["broken"] > 0
    assert any("drafter version 0 are not finite" in warning for warning in warnings)
    assert counters["drafted"] == 0 or drafter == "merge"  # whose history drafts on
    assert after["drafted"] == after["broken"] == 0


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["eagle", "merge"])
def test_in_bfloat16_drafts_are_accepted_too(drafter):
    plain, *_ = sound("off", "bfloat16")
    drafted, counters, after, _ = sound(drafter, "bfloat16")
    assert counters["broken"] == 0 and counters["drafted"] > 0
    assert counters["accepted"] + after["accepted"] > 0
    same = [a == b for one, other in zip(plain, drafted, strict=True)
            for a, b in zip(one, other, strict=False)]
    assert np.mean(same) > 0.9  # but for near ties, of which 8 bits have more, and what follows
