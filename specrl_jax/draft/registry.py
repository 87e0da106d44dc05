"""The drafters that a config names, joined with their weights.

A drafter of one's own is a factory, registered by a decorator or named as package.module:function
in spec.drafter or draft.parts:

    @register_drafter("mine")
    def mine(context: DrafterContext) -> DrafterPart:
        return DrafterPart("mine", drafter=...)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specrl_jax import sharding
from specrl_jax.config import Config, ConfigError, check
from specrl_jax.config.registry import Registry
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.draft_model import draft_model
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.history import MATCH, history
from specrl_jax.draft.merge import merge
from specrl_jax.draft.network import Truncate
from specrl_jax.draft.off import off
from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.model import weights
from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.model.tokenizer import Tokenizer, check_same_tokens
from specrl_jax.runtime.paths import weights_path
from specrl_jax.structs import DrafterParams, Params, PyTree


@dataclasses.dataclass(frozen=True)
class DrafterPart:
    """One drafter with its weights."""

    name: str  # in metrics: draft/NAME/...
    drafter: Drafter
    weights: DrafterParams = ()  # host arrays, the second argument of drafter.bind
    trainable: TrainableDrafter | None = None  # of one that can learn, see draft/trainable.py
    versioned: bool = True  # weights, if any, are verified before each rollout
    records_proposal: bool = False  # its trees carry the distribution that they were drawn from
    actor: str = ""  # identity of the actor's weights that it was trained with, if known
    described: PyTree = None  # a Param for each weight that is split over devices as the actor's;
    # None for all or for one: whole on every device


@dataclasses.dataclass(frozen=True)
class DrafterContext:
    """What a factory may read."""

    config: Config
    arch: Architecture  # the actor's
    stop: Sequence[int]  # tokens that end a response
    group: int  # M, samples of a prompt
    origin: int  # index among merged drafters, for DraftTree.origin
    warn: Callable[[str], None]
    drawn: bool = False  # the rule tests drafts as samples: trees need a `proposal`
    known_tokenizer: Tokenizer | None = None  # the actor's
    truncate: Truncate | None = None  # how rows are truncated; None where none is
    blank: bool = False  # random weights are zeros that take no memory: only shapes are read

    @property
    def tokenizer(self) -> Tokenizer:
        """The actor's tokenizer, read from config.model.path if it is not known yet."""
        return self.known_tokenizer or weights.describe_source(
            self.config.model.path, family=self.config.model.family).tokenizer

    @property
    def sizes(self) -> dict[str, int]:
        spec = self.config.spec
        return {"depth": spec.max_depth, "branch": spec.max_branch, "nodes": spec.max_nodes}

    @property
    def network(self) -> dict[str, Any]:
        draft = self.config.draft
        return {"children": draft.children, "temperature": draft.temperature,
                "origin": self.origin, "drawn": self.drawn,
                "dtype": jnp.dtype(self.config.model.dtype)}


Factory = Callable[[DrafterContext], DrafterPart]

DRAFTERS: Registry[Factory] = Registry("spec.drafter", Callable)
register_drafter = DRAFTERS.register
MERGE = "merge"  # joins the drafters of draft.parts


@dataclasses.dataclass(frozen=True)
class DrafterSet:
    """What drafts in a rollout: one drafter, or several merged into one. Weights come by part."""

    drafter: Drafter
    parts: tuple[DrafterPart, ...]
    merged: bool = False

    @property
    def weights(self) -> tuple[DrafterParams, ...]:
        return tuple(part.weights for part in self.parts)

    @property
    def versioned(self) -> tuple[int, ...]:
        """Indices of the parts whose weights are checked, the trainable one first."""
        parts = [i for i, p in enumerate(self.parts)
                 if p.trainable is not None or p.versioned and p.weights != ()]
        return tuple(sorted(parts, key=lambda i: self.parts[i].trainable is None))

    @property
    def trainable(self) -> int | None:
        """Index of the first part that can learn."""
        return next((i for i, p in enumerate(self.parts) if p.trainable is not None), None)

    def shardings(self, mesh: Mesh) -> tuple[PyTree, ...]:
        """Returns the shardings of each part's weights on a mesh, as trees or prefixes of trees.

        Described weights are split as the learner's are; `bind` gathers them over `fsdp`.
        """
        whole = sharding.replicated(mesh)
        return tuple(jax.tree.map(
            lambda p: whole if p is None else sharding.shardings(p, sharding.LEARNER_RULES, mesh),
            part.described, is_leaf=lambda p: p is None or is_param(p)) for part in self.parts)

    @property
    def actor(self) -> str:
        return "".join(part.actor for part in self.parts)

    def bind(self, actor: Params, weights: Sequence[DrafterParams]) -> DrafterParams:
        """Returns the parameters of a rollout: each part's weights joined with the actor's."""
        return self.drafter.bind(actor, tuple(weights) if self.merged else weights[0])


