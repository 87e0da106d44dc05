"""The draw from a head for TPUs: a Pallas kernel that reads each weight once.

A grid step multiplies a block of the head with all positions, makes the noise of its logits, and
keeps for each position the best perturbed score, its token and score, and the sum of exponentials.

Positions lie in lanes. With fewer than 128 several parts of a block share a register: the hidden
states are laid out once for each part, at lanes of its own with zeros in the others, and the parts'
products are added. So noise and sums cost by the logit, not by the register.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specrl_kernels.dispatch import Target, Unsupported, configured, metadata
from specrl_kernels.gumbel_argmax import Drawn, first_id, scale_of
from specrl_kernels.head_argmax.parts import LOWEST, Parts, draw
from specrl_kernels.noise import exponential_of, row_words

LANES, SUBLANES = 128, 8
LEAST = 16  # lanes that a position group takes at least
BLOCK_BYTES = 4 << 20  # of the head in VMEM, twice
VMEM_LIMIT = 64 << 20


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; none changes the result beyond rounding."""

    block: int  # tokens of a grid step; a multiple of 1,024


def head_argmax_pallas(hidden: jax.Array, head: jax.Array, temperature: jax.Array,
                       key: jax.Array, position: jax.Array, *, axis: str | None, target: Target
                       ) -> Drawn:
    """See `api.head_argmax`."""
    (features, width), vocab = hidden.shape, head.shape[0]
    if features % LANES:
        raise Unsupported(f"{features} features: must be a multiple of {LANES}")
    config = heuristic(features * head.dtype.itemsize) if target.config is None else configured(
        Config, target.config)
    if config.block < 1 or config.block % (LANES * SUBLANES):
        raise Unsupported(f"{config}: block must be a multiple of {LANES * SUBLANES}")
    lanes = next((n for n in (LEAST, 32, 64) if width <= n), LANES)
    parts, groups = LANES // lanes, -(-width // LANES)
    scale, greedy = scale_of(temperature)
    columns = jnp.stack([*row_words(key, position), *(jax.lax.bitcast_convert_type(x, jnp.uint32)
                                                      for x in (scale, greedy.astype(jnp.int32)))])
    columns = jnp.tile(_pad(columns, lanes), (1, parts)).reshape(4, groups, LANES)
    hidden = _pad(hidden.astype(head.dtype), lanes)
    laid = jnp.stack([jnp.pad(hidden, ((0, 0), (i * lanes, LANES - (i + 1) * lanes)))
                      for i in range(parts)]) if parts > 1 else hidden[None]
    first = first_id(vocab, axis)
    state = jax.ShapeDtypeStruct((groups, SUBLANES, LANES), jnp.float32)
    whole = pl.BlockSpec((groups, SUBLANES, LANES), lambda *_: (0, 0, 0))
    found = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, block=config.block, lanes=lanes),
        out_shape=[state, jax.ShapeDtypeStruct(state.shape, jnp.int32), state, state, state],
        interpret=target.interpret, name="head_argmax",
        metadata=metadata(-(-vocab // config.block)),
        cost_estimate=pl.CostEstimate(
            flops=2 * vocab * features * width, transcendentals=3 * vocab * width,
            bytes_accessed=head.size * head.dtype.itemsize),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(-(-vocab // config.block),),
            in_specs=[pl.BlockSpec(laid.shape, lambda *_: (0, 0, 0)),
                      pl.BlockSpec(columns.shape, lambda *_: (0, 0, 0)),
                      pl.BlockSpec((config.block, features), lambda i, *_: (i, 0))],
            out_specs=[whole] * 5),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
    )(first[None], laid, columns, head)

    def by_position(a: jax.Array) -> jax.Array:
        a = a.reshape(groups, SUBLANES * parts, LANES // parts)
        return jnp.moveaxis(a, 1, 2).reshape(-1, SUBLANES * parts)[:width]

    return draw(Parts(*map(by_position, found)), greedy, axis)


def heuristic(token_bytes: int) -> Config:
    """Returns the largest block that is a power of two and fits."""
    block = LANES * SUBLANES
    while 2 * block * token_bytes <= BLOCK_BYTES:
        block *= 2
    return Config(block)


def _pad(a: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % lanes)))


def _kernel(first: Any, hidden: Any, columns: Any, head: Any, best: Any, token: Any, score: Any,
            top: Any, total: Any, *, vocab: int, block: int, lanes: int) -> None:
    step, parts = pl.program_id(0), LANES // lanes
    size = block // parts
    shape = (size // SUBLANES, SUBLANES, LANES)

    @pl.when(step == 0)
    def _() -> None:
        for ref, nothing in ((best, LOWEST), (score, LOWEST), (top, LOWEST), (total, 0.0)):
            ref[...] = jnp.full(ref.shape, nothing, jnp.float32)
        token[...] = jnp.broadcast_to(first[0], token.shape)

    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    own = (step * block + iota(2) // lanes * size + iota(0) * SUBLANES + iota(1))
    ids = first[0] + own
    for group in range(best.shape[0]):
        words, scale, greedy = columns[:2, group], *(
            jax.lax.bitcast_convert_type(columns[2 + i, group], dtype)[None, None]
            for i, dtype in enumerate((jnp.float32, jnp.int32)))
        logits = _multiply(head, hidden, group, vocab - step * block)
        scores = jnp.where(own < vocab, logits.reshape(shape) * scale, LOWEST)
        noise = exponential_of(words[0][None, None], words[1][None, None], ids)
        perturbed = jnp.where(greedy > 0, scores, scores - jnp.log(noise))
        perturbed = jnp.where(own < vocab, perturbed, LOWEST)
        found = perturbed.max(0)
        chosen = jnp.where(perturbed == found[None], ids, jnp.iinfo(jnp.int32).max).min(0)
        at = jnp.where(ids == chosen[None], scores, LOWEST).max(0)
        better = found > best[group]
        best[group] = jnp.where(better, found, best[group])
        token[group] = jnp.where(better, chosen, token[group])
        score[group] = jnp.where(better, at, score[group])
        highest = jnp.maximum(top[group], scores.max(0))
        total[group] = total[group] * jnp.exp(top[group] - highest) + jnp.exp(
            scores - highest[None]).sum(0)
        top[group] = highest


def _multiply(head: Any, hidden: Any, group: int, left: jax.Array) -> jax.Array:
    """Returns the logits f32[block / parts, LANES] of a group of positions.

    Beyond the `left` tokens of the last block lies garbage, which may be NaN, and then the zeros of
    other parts' lanes would not hide it.
    """
    parts, (block, _) = hidden.shape[0], head.shape
    size, lanes = block // parts, slice(group * LANES, (group + 1) * LANES)

    def multiply(ragged: bool) -> jax.Array:
        out = jnp.zeros((size, LANES), jnp.float32)
        for i in range(parts):
            rows = head[i * size:(i + 1) * size]
            if ragged:
                index = i * size + jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
                rows = jnp.where(index < left, rows.astype(jnp.float32), 0).astype(rows.dtype)
            out += jnp.dot(rows, hidden[i, :, lanes], preferred_element_type=jnp.float32)
        return out

    return jax.lax.cond(left < block, lambda: multiply(True), lambda: multiply(False))
