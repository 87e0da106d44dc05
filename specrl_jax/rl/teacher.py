"""The teacher of on-policy distillation: a frozen model that scores what the policy sampled."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from specrl_jax.config import Config
from specrl_jax.model import lora, weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tokenizer import Tokenizer, check_same_tokens
from specrl_jax.rl import programs
from specrl_jax.structs import Params


class Teacher(NamedTuple):
    """A model of any architecture with the policy's tokens."""

    arch: Architecture
    params: Params  # in model.dtype, split as the learner's


def load(config: Config, tokenizer: Tokenizer, mesh: Mesh, say: Callable[[str], None]
         ) -> Teacher | None:
    """Reads the model at `rl.teacher`; returns None if there is none, or no update reads it.

    Raises:
      ConfigError: there is no such model, or its tokens are not those of `tokenizer`.
    """
    if not config.rl.teacher or not config.rl.updates:
        return None
    source = weights.describe_source(config.rl.teacher, field="rl.teacher")
    check_same_tokens("rl.teacher", config.rl.teacher, source.tokenizer, tokenizer)
    say(f"loading the teacher {source.source}")
    frozen = programs.abstract_frozen(config, source.arch, mesh)
    shardings = jax.tree.map(lambda a: a.sharding, frozen)
    return Teacher(source.arch, lora.freeze(source.params(shardings), config.model.dtype))