def make(config: Config, arch: Architecture, stop: Sequence[int], group: int,
         warn: Callable[[str], None], tokenizer: Tokenizer | None = None, *, drawn: bool = False,
         truncate: Truncate | None = None, blank: bool = False) -> DrafterSet:
    """Builds the drafter of spec.drafter.

    Args:
      arch: the actor's.
      stop: tokens that end a response.
      group: M, samples of a prompt.
      tokenizer: the actor's, which a small model must share; None is that of config.model.path.
      drawn: the rule of spec.rule tests drafts as samples of a distribution (`needs_proposal`).
      truncate: finds what top-k and top-p keep; None where no row is truncated.
      blank: see DrafterContext.

    Raises:
      ConfigError: a name is unknown, weights are missing or do not fit the actor, or sizes cannot
        work.
    """
    spec = config.spec
    merged = spec.drafter == MERGE
    merging = [_resolve(name, "draft.parts") for name in config.draft.parts]
    factories = merging if merged else [_resolve(spec.drafter, "spec.drafter")]
    if config.control.policy == "off":
        return DrafterSet(off(), (DrafterPart("off", off()),))
    parts = tuple(
        factory(DrafterContext(config, arch, stop, group, origin, warn, drawn, tokenizer, truncate,
                               blank))
        for origin, factory in enumerate(factories))
    for part in parts:
        check(isinstance(part, DrafterPart), "spec.drafter", spec.drafter,
              f"must make a DrafterPart, but it made a {type(part).__name__}")
        depth = part.drafter.depth
        check(depth <= spec.max_depth, "spec.max_depth", spec.max_depth,
              f"drafter {part.name} drafts up to {depth} tokens; raise it to that")
    if drawn and spec.drafter != "off":
        rule = f"spec.rule = {spec.rule!r} "
        check(not merged and parts[0].records_proposal, "spec.drafter", spec.drafter,
              rule + "needs a drafter that draws: choose eagle or draft_model, or rule rejection")
        check(config.draft.children != "top", "draft.children", config.draft.children,
              rule + "needs tokens that were drawn: choose perturbed or sampled")
    if not merged:
        return DrafterSet(parts[0].drafter, parts)
    return DrafterSet(merge([part.drafter for part in parts], spec.max_nodes), parts, merged=True)


def _resolve(name: str, field: str) -> Factory:
    known = [*DRAFTERS, MERGE] if field == "spec.drafter" else [n for n in DRAFTERS if n != "off"]
    check(name in known or ":" in name, field, name,
          f"choose one of {', '.join(known)}, or name your own as package.module:name")
    return DRAFTERS.resolve(name)


@register_drafter("off")
def _off(context: DrafterContext) -> DrafterPart:
    return DrafterPart("off", off())


@register_drafter("history")
def _history(context: DrafterContext) -> DrafterPart:
    return DrafterPart("history", history(
        match=MATCH, group=context.group, origin=context.origin,
        **context.sizes))


@register_drafter("eagle")
def _eagle(context: DrafterContext) -> DrafterPart:
    head, own, actor = _head(context)
    return DrafterPart("eagle", eagle(head, **context.sizes, **context.network), own,
                       eagle_model.trainable(head), records_proposal=True, actor=actor,
                       described={"weights": eagle_model.describe(head), "vocab": None})


@register_drafter("draft_model")
def _draft_model(context: DrafterContext) -> DrafterPart:
    config = context.config
    path = config.draft.model
    check(bool(path), "draft.model", path, "name a smaller model with the actor's tokenizer")
    small = weights.describe_source(path, "draft.model")
    check_same_tokens("draft.model", path, small.tokenizer, context.tokenizer)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    check(longest <= small.arch.max_position, "draft.model", path,
          f"has {small.arch.max_position} positions, rollout.max_prompt_tokens + "
          f"rollout.max_new_tokens = {longest}")
    # Models that share a tokenizer may pad their embeddings differently.
    vocab = min(small.arch.vocab_size, context.arch.vocab_size)
    params = _zeros(describe(small.arch)) if context.blank else small.params()
    own = {name: leaf[:vocab] if name in ("embed", "head") else leaf
           for name, leaf in params.items()}
    shared = dataclasses.replace(small.arch, vocab_size=vocab)
    return DrafterPart("draft_model", draft_model(
        shared, **context.sizes, **context.network, truncate=context.truncate), own,
                       records_proposal=True, described=describe(shared))


def _zeros(described: PyTree) -> PyTree:
    """Returns zeros of the described shapes, which take no memory."""
    return jax.tree.map(lambda p: np.broadcast_to(np.float32(0), p.shape), described,
                        is_leaf=is_param)


def _head(context: DrafterContext) -> tuple[EagleArch, DrafterParams, str]:
    """Returns the head of draft.path and the actor it was trained with, or a random head."""
    config, arch, stop = context.config, context.arch, context.stop
    path = config.draft.path
    if not path:
        context.warn("draft.path is empty: the eagle head starts from random weights and will "
                     "accept little; train one with experiments/train_drafter.py")
        head = EagleArch(actor=arch, draft_vocab=config.draft.vocab,
                         tap_norm=config.draft.tap_norm, state_norm=config.draft.state_norm)
        vocab = eagle_model.choose_vocab(np.zeros(arch.vocab_size), head.draft_vocab, stop)
        drawn = (_zeros(eagle_model.describe(head)) if context.blank
                 else eagle_model.initialize(head, config.seed))
        return head, {"weights": drawn, "vocab": vocab}, ""
    folder = weights_path("draft.path", path)
    try:
        head, own, warnings, made_for = eagle_weights.load(folder, arch, stop)
    except ConfigError as error:
        raise ConfigError(f"draft.path = {path!r}: {error}") from error
    for warning in warnings:
        context.warn(warning)
    if made_for.tokenizer:
        actors = context.tokenizer.identity
        check(made_for.tokenizer == actors, "draft.path", path,
              f"was trained with tokenizer {made_for.tokenizer}, the actor's is {actors}; give a "
              "head that was trained for it")
    return head, own, made_for.actor
