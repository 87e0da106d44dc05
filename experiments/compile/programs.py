"""Every program of a run, and what lies in memory beside each, from a config and a mesh alone.

The descriptions are the ones that a run compiles: `Engine.programs`, `rl.programs`,
`distill.programs`. No weights are read: shapes come from the architecture.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from specrl_jax import sharding
from specrl_jax.config import Config, check
from specrl_jax.distill import programs as distill
from specrl_jax.distill.update import Programs, init_state, state_shardings
from specrl_jax.draft.registry import DrafterSet
from specrl_jax.model import layers, lora, weights
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.hf_config import parse_config
from specrl_jax.model.published import without_weights
from specrl_jax.model.tokenizer import Tokenizer, read_json
from specrl_jax.rl import programs as policy
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.build import build
from specrl_jax.rollout.engine import Engine
from specrl_jax.rollout.sampler import cast, published_shardings
from specrl_jax.runtime import checksum
from specrl_jax.runtime.compilation import Program, abstract
from specrl_jax.runtime.paths import local_path
from specrl_jax.structs import PyTree

from . import rounds


class Model(NamedTuple):
    """What programs depend on of a model."""

    arch: Architecture
    stop: tuple[int, ...]  # stop tokens
    tokenizer: Tokenizer | None = None


def model_of(config: Config) -> Model:
    """Returns the model of `config.model.path`; a Hugging Face directory needs only config.json,
    and of a published model in model/published.py nothing is read.

    Raises:
      ConfigError: there is no such model.
    """
    config = without_weights(config)
    folder = local_path("model.path", config.model.path)
    if (folder / "config.json").is_file():
        file = folder / "config.json"
        arch = parse_config(read_json(file), str(file), config.model.family)
        return Model(arch, (arch.vocab_size - 1,))
    source = weights.describe_source(config.model.path, family=config.model.family)
    return Model(source.arch, tuple(source.tokenizer.stop_ids), source.tokenizer)


@dataclasses.dataclass(frozen=True)
class Run:
    """The programs of a run on a mesh, and the arrays that stay in memory."""

    config: Config
    arch: Architecture
    mesh: Mesh
    engine: Engine
    resident: dict[str, PyTree]  # abstract arrays by what they are
    drafters: DrafterSet
    master: PyTree  # all of the learner's weights
    actor: PyTree  # published
    weights: PyTree  # of each part of the drafter
    bound: PyTree  # what rollouts draft with
    drafter_state: LearnerState | None
    teacher: Architecture | None

    def groups(self) -> dict[str, Iterator[Program]]:
        """Returns the programs that the run compiles, by part of the run.

        Besides, single rounds of the largest batch, which no run compiles by themselves.
        """
        return {"rollout": self.engine.programs(self.actor, self.bound),
                "policy": policy.programs(self.config, self.arch, self.mesh, self.teacher),
                "publish": self._publish(), "drafter": self._drafter_programs(),
                "rounds": rounds.programs(self.engine, self.actor, self.bound)}

    def _publish(self) -> Iterator[Program]:
        master, dtype = self.master, self.engine.layout.dtype
        if self.actor is not master:
            stacked = layers.are_scanned(sharding.platform(self.mesh))
            yield Program("publish", cast(self.arch, self.mesh, dtype, stacked), (master,))
        yield Program("checksum", checksum.program, (self.actor,))

    def _drafter_programs(self) -> Iterator[Program]:
        config, place = self.config, self.drafters.trainable
        for at in self.drafters.versioned:
            yield Program(("drafter", "summary"), checksum.summary, (self.weights[at],))
        drafter = None if place is None else self.drafters.parts[place].trainable
        if config.distill.when == "off" or drafter is None or self.drafter_state is None:
            return
        jitted = Programs(drafter, self.arch, config.distill, self.mesh,
                          sharding.replicated(self.mesh))
        ring = distill.make_ring(config, drafter, self.arch.hidden_size)
        yield from distill.programs(jitted, config.distill, ring, self.drafter_state, self.actor,
                                    self.weights[place]["vocab"])


def describe(config: Config, mesh: Mesh, model: Model | None = None) -> Run:
    """Returns the programs of a run of `config` on a mesh of any devices.

    Raises:
      ConfigError: a value cannot work.
    """
    arch, stop, tokenizer = model or model_of(config)
    drafters, engine = build(config, arch, stop, mesh, prompts=config.groups_in_flight,
                             group=config.responses, warn=lambda text: None, tokenizer=tokenizer,
                             blank=True)
    state = policy.abstract_state(config, arch, mesh)
    base = policy.abstract_base(config, arch, mesh)
    master = state.params if base is None else base
    actor = _published(arch, mesh, engine.layout.dtype, master)
    own = abstract(drafters.weights, drafters.shardings(mesh))
    place, drafter_state = drafters.trainable, None
    check(config.distill.when == "off" or place is not None, "distill.when", config.distill.when,
          f"spec.drafter = {config.spec.drafter!r} has nothing that learns; choose eagle, or off")
    bound = drafters.bind(actor, own)
    cache = engine.layout.abstract_kv(engine.shapes.batch)
    resident = {"learner": state, "cache": cache}
    if base is not None:
        resident["base"] = base
    if actor is not master:
        resident["published"] = actor
    elif base is not None:
        resident["published"] = lora.merged_part(config.learner, actor)
    teacher = _teacher(config)
    if teacher is not None:
        resident["teacher"] = policy.abstract_frozen(config, teacher, mesh)
    if config.rl.kl:
        resident["reference"] = state.params
    if jax.tree.leaves(own):
        resident |= {"drafter": own, "drafting": _apart(bound, actor)}
    if config.distill.when != "off" and place is not None:
        learning = drafters.parts[place].trainable
        assert learning is not None
        drafter_state = abstract(
            jax.eval_shape(lambda w: init_state(config.distill, w), own[place]["weights"]),
            state_shardings(learning, config.distill, mesh))
        resident["distill"] = drafter_state.optimizer
    return Run(config, arch, mesh, engine, resident, drafters, master, actor, own, bound,
               drafter_state, teacher)


def _teacher(config: Config) -> Architecture | None:
    """Returns the architecture of `rl.teacher`, if an update reads one."""
    if not config.rl.teacher or not config.rl.updates:
        return None
    model = dataclasses.replace(config.model, path=config.rl.teacher, family="")
    return model_of(dataclasses.replace(config, model=model)).arch


def _published(arch: Architecture, mesh: Mesh, dtype: Any, params: PyTree) -> PyTree:
    """Returns what publishing makes of `params`: themselves if that changes nothing."""
    stacked = layers.are_scanned(sharding.platform(mesh))
    weights = abstract(jax.eval_shape(cast(arch, mesh, dtype, stacked), params),
                       published_shardings(arch, mesh, stacked))
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(weights), strict=False)
    same = jax.tree.structure(params) == jax.tree.structure(weights) and all(
        a.shape == b.shape and a.dtype == b.dtype
        and a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    return params if same else weights


def _apart(bound: PyTree, actor: PyTree) -> list[Any]:
    """Returns the arrays of what is drafted with that are not the actor's own."""
    own = {id(leaf) for leaf in jax.tree.leaves(actor)}
    return [leaf for leaf in jax.tree.leaves(bound) if id(leaf) not in own]


def device_bytes(tree: PyTree) -> int:
    """Returns the bytes of abstract arrays in the memory of one device; what lies in the host's is
    not among them."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree)
               if leaf.sharding is None or leaf.sharding.memory_kind != sharding.HOST)


def _leaf_bytes(leaf: Any) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def beside(program: Program, resident: dict[str, PyTree]) -> dict[str, int]:
    """Returns the bytes on one device of what is resident and no argument of a program, by what."""
    held = collections.Counter(_signature(program.args))
    sizes = {}
    for name, tree in resident.items():
        needed = collections.Counter(_signature(tree))
        if needed - held:
            sizes[name] = device_bytes(tree)
        else:
            held -= needed
    return sizes


def _signature(tree: PyTree) -> list[tuple[Any, ...]]:
    return [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in jax.tree.leaves(tree)
            if isinstance(leaf, jax.ShapeDtypeStruct)]
