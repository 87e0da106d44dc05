"""Jitted programs over the n micro-batches of a batch, on a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import DistillOptions
from specrl_jax.distill import metrics, teacher, update
from specrl_jax.distill.metrics import Evaluation
from specrl_jax.distill.teacher import FrozenParams, SequenceBatch, TeacherTargets
from specrl_jax.draft.trainable import TrainableDrafter
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.transformer import Params
from specrl_jax.structs import DrafterParams


class Programs:
    """Jitted functions; rows lie over data shards, parameters everywhere.

    Attributes:
      compute_targets: (T, actor, batch) -> TeacherTargets.
      update: (state, frozen, batch, targets) -> (state, metrics). The old state stays readable,
        because rollouts may still draft with it.
      evaluate: (params, frozen, batch, targets, key, scale) -> Evaluation, fields [n, J, b, T].
    """

    def __init__(self, drafter: TrainableDrafter, arch: Architecture, options: DistillOptions,
                 mesh: Mesh, targets: NamedSharding | None = None) -> None:
        """Args: arch, the actor's; targets, their sharding, None leaves it to the compiler."""
        self.drafter, self.arch, self.options, self.mesh = drafter, arch, options, mesh
        whole = sharding.replicated(mesh)
        self.compute_targets = jax.jit(
            self._compute_targets, static_argnums=0, out_shardings=targets)
        self.update = jax.jit(functools.partial(update.update, drafter, options),
                              out_shardings=whole)
        self.evaluate = jax.jit(self._evaluate, out_shardings=targets)

    def rows(self, values: Any) -> Any:
        """Puts host arrays [n, b, ...] on the devices, the rows over data shards."""
        return sharding.put(NamedSharding(self.mesh, P(None, sharding.ROWS)), values)

    def replicate(self, values: Any) -> Any:
        """Puts host arrays on every device."""
        return sharding.put(sharding.replicated(self.mesh), values)

    def put_targets(self, values: TeacherTargets) -> TeacherTargets:
        """Puts host targets on the devices that hold the rows of their batch."""
        tall = NamedSharding(self.mesh, P(None, None, sharding.ROWS))
        put = functools.partial(sharding.put, tall)
        rest = {name: self.rows(getattr(values, name))
                for name in ("normalizer", "best", "entropy")}
        return TeacherTargets(taps=put(values.taps), hidden=put(values.hidden),
                              teacher=self.replicate(values.teacher), **rest)

    def frozen_params(self, actor: Params, vocab: Any, teachers: Any, copy: bool) -> FrozenParams:
        """Returns what updates read of the actor; with `copy` it survives the actor's buffers."""
        frozen = teacher.frozen_params(self.arch, actor, vocab).replace(teachers=teachers)
        if not copy:
            return frozen
        return frozen.replace(embed=jnp.copy(frozen.embed), head=jnp.copy(frozen.head))

    def _compute_targets(self, window: int, actor: Params, batch: SequenceBatch) -> TeacherTargets:
        return jax.lax.map(functools.partial(teacher.compute_targets, self.arch, self.drafter.taps,
                                             window, actor), batch)

    def _evaluate(self, params: DrafterParams, frozen: FrozenParams, *batch: Any) -> Evaluation:
        one = functools.partial(
            metrics.evaluate_drafter, self.drafter, self.options, params, frozen)
        return jax.lax.map(lambda at: one(*at), batch)
