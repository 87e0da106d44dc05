"""The EAGLE-3 drafter: a head that reads the actor's features of committed tokens.

Position t of the drafter joins the actor's feature g_t with token t + 1, so a row whose root stands
at `context` has that many positions. A round that drafts nothing only stores its features.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from specrl_jax.draft import cached, eagle_model
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.draft.network import Growth, Network
from specrl_jax.draft.protocol import Drafter
from specrl_jax.model.transformer import Attend, embed
from specrl_jax.runtime.compilation import call
from specrl_jax.sharding import ROLLOUT_RULES, replicated, spec_of
from specrl_jax.structs import Array, DrafterParams, ModelParams, Params


class Bound(struct.PyTreeNode):
    """What drafting reads, in the rollout's dtype."""

    weights: Params  # of eagle_model.describe
    vocab: Array  # i32[Vd] token ids, ascending
    embed: Array  # f[V, F] the actor's
    head: Array | None  # f[Vd, F] the actor's rows, unless the drafter has its own head


def eagle(arch: EagleArch, depth: int, branch: int, nodes: int, children: str = "perturbed", *,
          temperature: float = 1.0, origin: int = 0, drawn: bool = False,
          dtype: DTypeLike = jnp.float32) -> Drafter:
    """Returns the drafter with D = `depth`, K = `branch`, N = `nodes`.

    Its own parameters are {"weights": the tree of eagle_model.describe, "vocab": i32[Vd] ascending
    token ids}.

    Args:
      children: which tokens a node's children are: the best ones `perturbed` by the noise of the
        actor's own draw, the `top` of the drafter's distribution, or some `sampled` from it.
      temperature: of the drafter's distribution, over the row's.
      origin: index of the drafter, for DraftTree.origin.
      drawn: whether trees carry their Proposal; their shape then follows from ranks and depths.
      dtype: of the stored features and of the cache.

    Raises:
      ConfigError: sizes that cannot work.
    """
    growth = Growth(_network(arch), depth, branch, nodes, children, origin, temperature, drawn)
    return cached.drafter(
        growth, arch.layer, dtype, name="eagle", bind=functools.partial(_bind, arch),
        taps=arch.taps, project=lambda params, taps, decode=False: eagle_model.project(
            arch, params.weights, taps, decode))


def _network(arch: EagleArch) -> Network:
    def run(params: Bound, token: Array, feature: Array | None, position: Array, attend: Attend
            ) -> Array:
        assert feature is not None
        embedded = embed({"embed": params.embed}, token)
        out, _ = eagle_model.step(arch, params.weights, embedded, feature, position,
                                  functools.partial(attend, 0), decode=True)
        return out

    return Network(
        run=run, logits=lambda params, hidden: eagle_model.logits(
            arch, params.weights, params.head, hidden, decode=True),
        vocab=lambda params: params.vocab, vocab_size=arch.draft_vocab, ahead=1)


def _bind(arch: EagleArch, actor: ModelParams, own: DrafterParams) -> Bound:
    """Joins the drafter's weights with what it reads of the published actor."""
    rows = actor["embed" if arch.actor.tied else "head"]
    weights, vocab, head = call(_cast, arch, own, rows, rows.dtype, cached.mesh_of(rows))
    if not arch.own_head and arch.draft_vocab == arch.actor.vocab_size:
        head = rows  # as it is: a copy would cost as much as the actor's
    return Bound(weights=weights, vocab=vocab, embed=actor["embed"], head=head)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _cast(arch: EagleArch, own: DrafterParams, rows: Array, dtype: DTypeLike, mesh: Mesh | None
          ) -> tuple[Params, Array, Array | None]:
    """Returns weights and vocabulary, placed, and the head's rows, gathered once."""
    weights = cached.cast(own["weights"], eagle_model.describe(arch), dtype, mesh)
    trimmed = not arch.own_head and arch.draft_vocab < arch.actor.vocab_size
    head, vocab = rows[own["vocab"]] if trimmed else None, own["vocab"]
    if mesh is None:
        return weights, vocab, head
    hold = jax.lax.with_sharding_constraint
    if head is not None:
        head = hold(head, NamedSharding(mesh, spec_of(
            head.shape, ("vocab", None), ROLLOUT_RULES, mesh)))
    return weights, hold(vocab, replicated(mesh)), head
