"""The drafter's forwards and updates over the n micro-batches of a batch, on a mesh."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import DistillOptions
from specrl_jax.distill import update
from specrl_jax.distill.update import Assessment, Lent, Lessons, Texts
from specrl_jax.draft.eagle_model import EagleArch
from specrl_jax.model.transformer import Params


class Programs:
    """Jitted functions; rows lie over data shards, parameters everywhere.

    Attributes:
      teach: (T, actor, texts) -> lessons.
      update: (state, lent, texts, lessons) -> (state, metrics). The old state stays readable, as
        rollouts may still draft with it.
      assess: (params, lent, texts, lessons, key, scale) -> Assessment, fields [n, J, b, T].
    """

    def __init__(self, arch: EagleArch, options: DistillOptions, mesh: Mesh,
                 features: NamedSharding | None = None) -> None:
        """Args: features, where the lessons of `teach` lie; None leaves it to the compiler."""
        self.arch, self.unroll, self.mesh = arch, options.unroll, mesh
        whole = sharding.replicated(mesh)
        self.teach = jax.jit(self._teach, static_argnums=0, out_shardings=features)
        self.update = jax.jit(functools.partial(update.update, arch, options),
                              out_shardings=whole)
        self.assess = jax.jit(self._assess, out_shardings=features)

    def rows(self, values: Any) -> Any:
        """Host arrays [n, b, ...], the rows over data shards."""
        return sharding.put(NamedSharding(self.mesh, P(None, sharding.ROWS)), values)

    def whole(self, values: Any) -> Any:
        """Host arrays, everywhere."""
        return sharding.put(sharding.replicated(self.mesh), values)

    def lessons(self, values: Lessons) -> Lessons:
        """Host lessons on the devices, as the rows of their texts lie."""
        tall = NamedSharding(self.mesh, P(None, None, sharding.ROWS))
        put = functools.partial(sharding.put, tall)
        rest = {name: self.rows(getattr(values, name))
                for name in ("normalizer", "best", "entropy")}
        return Lessons(taps=put(values.taps), hidden=put(values.hidden),
                       teacher=self.whole(values.teacher), **rest)

    def _teach(self, window: int, actor: Params, texts: Texts) -> Lessons:
        return jax.lax.map(functools.partial(update.teach, self.arch, window, actor), texts)

    def _assess(self, params: Params, lent: Lent, *batch: Any) -> Assessment:
        one = functools.partial(update.assess, self.arch, self.unroll, params, lent)
        return jax.lax.map(lambda at: one(*at), batch)
