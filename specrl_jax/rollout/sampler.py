"""Generation from token ids, for training, evaluation and single prompts.

A Sampler is the programs and shapes of a model, a drafter, a controller and an engine. What it
reads and returns are values, see state.py.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specrl_jax import prng, sharding
from specrl_jax.config import Config
from specrl_jax.control import cost_file
from specrl_jax.control.cost_model import plain_round_seconds
from specrl_jax.data.chats import messages, template_variables
from specrl_jax.data.prompts import PromptBatch
from specrl_jax.draft.protocol import Drafter
from specrl_jax.model import architecture, layers
from specrl_jax.model.architecture import Architecture
from specrl_jax.model.source import Actor, open_actor
from specrl_jax.model.tokenizer import Tokenizer
from specrl_jax.model.transformer import Params
from specrl_jax.rollout import profile as profiling
from specrl_jax.rollout import requests
from specrl_jax.rollout.build import build
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.state import PublishedDrafter, PublishedPolicy, RolloutInputs, Speculation
from specrl_jax.runtime.compilation import Compiler
from specrl_jax.runtime.stderr import warn as loud
from specrl_jax.structs import DrafterParams, Json, PyTree, Rollout

PROBE_STREAM = "probe"  # of prng.STREAMS: tokens that nobody reads


class Sampler:
    """Generates `group` samples of each of `prompts` prompts.

    `from_config` opens the model, too:

        sampler, state = Sampler.from_config(load_config("tiny"), prompts=1, group=4)
        rollout, speculation, result = sampler.generate(
            sampler.encode(["What is 52 + 21?"]), *state)

    Args:
      config: its model, spec, draft, control and rollout sections are read.
      prompts: prompts of one call, over all shards.
      group: M.
      greedy: whether the last sample of each prompt is greedy, whatever the temperature.
      warn: called with a line about each problem of the drafter.
      tokenizer: the actor's; None is that of config.model.path.
      wrap: returns the drafter to use in place of the config's, of the same sizes and parameters.
      records: whether rollouts return what distill.when=verification learns from.
    """

    def __init__(self, config: Config, arch: Architecture, stop: Sequence[int], mesh: Mesh, *,
                 prompts: int, group: int, greedy: bool = False, warn: Callable[[str], None] = loud,
                 tokenizer: Tokenizer | None = None,
                 wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
                 records: bool = False) -> None:
        if not stop:
            warn("the model's files name no end-of-sequence token, so every answer runs to "
                 "rollout.max_new_tokens; add eos_token_id to generation_config.json")
        self.config, self.group, self.greedy, self.mesh = config, group, greedy, mesh
        self.drafters, self.engine = build(config, arch, stop, mesh, prompts=prompts, group=group,
                                           warn=warn, tokenizer=tokenizer, wrap=wrap,
                                           records=records)
        self._cast = publisher(arch, mesh, self.engine.layout.dtype,
                               layers.are_scanned(sharding.platform(mesh)))
        self._warn, self._tokenizer = warn, tokenizer

    @classmethod
    def from_config(cls, config: Config, *, prompts: int = 1, group: int = 1,
                    actor: Actor | None = None, **options: Any) -> tuple["Sampler", RolloutInputs]:
        """Returns a sampler with no more slots than sequences, and the state to generate from.

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
        return sampler, sampler.initial_state(actor.params(mesh), actor.step)

    def with_config(self, config: Config) -> "Sampler":
        """Returns a sampler with the same programs that reads other run-time values."""
        other = copy.copy(self)
        other.config = config
        return other

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

    # Published weights.

    def initial_state(self, params: Params, version: int = 0) -> RolloutInputs:
        """Publishes a model's weights and the drafter's own; speculation has learned nothing."""
        policy = self.publish(params, version)
        drafter = self.publish_drafter(policy, sharding.put(
            self.drafters.shardings(self.mesh), self.drafters.weights), 0)
        trained_with = self.drafters.actor
        mine = layers.identity(policy.params) if trained_with else ""
        # Bits compare only where both have one dtype.
        if mine.split()[:1] == trained_with.split()[:1] and mine != trained_with:
            self._warn(f"draft.path = {self.config.draft.path!r}: the head was trained with other "
                       "weights of this actor, so fewer of its drafts may be accepted")
        return RolloutInputs(policy, drafter, self.engine.initial_speculation())

    def publish(self, params: Params, version: int) -> PublishedPolicy:
        """Returns `params` as rollouts read them: cast and resharded, or as they are."""
        return PublishedPolicy(self._cast(params), version)

    def publish_drafter(self, policy: PublishedPolicy, weights: Sequence[DrafterParams],
                        version: int, enabled: bool = True) -> PublishedDrafter:
        """Returns a drafter's `weights`, those of each part, bound to the published policy."""
        return PublishedDrafter(tuple(weights), self.drafters.bind(policy.params, weights),
                                version, enabled)

    # Programs.

    def compile(self, policy: PublishedPolicy, drafter: PublishedDrafter,
                report: Callable[[str], None] = lambda text: None,
                others: Callable[[Compiler], None] = lambda compiler: None) -> None:
        """Compiles all programs and runs each small one once: nothing compiles after this.

        Args:
          others: adds programs that are compiled at the same time.
        """
        self.engine.compile(policy.params, drafter.params, report, others)
        shapes = self.engine.shapes
        inputs = RolloutInputs(policy, drafter, self.engine.initial_speculation())
        self.probe(inputs, [[0, 0]], np.ones(shapes.sequences * shapes.shards, np.int32))

    def prepare(self, inputs: RolloutInputs, report: Callable[[str], None] = lambda text: None
                ) -> RolloutInputs:
        """Compiles all programs; returns the inputs with costs, where some are stored for this
        device."""
        self.compile(inputs.policy, inputs.drafter, report)
        return inputs._replace(speculation=self.find_costs(inputs, report, measure=False))

    def find_costs(self, inputs: RolloutInputs,
                   report: Callable[[str], None] = lambda text: None, measure: bool = True
                   ) -> Speculation:
        """Returns `inputs.speculation` with what rounds cost, as stored for this device or measured
        now. Without costs, a controller goes by the ratios of a default table.

        A controller whose state is not fresh keeps its own costs on a device whose costs are known,
        and on every device if control.cost_updates is off.

        Args:
          measure: whether to measure what is not stored.
        """
        engine, control, speculation = self.engine, self.config.control, inputs.speculation
        if not engine.decoder.drafter.depth:
            return speculation.replace(fresh=False)
        online = control.cost_updates == "online"
        since = time.time() - cost_file.FRESH if online else 0.0
        costs = profiling.stored(engine, control.cost_table, self._draft_settings(), since)
        keeps = not speculation.fresh and (costs is not None or not online)
        if costs is None and measure and not keeps:
            report("measuring what rounds cost")
            costs = profiling.measured(engine, inputs.policy.params, inputs.drafter.params,
                                       control.cost_table, self._draft_settings())
        if costs is None:
            return speculation
        speculation = speculation.replace(
            plain_round_seconds=plain_round_seconds(costs, profiling.limits_of(engine)))
        return speculation if keeps else speculation.replace(
            control=engine.decoder.controller.init(costs), fresh=False)

    def _draft_settings(self) -> Json:
        """Returns the settings that affect the cost of drafting: part of the cost table's key."""
        spec = dataclasses.asdict(self.config.spec)
        return dataclasses.asdict(self.config.draft) | {
            name: spec[name] for name in ("drafter", "max_depth", "max_branch", "history_past")}

    # Rollouts.

    def probe(self, inputs: RolloutInputs, prompts: Sequence[Sequence[int]], limit: np.ndarray,
              depth: int | None = None) -> Result:
        """Generates tokens that nobody reads; what speculation learns from them is dropped.

        Args:
          prompts: repeated to fill a call.
          limit: i32[sequences] most tokens of each.
          depth: of drafts, whether or not the drafter is enabled; None leaves it to the controller.
        """
        count = len(limit) // self.group
        batch = PromptBatch.of([prompts[i % len(prompts)] for i in range(count)])
        return self.generate(batch, *inputs, PROBE_STREAM, 0, limit=limit, depth=depth)[2]

    def generate(self, batch: PromptBatch, policy: PublishedPolicy, drafter: PublishedDrafter,
                 speculation: Speculation, stream: str = "generate", step: int = 0, *,
                 past: np.ndarray | None = None, limit: np.ndarray | None = None,
                 depth: int | None = None,
                 progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
                 on_chunk: Callable[[np.ndarray, np.ndarray], bool] | None = None
                 ) -> tuple[Rollout, Speculation, Result]:
        """Samples every prompt `group` times; compiles first if need be.

        Args:
          batch: prompts; their order does not affect the result.
          stream: purpose of the tokens, one of prng.STREAMS; part of the noise key.
          step: part of the noise key.
          past: i32[prompts, K, T] earlier responses, see draft/response_cache.py.
          limit: i32[sequences] most new tokens, if fewer than rollout.max_new_tokens, in canonical
            order.
          depth: of drafts, whatever the controller plans; None leaves it to the controller.
          progress, on_chunk: see `progress` and `peek` of Engine.run.

        Returns:
          The rollout in canonical order (prompt id, occurrence, sample id), what speculation has
          learned, and the engine's account.
        """
        rollout = requests.begin(batch, step, self.engine.shapes)
        if past is not None:
            past = past[np.lexsort((batch.occurrence, batch.prompt_id))]
        return self.extend(rollout, policy, drafter, speculation, stream, past=past, limit=limit,
                           depth=depth, progress=progress, on_chunk=on_chunk)

    def extend(self, rollout: Rollout, policy: PublishedPolicy, drafter: PublishedDrafter,
               speculation: Speculation, stream: str = "generate", *,
               past: np.ndarray | None = None, limit: np.ndarray | None = None,
               depth: int | None = None,
               progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
               on_chunk: Callable[[np.ndarray, np.ndarray], bool] | None = None
               ) -> tuple[Rollout, Speculation, Result]:
        """Samples further tokens of a rollout's sequences, which end as if nothing had stopped
        them: noise depends on a token's index alone. For the arguments see `generate`.

        Args:
          rollout: at most as many groups as the sampler was made for; more than rollout.quota
            tokens of a sequence need that to be positive.
          limit: i32[sequences] most tokens of each, those included that it has already.
          on_chunk: sees the engine's places, which are in the rollout's order if it has as many
            groups as the sampler was made for, none of them finished.
        """
        if not self.engine.compiled:
            self.compile(policy, drafter)
        shapes, config = self.engine.shapes, self.config.rollout
        unfinished = np.logical_not(requests.finished(rollout))
        at = requests.places(np.asarray(unfinished.reshape(-1, self.group).any(1)),
                             shapes.sequences * shapes.shards // self.group, shapes.shards)
        at = np.where(at[:, None] < 0, -1, at[:, None] * self.group + np.arange(self.group)
                      ).reshape(-1)
        keys = prng.row_keys(self.config.seed, stream, *(
            of_all[at] for of_all in (rollout.birth, rollout.prompt_id, rollout.occurrence,
                                      rollout.sample_id)))
        most = np.full_like(rollout.length, config.max_new_tokens) if limit is None else limit
        request = requests.request_of(
            rollout, at, keys, np.where(unfinished, most, rollout.length), config, past)
        if self.greedy:
            request.temperature[self.group - 1 :: self.group] = 0
        if depth is None and not drafter.enabled:
            depth = 0
        result, speculation = self.engine.run(
            policy.params, drafter.params, speculation, request, progress=progress, peek=on_chunk,
            rounds=config.rounds_per_launch, depth=depth)
        if result.counters["broken"] and stream != PROBE_STREAM:
            self._warn(f"speculation is off: scores of drafter version {drafter.version} are not "
                       "finite; train it again, or choose another spec.drafter")
        extended = requests.extended(rollout, at, result.sequences, policy.version,
                                     self.engine.layout.stop)
        if result.records is not None:
            extended = extended.replace(records=requests.records_of(rollout, at, result.records))
        return extended, speculation, result


def cast(arch: Architecture, mesh: Mesh, dtype: DTypeLike, stacked: bool) -> Any:
    """Returns the jitted program that casts, reshards and arranges parameters for the rollout.

    `stacked`: the form of the layers that the rollout reads; the program takes either.
    """
    return jax.jit(lambda params: jax.tree.map(
        lambda a: a.astype(dtype), layers.arrange(params, stacked)),
        out_shardings=published_shardings(arch, mesh, stacked))


def publisher(arch: Architecture, mesh: Mesh, dtype: DTypeLike, stacked: bool
              ) -> Callable[[Params], Params]:
    """Returns a function that casts, reshards and arranges parameters where they need it."""
    wanted, other = (published_shardings(arch, mesh, form) for form in (stacked, not stacked))
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


def published_shardings(arch: Architecture, mesh: Mesh, stacked: bool) -> PyTree:
    """Returns the shardings of what rollouts read; for `stacked` see model/layers.py."""
    return sharding.shardings(architecture.describe(arch, stacked), sharding.ROLLOUT_RULES, mesh)
