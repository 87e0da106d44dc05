"""The drafters that a config names, joined with their weights."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax.config import DRAWN_RULES, Config, ConfigError, check
from specrl_jax.draft import eagle_model, eagle_weights
from specrl_jax.draft.eagle import eagle
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.history import history
from specrl_jax.draft.merge import merge
from specrl_jax.draft.off import off
from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.recorded import replay, replay_params
from specrl_jax.draft.small_lm import small_lm
from specrl_jax.model import weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter, and its own weights as host arrays: what its `bind` takes.

    What has versions, and alone can learn, is an eagle head, {"weights", "vocab"}: all of `own`, or
    one part of it. Where there is none it is a small model's weights, which stay as they are. Small
    models beside it are looked after, too.
    """

    drafter: Drafter
    own: Any = ()
    head: EagleArch | None = None  # of what can learn
    part: int | None = None  # where `own` and what is bound are tuples: which of them
    weighty: bool = False  # there is something to look after
    beside: tuple[int, ...] = ()  # other parts with weights, which stay as they are
    actor: str = ""  # identity of the actor's weights that the head was trained with, if known

    def kept(self, tree: Any) -> Any:
        """The part of `own`, or of what is bound, that is looked after."""
        return tree if self.part is None else tree[self.part]

    def weights(self, tree: Any) -> tuple[Any, Any]:
        """(weights, draft vocabulary or ()) of `kept`."""
        if self.head is None:
            return tree, ()
        return (tree["weights"], tree["vocab"]) if isinstance(tree, dict) else (tree.weights,
                                                                                tree.vocab)

    def others(self, tree: Any) -> Any:
        """The weights beside `kept`."""
        return [tree[i] for i in self.beside]

    def with_kept(self, own: Any, head: Any) -> Any:
        """`own` with another head."""
        return head if self.part is None else (*own[: self.part], head, *own[self.part + 1 :])


def make(config: Config, arch: Architecture, stop: Sequence[int], group: int,
         warn: Callable[[str], None], tokenizer: Tokenizer | None = None) -> Drafting:
    """The drafter of spec.drafter.

    Args:
      arch: the actor's.
      stop: tokens that end a response.
      group: M, samples of a prompt.
      tokenizer: the actor's, which a small model must share; None is that of config.model.path.

    Raises:
      ConfigError: its weights are missing or do not fit the actor, or sizes cannot work.
    """
    if config.spec.drafter == "off" or config.control.policy == "off":
        return Drafting(off())
    if config.spec.rule in DRAWN_RULES:
        _check_drawn(config)
    names = config.draft.parts if config.spec.drafter == "merge" else (config.spec.drafter,)
    parts = [_small(config, arch, tokenizer, i) if name == "small_lm" else
             _part(name, i, config, arch, stop, group, tokenizer, warn)
             for i, name in enumerate(names)]
    if config.spec.drafter != "merge":
        return parts[0]
    weighty = [i for i, part in enumerate(parts) if part.weighty]
    kept = next((i for i in weighty if parts[i].head is not None), (weighty or [None])[0])
    return Drafting(merge([part.drafter for part in parts], config.spec.max_nodes),
                    tuple(part.own for part in parts),
                    None if kept is None else parts[kept].head, kept, kept is not None,
                    tuple(i for i in weighty if i != kept), "".join(part.actor for part in parts))


def _check_drawn(config: Config) -> None:
    """
    Raises:
      ConfigError: a token is not drawn.
    """
    spec, rule = config.spec, f"spec.rule = {config.spec.rule!r} "
    check(spec.drafter in ("eagle", "small_lm"), "spec.drafter", spec.drafter,
          rule + "needs a drafter that draws: choose eagle or small_lm, or rule rejection")
    check(config.draft.children != "top", "draft.children", config.draft.children,
          rule + "needs tokens that were drawn: choose perturbed or sampled")


