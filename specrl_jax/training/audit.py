"""Audit of differences between two runs, recomputed with the weights that acted.

The tokens before a first difference are equal, so a teacher-forced forward in float32 gives what
both runs computed there, except for rounding. A second forward in the run's dtype shows how much
that rounds. If the errors of its scores span r, a program that errs no more emits only tokens whose
exact perturbed score is within r of the best.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import prng
from specrl_jax.checkpoint.checkpoints import list_steps, read_meta, restore_part
from specrl_jax.config import RolloutConfig, check
from specrl_jax.evaluation.compare import Difference, compare_step, key_of
from specrl_jax.metrics import run_files
from specrl_jax.model import transformer
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import fit_mesh, run_config
from specrl_jax.model.transformer import Params
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.structs import Array, Json, PyTree
from specrl_jax.training.saving import restore
from specrl_jax.training.state import TrainState
from specrl_jax.training.trainer import Trainer
from specrl_jax.verify import sampling

LEAST_TOLERANCE = 1e-4  # of two float32 programs that sum in different orders
ROWS_AT_ONCE = 8
LENGTH_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Ruling:
    """The result of the teacher-forced forwards at one difference."""

    difference: Difference
    score_a: float  # perturbed score of A's token, -inf where there is none or truncation drops it
    score_b: float
    drawn: int  # the token that the recomputed scores choose
    gap: float  # from the best perturbed score to the lower of the two
    tolerance: float  # the largest gap that rounding explains

    @property
    def near_tie(self) -> bool:
        return self.gap < self.tolerance


@dataclasses.dataclass(frozen=True)
class Replay:
    """A run at the start of a step, and how it got there."""

    trainer: Trainer
    state: TrainState
    checkpoint: int  # 0 is the initial weights
    deviations: int  # sequences of repeated steps that differ from the run's


class OneCheckpoint(NamedTuple):
    """One checkpoint of a run for `saving.restore`, read only."""

    directory: Path
    step: int

    def restore_latest(self, abstract: Json, required: Collection[str] | None = None
                       ) -> tuple[int, PyTree, Json]:
        """Returns the checkpoint as `Checkpoints.restore_latest` does."""
        arrays = {key: restore_part(self.directory, self.step, key, part)
                  if jax.tree.leaves(part) else part for key, part in abstract.items()}
        return self.step, arrays, read_meta(self.directory, self.step)


def replay(run: Path, step: int, say: Callable[[str], None]) -> Replay:
    """Returns the state of `run` when `step` began.

    Starts at the last checkpoint before the step, or from the initial weights, and repeats the
    steps since. With learning rate 0 all checkpoints hold the same weights; no step is repeated.

    Raises:
      ConfigError: the run, its model, data or checkpoint cannot be read.
    """
    config = fit_mesh(run_config(run), say)
    check(config.rollout.quota == 0, "rollout.quota", config.rollout.quota,
          f"responses of {run} are of several policies, so near ties cannot be judged; compare "
          "runs with model.numerics=invariant")
    trainer, state = Trainer.from_config(config, say)
    directory = run / CHECKPOINTS
    checkpoint = max((s for s in list_steps(directory) if s <= step), default=0)
    if config.learner.learning_rate == 0:
        return Replay(trainer, state, 0, 0)
    if checkpoint:
        state = restore(trainer, state, OneCheckpoint(directory, checkpoint)) or state
    deviations = 0
    if state.step < step:
        state, _ = trainer.compile(state, say)
        state, deviations = _repeat(trainer, state, run, step, say)
    return Replay(trainer, state, checkpoint, deviations)


def _repeat(trainer: Trainer, state: TrainState, run: Path, step: int,
            say: Callable[[str], None]) -> tuple[TrainState, int]:
    """Repeats steps up to `step`; returns the number of sequences that differ from the run's."""
    first = state.step
    recorded: dict[int, list[Json]] = {s: [] for s in range(first, step)}
    for record in run_files.read_samples(run):
        if record["step"] in recorded:
            recorded[record["step"]].append(record)
    deviations = 0
    for number in range(first, step):
        say(f"repeating step {number} of {run}")
        state, _, samples = trainer.step(state)
        compared = compare_step(number, *({key_of(r): r for r in rows}
                                          for rows in (recorded[number], samples)))
        deviations += len(compared.differences)
    return state, deviations


def rule(replayed: Replay, differences: Sequence[Difference]) -> list[Ruling]:
    """Recomputes each difference with the weights that the replayed run has published."""
    trainer = replayed.trainer
    return recompute(trainer.arch, replayed.state.policy.params, trainer.config.rollout,
                     trainer.config.seed, trainer.tokenizer.encode, differences)


