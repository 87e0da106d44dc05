"""The policy's programs and the shapes of what they read, described without weights or a device."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax import sharding
from specrl_jax.config import Config
from specrl_jax.model import architecture, layers, lora
from specrl_jax.model.architecture import Architecture
from specrl_jax.rl import learner
from specrl_jax.rl.batch import Batch, Totals, layout_of, make_batch, part_of
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rl.optimizer import make_optimizer
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.runtime.hardware import chip_of
from specrl_jax.structs import Metrics, Params, Rollout

MATRIX_UNIT = 128  # columns of a TPU's smallest

def abstract_state(config: Config, arch: Architecture, mesh: Mesh) -> LearnerState:
    """Returns the shapes and shardings of the learner's state.

    What the optimiser keeps of a parameter in the parameter's own shape, such as AdamW's moments,
    is split over all data shards; everything else of it is replicated.
    """
    described = lora.trained(arch, config.learner, _scanned(mesh))
    shardings, moments = (sharding.shardings(described, rules, mesh)
                       for rules in (sharding.LEARNER_RULES, sharding.MOMENT_RULES))
    params = jax.tree.map(lambda p, place: jax.ShapeDtypeStruct(p.shape, jnp.float32,
                                                                sharding=place),
                          described, shardings, is_leaf=architecture.is_param)
    shapes = jax.eval_shape(make_optimizer(config.learner).init, params)
    if config.learner.optimizer_offload:
        moments = jax.tree.map(lambda to: to.with_memory_kind(sharding.HOST), moments)
    of_param = {path: (p.shape, to) for (path, p), to in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(moments), strict=True)}

    def place(path: tuple[Any, ...], a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        ends = (of_param.get(path[i:]) for i in range(len(path)))
        shape, to = next((end for end in ends if end), (None, None))
        return abstract(a, to if shape == a.shape else sharding.replicated(mesh))

    return LearnerState(params, jax.tree_util.tree_map_with_path(place, shapes))


def abstract_base(config: Config, arch: Architecture, mesh: Mesh) -> Params | None:
    """Returns the shapes and shardings of the frozen weights beside adapters; None without."""
    return abstract_frozen(config, arch, mesh) if config.learner.lora_rank else None


def abstract_frozen(config: Config, arch: Architecture, mesh: Mesh) -> Params:
    """Returns the shapes and shardings of weights that the learner only reads."""
    described = architecture.describe(arch, _scanned(mesh))
    shardings = sharding.shardings(described, sharding.LEARNER_RULES, mesh)
    whole = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), described,
                         is_leaf=architecture.is_param)
    return abstract(jax.eval_shape(lambda w: lora.freeze(w, config.model.dtype), whole), shardings)


def _scanned(mesh: Mesh) -> bool:
    return layers.are_scanned(sharding.platform(mesh))


def initial(config: Config, arch: Architecture, mesh: Mesh, weights: Params
            ) -> tuple[Params | None, Params]:
    """Returns the frozen weights, None without adapters, and what updates change, from a model's
    weights on the mesh."""
    if not config.learner.lora_rank:
        return None, weights
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, arch, mesh).params)
    adapters = lora.initialize(arch, config.learner, config.seed, _scanned(mesh))
    return lora.freeze(weights, config.model.dtype), sharding.put(shardings, adapters)


def merge(config: Config, arch: Architecture, mesh: Mesh) -> Program:
    """Returns the program that merges adapters into those weights of the rollout that change."""
    described = lora.merged_part(config.learner, architecture.describe(arch, _scanned(mesh)))
    shardings = sharding.shardings(described, sharding.ROLLOUT_RULES, mesh)
    function = functools.partial(lora.merge, config.learner, jnp.dtype(config.model.dtype))
    return Program("merge", jax.jit(function, out_shardings=shardings),
                   (abstract_base(config, arch, mesh), abstract_state(config, arch, mesh).params))


def host_batches(config: Config, rollout: Rollout, advantage: np.ndarray
                 ) -> list[tuple[Batch, Totals]]:
    """Returns the batch of each optimiser step over a rollout, as host arrays."""
    parts, layout = config.rl.minibatches, layout_of(config)
    rl = config.rl
    keep_all = rl.kl_in_loss or rl.entropy > 0 or rl.updates != 1 or bool(rl.teacher)
    # With 0 updates the gap is of any sequence.
    return [make_batch(part_of(rollout, i, parts), part, config.rollout.temperature, layout,
                       keep_all) for i, part in enumerate(np.split(advantage, parts))]


def batch_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of a batch, split over rows, and of its totals."""
    return NamedSharding(mesh, P(None, sharding.ROWS)), sharding.replicated(mesh)