def _part(name: str, origin: int, config: Config, arch: Architecture, stop: Sequence[int],
          group: int, tokenizer: Tokenizer | None, warn: Callable[[str], None]) -> Drafting:
    spec = config.spec
    sizes = {"depth": spec.max_depth, "branch": spec.max_branch, "nodes": spec.max_nodes}
    if name == "history":
        return Drafting(history(match=spec.history_match, group=group, origin=origin, **sizes))
    if name == "replay":
        drafter = replay(depth=spec.max_depth, nodes=spec.max_nodes, vocab=arch.vocab_size,
                         origin=origin)
        return Drafting(drafter, replay_params(config.draft.corruption, config.draft.cost))
    head, own, actor = _head(config, arch, stop, tokenizer, warn)
    return Drafting(eagle(head, children=config.draft.children, origin=origin,
                          temperature=config.draft.temperature,
                          drawn=config.spec.rule in DRAWN_RULES,
                          dtype=jnp.dtype(config.model.dtype), **sizes), own, head, weighty=True,
                    actor=actor)


def _head(config: Config, arch: Architecture, stop: Sequence[int], tokenizer: Tokenizer | None,
          warn: Callable[[str], None]) -> tuple[EagleArch, Any, str]:
    """The trained head of draft.path and the actor's weights it was trained with, or a random one.
    """
    path = config.draft.path
    if path:
        try:
            head, own, warnings, made_for = eagle_weights.load(path, arch, stop)
        except ConfigError as error:
            raise ConfigError(f"draft.path = {path!r}: {error}") from error
        for warning in warnings:
            warn(warning)
        if made_for.tokenizer:
            actors = _tokenizer(config, tokenizer).identity
            check(made_for.tokenizer == actors, "draft.path", path,
                  f"was trained with tokenizer {made_for.tokenizer}, the actor's is {actors}; give "
                  "a head that was trained for it")
        return head, own, made_for.actor
    warn("draft.path is empty: the eagle head starts from random weights and will accept little; "
         "train one with experiments/train_drafter.py")
    head = EagleArch(actor=arch, draft_vocab=config.draft.vocab)
    counts = np.zeros(arch.vocab_size)
    return head, {"weights": eagle_model.initialize(head, config.seed),
                  "vocab": eagle_model.choose_vocab(counts, head.draft_vocab, stop)}, ""


def _tokenizer(config: Config, tokenizer: Tokenizer | None) -> Tokenizer:
    """The actor's, where the caller has not read it yet."""
    return tokenizer or weights.describe_source(config.model.path).tokenizer


def _small(config: Config, arch: Architecture, tokenizer: Tokenizer | None, origin: int
           ) -> Drafting:
    """The model of draft.model."""
    path, spec = config.draft.model, config.spec
    check(bool(path), "draft.model", path, "name a smaller model with the actor's tokenizer")
    small = weights.describe_source(path, "draft.model")
    check_tokens(path, small.tokenizer, _tokenizer(config, tokenizer))
    most = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    check(most <= small.arch.max_position, "draft.model", path,
          f"has {small.arch.max_position} positions, rollout.max_prompt_tokens + "
          f"rollout.max_new_tokens = {most}")
    # Models of one tokenizer pad their embeddings differently.
    vocab = min(small.arch.vocab_size, arch.vocab_size)
    own = {name: leaf[:vocab] if name in ("embed", "head") else leaf
           for name, leaf in small.params().items()}
    shared = dataclasses.replace(small.arch, vocab_size=vocab)
    drafter = small_lm(shared, spec.max_depth, spec.max_branch, spec.max_nodes,
                       config.draft.children, temperature=config.draft.temperature, origin=origin,
                       drawn=config.spec.rule in DRAWN_RULES, dtype=jnp.dtype(config.model.dtype))
    return Drafting(drafter, own, weighty=True)


def check_tokens(path: str, small: Tokenizer, actor: Tokenizer) -> None:
    """
    Raises:
      ConfigError: the small model's tokens are not the actor's.
    """
    mine, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (small, actor))
    differ = sorted(token for token in mine.keys() | theirs.keys()
                    if mine.get(token) != theirs.get(token))
    check(not differ, "draft.model", path,
          f"{len(differ)} tokens differ from the actor's, such as {differ[:1]}; name a model with "
          "the actor's tokenizer")
