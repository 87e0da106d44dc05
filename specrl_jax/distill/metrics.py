"""Quality of drafts: a drafter evaluated on sequences, acceptance by depth, replayed rounds."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from specrl_kernels.noise import gumbel

from specrl_jax.config import DistillOptions
from specrl_jax.distill import teacher
from specrl_jax.distill.losses import acceptance
from specrl_jax.distill.teacher import Aligned, Batch, FrozenParams
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.structs import Array, DrafterParams


class Evaluation(struct.PyTreeNode):
    """How a drafter did on a micro-batch, at the anchors of `live_anchors`."""

    alpha: Array  # f32[J, b, T] acceptance rate
    agree: Array  # bool[J, b, T] drafter and actor have the same most likely token
    match: Array  # bool[J, b, T] the draft with the actor's noise is the response's token
    live: Array  # bool[J, b, T]


def evaluate_drafter(drafter: TrainableDrafter, options: DistillOptions, params: DrafterParams,
                     frozen: FrozenParams, batch: Batch, draws: tuple[Array, Array]
                     ) -> Evaluation:
    """Compares drafts of a micro-batch with the actor, each given that those before were right.

    The drafter has `outputs` and `logits`; `draws` are key and scale of `noise`.
    """
    assert drafter.outputs is not None and drafter.logits is not None
    logits, inputs, (sequences, made) = drafter.logits, teacher.inputs_of(frozen, batch), batch
    place = jnp.broadcast_to(jnp.arange(inputs.window)[None], made.best.shape)
    targets = teacher.targets_of(
        options, frozen, batch, (jnp.ones(options.unroll), jnp.ones(len(sequences.length))),
        extra=(made.best, inputs.tokens_at(0), place))

    def chunk(outputs: Sequence[Array], at: Aligned) -> tuple[Array, ...]:
        log_p, (best, response, place) = targets.log_probs(at), at.extra
        drawn, depths = noise(frozen.vocab, place, *draws), []
        for j, output in enumerate(outputs):
            def shift(a: Array, j: int = j, size: int = output.shape[-1]) -> Array:
                return a[..., j:][..., :size]

            log_q = targets.log_draft(logits(params, inputs, output))
            depths.append((jax.vmap(acceptance, in_axes=1)(shift(log_p), log_q),
                           frozen.vocab[log_q.argmax(0)] == shift(best),
                           frozen.vocab[(log_q + shift(drawn)).argmax(0)] == shift(response)))
        return tuple(jnp.stack(x) for x in zip(*depths, strict=True))

    outputs = drafter.outputs(params, inputs, options.unroll)
    return Evaluation(*teacher.in_chunks(chunk, outputs, targets.aligned), live=targets.mask)


def noise(vocab: Array, place: Array, key: Array, scale: Array) -> Array:
    """Returns the noise f32[Vd, b, C] of tokens at `place` i32[b, C], see prng.row_keys.

    `key` is u32[b, 2]; `scale` f32[b] is 0 for rows that were drawn greedily, else 1.
    """
    return jnp.moveaxis(gumbel(key[:, None], place, vocab) * scale[:, None, None], -1, 0)


def summarize(parts: list[Evaluation]) -> dict[str, float]:
    """Returns means over all held-out anchors by depth, and accept lengths by depth of the chain.

    alpha: acceptance rate of rejection sampling; agree: share of anchors at which drafter and actor
    have the same most likely token; match: share at which the draft made with the actor's noise is
    the response's token. Each assumes that the drafts before it were right. accept_length/d: tokens
    of a round with a chain of d drafts under the match rule, replayed over the responses.
    """
    out: dict[str, float] = {}
    for name in ("alpha", "agree", "match"):
        sums = np.sum([np.where(p.live, getattr(p, name), 0).sum((1, 2)) for p in parts], axis=0)
        out |= by_depth(name, sums / np.sum([p.live.sum((1, 2)) for p in parts], axis=0))
    depths = len(parts[0].match)
    walks = [walk(np.asarray(p.match[:, row] & p.live[:, row]), int(p.live[0, row].sum()))
             for p in parts for row in range(p.match.shape[1])]
    tokens = sum(total for total, _ in walks)
    rounds = np.sum([counts for _, counts in walks], axis=0)
    return out | {f"accept_length/{d + 1}": float(tokens / rounds[d]) for d in range(depths)}


def walk(match: np.ndarray, length: int) -> tuple[int, list[int]]:
    """Returns the tokens of a response, and its rounds with chains of 1, 2, ... drafts, of which
    match bool[J, T] holds whether the draft of depth j from anchor k is right.
    """
    reach = np.cumprod(match, axis=0).cumsum(0)  # [J, T] drafts accepted by chains of j + 1
    rounds = []
    for accepted in reach:
        at = count = 0
        while at < length:
            at, count = at + 1 + int(accepted[at]), count + 1
        rounds.append(count)
    return length, rounds


def by_depth(name: str, values: np.ndarray) -> dict[str, float]:
    """Returns name/0, name/1, ... for the values of each depth."""
    return {f"{name}/{depth}": float(x) for depth, x in enumerate(np.asarray(values))}


def table(summary: dict[str, float]) -> str:
    """Formats the result of `summarize`, one line for each depth."""
    depths = sum(name.startswith("alpha/") for name in summary)
    lines = ["held out: depth  alpha  agree  match  accept length of a chain"]
    lines += [f"          {d + 1:5d}  {summary[f'alpha/{d}']:.3f}  {summary[f'agree/{d}']:.3f}  "
              f"{summary[f'match/{d}']:.3f}  {summary[f'accept_length/{d + 1}']:.3f}"
              for d in range(depths)]
    return "\n".join(lines)