def reads_old(config: Config) -> bool:
    """Returns whether updates read log-probabilities of the policy that acted."""
    steps = config.rl.updates * config.rl.minibatches  # only the first one's ratios are 1
    return steps > 1 or config.learner.old_logprob == "rollout"


def abstract_batch(config: Config, mesh: Mesh) -> tuple[Batch, Totals]:
    """Returns the shapes and shardings of the batch of one optimiser step."""
    blank = host_batches(config, blank_rollout(config), np.zeros(config.sequences, np.float32))
    return abstract(blank[0], batch_shardings(mesh))


def compute_logprobs(config: Config, arch: Architecture, mesh: Mesh) -> Program:
    """Returns the program of `learner.compute_logprobs` for the policy."""
    function = sharding.traced_for(mesh, functools.partial(learner.compute_logprobs, arch, config))
    return Program("compute_logprobs", jax.jit(function), (
        abstract_state(config, arch, mesh).params, *abstract_batch(config, mesh),
        abstract_base(config, arch, mesh)))


def programs(config: Config, arch: Architecture, mesh: Mesh, teacher: Architecture | None = None
             ) -> Iterator[Program]:
    """Yields those that a run uses: update, compute_logprobs, teacher, kl, gap, merge."""
    replicated = sharding.replicated(mesh)
    state, base = abstract_state(config, arch, mesh), abstract_base(config, arch, mesh)
    batch, totals = abstract_batch(config, mesh)
    logprobs = batch.rollout_logprob
    on_mesh = functools.partial(sharding.traced_for, mesh)
    if base is not None:
        yield merge(config, arch, mesh)
    if not config.rl.updates:
        yield Program("gap", jax.jit(on_mesh(functools.partial(learner.first_gap, arch, config)),
                                     out_shardings=replicated), (state.params, batch, base))
        return
    if config.rl.kl or reads_old(config) and config.learner.old_logprob == "learner":
        yield compute_logprobs(config, arch, mesh)
    if config.rl.kl_in_reward:
        yield Program("kl", jax.jit(on_mesh(functools.partial(learner.sequence_kl, config)),
                                    out_shardings=replicated), (batch, logprobs, logprobs))
    if teacher is not None:
        function = functools.partial(learner.compute_logprobs, teacher, config)
        yield Program("teacher", jax.jit(on_mesh(function)),
                      (abstract_frozen(config, teacher, mesh), batch, totals))
    shardings = jax.tree.map(lambda a: a.sharding, state)
    update = jax.jit(on_mesh(functools.partial(learner.update, arch, config)), donate_argnums=(0,),
                     out_shardings=(shardings, replicated))
    yield Program("update", update, (state, batch, totals, logprobs if reads_old(config) else None,
                                     (logprobs, logprobs) if config.rl.kl_in_loss else None, base,
                                     None if teacher is None else logprobs),
                  update_options(arch, mesh))


def update_options(arch: Architecture, mesh: Mesh) -> dict[str, str] | None:
    """Returns the compiler's options for an update.

    A TPU's compiler turns a gradient's product and reduce-scatter into products of one shard's
    columns at a time. Where these are fewer than a matrix unit's, it is asked not to: the update of
    0.5B over 16 shards then has 30 % fewer estimated cycles.
    """
    columns = arch.hidden_size // sharding.shard_count(mesh)
    if sharding.platform(mesh) != "tpu" or columns >= MATRIX_UNIT:
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def speed(arch: Architecture, mesh: Mesh, tokens: int, seconds: float) -> Metrics:
    """Returns how fast `tokens` were learned, on each device, and the share of its peak.

    The share counts 6 FLOPs a parameter and token, whatever is recomputed, as PaLM's model FLOPs
    utilization does (arXiv:2204.02311, appendix B, without attention). Only a device whose peak is
    in runtime/hardware.py has one.
    """
    rate = tokens / seconds / mesh.size
    chip = chip_of(mesh.devices.flat[0])
    parameters = architecture.count(architecture.describe(arch))
    share = {} if chip is None else {
        "learn/mfu": 6 * parameters * rate / chip.flops}
    return {"learn/tokens_per_second": rate} | share


def blank_rollout(config: Config) -> Rollout:
    """Returns a rollout of one-token sequences with the shapes that `config` asks for."""
    q, r = config.sequences, config.rollout
    ints, floats = (np.zeros((q, r.max_new_tokens), dtype) for dtype in (np.int32, np.float32))
    one = np.ones(q, np.int32)
    return Rollout(
        prompt=np.zeros((q, r.max_prompt_tokens), np.int32), prompt_length=one, tokens=ints,
        length=one, logprob=floats, raw_logprob=floats, top_p_mass=floats, prompt_id=one,
        birth=0 * one, occurrence=one, sample_id=one, stopped=one > 0, commits=ints, rounds=one,
        version=ints)
