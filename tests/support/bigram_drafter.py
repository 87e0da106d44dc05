"""A drafter of one's own that learns: a table of logits [V, V] of the next token by the last one.

Named in a config as spec.drafter = "bigram_drafter:bigram".
"""

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.draft.protocol import Drafter
from specrl_jax.draft.registry import DrafterContext, DrafterPart
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.draft.tree import roots


def bigram(context: DrafterContext) -> DrafterPart:
    vocab, depth = context.arch.vocab_size, context.sizes["depth"]
    random = np.random.default_rng(context.config.seed)
    drafter = Drafter(
        nodes=depth + 1, depth=depth, branch=1, propose=propose(depth), names=("bigram",))
    return DrafterPart("bigram", drafter, {
        "weights": {"table": random.standard_normal((vocab, vocab), np.float32)},
        "vocab": np.arange(vocab, dtype=np.int32)}, TrainableDrafter(loss, vocab))


def loss(params, inputs, targets):
    outputs = [inputs.tokens_at(depth - 1) for depth in range(targets.depths)]
    return targets.loss(params, outputs, lambda params, last: jnp.moveaxis(
        params["table"][last], -1, 0))


def propose(depth):
    def run(params, state, frontier, rows, spec, survive):
        tree = roots(frontier.root, frontier.live, depth + 1)
        tokens, survival, probs = [frontier.root], [tree.survival[:, 0]], [tree.draft_prob[:, 0]]
        for level in range(1, depth + 1):
            q = jax.nn.softmax(params["weights"]["table"][tokens[-1]])
            tokens.append(q.argmax(-1).astype(jnp.int32))
            probs.append(q.max(-1))
            survival.append(survive(survival[-1][:, None], probs[-1][:, None], jnp.full_like(
                tree.depth[:, :1], level), tree.origin[:, :1])[:, 0])
        level = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32)[None], tree.depth.shape)
        draft_prob = jnp.stack(probs, 1)
        return tree.replace(
            tokens=jnp.stack(tokens, 1), parent=jnp.maximum(level - 1, 0), depth=level,
            survival=jnp.stack(survival, 1), draft_prob=draft_prob,
            logq=jnp.log(draft_prob).at[:, 0].set(0.0),
            live=frontier.live[:, None] & (level <= spec.steps)), state

    return run
