"""Bytes and FLOPs that a round or an update cannot do without, and the seconds that they take.

A multiply-add is two FLOPs. Element-wise work, norms and softmaxes are not counted.
"""

import dataclasses
import math

import jax
import numpy as np

from specrl_jax.model.architecture import Architecture, describe, is_param
from specrl_jax.rl.learner import Batch

from .hardware import Hardware

BACKWARD = 3  # forward and backward: two more products for each one of the forward pass
MATRICES = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least seconds of some rounds."""

    seconds: float  # sum over rounds of the larger of the two
    bytes_seconds: float
    flops_seconds: float

    @property
    def kind(self) -> str:
        return "bytes" if self.bytes_seconds >= self.flops_seconds else "flops"


def layer_matmul_params(arch: Architecture) -> int:
    """Parameters of all layers that are factors of a matrix product."""
    return sum(math.prod(layer[name].shape) for layer in describe(arch)["layers"]
               for name in MATRICES)


def head_params(arch: Architecture) -> int:
    return arch.vocab_size * arch.hidden_size


def weight_bytes(arch: Architecture, itemsize: int) -> int:
    """Bytes of weights that a round reads: of an untied embedding, only the rows looked up."""
    leaves = jax.tree.leaves(describe(arch), is_leaf=is_param)
    total = sum(math.prod(p.shape) for p in leaves)
    return itemsize * (total if arch.tied else total - head_params(arch))


def cache_bytes(arch: Architecture, itemsize: int) -> int:
    """Bytes of keys and values of one token."""
    return itemsize * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim


def attention_flops(arch: Architecture, pairs: np.ndarray | int) -> np.ndarray | int:
    """Scores and weighted sums of (query token, key token) pairs, all layers and heads."""
    return 4 * arch.num_layers * arch.num_heads * arch.head_dim * pairs


def context_by_round(prompt: np.ndarray, commits: np.ndarray, rounds: np.ndarray
                     ) -> tuple[np.ndarray, np.ndarray]:
    """Live rows and the sum of their cached tokens in each round of a rollout without refill.

    Args:
      prompt: i32[Q] prompt tokens; the last one is the first root, so it is not cached.
      commits: i32[Q, T] tokens committed in each round.
      rounds: i32[Q].

    Returns:
      i64[rounds], i64[rounds].
    """
    turn = np.arange(int(rounds.max()))[None]
    live = turn < rounds[:, None]
    before = np.cumsum(commits[:, : turn.shape[1]], 1) - commits[:, : turn.shape[1]]
    context = (prompt[:, None] - 1 + before) * live
    return live.sum(0), context.sum(0)


def rounds_bound(arch: Architecture, hardware: Hardware, rows: np.ndarray, context: np.ndarray,
                 nodes: float, itemsize: int) -> Bound:
    """Weights and committed cache read once a round, against the products of its live nodes.

    Args:
      rows, context: i64[rounds], see `context_by_round`.
      nodes: verified tree nodes of a row, root included, on average; 1 is plain decoding.
    """
    tokens = rows * nodes
    moved = weight_bytes(arch, itemsize) + cache_bytes(arch, itemsize) * (context + tokens)
    products = 2 * tokens * (layer_matmul_params(arch) + head_params(arch))
    flops = products + attention_flops(arch, nodes * context + tokens)
    by_bytes, by_flops = moved / hardware.bandwidth, flops / hardware.peak
    return Bound(float(np.maximum(by_bytes, by_flops).sum()), float(by_bytes.sum()),
                 float(by_flops.sum()))


@dataclasses.dataclass(frozen=True)
class UpdateWork:
    """What one policy update computes; the optimiser's element-wise work is not counted."""

    tokens: int  # through the layers
    pairs: int  # (query, key)
    scored: int  # positions whose logits are needed

    def flops(self, arch: Architecture) -> int:
        """Forward and backward, without recomputation."""
        products = 2 * (layer_matmul_params(arch) * self.tokens + head_params(arch) * self.scored)
        return BACKWARD * (products + int(attention_flops(arch, self.pairs)))


def useful_work(batch: Batch) -> UpdateWork:
    """What the sequences of a batch need at least: their tokens, and keys that are visible."""
    said = np.asarray(batch.length).sum(-1) > 0  # [n, b]; the others are padding
    segment, position = (np.asarray(a)[said] for a in (batch.segment, batch.position))
    pairs = sum(_visible_pairs(s, p) for s, p in zip(segment, position, strict=True))
    return UpdateWork(tokens=int((segment >= 0).sum()), pairs=pairs,
                      scored=int(np.asarray(batch.length).sum()))


def padded_work(batch: Batch, micro_batches: int) -> UpdateWork:
    """What the compiled program computes, padding and masked pairs included."""
    width = batch.tokens.shape[-1]
    rows = micro_batches * batch.tokens.shape[1]
    return UpdateWork(tokens=rows * width, pairs=rows * width**2,
                      scored=micro_batches * math.prod(batch.response.shape[1:]))


def _visible_pairs(segment: np.ndarray, position: np.ndarray) -> int:
    """See transformer.segment_attend."""
    real = segment >= 0
    segment, position = segment[real], position[real]
    mine, other = segment[:, None], segment[None]
    related = (mine == other) | (other == 0)
    return int((related & (position[None] <= position[:, None])).sum())
