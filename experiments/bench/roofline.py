"""The least seconds of measured rounds, by the work that compile/work.py counts."""

import dataclasses

import numpy as np
from compile.work import forward_flops, round_bytes

from specrl_jax.model.architecture import Architecture

from .hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least seconds of a number of rounds."""

    seconds: float  # sum over rounds of the larger of the two below
    bytes_seconds: float
    flops_seconds: float

    @property
    def kind(self) -> str:
        return "bytes" if self.bytes_seconds >= self.flops_seconds else "flops"


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
