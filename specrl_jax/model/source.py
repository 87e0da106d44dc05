"""The actor of an evaluation or a single prompt: a model, or a run at one of its steps."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specrl_jax import sharding
from specrl_jax.checkpoint.checkpoints import (
    BEST,
    CheckpointError,
    list_steps,
    read_meta,
    restore_part,
    saved_leaves,
)
from specrl_jax.config import Config, ConfigError, LearnerConfig, MeshConfig, at_least, build
from specrl_jax.model import architecture, layers, lora, weights
from specrl_jax.runtime.paths import CHECKPOINTS
from specrl_jax.runtime.workdir import BEST_FILE, CONFIG, read_config, read_object
from specrl_jax.structs import Params, PyTree


@dataclasses.dataclass
class Actor:
    """A model whose weights are not read yet."""

    source: weights.Source
    run: Path | None = None
    step: int = 0  # completed steps of the run; 0 is the initial model
    newest: bool = False  # `step` is the newest one; `params` moves it on if the run deletes it
    learner: LearnerConfig = LearnerConfig()  # of the run

    @property
    def name(self) -> str:
        """The model's source, or the run and its step."""
        return self.source.source if self.run is None else f"{self.run}, step {self.step}"

    def params(self, mesh: Mesh) -> Params:
        """Reads the weights, float32, sharded for rollouts; a run's layers are stacked if they were
        stored so. Adapters are merged.

        Raises:
          ConfigError: the checkpoint is missing, damaged, or of another model.
        """
        if self.step == 0 or self.run is None:
            return self._initial(mesh, layers.are_scanned(sharding.platform(mesh)))
        stored, saved = self._of_run(mesh)
        if not self.learner.lora_rank:
            return stored
        base = self._initial(mesh, layers.is_stacked(stored))
        layers.check_identity("model.path", self.source.source, saved, layers.identity(base))
        merged = jax.jit(functools.partial(lora.merge, self.learner, jnp.float32))(base, stored)
        return lora.overlay(base, merged)

    def trained(self, mesh: Mesh) -> Params:
        """Reads what the run trains, float32: weights, or adapters that are not merged.

        Raises:
          ConfigError: there is no run, or the checkpoint is missing, damaged or of another model.
        """
        return self._of_run(mesh)[0]

    def _of_run(self, mesh: Mesh) -> tuple[Params, str | None]:
        """Returns what the run trains and, for adapters, the identity of their base."""
        if self.step == 0 or self.run is None:
            raise ConfigError("--run: name a run with a checkpoint, whose adapters are read")
        checkpoints = self.run / CHECKPOINTS
        while True:
            try:
                stored = saved_leaves(checkpoints, self.step, "actor")
                stacked = not any(name.startswith("actor/layers/0/") for name in stored)
                abstract = _abstract(lora.trained(self.source.arch, self.learner, stacked), mesh)
                params = restore_part(checkpoints, self.step, "actor", abstract)
                meta = read_meta(checkpoints, self.step) if self.learner.lora_rank else {}
                return params, meta.get("base")
            except CheckpointError:
                # A checkpoint that the run is deleting looks damaged, but a newer one exists.
                if not self.newest or (newest := _newest(self.run)) == self.step:
                    raise
                self.step = newest

    def _initial(self, mesh: Mesh, stacked: bool) -> Params:
        described = architecture.describe(self.source.arch, stacked)
        return self.source.params(jax.tree.map(lambda a: a.sharding, _abstract(described, mesh)))


def _abstract(described: PyTree, mesh: Mesh) -> PyTree:
    """Returns shapes and shardings of float32 arrays for rollouts."""
    shardings = sharding.shardings(described, sharding.ROLLOUT_RULES, mesh)
    return jax.tree.map(
        lambda param, to: jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=to),
        described, shardings, is_leaf=architecture.is_param)


def open_actor(config: Config, run: Path | None = None, step: int | str | None = None) -> Actor:
    """Finds the model at `config.model.path`, or as a run has trained it.

    Args:
      run: a run's working directory.
      step: completed steps, 0 for the initial weights; BEST is the run's best checkpoint, None the
        newest one.

    Raises:
      ConfigError: there is no such model or run, or the run has no checkpoint.
    """
    if run is None and step:
        raise ConfigError(f"--step={step}: it needs --run=DIR")
    newest = run is not None and step is None
    if run is not None:
        step = _newest(run) if newest else best_step(run) if step == BEST else step
    at_least(0, step=int(step or 0))
    source = weights.describe_source(config.model.path, family=config.model.family)
    return Actor(source, run, int(step or 0), newest, config.learner)


def _newest(run: Path) -> int:
    step = max(list_steps(run / CHECKPOINTS), default=0)
    if step == 0:
        raise ConfigError(f"{run / CHECKPOINTS}: no complete checkpoint; wait for one, or give "
                          f"--step=0 for the initial weights")
    return step


def best_step(run: Path) -> int:
    """Returns the completed steps of a run's best evaluation. Raises ConfigError without one."""
    best = read_object(run / BEST_FILE)
    if best is None:
        raise ConfigError(f"{run / BEST_FILE}: no such file, so the run has evaluated nothing yet; "
                          f"it does so with eval.every")
    step = best.get("step")
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"{run / BEST_FILE} holds no step: give --step=N")
    return step


def run_config(run: Path) -> Config:
    """Returns the configuration that a run was started with. Raises ConfigError if the directory
    holds no run, or one of another format."""
    stored = read_config(run)
    if stored is None:
        raise ConfigError(f"{run / CONFIG}: no such file; give the working directory of a run")
    return build(Config, stored)


def fit_mesh(config: Config, say: Callable[[str], None]) -> Config:
    """Returns a run's config for reading it here: on one device, with a line to `say`, where the
    run's mesh has more than there are."""
    if config.mesh.size <= len(sharding.all_devices()):
        return config
    say(f"mesh: the run's {config.mesh.size} devices are not here; using one, which changes no "
        f"result but by rounding (--config.mesh.data, fsdp and tensor set others)")
    return dataclasses.replace(config, mesh=MeshConfig())
