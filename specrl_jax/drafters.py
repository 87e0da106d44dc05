"""The drafters that a config names, joined with their weights."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrl_jax.config import Config
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.base import Drafter
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.history import history
from specrl_jax.draft.merge import merge
from specrl_jax.draft.off import off
from specrl_jax.model.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter, and its own weights as host arrays: what its `bind` takes."""

    drafter: Drafter
    own: Any = ()


def make(config: Config, arch: Architecture, stop: Sequence[int], group: int,
         warn: Callable[[str], None]) -> Drafting:
    """The drafter of spec.drafter.

    Args:
      arch: the actor's.
      stop: tokens that end a response.
      group: M, samples of a prompt.

    Raises:
      ConfigError: its weights are missing or do not fit the actor, or sizes cannot work.
    """
    if config.spec.drafter == "off" or config.control.policy == "off":
        return Drafting(off())
    names = config.draft.parts if config.spec.drafter == "merge" else (config.spec.drafter,)
    parts = [_part(name, i, config, arch, stop, group, warn) for i, name in enumerate(names)]
    if config.spec.drafter != "merge":
        return parts[0]
    return Drafting(merge([part.drafter for part in parts], config.spec.max_nodes),
                    tuple(part.own for part in parts))


def _part(name: str, origin: int, config: Config, arch: Architecture, stop: Sequence[int],
          group: int, warn: Callable[[str], None]) -> Drafting:
    spec = config.spec
    sizes = {"depth": spec.max_steps, "branch": spec.max_branch, "nodes": spec.max_nodes}
    if name == "history":
        return Drafting(history(match=spec.history_match, group=group, origin=origin, **sizes))
    head, own = _head(config, arch, stop, warn)
    return Drafting(eagle(head, children=config.draft.children, origin=origin, **sizes), own)


def _head(config: Config, arch: Architecture, stop: Sequence[int], warn: Callable[[str], None]
          ) -> tuple[EagleArch, Any]:
    """The trained head of draft.path, or a random one."""
    if config.draft.path:
        head, own, warnings = eagle_weights.load(config.draft.path, arch, stop)
        for warning in warnings:
            warn(warning)
        return head, own
    warn("draft.path is empty: the eagle head starts from random weights and will accept little; "
         "train one with experiments/train_drafter.py")
    head = EagleArch(actor=arch, draft_vocab=config.draft.vocab)
    counts = np.zeros(arch.vocab_size)
    return head, {"weights": eagle_model.initialize(head, config.seed),
                  "vocab": eagle_model.choose_vocab(counts, head.draft_vocab, stop)}
