"""The programs of a drafter's training, described without a device."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config, DistillConfig
from specrl_jax.distill import teacher
from specrl_jax.distill.features import FeatureBuffer
from specrl_jax.distill.teacher import FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.distill.update import Programs
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.model.architecture import Architecture
from specrl_jax.rl.learner import LearnerState
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.structs import Array, Params, PyTree, carrier

FROZEN, ROWS, TARGETS, UPDATE, EVALUATE = (
    ("drafter", name) for name in ("frozen", "rows", "targets", "update", "evaluate"))
Batch = tuple[SequenceBatch, TeacherTargets]


class Sizes(NamedTuple):
    """How much a run stores of its rollouts and trains on."""

    sequences: int  # stored of each rollout
    columns: int  # S
    window: int  # T


def make_buffer(config: Config, drafter: TrainableDrafter, hidden_size: int
                ) -> tuple[FeatureBuffer, Sizes]:
    """Returns an empty buffer of a run's features, and the sizes of what goes in.

    Raises:
      ConfigError: the budget does not hold one update's sequences.
    """
    options, window = config.distill, config.rollout.max_new_tokens
    sequences = min(options.sequences or config.sequences, config.sequences)
    columns = config.rollout.max_prompt_tokens + window
    buffer = FeatureBuffer(options, drafter, hidden_size, sequences, columns, window,
                           1 if options.when == "once" else options.rollouts,
                           jnp.dtype(config.model.dtype))
    return buffer, Sizes(min(sequences, buffer.rows), columns, window)


def programs(jitted: Programs, options: DistillConfig, sizes: Sizes, heads: np.ndarray,
             state: LearnerState, actor: Params, vocab: Array) -> Iterator[Program]:
    """Yields whatever a step may run.

    Args:
      heads: f[H, Vd, F] of a FeatureBuffer.
      state, actor, vocab: the drafter's learner state, the published actor, and i32[Vd] the draft
        vocabulary: arrays, or their shapes with shardings.
    """
    arch, mesh, b = jitted.arch, jitted.mesh, options.micro_batch
    frozen = jax.jit(_frozen_params, static_argnums=(0, 4),
                     out_shardings=_frozen_places(arch, mesh, heads, actor))
    teachers = abstract(heads, teachers_place(mesh, heads))
    yield Program(FROZEN, frozen, (arch, actor, vocab, teachers, options.overlap))
    yield Program(ROWS, jax.jit(teacher.draft_rows, static_argnums=0,
                                out_shardings=sharding.replicated(mesh)), (arch, actor, vocab))
    stored, _ = places(mesh)
    blank = abstract(blank_batch(-(-sizes.sequences // b), b, sizes.columns), stored)
    yield Program(TARGETS, jitted.compute_targets, (sizes.window, actor, blank))
    found = jax.eval_shape(lambda *args: jitted.compute_targets(sizes.window, *args), actor, blank)
    n = options.batch // b
    targets = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), found)
    batch = abstract((blank_batch(n, b, sizes.columns), targets), places(mesh))
    read = abstract(jax.eval_shape(lambda actor, vocab, teachers: _frozen_params(
        arch, actor, vocab, teachers, False), actor, vocab, teachers),
        _frozen_places(arch, mesh, heads, actor))
    yield Program(UPDATE, jitted.update, (state, read, *batch))
    if options.when == "trigger":
        noise = abstract(no_noise(n, b), stored)
        yield Program(EVALUATE, jitted.evaluate, (state.params, read, *batch, *noise))


def places(mesh: Mesh) -> tuple[NamedSharding, TeacherTargets]:
    """Returns where micro-batches [n, b, ...] and their targets lie: rows over data shards."""
    rows, tall = (NamedSharding(mesh, P(*axes, sharding.ROWS)) for axes in ([None], [None] * 2))
    return rows, TeacherTargets(taps=tall, hidden=tall, normalizer=rows, best=rows, entropy=rows,
                                teacher=sharding.replicated(mesh))


def no_noise(n: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and scale for `evaluate`, whose draws are not read."""
    return np.zeros((n, b, 2), np.uint32), np.zeros((n, b), np.float32)


def blank_batch(n: int, b: int, columns: int) -> SequenceBatch:
    """Returns micro-batches of padding."""
    zero, none = np.zeros((n, b), np.int32), np.zeros((n, b), np.float32)
    return SequenceBatch(tokens=np.zeros((n, b, columns), np.int32), length=zero, first=zero + 1,
                         temperature=none + 1, reward=none, advantage=none)


def _frozen_params(arch: Architecture, actor: Params, vocab: Array, teachers: Array, copy: bool
                   ) -> FrozenParams:
    """Returns what updates read of the actor; with `copy` it survives the actor's buffers."""
    frozen = teacher.frozen_params(arch, actor, vocab).replace(teachers=teachers)
    return frozen.replace(embed=jnp.copy(frozen.embed), head=jnp.copy(frozen.head)
                          ) if copy else frozen


def _frozen_places(arch: Architecture, mesh: Mesh, heads: np.ndarray, actor: Params) -> PyTree:
    """Returns the shardings of what `_frozen_params` returns."""
    teachers = teachers_place(mesh, heads)
    head = NamedSharding(mesh, P(*teachers.spec[1:]))
    return carrier(FrozenParams, embed=actor["embed"].sharding, head=head,
                   vocab=sharding.replicated(mesh), teachers=teachers)


def teachers_place(mesh: Mesh, heads: np.ndarray) -> NamedSharding:
    """Returns where heads f32[H, Vd, F] lie: the vocabulary is split as that of the actor's is."""
    return NamedSharding(mesh, sharding.spec_of(
        heads.shape, (None, "vocab", None), sharding.ROLLOUT_RULES, mesh))
