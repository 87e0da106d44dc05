"""The programs of a drafter's training, described without a device."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config, DistillConfig
from specrl_jax.distill import teacher
from specrl_jax.distill.features import FeatureRing, Sizes
from specrl_jax.distill.teacher import FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.distill.update import Programs
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.model.architecture import Architecture
from specrl_jax.rl.learner import LearnerState
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.structs import Array, Params, PyTree, carrier

FROZEN, ROWS, TARGETS, RECORDS, UPDATE, EVALUATE = (
    ("drafter", name) for name in ("frozen", "rows", "targets", "records", "update", "evaluate"))


def make_ring(config: Config, drafter: TrainableDrafter, hidden_size: int) -> FeatureRing:
    """Returns the ring of a run's features.

    Raises:
      ConfigError: the budget does not hold one update's sequences.
    """
    sequences, window = config.distill.sequences or config.sequences, config.rollout.max_new_tokens
    sizes = Sizes(min(sequences, config.sequences), config.rollout.max_prompt_tokens + window,
                  window, hidden_size)
    return FeatureRing(config.distill, drafter, sizes, jnp.dtype(config.model.dtype))


def programs(jitted: Programs, options: DistillConfig, ring: FeatureRing, learner: LearnerState,
             actor: Params, vocab: Array) -> Iterator[Program]:
    """Yields whatever a step may run.

    Args:
      learner, actor, vocab: the drafter's learner state, the published actor, and i32[Vd] the
        draft vocabulary: arrays, or their shapes with shardings.
    """
    arch, mesh, sizes = jitted.arch, jitted.mesh, ring.sizes
    b, n = options.micro_batch, options.batch // options.micro_batch
    shardings = _frozen_shardings(mesh, ring, actor)
    read = functools.partial(_frozen_params, arch, options.overlap)
    inputs = (actor, vocab, abstract(ring.heads, shardings.teachers))
    yield Program(FROZEN, jax.jit(read, out_shardings=shardings), inputs)
    yield Program(ROWS, jax.jit(teacher.draft_rows, static_argnums=0,
                                out_shardings=sharding.replicated(mesh)), (arch, actor, vocab))
    rows, _ = batch_shardings(mesh)
    stored = abstract(blank_batch(-(-sizes.sequences // b), b, sizes.columns), rows)
    if options.when == "verification":
        yield Program(RECORDS, jitted.from_records, (sizes.window, actor, stored, *abstract(
            blank_records(stored.tokens.shape, sizes, ring.width, ring.heads.dtype), rows)))
    else:
        yield Program(TARGETS, jitted.compute_targets, (sizes.window, actor, stored))
    made = jax.eval_shape(lambda *args: jitted.compute_targets(sizes.window, *args), actor, stored)
    targets = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), made)
    batch = abstract((blank_batch(n, b, sizes.columns), targets), batch_shardings(mesh))
    frozen = abstract(jax.eval_shape(read, *inputs), shardings)
    yield Program(UPDATE, jitted.update, (learner, frozen, *batch))
    if options.when == "trigger":
        noise = abstract(no_noise(n, b), rows)
        yield Program(EVALUATE, jitted.evaluate, (learner.params, frozen, *batch, *noise))


def batch_shardings(mesh: Mesh) -> tuple[NamedSharding, TeacherTargets]:
    """Returns the shardings of micro-batches [n, b, ...] and of their targets: rows over data
    shards."""
    rows, tall = (NamedSharding(mesh, P(*axes, sharding.ROWS)) for axes in ([None], [None] * 2))
    return rows, TeacherTargets(taps=tall, hidden=tall, normalizer=rows, best=rows, entropy=rows,
                                drafted=rows, teacher=sharding.replicated(mesh))


def no_noise(n: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and scale for `evaluate`, whose draws are not read."""
    return np.zeros((n, b, 2), np.uint32), np.zeros((n, b), np.float32)


def blank_batch(n: int, b: int, columns: int) -> SequenceBatch:
    """Returns micro-batches of padding."""
    zero, none = np.zeros((n, b), np.int32), np.zeros((n, b), np.float32)
    return SequenceBatch(tokens=np.zeros((n, b, columns), np.int32), length=zero, first=zero + 1,
                         temperature=none + 1, reward=none, advantage=none)


def blank_records(shape: tuple[int, int, int], sizes: Sizes, width: int, dtype: np.dtype
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `states`, `drafted` and `raw_logprob` of `from_records` for tokens [n, b, S]."""
    tokens = (*shape[:2], sizes.window)
    return (np.broadcast_to(np.zeros((), dtype), (*shape, width)), np.zeros(tokens, np.int32),
            np.zeros(tokens, np.float32))


def head_sharding(mesh: Mesh, ring: FeatureRing) -> NamedSharding:
    """Returns the sharding of heads f[H, Vd, F]: the vocabulary is split as the actor's is."""
    return NamedSharding(mesh, sharding.spec_of(
        ring.heads.shape, (None, "vocab", None), sharding.ROLLOUT_RULES, mesh))


def _frozen_params(arch: Architecture, copy: bool, actor: Params, vocab: Array, heads: Array
                   ) -> FrozenParams:
    """Returns what updates read of the actor; with `copy` it survives the actor's buffers."""
    frozen = teacher.frozen_params(arch, actor, vocab).replace(teachers=heads)
    return frozen.replace(embed=jnp.copy(frozen.embed), head=jnp.copy(frozen.head)
                          ) if copy else frozen


def _frozen_shardings(mesh: Mesh, ring: FeatureRing, actor: Params) -> PyTree:
    """Returns the shardings of what `_frozen_params` returns."""
    teachers = head_sharding(mesh, ring)
    head = NamedSharding(mesh, P(*teachers.spec[1:]))
    return carrier(FrozenParams, embed=actor["embed"].sharding, head=head,
                   vocab=sharding.replicated(mesh), teachers=teachers)
