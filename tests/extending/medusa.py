"""A drafter with a branching tree: head d, from 0, drafts the token d + 1 positions after the last
one, from the hidden state that drew the last one (Medusa, arXiv 2401.10774). The first head's K
best tokens begin K branches, which the best tokens of the other heads continue."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.registry import DrafterContext, DrafterPart
from specrl_jax.draft.trainable import DraftInputs, from_predictions
from specrl_jax.draft.tree import attach, roots
from specrl_jax.model.transformer import head, rms_norm
from specrl_jax.structs import Array, DraftTree, Frontier, TreeNodes


def medusa(context: DrafterContext) -> DrafterPart:
    """Returns the drafter of spec.drafter = medusa:medusa."""
    depth, branch, nodes = (context.sizes[name] for name in ("depth", "branch", "nodes"))
    arch = context.arch
    last, width = arch.num_layers - 1, arch.hidden_size

    def propose(params: Any, state: Any, request: DraftRequest) -> tuple[DraftTree, Any]:
        frontier, spec = request.frontier, request.spec
        shape, levels = (len(frontier.root), branch), []
        above = jnp.ones((shape[0], 1, 1))
        for d in range(depth):  # a level has [B, K] nodes, one of each branch
            q = jax.nn.softmax(params["head"] @ block(params["weights"], d, state["now"].T), 0)
            prob, token = jax.lax.top_k(q.T, 1 if d else branch)
            prob, token = (jnp.broadcast_to(a, shape) for a in (prob, token))
            k, level, origin = (jnp.broadcast_to(jnp.int32(a), shape) for a in (
                np.arange(branch), d + 1, context.origin))
            grouped = (*shape, 1) if d else (shape[0], 1, branch)  # siblings last
            above = request.survive(above, *(a.reshape(grouped) for a in (prob, level, origin)))
            levels.append(TreeNodes(
                tokens=token, parent=1 + (d - 1) * branch + k if d else 0 * k, depth=level,
                rank=0 * k if d else k, origin=origin, survival=above.reshape(shape),
                logq=jnp.log(prob), draft_prob=prob, score_gap=jnp.zeros(shape),
                live=frontier.live[:, None] & (d < spec.depth) & (k < spec.branch)))
            above = above.reshape(*shape, 1)
        children = jax.tree.map(lambda *of: jnp.concatenate(of, 1).T[:nodes - 1], *levels)
        return attach(roots(frontier.root, frontier.live, nodes), children), state

    def observe(params: Any, state: Any, frontier: Frontier, verdict: Any, path: Any) -> Any:
        at = jnp.maximum(verdict.count - 1, 0)[:, None, None]  # the node that the new root is after
        return state | {"now": jnp.take_along_axis(path.taps, at, 1)[:, 0]}

    def enter(state: Any, slots: Array, hidden: Array) -> Any:  # a prompt's, where bool[B]
        return {name: jnp.where(slots[:, None], hidden, old) for name, old in state.items()}

    zeros = np.zeros((1, width), jnp.dtype(context.config.model.dtype))
    drafter = Drafter(
        nodes=nodes, depth=depth, branch=branch, propose=propose, observe=observe, taps=(last,),
        init=lambda info: {name: zeros.repeat(info.batch, 0) for name in ("now", "prompt")},
        prefill=lambda state, fill, tokens, features: enter(
            state, fill.source >= 0, features[:, fill.source, fill.length - 1].T),
        copy_prompt=lambda state, fill: enter(state, fill.copy >= 0, state["prompt"][fill.copy]),
        bind=lambda actor, own: own | {"head": head(arch, actor)}, names=("medusa",))
    rng = np.random.default_rng(context.config.seed)
    weights = {"blocks": 0.01 * rng.standard_normal((depth, width, width), np.float32),
               "norm": np.ones(width, np.float32)}
    own = {"weights": weights, "vocab": np.arange(arch.vocab_size, dtype=np.int32)}
    return DrafterPart("medusa", drafter, own, from_predictions(
        outputs, lambda weights, inputs, output: jnp.einsum("vf,f...->v...", inputs.head, output),
        arch.vocab_size, (last,)))


def block(weights: Any, d: int, hidden: Array) -> Array:
    """Returns f32[F, n], from which the actor's output head predicts the token of head d."""
    x = rms_norm(hidden.astype(jnp.float32), weights["norm"], 1e-6)
    return x + jax.nn.silu(weights["blocks"][d] @ x)


def outputs(weights: Any, inputs: DraftInputs, depths: int) -> list[Array]:
    """Returns f32[F, b, T] of each depth, from the state two columns before: it drew the root."""
    hidden = jnp.take_along_axis(inputs.taps, inputs.columns(-2)[None], 2)
    flat = hidden.reshape(len(hidden), -1)
    return [block(weights, d, flat).reshape(hidden.shape) for d in range(depths)]
