"""Generation from token ids, for training, evaluation and single prompts.

A Sampler joins a model, a drafter, a controller and an engine; it reads only published parameters.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specrl_jax import prng, sharding
from specrl_jax.config import Config, check
from specrl_jax.control import cost_file
from specrl_jax.control.cost_model import plain_round_seconds
from specrl_jax.control.protocol import make_spec
from specrl_jax.data.chats import messages, template_variables
from specrl_jax.data.prompts import PromptBatch
from specrl_jax.draft.protocol import Drafter
from specrl_jax.model import architecture, layers
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import Actor, open_actor
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.transformer import Params
from specrl_jax.rollout import profile as profiling
from specrl_jax.rollout.build import build
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import make_request, pad
from specrl_jax.runtime.checksum import checksum
from specrl_jax.runtime.compilation import Compiler
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.structs import DrafterParams, Json, PyTree, Rollout, carrier

PROBE_STREAM = "probe"  # of prng.STREAMS: tokens that nobody reads


class Sampler:
    """Generates `group` samples of each of `prompts` prompts.

    `from_config` opens the model, too:

        sampler = Sampler.from_config(load_config("tiny"), prompts=1, group=4)
        rollout, result = sampler.generate(sampler.encode(["What is 52 + 21?"]))

    Args:
      config: its model, spec, draft, control and rollout sections are read.
      prompts: prompts of one call, over all shards.
      group: M.
      greedy: whether the last sample of each prompt is greedy, whatever the temperature.
      warn: called with a line about each problem of the drafter.
      tokenizer: the actor's; None is that of config.model.path.
      wrap: returns the drafter to use in place of the config's, of the same sizes and parameters.
    """

    def __init__(self, config: Config, arch: Architecture, stop: Sequence[int], mesh: Mesh, *,
                 prompts: int, group: int, greedy: bool = False, warn: Callable[[str], None] = loud,
                 tokenizer: Tokenizer | None = None,
                 wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter) -> None:
        if not stop:
            warn("the model's files name no end-of-sequence token, so every answer runs to "
                 "rollout.max_new_tokens; add eos_token_id to generation_config.json")
        self.config, self.group, self.greedy, self.mesh = config, group, greedy, mesh
        self.drafters, self.engine = build(config, arch, stop, mesh, prompts=prompts, group=group,
                                           warn=warn, tokenizer=tokenizer, wrap=wrap)
        self.plain_round_seconds: dict[int, float] = {}  # by batch size, where costs are known
        self.profiling_seconds = 0.0  # spent on reading or measuring costs
        self._depth: int | None = None  # of drafts, whatever the controller plans
        self.control_restored = False  # the controller's state is a checkpoint's
        self._cast = publisher(arch, mesh, self.engine.layout.dtype,
                               layers.are_scanned(sharding.platform(mesh)))
        self.params: Params = {}  # as published
        self.drafter_params: DrafterParams = ()  # bound to them
        self.drafter_weights = sharding.put(self.drafters.places(mesh), self.drafters.weights)
        warn_of_broken(self.drafters.weights, warn)
        self.version, self.drafter_version = -1, 0
        self.broken = False  # a rollout found non-finite draft scores and switched drafting off
        self._checksum: int | None = None
        self._warn, self._tokenizer = warn, tokenizer

    @classmethod
    def from_config(cls, config: Config, *, prompts: int = 1, group: int = 1,
                    actor: Actor | None = None, **options: Any) -> "Sampler":
        """Returns a sampler with the weights of a model published, and no slot that stays empty.

        Args:
          prompts, group, options: those of the class.
          actor: see `open_actor`; None is the model at config.model.path.

        Raises:
          ConfigError: there is no such model, or a value cannot work.
        """
        actor = actor or open_actor(config)
        slots = min(config.rollout.batch_size, prompts * group)
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, batch_size=slots))
        mesh, tokenizer = sharding.make_mesh(config.mesh), actor.source.tokenizer
        sampler = cls(config, actor.source.arch, tokenizer.stop_ids, mesh, prompts=prompts,
                      group=group, tokenizer=tokenizer, **options)
        sampler.publish(actor.params(mesh), actor.step)
        return sampler

    @property
    def tokenizer(self) -> Tokenizer:
        """The actor's tokenizer."""
        return self._tokenizer or open_actor(self.config).source.tokenizer

    def encode(self, questions: Sequence[str], system: str = "") -> PromptBatch:
        """Returns questions as prompts in the model's chat template, one id each.

        Raises:
          ConfigError: the model has no chat template.
        """
        chats = [messages({"question": text}, system) for text in questions]
        variables = template_variables(self.config.data)
        return PromptBatch.of([self.tokenizer.encode(self.tokenizer.chat(x, **variables))
                               for x in chats])

    def publish(self, params: Params, version: int) -> None:
        """Makes `params` what rollouts read: cast and resharded, or as they are if both agree."""
        first, self.version, self._checksum = self.version < 0, version, None
        self.params = self._cast(params)
        trained = self.drafters.actor
        mine = layers.identity(self.params) if first and trained else ""
        if mine.split()[:1] == trained.split()[:1] and mine != trained:  # bits of one dtype compare
            self._warn(f"draft.path = {self.config.draft.path!r}: the head was trained with other "
                       "weights of this actor and may have less accepted")
        self.publish_drafter(self.drafter_weights, self.drafter_version)

    def publish_drafter(self, weights: Sequence[DrafterParams], version: int) -> None:
        """Makes `weights`, those of each part, what rollouts draft with; an error changes nothing.
        """
        bound = self.drafters.bind(self.params, weights)
        self.drafter_weights, self.drafter_version = tuple(weights), version
        self.drafter_params = bound

    def follow(self, other: "Sampler") -> None:
        """Reads what `other` has published, which is of the same model and drafter."""
        self.params, self.version, self._checksum = other.params, other.version, None
        self.drafter_weights, self.drafter_params = other.drafter_weights, other.drafter_params
        self.drafter_version, self._depth = other.drafter_version, other._depth

    def forget(self) -> None:
        """Holds no weights until it follows or publishes again: they may be a copy of their own."""
        self.params, self.drafter_params, self.drafter_weights = {}, (), ()

    @property
    def checksum(self) -> int:
        """Checksum of the published policy, computed once a version."""
        if self._checksum is None:
            self._checksum = checksum(self.params)
        return self._checksum

    def draft_to(self, depth: int | None) -> None:
        """Forces the draft depth of all rounds; None lets the controller choose again."""
        self._depth = depth

    def speculate(self, *, depth: int, branch: int, nodes: int, budget: int = 0,
                  mix: Sequence[float] | None = None) -> None:
        """Replaces the settings of control.policy = "fixed", without compiling anything.

        Args:
          depth, branch, nodes, budget, mix: see spec.depth and so on, and SpecConfig.

        Raises:
          ConfigError: control.policy is another.
        """
        check(self.config.control.policy == "fixed", "control.policy", self.config.control.policy,
              "chooses its settings itself; use fixed")
        mix = mix or (1.0,) * len(self.engine.decoder.drafter.names)
        self.engine.control = make_spec(depth, branch, nodes, budget, mix)

    def compile(self, report: Callable[[str], None] = lambda text: None, profile: bool = True,
                others: Callable[[Compiler], None] = lambda compiler: None) -> None:
        """Compiles all programs and runs each small one once: nothing compiles after this.

        Args:
          profile: whether to measure what rounds cost if nothing is stored for this device.
            Without costs, a controller goes by the ratios of a default table.
          others: adds programs that are compiled at the same time.
        """
        self.engine.compile(self.params, self.drafter_params, report, others)
        began = time.perf_counter()
        if self.engine.decoder.drafter.depth:
            self._find_costs(report, profile)
        self.profiling_seconds = time.perf_counter() - began
        shapes = self.engine.shapes
        limit = np.ones(shapes.sequences * shapes.shards, np.int32)
        self.probe([[0, 0]], limit)

    def _find_costs(self, report: Callable[[str], None], measure: bool) -> None:
        """Gives the controller what rounds cost, as stored for this device or measured now.

        A restored controller keeps its own costs on a device whose costs are known, and on every
        device if control.cost_updates is off.
        """
        engine, control = self.engine, self.config.control
        online = control.cost_updates == "online"
        since = time.time() - cost_file.FRESH if online else 0.0
        costs = profiling.stored(engine, control.cost_table, self._draft_settings(), since)
        keeps = self.control_restored and (costs is not None or not online)
        if costs is None and measure and not keeps:
            report("measuring what rounds cost")
            costs = profiling.measured(engine, self.params, self.drafter_params,
                                       control.cost_table, self._draft_settings())
        if costs is not None:
            self.plain_round_seconds = plain_round_seconds(costs, profiling.limits_of(engine))
            if not keeps:
                engine.control = engine.decoder.controller.init(costs)

    def probe(self, prompts: Sequence[Sequence[int]], limit: np.ndarray, depth: int | None = None
              ) -> Result:
        """Generates tokens that nobody reads; acceptance and control stay as they were.

        Args:
          prompts: repeated to fill a call.
          limit: i32[sequences] most tokens of each.
          depth: of drafts; None leaves it to the controller.
        """
        count = len(limit) // self.group
        batch = PromptBatch.of([prompts[i % len(prompts)] for i in range(count)])
        before = self.engine.control, self.engine.acceptance, self._depth
        self._depth = self._depth if depth is None else depth
        _, result = self.generate(batch, PROBE_STREAM, 0, limit=limit)
        self.engine.control, self.engine.acceptance, self._depth = before
        return result

    def _draft_settings(self) -> Json:
        """Returns the settings that affect the cost of drafting: part of the cost table's key."""
        spec = dataclasses.asdict(self.config.spec)
        return dataclasses.asdict(self.config.draft) | {
            name: spec[name] for name in ("drafter", "max_depth", "max_branch", "history_past")}

    def generate(self, batch: PromptBatch, stream: str = "generate", step: int = 0, *,
                 past: np.ndarray | None = None, limit: np.ndarray | None = None,
                 progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
                 on_chunk: Callable[[np.ndarray, np.ndarray], bool] | None = None
                 ) -> tuple[Rollout, Result]:
        """Samples every prompt `group` times; compiles first, without profiling, if need be.

        Args:
          batch: prompts, which take slots in the order of their ids.
          stream: purpose of the tokens, one of prng.STREAMS; part of the noise key.
          step: part of the noise key.
          past: i32[prompts, K, T] earlier responses, see draft/response_cache.py.
          limit: i32[sequences] most new tokens, if fewer than rollout.max_new_tokens, in the order
            of the slots; 0 is none, for the last ones of a shard.
          progress, on_chunk: see `progress` and `peek` of Engine.run.

        Returns:
          The rollout in canonical order (prompt id, occurrence, sample id); the engine's account.
        """
        if not self.engine.compiled:
            self.compile(profile=False)
        order = np.lexsort((batch.occurrence, batch.prompt_id))
        ids, occurrence = (np.repeat(a[order], self.group).astype(np.int32)
                           for a in (batch.prompt_id, batch.occurrence))
        sample = np.tile(np.arange(self.group, dtype=np.int32), len(order))
        keys = prng.row_keys(self.config.seed, stream, step, ids, occurrence, sample)
        prompts = [batch.prompts[i] for i in order]
        wanted = make_request(prompts, keys, self.group, self.config.rollout,
                         None if past is None else past[order])
        if self.greedy:
            wanted.temperature[sample == self.group - 1] = 0
        if limit is not None:
            wanted.limit = np.minimum(wanted.limit, limit).astype(np.int32)
        result = self.engine.run(
            self.params, wanted, self.drafter_params, progress=progress, peek=on_chunk,
            rounds=self.config.rollout.rounds_per_launch, depth=self._depth)
        if result.counters["broken"] and stream != PROBE_STREAM:
            self._warn(f"speculation is off: scores of drafter version {self.drafter_version} are "
                       "not finite; train it again, or choose another spec.drafter")
            self.draft_to(0)
            self.broken = True
        rollout = self._rollout(prompts, result, ids, occurrence, sample)
        canonical = np.lexsort((sample, occurrence, ids))
        return jax.tree.map(lambda a: a[canonical], rollout), result

    def _rollout(self, prompts: Sequence[Sequence[int]], result: Result, ids: np.ndarray,
                 occurrence: np.ndarray, sample: np.ndarray) -> Rollout:
        tokens, length = pad(prompts, self.engine.shapes.prompt)
        s = result.sequences
        last = np.asarray(s.tokens)[np.arange(len(ids)), np.maximum(s.length - 1, 0)]
        return carrier(
            Rollout,
            prompt=np.repeat(tokens, self.group, 0), prompt_length=np.repeat(length, self.group),
            tokens=s.tokens, length=s.length, logprob=s.logprob, raw_logprob=s.raw_logprob,
            top_p_mass=s.top_p_mass, prompt_id=ids, occurrence=occurrence, sample_id=sample,
            stopped=np.isin(last, self.engine.layout.stop), commits=s.commits, rounds=s.rounds,
            policy_version=self.version, drafter_version=self.drafter_version)


