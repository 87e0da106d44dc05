"""Builds the drafter and the engine that a config asks for; nothing is put on a device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from specrl_jax import sharding
from specrl_jax.config import Config, check
from specrl_jax.control import registry
from specrl_jax.control.buckets import bucket_table
from specrl_jax.control.protocol import Limits
from specrl_jax.draft import registry as drafters
from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.registry import DrafterSet
from specrl_jax.model import invariant
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.rollout.engine import Engine
from specrl_jax.rollout.layout import FEED, Shapes
from specrl_jax.rollout.plan import Decoder
from specrl_jax.verify import truncation
from specrl_jax.verify.registry import RULES


def build(config: Config, arch: Architecture, stop: Sequence[int], mesh: Mesh, *, prompts: int,
          group: int, warn: Callable[[str], None], tokenizer: Tokenizer | None = None,
          wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter, blank: bool = False,
          records: bool = False) -> tuple[DrafterSet, Engine]:
    """Returns what drafts and the engine of a rollout; for the arguments see `Sampler`.

    With `blank` only the shapes of the drafter's random weights can be read.

    Raises:
      ConfigError: a value cannot work.
    """
    shards = sharding.shard_count(mesh)
    check(prompts % shards == 0, "prompts", prompts,
          f"must be a multiple of the {shards} data shards")
    most = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    check(most <= arch.max_position, "rollout.max_new_tokens", config.rollout.max_new_tokens,
          f"with rollout.max_prompt_tokens that is {most} positions; the model has "
          f"{arch.max_position}")
    drafter_set = drafters.make(
        config, arch, stop, group, warn, tokenizer,
        drawn=RULES.resolve(config.spec.rule).needs_proposal, blank=blank,
        truncate=functools.partial(truncation.threshold, min_p=config.rollout.min_p)
        if truncates(config) else None)
    drafter = wrap(drafter_set.drafter)
    shapes = Shapes(
        batch=config.rollout.batch_size // shards, sequences=prompts * group // shards,
        group=group, prompt=config.rollout.max_prompt_tokens,
        response=config.rollout.max_new_tokens, shards=shards, depth=drafter.depth,
        min_batch=config.rollout.min_batch, feed=FEED if config.rollout.quota else 0)
    decoder = _decoder(config, arch, mesh, drafter, shapes)
    if records and config.distill.when == "verification":
        decoder = dataclasses.replace(decoder, recorded=drafter_set.trainable,
                                      explore=round(1 / config.distill.explore))
    past = config.spec.history_past if drafter.depth else 0
    return drafter_set, Engine(decoder, mesh, shapes, stop, jnp.dtype(config.model.dtype), past)


def truncates(config: Config) -> bool:
    """Returns whether a row may be truncated: programs hold no truncation otherwise."""
    return config.rollout.top_k > 0 or config.rollout.top_p < 1 or config.rollout.min_p > 0


def _decoder(config: Config, arch: Architecture, mesh: Mesh, drafter: Drafter, shapes: Shapes
             ) -> Decoder:
    smallest = shapes.batches[-1]
    limits = Limits(
        depth=drafter.depth, branch=config.spec.max_branch, nodes=config.spec.max_nodes,
        mix=(1.0,) * len(drafter.names), longest=shapes.longest,
        buckets={rows: bucket_table(rows, drafter.nodes, config.spec.max_packed,
                                    rows == smallest) for rows in shapes.batches},
        seed=config.seed, platform=sharding.platform(mesh))
    controller = registry.make(config.control, config.spec, limits)
    decoder = Decoder(arch, drafter, controller, config.spec.max_packed, smallest,
                      rule=config.spec.rule,
                      truncates=truncates(config), min_p=config.rollout.min_p,
                      repetition_penalty=config.rollout.repetition_penalty)
    if config.model.numerics == "invariant":
        invariant.check_possible(arch, config.model.dtype, mesh)
        decoder = dataclasses.replace(decoder, invariant=True,
                                      implementation=invariant.IMPLEMENTATION)
    return decoder