def recompute(arch: Architecture, params: Params, config: RolloutConfig, seed: int,
              encode: Callable[[str], list[int]], differences: Sequence[Difference]
              ) -> list[Ruling]:
    """Computes teacher-forced perturbed scores at each difference, with the published params of
    its step, the run's seed, and the temperature and truncation of `config`."""
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    rulings: list[Ruling] = []
    for start in range(0, len(differences), ROWS_AT_ONCE):
        part = list(differences[start : start + ROWS_AT_ONCE])
        padded = part + [part[-1]] * (ROWS_AT_ONCE - len(part))
        tokens, length = _rows([encode(d.prompt) + d.before for d in padded])
        with jax.default_matmul_precision("highest"):  # TPUs multiply float32 in bfloat16 otherwise
            raw = next_logits(arch, exact, tokens, length)
        span = np.ptp(np.asarray(next_logits(arch, params, tokens, length) - raw), axis=0)
        tolerance = np.maximum(LEAST_TOLERANCE, span / (config.temperature or 1.0))
        keys = np.concatenate([
            prng.row_keys(seed, "train", d.step, *(np.asarray([k], np.int32) for k in d.key[:3]))
            for d in padded])
        position = np.asarray([d.position for d in padded], np.int32)
        scores, drawn = perturb(config, raw, keys, position)
        scores, drawn, raw = (np.asarray(x) for x in (scores, drawn, raw))
        rulings += [judge(d, config, raw[:, i], scores[:, i], int(drawn[i]), float(tolerance[i]))
                    for i, d in enumerate(part)]
    return rulings


def _rows(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns i32[B, S], right-padded to a multiple (few compiled shapes), and lengths i32[B]."""
    length = np.asarray([len(row) for row in rows], np.int32)
    width = -(-int(length.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, length


@functools.partial(jax.jit, static_argnums=0)
def next_logits(arch: Architecture, params: Params, tokens: Array, length: Array) -> Array:
    """Returns logits f32[V, B] after the last token of each row of i32[B, S]."""
    rows, columns = tokens.shape
    hidden, _, _ = transformer.hidden_states(
        arch, params, tokens, *transformer.right_padded((rows, columns), length))
    last = hidden[:, jnp.arange(rows), length - 1]
    return transformer.logits(arch, params, last)


@functools.partial(jax.jit, static_argnums=0)
def perturb(config: RolloutConfig, logits: Array, key: Array, position: Array
            ) -> tuple[Array, Array]:
    """Returns perturbed scores f32[V, W] before truncation, and the token i32[W] of `draw`.

    Scores are logits f32[V, W] over temperature plus noise by key u32[W, 2] and position i32[W].
    They differ from perturbed log-probabilities by a constant that cancels in gaps.
    """
    (vocab, width), temperature = logits.shape, config.temperature
    scores = logits / (temperature or 1.0)
    noise = prng.gumbel(key, position, jnp.arange(vocab)).T
    drawn = sampling.draw(logits, jnp.full(width, temperature), jnp.full(width, config.top_k),
                          jnp.full(width, config.top_p), key, position, min_p=config.min_p)
    return scores + noise if temperature else scores, drawn.token


def judge(difference: Difference, config: RolloutConfig, logits: np.ndarray, scores: np.ndarray,
          drawn: int, tolerance: float) -> Ruling:
    """Returns the ruling on one difference from its logits and perturbed scores, both f32[V]."""
    a, b = (float(scores[token])
            if token is not None and kept(logits, token, config, tolerance) else -math.inf
            for token in (difference.a, difference.b))
    best = max(float(scores[drawn]), a, b)
    return Ruling(difference, a, b, drawn, best - min(a, b), tolerance)


def kept(logits: np.ndarray, token: int, config: RolloutConfig, tolerance: float) -> bool:
    """Whether top-k, top-p and min-p keep a token if their edge may move by `tolerance`."""
    scores = logits.astype(np.float64) / (config.temperature or 1.0)
    ranked = np.sort(scores)[::-1][: config.top_k or None]
    least = ranked[0] + math.log(config.min_p) if config.min_p else -math.inf
    if scores[token] < max(ranked[-1], least) - tolerance:
        return False
    mass = np.exp(ranked - ranked[0])
    before = mass[ranked > scores[token]].sum() / mass.sum()
    return config.top_p == 1 or bool(before < config.top_p + tolerance)