def cast(arch: Architecture, mesh: Mesh, dtype: DTypeLike, stacked: bool) -> Any:
    """Returns the jitted program that casts, reshards and arranges parameters for the rollout.

    `stacked`: the form of the layers that the rollout reads; the program takes either.
    """
    return jax.jit(lambda params: jax.tree.map(
        lambda a: a.astype(dtype), layers.arrange(params, stacked)),
        out_shardings=published_places(arch, mesh, stacked))


def publisher(arch: Architecture, mesh: Mesh, dtype: DTypeLike, stacked: bool
              ) -> Callable[[Params], Params]:
    """Returns a function that casts, reshards and arranges parameters where they need it."""
    wanted, other = (published_places(arch, mesh, form) for form in (stacked, not stacked))
    convert = cast(arch, mesh, dtype, stacked)

    def publish(params: Params) -> Params:
        as_wanted = layers.is_stacked(params) == stacked
        params = jax.tree.map(
            lambda a, place: a if isinstance(a, jax.Array) else sharding.put(place, a),
            params, wanted if as_wanted else other)
        agree = as_wanted and all(jax.tree.leaves(jax.tree.map(
            lambda a, place: a.dtype == dtype and a.sharding.is_equivalent_to(place, a.ndim),
            params, wanted)))
        return params if agree else convert(params)

    return publish


def published_places(arch: Architecture, mesh: Mesh, stacked: bool) -> PyTree:
    """Returns the shardings of what rollouts read; for `stacked` see model/layers.py."""
    return sharding.shardings(architecture.describe(arch, stacked), sharding.ROLLOUT_RULES, mesh,
                              architecture.is_param)


def warn_of_broken(weights: tuple[DrafterParams, ...], warn: Callable[[str], None]) -> None:
    """Warns of drafter weights that are not finite; such a drafter proposes nothing."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    broken = [jax.tree_util.keystr(path[1:]) for path, leaf in leaves
              if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(leaf).all()]
    if broken:
        warn(f"speculation is off: the drafter's {', '.join(broken)} are not finite; train it "
             "again, or choose another spec.drafter")
