"""Roofline bounds: the bytes and FLOPs that a round or an update needs at least.

A multiply-add is two FLOPs. Element-wise work, norms and softmaxes are not counted.
"""

import dataclasses
import math

import jax
import numpy as np

from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.rl.batch import Batch

from .hardware import Hardware

BACKWARD = 3  # forward and backward: two more products for each one of the forward pass
Amount = np.ndarray | float
MATRICES = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least seconds of a number of rounds."""

    seconds: float  # sum over rounds of the larger of the two below
    bytes_seconds: float
    flops_seconds: float

    @property
    def kind(self) -> str:
        return "bytes" if self.bytes_seconds >= self.flops_seconds else "flops"


def layer_matmul_params(arch: Architecture) -> int:
    """Returns the number of layer parameters that take part in matrix products."""
    return sum(math.prod(layer[name].shape) for layer in describe(arch)["layers"]
               for name in MATRICES)


def head_params(arch: Architecture) -> int:
    """Returns the number of parameters of the output head."""
    return arch.vocab_size * arch.hidden_size


def weight_bytes(arch: Architecture, itemsize: int) -> int:
    """Returns the bytes of weights that a round reads; an untied embedding is only looked up."""
    leaves = jax.tree.leaves(describe(arch), is_leaf=is_param)
    total = sum(math.prod(p.shape) for p in leaves)
    return itemsize * (total if arch.tied else total - head_params(arch))


def cache_bytes(arch: Architecture, itemsize: int) -> int:
    """Returns the bytes of the keys and values of one token."""
    return itemsize * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim


def attention_flops(arch: Architecture, pairs: Amount) -> Amount:
    """Returns the FLOPs of scores and weighted sums of (query, key) pairs, all layers and heads."""
    return 4 * arch.num_layers * arch.num_heads * arch.head_dim * pairs


def forward_flops(arch: Architecture, tokens: Amount, scored: Amount, pairs: Amount) -> Amount:
    """Returns the FLOPs of a forward pass.

    Args:
      tokens: through the layers.
      scored: positions whose logits are computed.
      pairs: (query, key) pairs of their attention.
    """
    products = layer_matmul_params(arch) * tokens + head_params(arch) * scored
    return 2 * products + attention_flops(arch, pairs)


def round_bytes(arch: Architecture, itemsize: int, cached: Amount) -> Amount:
    """Returns the bytes of a round: the weights, and `cached` tokens that it reads or writes."""
    return weight_bytes(arch, itemsize) + cache_bytes(arch, itemsize) * cached


def context_by_round(prompt: np.ndarray, commits: np.ndarray, rounds: np.ndarray
                     ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the live rows and the sum of their cached tokens in each round, without refill.

    Args:
      prompt: i32[Q] prompt tokens; the last one is the first root, so it is not cached.
      commits: i32[Q, T] tokens committed in each round.
      rounds: i32[Q] rounds of each row.

    Returns:
      i64[rounds], i64[rounds].
    """
    index = np.arange(int(rounds.max()))[None]
    live = index < rounds[:, None]
    before = np.cumsum(commits[:, : index.shape[1]], 1) - commits[:, : index.shape[1]]
    context = (prompt[:, None] - 1 + before) * live
    return live.sum(0), context.sum(0)


def rounds_bound(arch: Architecture, hardware: Hardware, rows: np.ndarray, context: np.ndarray,
                 nodes: float, itemsize: int) -> Bound:
    """Returns the bound of rounds that read weights and cache once and multiply their live nodes.

    Args:
      rows, context: i64[rounds], see `context_by_round`.
      nodes: mean verified tree nodes per row, root included; 1 is plain decoding.
    """
    tokens = rows * nodes
    flops = forward_flops(arch, tokens, tokens, nodes * context + tokens)
    by_bytes = np.asarray(round_bytes(arch, itemsize, context + tokens) / hardware.bandwidth)
    by_flops = np.asarray(flops / hardware.peak)
    return Bound(float(np.maximum(by_bytes, by_flops).sum()), float(by_bytes.sum()),
                 float(by_flops.sum()))


@dataclasses.dataclass(frozen=True)
class UpdateWork:
    """The work of one policy update, without the optimiser."""

    tokens: int  # through the layers
    pairs: int  # (query, key)
    scored: int  # positions whose logits are needed

    def flops(self, arch: Architecture) -> int:
        """Returns the FLOPs of forward and backward, without recomputation."""
        return BACKWARD * int(forward_flops(arch, self.tokens, self.scored, self.pairs))


def useful_work(batch: Batch) -> UpdateWork:
    """Returns the work that the sequences of a batch need: their tokens and visible keys."""
    prefix = batch.segment if batch.prefix is None else batch.prefix
    places = [np.asarray(a).reshape(-1, a.shape[-1])
              for a in (batch.position, batch.segment, prefix)]
    pairs = sum(_visible_pairs(*row) for row in zip(*places, strict=True))
    return UpdateWork(tokens=int((places[1] >= 0).sum()), pairs=pairs,
                      scored=int(np.asarray(batch.length).sum()))


def _visible_pairs(position: np.ndarray, segment: np.ndarray, prefix: np.ndarray) -> int:
    """Counts the pairs that model.attention.segment_attention leaves visible in a row."""
    real = segment >= 0
    position, segment, prefix = position[real], segment[real], prefix[real]
    related = (segment[:, None] == segment[None]) | (prefix[:, None] == segment[None])
    return int((related & (position[None] <= position[:, None])).sum())
