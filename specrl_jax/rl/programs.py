"""The policy's programs and the shapes of what they read, described without weights or a device."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.io.compilation import Program, abstract
from specrl_jax.model import architecture, layers
from specrl_jax.model.architecture import Architecture
from specrl_jax.rl import learner
from specrl_jax.rl.learner import Batch, LearnerState, Totals
from specrl_jax.structs import PyTree, Rollout


def abstract_state(config: Config, arch: Architecture, mesh: Mesh) -> LearnerState:
    """Returns the shapes and shardings of the learner's state.

    AdamW's moments lie like their parameters, everything else is replicated.
    """
    described = architecture.describe(arch, layers.are_scanned(sharding.platform(mesh)))
    places = sharding.shardings(described, sharding.LEARNER_RULES, mesh, architecture.is_param)
    params = jax.tree.map(lambda p, place: jax.ShapeDtypeStruct(p.shape, jnp.float32,
                                                                sharding=place),
                          described, places, is_leaf=architecture.is_param)
    shapes = jax.eval_shape(learner.make_optimizer(config.learner).init, params)
    like = jax.tree.structure(params)

    def lies_like_params(node: PyTree) -> bool:
        return jax.tree.structure(node) == like

    def place(node: PyTree) -> PyTree:
        return abstract(node, places if lies_like_params(node) else sharding.replicated(mesh))

    return LearnerState(params, jax.tree.map(place, shapes, is_leaf=lies_like_params))


def host_batch(config: Config, rollout: Rollout, advantage: np.ndarray) -> tuple[Batch, Totals]:
    """Returns a rollout as the micro-batches that `config` asks for, as host arrays."""
    return learner.make_batch(
        rollout, advantage, config.rollout.temperature,
        rows=config.learner.micro_batch // config.sequences_per_row,
        sequences_per_row=config.sequences_per_row,
        keep_all=bool(config.rl.kl) or config.rl.updates > 1)


def batch_places(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of a batch, split over rows, and of its totals."""
    return NamedSharding(mesh, P(None, sharding.ROWS)), sharding.replicated(mesh)


def reads_old(config: Config) -> bool:
    """Returns whether updates read log-probabilities of the policy that acted."""
    return config.rl.updates > 1 or config.learner.old_logprob == "rollout"


def needs_scores(config: Config) -> bool:
    """Returns whether a step scores its rollout apart from the update."""
    kl, old = config.rl.kl, config.learner.old_logprob
    return bool(kl) or (config.rl.updates > 1 and old == "learner")


def programs(config: Config, arch: Architecture, mesh: Mesh) -> Iterator[Program]:
    """Yields the policy's programs, as far as they are used: update, score, gap."""
    remat, replicated = config.learner.remat, sharding.replicated(mesh)
    state = abstract_state(config, arch, mesh)
    batch, totals = abstract(host_batch(config, _blank_rollout(config), np.zeros(
        config.sequences, np.float32)), batch_places(mesh))
    scores = batch.rollout_logprob
    on_mesh = functools.partial(sharding.traced_for, mesh)
    if not config.rl.updates:
        yield Program("gap", jax.jit(on_mesh(functools.partial(learner.first_gap, arch, remat)),
                                     out_shardings=replicated), (state.params, batch))
        return
    if needs_scores(config):
        yield Program("score", jax.jit(on_mesh(functools.partial(learner.score, arch, remat))),
                      (state.params, batch))
    places = jax.tree.map(lambda a: a.sharding, state)
    update = jax.jit(on_mesh(functools.partial(learner.update, arch, config)), donate_argnums=(0,),
                     out_shardings=(places, replicated))
    yield Program("update", update, (state, batch, totals, scores if reads_old(config) else None,
                                     (scores, scores) if config.rl.kl else None))


def _blank_rollout(config: Config) -> Rollout:
    q, r = config.sequences, config.rollout
    ints, floats = (np.zeros((q, r.max_new_tokens), dtype) for dtype in (np.int32, np.float32))
    one = np.ones(q, np.int32)
    return Rollout(
        prompt=np.zeros((q, r.max_prompt_tokens), np.int32), prompt_length=one, tokens=ints,
        length=one, logprob=floats, raw_logprob=floats, top_p_mass=floats, prompt_id=one,
        occurrence=one, sample_id=one, stopped=one > 0, commits=ints, rounds=one)
