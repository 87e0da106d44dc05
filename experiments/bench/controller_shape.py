"""The engines of one number of rows, and rollouts by them."""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax import prng, sharding
from specrl_jax.config import Config, ConfigError
from specrl_jax.control import acceptance, prices, respec
from specrl_jax.draft.recorded import replay_params
from specrl_jax.io import machine
from specrl_jax.io.compilation import CompilationCounter
from specrl_jax.model.weights import Source
from specrl_jax.rollout.engine import Result
from specrl_jax.rollout.layout import request
from specrl_jax.rollout.sampler import Sampler

from .controller_cells import Cell, shaped
from .workload import heavy_limits


@dataclasses.dataclass(frozen=True)
class Run:
    """One rollout. `seconds` are without prefill, which is the same for all."""

    result: Result
    compilations: int

    @property
    def seconds(self) -> float:
        return self.result.seconds - self.result.prefill_seconds

    @property
    def accept_length(self) -> float:
        counters = self.result.counters
        return counters["committed"] / max(counters["row_rounds"], 1)


class Shape:
    """The engines of one number of rows; context, corruption and lengths are data.

    Args:
      config: its rollout section holds temperature, and max_new_tokens of a uniform row.
      loads: by context, token ids of all rows, of one rollout after the other, at least two; where
        they are equal, rows are samples of one prompt. One half chooses and teaches, the other is
        timed. Engines hold the longest prompt of all.
      stop: tokens that end a response.
      stops: of its cells rows end there, and not at limits.
    """

    def __init__(self, config: Config, source: Source, params: Any,
                 loads: Mapping[int, Sequence[Sequence[Sequence[int]]]], stop: Sequence[int],
                 drafter: str, policies: Sequence[str], counter: CompilationCounter,
                 stops: bool = False) -> None:
        every = [load for of in loads.values() for load in of]
        self.config, self.counter, self.rows, self.stops = config, counter, len(every[0]), stops
        self._longest = max(len(prompt) for load in every for prompt in load)
        self._said: dict[tuple[int, str, int], np.ndarray] = {}  # by context, lengths and load
        self._replays = drafter == "replay"  # others must not know what they will say
        self._maps = 0  # of an engine's programs, the most so far
        self.group = self.rows if all(len(set(map(tuple, load))) == 1 for load in every) else 1
        self._loads = {context: [list(load)[:: self.group] for load in of]
                       for context, of in loads.items()}
        self.stop = stop
        self.new_tokens = config.rollout.max_new_tokens
        self.plain = self._sampler(source, params, config, "off", "off")
        # Where weights lie in memory is worth some per cent of a round: the same for all.
        make = functools.partial(self._sampler, source, self.plain.params, config, drafter)
        self.fixed = self._last = make("fixed")
        self.policies: dict[str, Sampler] = {}
        for policy in policies:
            self.policies[policy] = make(policy)
            self._turn_of(self.policies[policy])
        nodes = self.fixed.config.spec.max_nodes
        self.settings = respec.settings_of(
            config.control.settings, self.fixed.engine.decoder.drafter.depth,
            self.fixed.config.spec.max_branch, nodes)

    def _sampler(self, source: Source, params: Any, config: Config, drafter: str, policy: str
                 ) -> Sampler:
        """
        Raises:
          ConfigError: its programs, as large as another engine's, do not fit this process.
        """
        held, most = machine.maps()
        if held + self._maps > most:
            raise ConfigError(
                f"--policies: the engine of {policy!r} has some {self._maps} memory maps, {held} "
                f"of {most} are taken; name fewer policies or cells, or raise the bound "
                f"with `sysctl -w vm.max_map_count={4 * most}`")
        sampler = Sampler(
            shaped(config, self.rows, self._longest, self.group, drafter, policy, self.stops),
            source.arch, self.stop, sharding.make_mesh(config.mesh),
            prompts=self.rows // self.group, group=self.group, tokenizer=source.tokenizer,
            warn=lambda text: None)
        sampler.publish(params, 0)
        sampler.compile()
        machine.give_back()  # six engines of 64 rows of SmolLM2 need it
        self._maps = max(self._maps, machine.maps()[0] - held)
        return sampler

    def _turn_of(self, sampler: Sampler) -> None:
        """One cache of keys and values for all that draft; that of 64 rows of SmolLM2 is 1.1 GB."""
        if sampler not in (self.plain, self._last):
            self._last.engine.hand_on(sampler.engine)
            self._last = sampler

    def keep(self, policies: Sequence[str]) -> None:
        """Drops the engines of other policies."""
        self._turn_of(self.fixed)
        self.policies = {name: self.policies[name] for name in policies}
        machine.give_back()

    def price_rounds(self) -> None:
        """Measures what rounds cost anew."""
        with tempfile.TemporaryDirectory() as fresh:
            for sampler in self.policies.values():
                self._turn_of(sampler)
                sampler.publish_drafter(sampler.drafter_weights,
                                        sampler.drafter_version)  # no cell's
                sampler.price_rounds(str(Path(fresh) / "costs.json"))

    def limits(self) -> np.ndarray:
        """i32[rows], at most twice the tokens of a uniform row."""
        if self.cell.lengths != "heavy":
            tokens = self.new_tokens * (1 if self.cell.lengths == "uniform" else 2)
            return np.full(self.rows, tokens, np.int32)
        return heavy_limits(self.rows, 2 * self.new_tokens)

    def choosing(self, turn: int) -> int:
        """The load of a rollout that chooses or teaches, not one of those that are timed."""
        return turn % (len(self.loads) // 2)

    def timed(self, turn: int) -> int:
        return len(self.loads) - 1 - self.choosing(turn)

    def run(self, sampler: Sampler, load: int) -> Run:
        """A rollout of the cell that was begun."""
        rows, prompts = np.arange(self.rows), self.loads[load]
        keys = prng.row_keys(self.config.seed, "generate", load, rows // self.group, rows * 0,
                             rows % self.group)
        drafts = sampler != self.plain
        past = self._said[self._key(load)] if self._replays and drafts else None
        asked = request(prompts, keys, self.group, sampler.config.rollout, past)
        asked.limit = self.limits()
        self._turn_of(sampler)
        self.counter.take()
        result = sampler.engine.run(sampler.params, asked, sampler.drafter_params,
                                    rounds=sampler.config.rollout.rounds_per_launch)
        return Run(result, self.counter.take())

    def begin(self, cell: Cell) -> None:
        """Takes the cell's loads and lengths, forgets what earlier cells taught, sets the drafter's
        quality, and records once what a rollout without drafts says, for those who replay it."""
        self.cell, self.loads = cell, self._loads[cell.context]
        for load in range(len(self.loads)) if self._replays else ():
            if self._key(load) not in self._said:
                plain = self.run(self.plain, load)
                self._said[self._key(load)] = said(plain.result, self.group)
        for sampler in (self.fixed, *self.policies.values()):
            engine, decoder = sampler.engine, sampler.engine.decoder
            engine.acceptance = acceptance.blank(len(decoder.drafter.names), decoder.drafter.depth)
            if decoder.controller.adaptive:
                before = engine.control
                tables = {size: prices.measured(before.prices[size], table)
                          for size, table in before.tables.items()}
                engine.control = decoder.controller.init().replace(tables=tables)
            if cell.corruption is not None:
                sampler.drafter_params = engine.everywhere(replay_params(cell.corruption))

    def _key(self, load: int) -> tuple[int, str, int]:
        return self.cell.context, self.cell.lengths, load


def said(result: Result, group: int) -> np.ndarray:
    """i32[Q / M, M, T] what was said, -1 behind it."""
    s = result.sequences
    within = np.arange(s.tokens.shape[1])[None] < s.length[:, None]
    tokens = np.where(within, s.tokens, -1).astype(np.int32)
    return tokens.reshape(-1, group, tokens.shape[1])
