"""A drafter that learns while RL runs: a table of logits of the next token, given the last one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.draft.protocol import Drafter, DraftRequest
from specrl_jax.draft.registry import DrafterContext, DrafterPart
from specrl_jax.draft.trainable import DraftInputs, Targets, TrainableDrafter
from specrl_jax.draft.tree import chain
from specrl_jax.structs import Array, DraftTree, Metrics


def bigram(context: DrafterContext) -> DrafterPart:
    """Returns the drafter of spec.drafter = bigram:bigram."""
    depth, nodes, vocab = context.sizes["depth"], context.sizes["nodes"], context.arch.vocab_size

    def propose(params: Any, state: Any, request: DraftRequest) -> tuple[DraftTree, Any]:
        tokens, probs = [request.frontier.root], []
        for _ in range(depth):
            q = jax.nn.softmax(params["weights"]["table"][tokens[-1]])  # f32[B, V]
            tokens.append(q.argmax(1).astype(jnp.int32))
            probs.append(q.max(1))
        return chain(jnp.stack(tokens[1:]), jnp.stack(probs), request, nodes=nodes,
                     origin=context.origin), state

    rng = np.random.default_rng(context.config.seed)
    weights = {"weights": {"table": rng.standard_normal((vocab, vocab), np.float32)},  # learns
               "vocab": np.arange(vocab, dtype=np.int32)}  # tokens that it can propose
    drafter = Drafter(nodes=nodes, depth=depth, branch=1, propose=propose, names=("bigram",))
    return DrafterPart("bigram", drafter, weights, TrainableDrafter(loss, vocab))


def loss(params: Any, inputs: DraftInputs, targets: Targets) -> tuple[Array, Metrics]:
    """Returns the loss of distill.loss at each depth: here, each token is drafted from the one
    before it, so depth 0 predicts from the token at -1, depth 1 from the token at 0, and so on."""
    outputs = [inputs.tokens_at(depth - 1) for depth in range(targets.depths)]
    return targets.loss(params, outputs, logits)


def logits(params: Any, last: Array) -> Array:
    """Returns f32[Vd, ...], the logits of the token after `last`."""
    return jnp.moveaxis(params["table"][last], -1, 0)
