"""Log-probability and entropy of tokens under the output head, a chunk of tokens at a time.

The logits of a whole batch would be the largest array of a policy update: 25 GB for 151,936 x
40,960 float32 values. Forward and backward loop over chunks, and the backward pass recomputes the
logits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from specrl_kernels.dispatch import traced_for

from specrl_jax.model.transformer import project
from specrl_jax.sharding import FSDP, ROWS, largest, straight_line
from specrl_jax.structs import Array

# Tokens whose logits exist at the same time. Each chunk reads the head three times and adds to the
# whole of its gradient: on an accelerator 1,024 tokens' products take longer than that.
TOKENS_AT_ONCE = {"cpu": 256, "gpu": 1024, "tpu": 1024}


def row_logprobs(head: Array, hidden: Array, tokens: Array, temperature: Array, count: Array
                 ) -> tuple[Array, Array]:
    """Returns the log-probability and the entropy in nats of tokens in rows, f32[b, R] each.

    On a mesh each data shard computes its own rows with the whole head, which it gathers in the
    dtype of `hidden`; the gradient of the head is scattered to the shards in float32.

    Args:
      head: f32[V, F].
      hidden: f[F, b, R], tokens: i32[b, R], see `token_logprobs`.
      temperature: f32[b].
      count: i32[b] tokens of each row to compute; the rest is padding.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {axis for axis in ROWS if axis in mesh.axis_names} - set(mesh.manual_axes)
    if all(mesh.shape[axis] == 1 for axis in axes):
        return _rows(None, head, hidden, tokens, temperature, count)
    gathers = mesh.shape[FSDP] > 1 and head.shape[1] % mesh.shape[FSDP] == 0
    return jax.shard_map(
        partial(_rows, FSDP if gathers else None),
        in_specs=(P(None, FSDP if gathers else None), P(None, ROWS), P(ROWS), P(ROWS), P(ROWS)),
        out_specs=P(ROWS), axis_names=axes, check_vma=False)(
            head, hidden, tokens, temperature, count)


def _rows(gather: str | None, head: Array, hidden: Array, tokens: Array, temperature: Array,
          count: Array) -> tuple[Array, Array]:
    """Computes `token_logprobs` of the rows in column order, so that padding comes last."""
    flat: Any = jax.tree.map(lambda a: jnp.swapaxes(a, -1, -2).reshape(*a.shape[:-2], -1), (
        hidden, tokens, jnp.broadcast_to(temperature[:, None], tokens.shape)))
    most = jnp.int32(tokens.shape[1]) if straight_line() else largest(count.max())
    states, targets, temperatures = flat
    logprob, entropy = token_logprobs(head, states, targets, temperatures, most * len(tokens),
                                      gather=gather)
    return logprob.reshape(-1, len(tokens)).T, entropy.reshape(-1, len(tokens)).T


def token_logprobs(head: Array, hidden: Array, tokens: Array, temperature: Array, count: Array,
                   chunk: int = 0, gather: str | None = None) -> tuple[Array, Array]:
    """Returns the log-probability and the entropy in nats of each token, f32[N] each.

    Products run in the dtype of `hidden` and accumulate in float32. Gradients flow to `head`, in
    float32, and to `hidden`.

    Args:
      head: f32[V, F], or a part of F.
      hidden: f[F, N] final normalised hidden states that predict the tokens.
      tokens: i32[N].
      temperature: f32[N], positive; logits are divided by it.
      count: i32[] leading tokens to compute; later chunks are zero.
      chunk: tokens whose logits exist at once; 0 is that of TOKENS_AT_ONCE.
      gather: mesh axis whose devices hold the parts of the head.
    """
    total = len(tokens)
    chunk = min(chunk or TOKENS_AT_ONCE[traced_for().platform], total)
    spare = -total % chunk
    chunks = total // chunk + (spare > 0) if straight_line() else -(
        -jnp.minimum(count, total) // chunk)
    values: Any = _chunked(
        chunk, gather, head, jnp.pad(hidden, ((0, 0), (0, spare))), jnp.pad(tokens, (0, spare)),
        jnp.pad(temperature, (0, spare), constant_values=1), chunks)
    return values[0][:total], values[1][:total]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(chunk: int, gather: str | None, *inputs: Array) -> tuple[Array, Array]:
    return _forward(chunk, gather, *inputs)[0]


