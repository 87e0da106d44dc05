"""Heads: of another tokenizer or other weights of their actor, and new ones with their options."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
from helpers import micro_config, with_fields

from specrl_jax import sharding
from specrl_jax.config import ConfigError
from specrl_jax.draft import eagle_model, eagle_weights, registry
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.layers import identity
from specrl_jax.model.tiny import TINY, byte_tokenizer, random_tensors
from specrl_jax.model.weights import Source
from specrl_jax.rollout.sampler import Sampler

ARCH = dataclasses.replace(TINY, num_layers=1)
TOKENIZER = byte_tokenizer()


def actor(seed: int) -> dict:
    return Source(ARCH, TOKENIZER, random_tensors(ARCH, seed), "").params()


def warnings_of(folder: Path, *weights: dict, parts: tuple[str, ...] = ()) -> list[str]:
    """The warnings of a run that drafts with the head in `folder` and starts with `weights[0]`."""
    told: list[str] = []
    config = micro_config(spec__drafter="eagle", draft__path=str(folder))
    if parts:
        config = with_fields(config, spec__drafter="merge", spec__max_nodes=5, draft__parts=parts)
    sampler = Sampler(config, ARCH, TOKENIZER.stop_ids, sharding.make_mesh(config.mesh), prompts=4,
                      group=2, warn=told.append, tokenizer=TOKENIZER)
    for params in weights[:1]:
        sampler.initial_state(params)
    for params in weights[1:]:
        sampler.publish(params, 1)
    return told


def saved(folder: Path, made_for: eagle_weights.MadeFor) -> Path:
    head = EagleArch(ARCH, draft_vocab=64)
    vocab = eagle_model.choose_vocab(np.zeros(ARCH.vocab_size), 64, TOKENIZER.stop_ids)
    eagle_weights.save(folder, head, {"weights": eagle_model.initialize(head, 0), "vocab": vocab},
                       made_for)
    return folder


@pytest.mark.parametrize("norms", [True, False])
def test_options_of_a_new_head_reach_its_network(norms: bool) -> None:
    config = micro_config(spec__drafter="eagle", draft__tap_norm=norms, draft__state_norm=norms)
    (part,) = registry.make(config, ARCH, TOKENIZER.stop_ids, 1, lambda line: None).parts
    assert ("tap_norm" in part.weights["weights"]) is norms
    assert part.trainable is not None and part.trainable.logits is not None
    hidden = np.random.default_rng(0).standard_normal((ARCH.hidden_size, 3)).astype(np.float32)
    weights, inputs = part.weights["weights"], types.SimpleNamespace(head=None)
    one, twice = (part.trainable.logits(weights, inputs, x) for x in (hidden, 2 * hidden))
    np.testing.assert_allclose(twice, one * (2 if norms else 1), rtol=1e-3)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", eagle_weights.MadeFor(tokenizer="0123456789abcdef"))
    with pytest.raises(ConfigError, match=f"draft.path.*0123456789abcdef.*{TOKENIZER.identity}"):
        warnings_of(head)


@pytest.mark.parametrize("parts", [(), ("eagle", "history")])
def test_head_of_another_actor_is_reported_in_one_line(
        tmp_path: Path, parts: tuple[str, ...]) -> None:
    mine = saved(tmp_path / "head", eagle_weights.MadeFor(TOKENIZER.identity, identity(actor(0))))
    assert warnings_of(mine, actor(0), actor(1), parts=parts) == []  # it learns, and drifts away
    assert warnings_of(mine, actor(1), actor(0), parts=parts) == [
        f"draft.path = {str(mine)!r}: the head was trained with other weights of this actor, "
        "so fewer of its drafts may be accepted"]
    unknown = saved(tmp_path / "other", eagle_weights.UNKNOWN)
    (told,) = warnings_of(unknown, actor(1), parts=parts)
    assert told.startswith(f"{unknown}: does not name the tokenizer that it was trained with")