def _whole(gather: str | None, head: Array, dtype: Any) -> Array:
    """Returns the whole head in `dtype`, cast before the all-gather."""
    narrow = head.astype(dtype)
    return jax.lax.all_gather(narrow, gather, axis=1, tiled=True) if gather else narrow


def _forward(chunk: int, gather: str | None, head: Array, hidden: Array, tokens: Array,
             temperature: Array, chunks: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    narrow = _whole(gather, head, hidden.dtype)
    vocabulary = jnp.arange(len(head))[:, None]

    def compute(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden_i, tokens_i, temperature_i = _take(chunk, i, hidden, tokens, temperature)
        logits = project(narrow, hidden_i, dtype=jnp.float32) / temperature_i[None]
        top = logits.max(0)
        weight = jnp.exp(logits - top[None])
        mass = weight.sum(0)
        total, mean = jnp.log(mass) + top, (weight * logits).sum(0) / mass
        # Compared, not gathered: a mesh may split the vocabulary.
        chosen = jnp.where(vocabulary == tokens_i[None], logits, 0).sum(0)
        return _put(chunk, i, out, (chosen - total, total - mean, total))

    zeros = (jnp.zeros(tokens.shape, jnp.float32),) * 3
    logprob, entropy, total = jax.lax.fori_loop(0, chunks, compute, zeros)
    return (logprob, entropy), (head, hidden, tokens, temperature, chunks, total, entropy)


def _backward(chunk: int, gather: str | None, residuals: tuple[Array, ...],
              gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """With logits z over temperature, p their softmax and H its entropy, the gradient of a token's
    log-probability is onehot - p, and that of H is -p (log p + H)."""
    head, hidden, tokens, temperature, chunks, total, entropy = residuals
    narrow = _whole(gather, head, hidden.dtype)

    def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_i, tokens_i, temperature_i, total_i, entropy_i, by_logprob, by_entropy = _take(
            chunk, i, hidden, tokens, temperature, total, entropy, *gradients)
        logits = project(narrow, hidden_i, dtype=jnp.float32) / temperature_i[None]
        logp = logits - total_i[None]
        chosen = jnp.arange(len(head))[:, None] == tokens_i[None]
        by_logits = jnp.where(chosen, by_logprob[None], 0) - jnp.exp(logp) * (
            by_logprob[None] + by_entropy[None] * (logp + entropy_i[None]))
        by_logits = (by_logits / temperature_i[None]).astype(hidden.dtype)
        by_head = project(by_logits, hidden_i.T, dtype=jnp.float32)
        by_hidden, = _put(chunk, i, sums[1:], (project(narrow.T, by_logits),))
        return sums[0] + by_head, by_hidden

    zeros = jnp.zeros(narrow.shape, jnp.float32), jnp.zeros_like(hidden)
    by_head, by_hidden = jax.lax.fori_loop(0, chunks, add, zeros)
    if gather:
        by_head = jax.lax.psum_scatter(by_head, gather, scatter_dimension=1, tiled=True)
    return by_head, by_hidden, None, None, None


_chunked.defvjp(_forward, _backward)


def _take(chunk: int, i: Array, *arrays: Array) -> list[Array]:
    """Returns chunk i of the last axis of each array."""
    return [jax.lax.dynamic_slice_in_dim(a, i * chunk, chunk, -1) for a in arrays]


def _put(chunk: int, i: Array, arrays: tuple[Array, ...], parts: tuple[Array, ...]
         ) -> tuple[Array, ...]:
    """Replaces chunk i of the last axis of each array."""
    return tuple(jax.lax.dynamic_update_slice_in_dim(a, part, i * chunk, -1)
                 for a, part in zip(arrays, parts, strict=True))
